"""Gradients of `attention`: every one of them, without holding the scores."""

import itertools

import numpy as np

from . import _core, _kernels
from ._gradients import Gradients
from ._problem import Problem, may_hold, plain_array, sum_dtype
from ._varlen import check_options, heads_first, one_batch, packed_arrays, thread_count


def attention_backward(
    grad_out, query, key, value, out, lse, *, grad_lse=None, mask=None, bias=None, causal=False, window=None,
    q_offset=None, kv_lengths=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None,
):  # fmt: skip
    """How a number L, such as a loss, that was computed from the results of `attention` changes with its inputs.

    Parameters
    ----------
    grad_out : the derivatives of L by the elements of `out`, in an array of its shape and of the dtype of query.
    query, key, value, and the options : as they were given to `attention`.
    out, lse : what `attention` returned for them, with return_lse=True.  Where query is of a half type, better give
        `attention` an `out` of float32: gradients of query and key are differences, in which its rounding may be large.
    grad_lse : the derivatives of L by the elements of `lse`, likewise; None where L was computed from `out` alone.
    threads : as for `attention`.

    Returns
    -------
    Gradients(query, key, value, bias, sinks), a named tuple: the derivatives of L by each input, in an array of its
    shape and dtype; sums are float32 at least.  bias and sinks are None where the call had none; the gradient of sinks
    that are whole numbers is float64.  There is none of scale, softcap and alibi_slopes.

    What was used several times, a broadcast input or a key/value head that query heads share, gets the sum over its
    uses.  A query and a key that do not see each other add exactly 0, whatever the arrays hold for them, NaN included:
    the gradient of a query that sees no key is 0, as is that of a key that no query sees.  The lse of such a query is
    its sink, which gets its grad_lse.

    The scores are computed anew, a block at a time.  The bits do not depend on the number of threads.

    >>> import numpy as np, sdpa
    >>> query, key, value = np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]]), np.array([[8.0], [4.0]])
    >>> out, lse = sdpa.attention(query, key, value, return_lse=True)        # weights 1/4 and 3/4
    >>> sdpa.attention_backward(np.array([[1.0]]), query, key, value, out, lse).value
    array([[0.25],
           [0.75]])
    """
    problem = Problem(
        query, key, value, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, threads=threads,
    )  # fmt: skip
    given, lead, heads, q_len = problem.inputs, problem.lead, problem.heads, problem.q_len
    shape = (*lead, heads, q_len, problem.value_dim)
    results = check_results(grad_out, out, lse, grad_lse, shape[-problem.rank :], problem.dtype)
    grad_out, out, lse, grad_lse = (
        None if x is None else x.reshape(shape[: len(shape) - (i > 1)]) for i, x in enumerate(results)
    )
    wide = sum_dtype(problem.dtype)
    grads = [_new(given[name], getattr(problem, name), wide) for name in ("query", "key", "value")]
    grad_bias = None if bias is None else np.zeros(given["bias"].shape, wide)
    delta = None if sinks is None else np.zeros((*lead, heads, q_len), wide)
    if not all(problem.query.shape[-3:]) or not all(problem.key.shape[-3:-1]):  # nothing that sees anything
        for grad in grads:
            grad[...] = 0
        _let_lse_through(delta, grad_lse, ...)
    else:
        _run(problem, out, lse, grad_out, grad_lse, *grads, grad_bias, delta)
    return Gradients(
        *(_like(x, given[name]) for x, name in zip(grads, ("query", "key", "value"))),
        None if bias is None else _like(grad_bias, given["bias"]),
        None if sinks is None else _grad_sinks(problem, out, lse, delta, grad_lse, sinks),
    )


def attention_varlen_backward(
    grad_out, query, key, value, out, lse, *, cu_seqlens_q, cu_seqlens_k=None, grad_lse=None,
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None,
):  # fmt: skip
    """`attention_backward` for what `attention_varlen` computed: arrays and options as there.

        grad_out, out : (T, H, E)    lse, grad_lse : (T, H)    query : (T, H, D)    key : (U, G, D)    value : (U, G, E)

    Gradients have the shapes of what was given; a bias or sinks that sequences share gets the sum over them.

    >>> import numpy as np, sdpa
    >>> query = np.ones((3, 1, 1))
    >>> value = np.array([2.0, 4.0, 7.0]).reshape(3, 1, 1)
    >>> out, lse = sdpa.attention_varlen(query, query, value, cu_seqlens_q=[0, 2, 3], causal=True, return_lse=True)
    >>> grads = sdpa.attention_varlen_backward(
    ...     np.ones((3, 1, 1)), query, query, value, out, lse, cu_seqlens_q=[0, 2, 3], causal=True)
    >>> grads.value.ravel().round(6).tolist()
    [1.5, 0.5, 1.0]
    """
    query, key, value, q_starts, k_starts = packed_arrays(query, key, value, cu_seqlens_q, cu_seqlens_k)
    given = {"query": query, "key": key, "value": value}
    options = check_options(
        query, key, value, q_starts=q_starts, k_counts=np.diff(k_starts), mask=mask, bias=bias, causal=causal,
        window=window, q_offset=q_offset, kv_lengths=kv_lengths, scale=scale, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, threads=threads, given=given,
    )  # fmt: skip
    shape, wide, all_sinks = (*query.shape[:2], value.shape[2]), sum_dtype(query.dtype), options.pop("sinks")
    grad_out, out, lse, grad_lse = check_results(grad_out, out, lse, grad_lse, shape, query.dtype)
    grads = [np.zeros_like(x, subok=False) for x in (query, key, value)]
    grad_bias = None if bias is None else np.zeros(given["bias"].shape, wide)
    delta = None if sinks is None else np.zeros(lse.shape, wide)
    if query.size and options["kv_lengths"].any():
        _run_packed(options, k_starts[:-1], query, key, value, out, lse, grad_out, grad_lse, *grads, grad_bias, delta)
    else:
        _let_lse_through(delta, grad_lse, ...)
    return Gradients(
        *grads,
        None if bias is None else _like(grad_bias, given["bias"]),
        None if sinks is None else _grad_packed_sinks(all_sinks, q_starts, out, lse, delta, grad_lse, sinks),
    )


def check_results(grad_out, out, lse, grad_lse, shape, dtype):
    """grad_out, out, lse and grad_lse (or None) as arrays, which fit a query of `dtype` and a result of `shape`."""
    given = [plain_array("grad_out", grad_out), plain_array("out", out), plain_array("lse", lse)]
    given.append(None if grad_lse is None else plain_array("grad_lse", grad_lse))
    expected = [shape, shape, shape[:-1], shape[:-1]]
    dtypes = [dtype, dtype, sum_dtype(dtype), sum_dtype(dtype)]  # out may be wider: unrounded
    for name, array, size, kind in zip(("grad_out", "out", "lse", "grad_lse"), given, expected, dtypes):
        if array is None:
            continue
        if array.dtype != kind and not (name == "out" and may_hold(array.dtype, kind)):
            rule = f"it must be {kind}{' or wider' if name == 'out' else ''}"
            raise TypeError(f"{name} has dtype {array.dtype}: for a query of {dtype} {rule}")
        if array.shape != size:
            raise ValueError(f"{name} has shape {array.shape}: for these query, key and value it must be {size}")
    return given


def _new(given, whole, wide):
    """An array for the gradient of `given`, of the shape of `whole`, what it was broadcast to.  Where that repeats it,
    sums follow, so it is of their dtype."""
    return np.empty_like(whole, dtype=given.dtype if whole.size == given.size else wide, subok=False)


def _like(grad, given):
    """Summed over the axes along which `given` was broadcast, in its dtype."""
    shape = (1,) * (grad.ndim - given.ndim) + given.shape
    axes = tuple(i for i, (size, whole) in enumerate(zip(shape, grad.shape)) if size == 1 != whole)
    with np.errstate(over="ignore", invalid="ignore"):
        grad = grad.sum(axis=axes, keepdims=True) if axes else grad
        return grad.reshape(given.shape).astype(given.dtype, copy=False)


def _run(problem, out, lse, grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias, delta):
    """Fill the gradients, and delta.  grad_bias is zeros at first; the others have the axes `lead` of the problem."""
    shape = (*problem.lead, problem.heads, problem.q_len, problem.kv_len)
    shared_bias = None if grad_bias is None else np.broadcast_to(grad_bias, shape)
    lse, grad_lse, delta = (None if x is None else x[..., None] for x in (lse, grad_lse, delta))
    arrays = dict(
        query=problem.query, key=problem.key, value=problem.value, out=out, lse=lse, grad_out=grad_out,
        grad_lse=grad_lse, mask=problem.mask, bias=problem.bias, grad_query=grad_query, grad_key=grad_key,
        grad_value=grad_value, grad_bias=shared_bias, delta=delta,
    )  # fmt: skip
    arrays, numbers = problem.in_order(arrays, problem.numbers(), shared_bias)
    _core.attend_backward(
        _kernels.default, **arrays, **numbers, scale=problem.scale, softcap=problem.softcap, threads=problem.threads
    )


def _run_packed(
    options, k_starts, query, key, value, out, lse, grad_out, grad_lse,
    grad_query, grad_key, grad_value, grad_bias, delta,
):  # fmt: skip
    """The same for packed sequences; `options` are those of check_options, the gradients zeros at first."""
    mask, bias, threads = options.pop("mask"), options.pop("bias"), options.pop("threads")
    threads = thread_count(threads, query, value, options["kv_lengths"])
    shared_bias = None if bias is None else np.broadcast_to(grad_bias, bias.shape)
    rows = [None if x is None else heads_first(x[..., None]) for x in (lse, grad_lse, delta)]
    query, key, value, out, grad_out, grad_query, grad_key, grad_value = map(
        heads_first, (query, key, value, out, grad_out, grad_query, grad_key, grad_value)
    )
    _core.attend_backward(
        _kernels.default, query, key, value, out=out, lse=rows[0], grad_out=grad_out, grad_lse=rows[1],
        grad_query=grad_query, grad_key=grad_key, grad_value=grad_value, grad_bias=one_batch(shared_bias),
        delta=rows[2], mask=one_batch(mask), bias=one_batch(bias), threads=threads,
        k_starts=np.ascontiguousarray(k_starts), **options,
    )  # fmt: skip


def _grad_sinks(problem, out, lse, delta, grad_lse, given):
    sinks = problem.sinks.reshape(*problem.lead, problem.heads, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        return _like_floats(_sink_slopes(sinks, out, lse, delta, grad_lse).sum(axis=-1), given)


def _grad_packed_sinks(sinks, q_starts, out, lse, delta, grad_lse, given):
    """sinks (S, H); out (T, H, E); lse, delta, grad_lse (T, H)."""
    by_row = _sink_slopes(np.repeat(sinks, np.diff(q_starts), axis=0), out, lse, delta, grad_lse)
    by_sequence = np.zeros(sinks.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for b, (first, end) in enumerate(itertools.pairwise(q_starts)):
            by_sequence[b] = by_row[first:end].sum(axis=0)
    return _like_floats(by_sequence, given)


def _sink_slopes(sinks, out, lse, delta, grad_lse):
    """A sink is a key whose value is 0: of each row exp(sink - lse) (0 - delta).  Of a row that saw the sink alone
    grad_out does not count, NaN included."""
    odd = ~np.isfinite(delta) & (lse == sinks.astype(lse.dtype))
    if odd.any():
        _let_lse_through(delta, grad_lse, odd & (out == 0).all(axis=-1))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isneginf(lse), 0, np.exp(sinks - lse) * -delta.astype(np.float64))


def _let_lse_through(delta, grad_lse, rows):
    """delta of rows that saw no key: grad_out has no influence there."""
    if delta is not None:
        delta[rows] = 0 if grad_lse is None else -grad_lse[rows]


def _like_floats(grad, given):
    given = np.asarray(given)
    return _like(grad, given.astype(np.float64) if given.dtype.kind in "iu" else given)
