"""What mpiexec starts: any problems, spread in any way over its ranks, against the oracle."""

import numpy as np
from hypothesis import strategies as st
from mpi4py import MPI
from support import packed
from support.accuracy import judge
from support.differences import upstream
from support.draw import float32, float64, rng
from support.gradients import judge as judge_gradients
from support.packed import draw_packed, judge_packed
from support.problems import problems
from support.ranks import holds, joined, on_ranks, positions, taken

import sdpa
from sdpa import distributed, reference
from sdpa.distributed import _attention, _backward, _ring

USUAL = _ring.PIECE_FLOPS, _attention.LEAST_ROWS, _backward.LEAST_ROWS

# What one rank does.


def choose(gathered, in_pieces):
    """Whether keys are gathered, or travel; and whether 64 rows are computed at a time, or as many as there are."""
    _attention.GATHER_BYTES = 1 << 20 if gathered else -1
    _ring.PIECE_FLOPS, _attention.LEAST_ROWS, _backward.LEAST_ROWS = (1, 1, 1) if in_pieces else USUAL


def of_rows(options, rows, all_rows):
    return {name: taken(x, rows, -2, all_rows) if name in ("mask", "bias") else x for name, x in options.items()}


def attend(comm, arrays, options, places, chosen, how):
    """(out, lse) of the rows of this rank."""
    choose(*chosen)
    query, key, value = arrays
    rows, keys = (of[comm.rank] for of in places)
    mine = [np.take(x, at, -2) for x, at in ((query, rows), (key, keys), (value, keys))]
    before = [x.copy() for x in mine]
    more = how | of_rows(options, rows, query.shape[-2])
    found = distributed.attention(comm, *mine, return_lse=True, **more)
    wide = np.empty((2, *found[0].shape), float64 if found[0].dtype == float64 else float32)[comm.rank % 2]
    again = distributed.attention(comm, *mine, return_lse=True, out=wide, **more)
    with np.errstate(over="ignore"):
        again = wide.astype(found[0].dtype), again[1]
    for x, y in zip((*found, *before), (*again, *mine)):
        np.testing.assert_array_equal(x, y)  # the same bits, and inputs are not written
    return found


def differentiate(comm, call, options, places, chosen, how):
    choose(*chosen)
    rows, keys = (of[comm.rank] for of in places)
    where = {"key": (keys, -2), "value": (keys, -2), "lse": (rows, -1), "grad_lse": (rows, -1)}
    mine = {name: np.take(x, *where.get(name, (rows, -2))) for name, x in call.items()}
    more = how | of_rows(options, rows, call["query"].shape[-2])
    first, again = (tuple(distributed.attention_backward(comm, **mine, **more)) for _ in range(2))
    for x, y in zip(first, again):
        np.testing.assert_array_equal(x, y)
    return first


def attend_packed(comm, arrays, where, options, places, chosen, how):
    choose(*chosen)
    rows, keys = (of[comm.rank] for of in places)
    more = where | how | of_rows(options, rows, len(arrays[0]))
    return distributed.attention_varlen(
        comm, arrays[0][rows], arrays[1][keys], arrays[2][keys], return_lse=True, **more
    )


def differentiate_packed(comm, call, where, options, places, how):
    rows, keys = (of[comm.rank] for of in places)
    mine = {name: x[keys if name in ("key", "value") else rows] for name, x in call.items()}
    more = where | how | of_rows(options, rows, len(call["query"]))
    return tuple(distributed.attention_varlen_backward(comm, **mine, **more))


# What rank 0 draws, and how it judges.

CHOSEN = st.tuples(st.booleans(), st.booleans())


@st.composite
def spreads(choose, *lengths, size):
    """The positions that each rank has of each length, as `rows` says or any numbers of them; and the layout."""
    layout = choose(st.sampled_from(["contiguous", "zigzag"]))
    if choose(st.booleans()):
        return [[distributed.rows(n, rank, size, layout) for rank in range(size)] for n in lengths], {"layout": layout}
    random = rng(choose(st.integers(0, 999)))
    counts = [np.diff(np.sort([0, *random.integers(0, n + 1, size - 1), n])).tolist() for n in lengths]
    return [positions(of_ranks, layout) for of_ranks in counts], {"layout": layout}


def whole_gradients(found, places, options, rows, axis):
    """From those of the ranks."""
    grads = [
        joined(parts, at, axis) for parts, at in zip(zip(*(each[:3] for each in found)), (places[0], *[places[1]] * 2))
    ]
    bias, sinks = found[0][3:]
    if bias is not None:
        of_ranks = [each[3] for each in found]
        own_rows = np.shape(options["bias"])[-2:-1] == (rows,) and rows != 1
        bias = joined(of_ranks, places[0], -2) if own_rows else np.sum(of_ranks, axis=0)
    for each in found:
        np.testing.assert_array_equal(each[4], sinks)  # the same bits on all ranks
    return sdpa.Gradients(*grads, bias, sinks)


def with_wide_bias(options):
    """Its gradients are added up, where ranks share a row."""
    return options | ({"bias": options["bias"].astype(float64)} if "bias" in options else {})


def forward(ranks, data):
    query, key, value, options = data.draw(problems())
    places, how = data.draw(spreads(query.shape[-2], key.shape[-2], size=ranks.comm.size))
    if query.ndim > 2 and query.shape[-3] >= ranks.comm.size and data.draw(st.booleans()):
        how |= {"split": "heads"}
    found = ranks.all(attend, (query, key, value), options, places, data.draw(CHOSEN), how)
    out, lse = (joined(parts, places[0], axis) for parts, axis in zip(zip(*found), (-2, -1)))
    judge(out, lse, query, key, value, factor=4, floor=20, **options)


def backward(ranks, data):
    query, key, value, options = data.draw(problems())
    options = with_wide_bias(options)
    wide = np.empty((*query.shape[:-1], value.shape[-1]), float64 if query.dtype == float64 else float32)
    out, lse = sdpa.attention(query, key, value, return_lse=True, out=wide, **options)
    grad_out, grad_lse = upstream(out, lse)
    call = dict(
        grad_out=np.asarray(grad_out).astype(query.dtype), query=query, key=key, value=value, out=out, lse=lse,
        grad_lse=np.asarray(grad_lse).astype(lse.dtype),
    )  # fmt: skip
    places, how = data.draw(spreads(query.shape[-2], key.shape[-2], size=ranks.comm.size))
    found = ranks.all(differentiate, call, options, places, data.draw(CHOSEN), how)
    grads = whole_gradients(found, places, options, query.shape[-2], -2)
    judge_gradients(grads, call | options, factor=4, floor=40)


def of_packed(ranks, data):
    counts = st.lists(packed.COUNTS, min_size=0, max_size=6)
    q_counts = data.draw(counts)
    k_counts = data.draw(st.just(q_counts) | st.lists(packed.COUNTS, min_size=len(q_counts), max_size=len(q_counts)))
    arrays, where = draw_packed(q_counts, k_counts, dtype=data.draw(st.sampled_from([float32, float64])))
    names = data.draw(st.lists(st.sampled_from(list(packed.OPTIONS)), max_size=3)) if k_counts else []
    if "huge offset" in names:  # distances so large that float32 has no room for scores
        names = [name for name in names if "alibi" not in name]
    options = with_wide_bias(packed.options_for(arrays[0], k_counts, *names))
    T, U = len(arrays[0]), len(arrays[1])
    if T == 1:  # one row is not told from one row for all
        options = {name: x for name, x in options.items() if name not in ("mask", "bias")}
    places, how = data.draw(spreads(T, U, size=ranks.comm.size))
    found = ranks.all(attend_packed, arrays, where, options, places, data.draw(CHOSEN), how)
    out, lse = (joined(parts, places[0], 0) for parts in zip(*found))
    judge_packed(out, lse, *arrays, factor=4, floor=20, **where, **options)

    out, lse = sdpa.attention_varlen(*arrays, return_lse=True, **where, **options)
    names = ("grad_out", "query", "key", "value", "out", "lse", "grad_lse")
    grad_out, grad_lse = (x.astype(out.dtype) for x in upstream(out, lse))
    call = dict(zip(names, (grad_out, *arrays, out, lse, grad_lse)))
    found = ranks.all(differentiate_packed, call, where, options, places, how)
    grads = whole_gradients(found, places, options, T, 0)
    exact = reference.attention_varlen_backward(**call, **where, **options)
    for name, grad, right in zip(grads._fields, grads, exact):
        if right is not None:
            most = (1e-10 if out.dtype == float64 else 1e-4) * (1 + np.abs(right).max(initial=0))
            assert np.abs(grad - right).max(initial=0) <= most, name


def main(ranks):
    for check in (forward, backward, of_packed):
        holds(check, ranks)


if __name__ == "__main__":
    on_ranks(MPI.COMM_WORLD, main)
