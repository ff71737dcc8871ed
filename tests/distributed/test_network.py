"""Ranks in two network namespaces of this machine, which a pair of virtual devices connects: all that they send goes
through the network of the kernel, as between two machines, and may be slow or late (see late.py).

Only root can make such a network, and nothing of it leaves this machine.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ranks import WITH_RANKS, run_ranks

HERE = Path(__file__).parent
ADDRESS = "10.213.77.{}"
DEVICE = "sdpa-veth"
# mpiexec starts the processes of a host as `ssh host command`: here, in the namespace that has the address.
LAUNCHER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "{name}${{host##*.}}" sh -c "$*"
"""
SLOW = "tbf", "rate", "1gbit", "burst", "256kb", "latency", "100ms"
DELAY = 0.02
pytestmark = [
    pytest.mark.slow,
    WITH_RANKS,
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
        reason="only root can make network namespaces, with ip and tc of iproute2",
    ),
]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """The names of two."""
    names = [f"sdpa-{os.getpid()}-{i}" for i in (1, 2)]
    try:
        for each in names:
            if (done := run("ip", "netns", "add", each)).returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        yield names
    finally:
        for each in names:
            run("ip", "netns", "delete", each)


@pytest.fixture
def wire(namespaces):
    """Devices that the kernel connects."""
    ends = [["netns", each, "type", "veth"] for each in namespaces]
    made = run("ip", "link", "add", DEVICE, *ends[0], "peer", "name", DEVICE, *ends[1][:2])
    if made.returncode:
        pytest.skip(f"this machine makes no pairs of virtual devices: {made.stderr.strip()}")


@pytest.fixture
def slow_wire(wire, namespaces):
    for each in namespaces:
        done = run("ip", "netns", "exec", each, "tc", "qdisc", "add", "dev", DEVICE, "root", *SLOW)
        if done.returncode:
            pytest.skip(f"the kernel has no {SLOW[0]}: {done.stderr.strip()}")


@pytest.fixture
def late_wire(namespaces):
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("this machine has no /dev/net/tun, so there is nothing that could delay what is sent")
    command = [sys.executable, str(HERE / "late.py"), str(DELAY), DEVICE, *namespaces]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def connect(namespaces, folder):
    """Arguments of run_ranks, for ranks in both namespaces by turns, once there are devices in them."""
    for i, each in enumerate(namespaces, start=1):
        run("ip", "-n", each, "addr", "add", f"{ADDRESS.format(i)}/24", "dev", DEVICE)
        run("ip", "-n", each, "link", "set", DEVICE, "up")
        run("ip", "-n", each, "link", "set", "lo", "up")
    wait_until_up(namespaces)
    launcher = folder / "launcher"
    launcher.write_text(LAUNCHER.format(name=namespaces[0][:-1]))
    launcher.chmod(0o700)
    hosts = ",".join(f"{ADDRESS.format(i)}:1" for i in (1, 2))
    return {
        "before": ["ip", "netns", "exec", namespaces[0]],
        "options": ["-launcher", "ssh", "-launcher-exec", str(launcher), "-hosts", hosts],
        "UCX_TLS": "tcp,self",  # not the memory that both namespaces share
        "UCX_NET_DEVICES": DEVICE,
    }


def wait_until_up(namespaces):
    """A device is up a moment after it was asked to be, and MPI sees no other."""
    end = time.monotonic() + 10
    while not all("LOWER_UP" in run("ip", "-n", each, "link", "show", "dev", DEVICE).stdout for each in namespaces):
        if time.monotonic() > end:
            pytest.skip("the virtual devices did not come up")
        time.sleep(0.05)


def bytes_sent(namespace):
    """Through the device that connects the namespaces."""
    done = run("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    return int(done.stdout)


@pytest.mark.parametrize("quality", ["wire", "slow_wire", "late_wire"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_across_a_network(request, namespaces, ranks, quality, tmp_path):
    request.getfixturevalue(quality)
    arguments = connect(namespaces, tmp_path)
    late = quality == "late_wire"
    run_ranks(ranks, str(HERE / "many_cases.py"), "1" if late else "10", timeout=600, **arguments)
    said = run_ranks(ranks, "-m", "sdpa", "distributed", "--length", "2000", "--repeat", "1", timeout=600, **arguments)
    assert min(map(bytes_sent, namespaces)) > 2000 * 8 * 64 * 4  # keys really went through it
    (took,) = re.findall(r"attention: ([\d.]+) ms", said)
    assert not late or float(took) >= 2 * DELAY * 1000  # they agree, and then keys travel


KILLED = """
import os, signal
import numpy as np
from mpi4py import MPI
from sdpa import distributed
comm = MPI.COMM_WORLD
x = np.ones((1, 8, 500, 64), np.float32)
for call in range(1000):
    if call == 3 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.attention(comm, x, x, x, causal=True)
"""


def test_a_peer_that_is_killed_ends_the_others(wire, namespaces, tmp_path):
    """With an error, and not by waiting for ever."""
    arguments = connect(namespaces, tmp_path)
    with pytest.raises(AssertionError, match=r"exit code (?s:.)*(KILLED|signal 9|EXIT CODE: 9)"):
        run_ranks(2, "-c", KILLED, timeout=120, **arguments)
