"""What attention over ranks costs: work, bytes and time of up to 256 ranks by simulation, and two ranks measured.

python -m benchmarks.studies.distributed                          # both, about half a minute; needs mpi4py and mpich
python -m benchmarks.studies.distributed --update                 # writes the tables into docs/how_to/distributed.md
python -m benchmarks.studies.distributed --simulate --rate 1e12 --bandwidth 12.5e9 --latency 5e-6 --length 1048576

The simulation plans as the library does, with the functions of sdpa/distributed/_layout.py and _blocks.py: the same
chunks, the same pairs of chunks that see each other, the same route.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sdpa
from sdpa.distributed import _blocks, _layout

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2, 4, 8, 16, 32, 64, 128, 256
SECONDS = 0.4  # of each measurement, at least
DOCUMENT = ROOT / "docs/how_to/distributed.md"


class Machine(NamedTuple):
    """Rates of one rank, and of the network between two."""

    rate: float  # multiplications and additions a second, in attention
    memory: float  # bytes a second: partial results are read and written as they are joined
    bandwidth: float  # bytes a second
    latency: float  # seconds of a message


class Work(NamedTuple):
    """Causal attention of a sequence to itself."""

    length: int
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    bytes: int = 4  # of a number

    @property
    def row(self):
        """Bytes of one key and its value, in all heads."""
        return 2 * self.kv_heads * self.dim * self.bytes


class Plan:
    """What each rank computes in each step, and what it receives from whom."""

    def __init__(self, work, ranks, layout):
        self.work, self.ranks = work, ranks
        self.chunks = chunks = _layout.cut(_layout.counts_of(work.length, ranks, layout), layout)
        zero, end = np.array([0]), np.array([work.length])
        self.sight = _layout.Sight(None, 0, zero, end, zero, end, zero, end)
        self.seen = self.sight.seen(chunks, chunks)
        self.route = _layout.route(chunks, chunks, self.seen, ranks)
        self.flops = np.zeros((ranks, ranks))  # of a rank in a step
        self.joined = np.zeros((ranks, ranks))  # bytes of partial results that are read and written
        self.sent = np.zeros(ranks)
        for q, sees in zip(chunks, self.seen):
            for c in np.flatnonzero(sees):
                step = (q.rank - chunks[c].rank) % ranks
                self.flops[q.rank, step] += 4 * work.heads * work.dim * visible_pairs(q, chunks[c])
                self.joined[q.rank, step] += 3 * work.heads * work.dim * 4 * q.count
        for rank in range(ranks):
            for step in range(1, ranks):
                self.sent[rank] += sum(self._bytes(c) for c, _ in self.route.departures(rank, step))

    def _bytes(self, chunk):
        return self.chunks[chunk].count * self.work.row

    @property
    def balance(self):
        """The work of the busiest rank, in that of the mean."""
        of_ranks = self.flops.sum(axis=1)
        return of_ranks.max() / of_ranks.mean()

    def time(self, machine):
        """Seconds until the last rank is done: all of them compute a step while the blocks of the next one travel."""
        now = np.zeros(self.ranks)
        for step in range(self.ranks):
            computed = now + self.flops[:, step] / machine.rate + self.joined[:, step] / machine.memory
            arrived = computed.copy()
            for rank in range(self.ranks if step + 1 < self.ranks else 0):
                for c, source in self.route.arrivals(rank, step + 1):
                    sent = max(now[rank], now[source])
                    arrived[rank] = max(arrived[rank], sent + machine.latency + self._bytes(c) / machine.bandwidth)
            now = np.maximum(computed, arrived)
        return now.max()


def visible_pairs(q, k):
    """How many pairs of these rows and keys see each other, where a row sees the keys up to its own position."""
    last = np.arange(q.first, q.first + q.count)
    return int(np.clip(last + 1 - k.first, 0, k.count).sum())


# ----------------------------------------------------------------------------------------------------------- tables


def of_attention(work, machine):
    alone = Plan(work, 1, "contiguous").time(machine)
    yield "| ranks | layout | largest / mean work | MB sent by a rank | predicted, ms | times as fast as one rank |"
    yield "|---:|---|---:|---:|---:|---:|"
    for ranks in RANKS:
        for layout in _layout.LAYOUTS:
            plan = Plan(work, ranks, layout)
            assert plan.balance <= (1.05 if layout == "zigzag" else 2)
            took = plan.time(machine)
            yield (
                f"| {ranks} | {layout} | {plan.balance:.3f} | {plan.sent.mean() / 1e6:.1f} | {took * 1e3:.1f} "
                f"| {alone / took:.1f} |"
            )


def of_decoding(work, machine):
    """One query, of all heads: each rank reads its keys; then two messages go through log2(P) steps."""
    yield "| ranks | tokens of the largest rank / mean | MB of a rank | predicted step, µs |"
    yield "|---:|---:|---:|---:|"
    for ranks in RANKS:
        held = [_blocks.Blocks(rank, ranks).held(work.length) for rank in range(ranks)]
        steps = (ranks - 1).bit_length()
        joining = 2 * steps * machine.latency + steps * work.heads * (work.dim + 1) * 4 / machine.bandwidth
        took = max(held) * work.row / machine.memory + joining
        balance = max(held) / (sum(held) / ranks)
        yield f"| {ranks} | {balance:.3f} | {max(held) * work.row / 1e6:.1f} | {took * 1e6:.0f} |"


def of_measurement(found):
    yield "| positions | predicted, ms | measured, ms | predicted / measured | one process of two threads, ms |"
    yield "|---:|---:|---:|---:|---:|"
    for (length, measured), plain in zip(found["calls"], found["plain"]):
        took = Plan(Work(length), 2, "zigzag").time(Machine(*found["machine"]))
        yield f"| {length} | {took * 1e3:.1f} | {measured * 1e3:.1f} | {took / measured:.2f} | {plain * 1e3:.1f} |"


def of_steps(found):
    yield "| tokens | its kernel, µs | attend over two ranks, µs | difference |"
    yield "|---:|---:|---:|---:|"
    for length, kernel, whole in found["steps"]:
        yield f"| {length} | {kernel * 1e6:.0f} | {whole * 1e6:.0f} | {(whole - kernel) * 1e6:.0f} |"


# ------------------------------------------------------------------------------------------------- two ranks, measured


def best(comm, work):
    """The median over calls that the ranks begin together, of the slowest of them.  `comm` None: of this process."""
    times, end = [], time.perf_counter() + SECONDS
    going = True
    while going:
        if comm is not None:
            comm.Barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
        going = len(times) < 5 or time.perf_counter() < end
        going = going if comm is None else comm.bcast(going)
    return float(np.median(times if comm is None else np.max(comm.allgather(times), axis=0)))


def plain(length):
    """One process of two threads, on its own: ranks that wait would take a CPU from it."""
    arrays = np.random.default_rng(0).standard_normal((3, 1, 8, length, 64), np.float32)
    return best(None, lambda: sdpa.attention(*arrays, causal=True, threads=2))


def measure(lengths):
    """On each of two ranks: the rates, then what is predicted from them; rank 0 prints both as JSON."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    normal = np.random.default_rng(0).standard_normal
    x = normal((1, 8, 1024, 64), np.float32)
    rate = 4 * 8 * 1024 * 1024 * 64 / best(comm, lambda: sdpa.attention(x, x, x, threads=1))
    parts = [np.zeros((1, 8, 4096, 64), np.float32) for _ in range(2)]
    lses = [np.zeros((1, 8, 4096), np.float32) for _ in range(2)]
    joined = np.empty_like(parts[0])
    memory = 3 * joined.nbytes / best(comm, lambda: sdpa.merge(parts, lses, out=joined))
    block, room = np.zeros(1 << 23, np.uint8), np.empty(1 << 23, np.uint8)
    other = 1 - comm.rank
    bandwidth = block.nbytes / best(comm, lambda: comm.Sendrecv(block, other, recvbuf=room))
    latency = best(comm, lambda: comm.Sendrecv(block[:8], other, recvbuf=room[:8]))
    calls, steps = [], []
    for length in lengths:
        whole = normal((3, 1, 8, length, 64), np.float32)
        mine = [x[:, :, sdpa.distributed.rows(length, comm.rank, 2, "zigzag")] for x in whole]
        options = {"causal": True, "threads": 1}
        took = best(comm, lambda: sdpa.distributed.attention(comm, *mine, layout="zigzag", **options))  # noqa: B023
        calls.append((length, took))
    for length in (256, 1024, 4096):
        cache = sdpa.distributed.KVCache(comm, 1, 8, 128)
        cache.append(*normal((2, 1, 8, length, 128), np.float32))
        query = normal((1, 32, 1, 128), np.float32)
        kernel = best(comm, lambda: cache._local.attend(query, threads=1))  # noqa: B023
        steps.append((length, kernel, best(comm, lambda: cache.attend(query, threads=1))))  # noqa: B023
    if comm.rank == 0:
        print(json.dumps({"machine": (rate, memory, bandwidth, latency), "calls": calls, "steps": steps}))


def measured(lengths):
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    command = [
        mpiexec,
        "--bind-to",
        "core",
        "-n",
        "2",
        sys.executable,
        "-m",
        "benchmarks.studies.distributed",
        "--worker",
    ]
    command += ["--measured", *map(str, lengths)]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return found | {"plain": [plain(length) for length in lengths]}


def described(machine):
    return (
        f"{machine.rate / 1e9:.0f} GFLOP/s and {machine.memory / 1e9:.1f} GB/s a rank, "
        f"{machine.bandwidth / 1e9:.2f} GB/s and {machine.latency * 1e6:.1f} µs between ranks"
    )


def report(args):
    """{name: lines} of all tables."""
    work, machine = Work(args.length), Machine(args.rate, args.memory, args.bandwidth, args.latency)
    given = (
        f"By simulation, for {described(machine)}; {work.length} positions, {work.heads} heads of {work.dim}, float32"
    )
    tables = {
        "simulated": [f"{given}, causal:", "", *of_attention(work, machine)],
        "decoding": [f"{given}, one query:", "", *of_decoding(work, machine)],
    }
    if not args.simulate:
        from benchmarks.measure.machine import cpu_name

        found = measured(args.measured)
        rates = described(Machine(*found["machine"]))
        about = f"Measured {datetime.date.today()} on {cpu_name()}, commit {commit()}: {rates}"
        tables["measured"] = [f"{about}; causal, zigzag, two ranks of one thread:", "", *of_measurement(found)]
        tables["steps"] = ["The same machine, 32 heads on 8 of 128, float32:", "", *of_steps(found)]
    return tables


def commit():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def update(document, tables):
    """Put the tables between their marks."""
    text = document.read_text(encoding="utf-8")
    for name, lines in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n".join(lines) + "\n" + end + after
    document.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="only the simulation")
    parser.add_argument("--length", type=int, default=131072, help="positions of the simulation")
    for name, default, text in (
        ("rate", 200e9, "multiplications and additions of a rank a second"),
        ("memory", 20e9, "bytes that a rank reads a second"),
        ("bandwidth", 1.25e9, "bytes a second from one rank to another; default: 10 Gbit/s"),
        ("latency", 20e-6, "seconds of a message"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=text)
    parser.add_argument("--measured", type=int, nargs="*", default=[4096, 16384], help="positions of what is measured")
    parser.add_argument("--update", action="store_true", help=f"write the tables into {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(args.measured)
        return
    tables = report(args)
    for lines in tables.values():
        print("\n".join(lines), end="\n\n")
    if args.update:
        update(DOCUMENT, tables)


if __name__ == "__main__":
    main()
