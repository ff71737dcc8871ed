"""`mpiexec -n 4 python -m sdpa distributed`: one call spread over ranks, checked and timed."""

import time

import numpy as np

import sdpa

from .._checks import float_dtype, sum_dtype

TEXT = "attention over the ranks of mpiexec: what is spread, the same numbers, times, waiting, bytes and balance"
NEEDS = "this needs mpi4py and an MPI: pip install mpi4py mpich"


def add_to(commands):
    parser = commands.add_parser("distributed", help=TEXT, description=TEXT)
    parser.add_argument("--length", type=int, default=4096, help="positions of the whole sequence (default: 4096)")
    parser.add_argument("--heads", type=int, default=8, help="heads of the queries (default: 8)")
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values (default: as many as --heads)")
    parser.add_argument("--head-dim", type=int, default=64, help="size of a head (default: 64)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16", "bfloat16"])
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag"])
    parser.add_argument("--split", default="sequence", choices=["sequence", "heads"])
    parser.add_argument(
        "--full", action="store_true", help="all queries see all keys, instead of the keys up to their position"
    )
    parser.add_argument("--window", type=int, help="how many positions back a query sees")
    parser.add_argument(
        "--threads", type=int, help="threads of each rank (default: the CPUs, shared by the ranks that use them)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="timed calls, of which the best counts (default: 5)")
    parser.set_defaults(run=run)


def run(arguments):
    try:
        from mpi4py import MPI
    except ImportError:
        raise SystemExit(NEEDS) from None
    for line in demonstrate(MPI.COMM_WORLD, arguments):
        if MPI.COMM_WORLD.rank == 0:
            print(line, flush=True)


def demonstrate(comm, given):
    """The lines to print; all ranks go through them."""
    from sdpa.distributed import attention, attention_backward, explain, gather, scatter

    options = {"causal": not given.full, "threads": given.threads}
    if given.window is not None:
        options["window"] = (given.window, None)
    whole = arrays_of(given) if comm.rank == 0 else [None] * 4
    query, key, value, slopes = (scatter(comm, x, layout=given.layout) for x in whole)
    yield f"sdpa {sdpa.__version__}, {comm.size} rank{'s' * (comm.size > 1)}"
    yield str(explain(comm, query, key, value, layout=given.layout, split=given.split, **options))
    yield f"{'rows of each rank':18}{', '.join(map(str, comm.allgather(query.shape[-2])))}"

    out = np.empty(query.shape, sum_dtype(query.dtype))
    forward = {**options, "out": out, "return_lse": True}
    called = Calls(comm, given.repeat)
    called(lambda: attention(comm, query, key, value, layout=given.layout, split=given.split, **forward))
    yield from called.lines("attention")
    arrays = slopes, query, key, value, out, called.result[1]
    called(lambda: attention_backward(comm, *arrays, layout=given.layout, **options))
    yield from called.lines("gradients")

    found = [gather(comm, x, layout=given.layout) for x in (out, *called.result[:3])]
    if comm.rank == 0:
        yield from compare(found, whole, options)
    comm.Barrier()


def arrays_of(given):
    """Query, key, value, and a gradient of the result."""
    random, dtype = np.random.default_rng(0), float_dtype(given.dtype)
    kv_heads = given.kv_heads or given.heads
    shapes = [(1, heads, given.length, given.head_dim) for heads in (given.heads, kv_heads, kv_heads, given.heads)]
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


class Calls:
    """The best of several calls, each of which all ranks begin together; the first one finds memory and threads."""

    def __init__(self, comm, repeat):
        self.comm, self.repeat = comm, repeat

    def __call__(self, work):
        from sdpa.distributed._agreement import join

        every, tally = [], join(self.comm).tally
        for _ in range(self.repeat + 1):
            self.comm.Barrier()
            begin = time.perf_counter(), tally.seconds_waiting, tally.bytes_sent
            self.result = work()
            end = time.perf_counter(), tally.seconds_waiting, tally.bytes_sent
            every.append(self.comm.allgather(tuple(np.subtract(end, begin).tolist())))
        self.best = min(every[1:] or every, key=max)

    def lines(self, name):
        yield f"\n{name}: {max(self.best)[0] * 1e3:.2f} ms"
        yield f"{'rank':>4}{'time':>12}{'of which waiting':>20}{'bytes sent':>14}"
        for rank, (own, waiting, sent) in enumerate(self.best):
            yield f"{rank:4}{own * 1e3:9.2f} ms{waiting * 1e3:10.2f} ms {waiting / own:6.1%}{sent:14.0f}"


def compare(found, whole, options):
    """With the plain call on this rank alone, while the others wait."""
    query, key, value, slopes = whole
    wide = np.empty(query.shape, sum_dtype(query.dtype))
    out, lse = sdpa.attention(query, key, value, return_lse=True, out=wide, **options)
    grads = sdpa.attention_backward(slopes, query, key, value, out, lse, **options)
    yield "\nlargest difference from the plain call, relative to its largest number"
    for name, ours, plain in zip(("result", "grad of query", "grad of key", "grad of value"), found, (out, *grads[:3])):
        ours, plain = ours.astype(float), plain.astype(float)
        yield f"{name:18}{np.abs(ours - plain).max(initial=0) / max(np.abs(plain).max(initial=0), 1e-300):.1e}"
