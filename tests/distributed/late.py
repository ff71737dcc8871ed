"""A wire between two network namespaces, at whose end everything arrives late: `python late.py SECONDS DEVICE NAMESPACE
NAMESPACE` makes a device of that name in each of them, and carries what is sent until it is killed.  It needs root and
/dev/net/tun.  (The qdisc netem of Linux does this, too, but many kernels come without it.)
"""

import collections
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def make_end(name, device, namespace):
    """A file: what is written to it arrives at the device, and what the device sends can be read from it."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    for command in (
        ["ip", "link", "set", name, "mtu", "9000", "txqueuelen", "10000", "netns", namespace],
        ["ip", "-n", namespace, "link", "set", name, "name", device],
    ):
        subprocess.run(command, check=True)
    return end


def carry(ends, delay):
    under_way = collections.deque()  # (when it arrives, where, what): first in, first out
    while True:
        pause = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], pause)[0]:
            other = ends[1 - ends.index(end)]
            under_way.append((time.monotonic() + delay, other, os.read(end, 1 << 16)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, data = under_way.popleft()
            try:
                os.write(end, data)
            except OSError:  # the device is not up: it is lost, and TCP sends it again
                pass


if __name__ == "__main__":
    delay, device, *namespaces = sys.argv[1:]
    ends = [make_end(f"late{os.getpid()}-{i}"[-15:], device, each) for i, each in enumerate(namespaces)]
    print("ready", flush=True)
    carry(ends, float(delay))
