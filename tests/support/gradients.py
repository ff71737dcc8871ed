"""How accurate gradients are."""

import numpy as np
from ml_dtypes import bfloat16

import sdpa
from sdpa import reference
from sdpa._options import InputOptions
from sdpa._options.signatures import described
from sdpa._runtime import kernels
from sdpa.reference._attention import align, compare, over_groups, reduced
from support.accuracy import arithmetic, eps, exactly, plainly, units
from support.draw import float64, inf
from support.kernels import PAIRS_OF_BFLOAT16

FIELDS = ("query", "key", "value", "bias", "sinks")


def sizes_of(grad_out, query, key, value, out, lse, *, grad_lse=None, scale=None, **options):
    """What the gradients sum: the same sums over the absolute values of their terms.  A weight counts as no smaller
    than what an exponential may flush to 0; that of a sink, whose logit has no error of its own as scores have, counts
    as often as exp magnifies the rounding of its argument."""
    q, k, v, leading, _ = align(query, key, value, None)
    rows = (*leading, *q.shape[-3:-1])
    bias, sinks = options.get("bias"), options.get("sinks")
    defaults = {name: option.default for name, option in described(InputOptions).items()}
    options = defaults | dict(scale=scale) | options
    options.pop("threads")
    seen, score, _, sink = compare(q, k, leading, None, **options)
    lse = lse.astype(float64).reshape(rows)[..., None]
    seen &= (score != -inf) & (lse != -inf)
    with np.errstate(invalid="ignore", over="ignore"):
        flushed = np.finfo(arithmetic(out.dtype)).tiny / eps(arithmetic(out.dtype))
        weight = np.where(seen, np.maximum(np.exp(score - lse), flushed), 0)
        sink = np.where(lse == -inf, 0, np.maximum(np.exp(sink - lse) * np.maximum(abs(sink - lse), 1), flushed))
        sink = np.where(np.isnan(sink), 0, sink)  # no sink
    grad_out, out = (np.abs(x.astype(float64)).reshape(*rows, v.shape[-1]) for x in (grad_out, out))
    delta = (grad_out * out).sum(axis=-1, keepdims=True)
    delta = delta if grad_lse is None else delta + np.abs(grad_lse.astype(float64).reshape(rows)[..., None])
    grad_score = weight * (grad_out @ np.abs(v).swapaxes(-1, -2) + delta)
    steepness = abs(float(max(q.shape[-1], 1) ** -0.5 if scale is None else scale))
    by_key = steepness * grad_score.swapaxes(-1, -2) @ np.abs(q), weight.swapaxes(-1, -2) @ grad_out
    grads = [steepness * grad_score @ np.abs(k)]
    grads += [over_groups(x, np.shape(of)) for x, of in zip(by_key, (key, value))]
    grads += [None if bias is None else grad_score, None if sinks is None else (sink * delta).sum(axis=(-2, -1))]
    shapes = map(np.shape, (query, key, value, bias, sinks))
    return sdpa.Gradients(*(x if x is None else reduced(x, shape) for x, shape in zip(grads, shapes)))


def dtypes_of(call):
    """Of the gradients: those of what they are gradients of; float64 where sinks are not of a float type."""
    for name in FIELDS:
        dtype = np.asarray(call[name]).dtype if call.get(name) is not None else None
        yield float64 if name == "sinks" and dtype is not None and dtype.kind in "iu" else dtype


def judge(grads, call, *, oracle=reference.attention_backward, sizes=sizes_of, factor=2, floor=4):
    """The gradients are as accurate as NumPy in the dtype of the arithmetic: their errors, in roundings of `sizes`,
    are under a multiple of NumPy's plus a rounding floor.  Where the result is of a narrower dtype, half a rounding
    of it is added; where pairs of bfloat16 are multiplied, one of them for the weights and the gradients of scores.
    The kernel in plain C rounds products too, as NumPy does not."""
    factor += 0.5 * (kernels.default.name == "baseline")
    call = {name: x for name, x in call.items() if name != "threads"}
    wide, shown = arithmetic(call["query"].dtype), plainly(call["query"].dtype)
    exact, naive = (oracle(**call, dtype=dtype) for dtype in (exactly(call["query"].dtype), shown))
    pairs = kernels.default.name in PAIRS_OF_BFLOAT16 and all(
        call[name].dtype == bfloat16 for name in ("query", "key", "value")
    )
    assert isinstance(grads, sdpa.Gradients)
    for name, grad, dtype, right, plain, size in zip(FIELDS, grads, dtypes_of(call), exact, naive, sizes(**call)):
        if dtype is None:
            assert grad is None, name
            continue
        assert grad.dtype == dtype and grad.shape == np.shape(call[name]), name
        unit = max(dtype, wide, key=eps)
        error = (factor * units(plain, right, size, shown) + floor) * eps(wide) / eps(unit)
        if unit != wide:
            error += 0.5 + pairs
        assert units(grad, right, size, unit) <= error, name
