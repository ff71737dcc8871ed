"""Ranks in two network namespaces of this machine, which a pair of virtual devices connects: all that they send goes
through the network of the kernel, as between two machines, and may be slow or late.

Only root can make such a network, and nothing of it leaves this machine.
"""

import os
import shutil
import subprocess
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
QUALITIES = {
    "as it is": [],
    "1 Gbit per second": ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "100ms"],
    "20 ms late": ["netem", "delay", "20ms"],
}
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
def network(tmp_path):
    """Arguments of run_ranks, for ranks in both namespaces by turns; and the names of the namespaces."""
    name = f"sdpa-{os.getpid()}-"
    names = [f"{name}{i}" for i in (1, 2)]
    try:
        for each in names:
            if (done := run("ip", "netns", "add", each)).returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        made = run(
            "ip", "link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1]
        )
        if made.returncode:
            pytest.skip(f"this machine makes no pairs of virtual devices: {made.stderr.strip()}")
        for i, each in enumerate(names, start=1):
            run("ip", "-n", each, "addr", "add", f"{ADDRESS.format(i)}/24", "dev", DEVICE)
            run("ip", "-n", each, "link", "set", DEVICE, "up")
            run("ip", "-n", each, "link", "set", "lo", "up")
        wait_until_up(names)
        launcher = tmp_path / "launcher"
        launcher.write_text(LAUNCHER.format(name=name))
        launcher.chmod(0o700)
        hosts = ",".join(f"{ADDRESS.format(i)}:1" for i in (1, 2))
        yield (
            names,
            {
                "before": ["ip", "netns", "exec", names[0]],
                "options": ["-launcher", "ssh", "-launcher-exec", str(launcher), "-hosts", hosts],
                "UCX_TLS": "tcp,self",  # not the memory that both namespaces share
                "UCX_NET_DEVICES": DEVICE,
            },
        )
    finally:
        for each in names:
            run("ip", "netns", "delete", each)


def wait_until_up(names):
    """A device is up a moment after it was asked to be, and MPI sees no other."""
    end = time.monotonic() + 10
    while not all(" UP " in run("ip", "-n", each, "-br", "link", "show", "dev", DEVICE).stdout for each in names):
        if time.monotonic() > end:
            pytest.skip("the virtual devices did not come up")
        time.sleep(0.05)


def bytes_sent(namespace):
    """Through the device that connects the namespaces."""
    done = run("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    return int(done.stdout)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_across_a_network(network, ranks, quality):
    names, arguments = network
    for each in names if QUALITIES[quality] else []:
        done = run("ip", "netns", "exec", each, "tc", "qdisc", "add", "dev", DEVICE, "root", *QUALITIES[quality])
        if done.returncode:
            pytest.skip(f"the kernel has no {QUALITIES[quality][0]}: {done.stderr.strip()}")
    run_ranks(ranks, str(HERE / "many_cases.py"), "3" if "late" in quality else "10", timeout=600, **arguments)
    said = run_ranks(ranks, "-m", "sdpa", "distributed", "--length", "2000", "--repeat", "1", timeout=600, **arguments)
    assert "attention:" in said
    assert min(map(bytes_sent, names)) > 2000 * 8 * 64 * 4  # keys really went through it


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


def test_a_peer_that_is_killed_ends_the_others(network):
    """With an error, and not by waiting for ever."""
    _, arguments = network
    with pytest.raises(AssertionError, match=r"exit code (?s:.)*(KILLED|signal 9|EXIT CODE: 9)"):
        run_ranks(2, "-c", KILLED, timeout=120, **arguments)
