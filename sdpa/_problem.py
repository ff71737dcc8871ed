"""From what callers give to what the kernels take: all checks, and the only place that raises.

Everything becomes four axes, (B, H, M, D) and so on, as views: nothing is copied but the small arrays (offsets,
lengths, sinks, slopes).  Messages name the argument, the values given and the rule.
"""

import math
import operator
from typing import NamedTuple

import numpy as np

from . import _core, _threads

# Names of the dtypes that can be computed with, narrow before wide.  NumPy has no bfloat16 of its own: it comes from
# the package ml_dtypes, is known by its name, and that package is never imported.
FLOATS = ("float16", "bfloat16", "float32", "float64")
INT64 = np.iinfo(np.int64)
LONGEST = 2**40  # size of a key or a value: sizes of scratch must not overflow
MOST_AXES = 32  # of an array: NumPy 1 has no more, and NumPy 2, which has 64, broadcasts no more
NO_VALUE = object()  # for weights alone; None is what somebody gave


class Plan(NamedTuple):
    """How a problem is cut for the threads."""

    few_rows: bool
    pairs: bool
    converted: bool
    lanes: int
    most_rows: int
    rows: int
    keys: int
    tasks: int
    bundle: int
    parts: int
    parts_shared: bool
    threads: int
    scratch_bytes: int


class Problem:
    """Checked arguments of one call.  `lead` are the axes before (H, M, ...), broadcast; `rank` that of the result."""

    def __init__(
        self, query, key, value=NO_VALUE, *, mask=None, bias=None, causal=False, window=None, q_offset=None,
        kv_lengths=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None, mask_name="mask",
        bias_name="bias",
    ):  # fmt: skip
        query, key = _float_array("query", query), _float_array("key", key)
        value = None if value is NO_VALUE else _float_array("value", value)
        self.inputs = {"query": query, "key": key, "value": value}
        self.rank = max(x.ndim for x in (query, key, value) if x is not None)
        check_widths(self.inputs)
        self.like = query
        self.dtype = query.dtype
        self._take_arrays(query, key, value)
        lead, heads, q_len, kv_len = self.lead, self.heads, self.q_len, self.kv_len
        pairs = (*lead, heads, q_len, kv_len)
        self.mask = self.bias = None
        if mask is not None:
            self.inputs[mask_name], self.mask = broadcast_mask(mask, pairs, mask_name)
        if bias is not None:
            self.inputs[bias_name], self.bias = broadcast_bias(bias, pairs, bias_name)
        self.kv_lengths = None if kv_lengths is None else _lengths(kv_lengths, lead, kv_len)
        self.q_offset = None if q_offset is None else _whole_numbers("q_offset", q_offset, lead)
        self._place_window(*_window(window, causal))
        self.scale = _scale(scale, query.shape[-1])
        self.softcap = _softcap(softcap)
        self.sinks = None if sinks is None else _per_head("sinks", sinks, lead, heads)
        self.alibi_slopes = None if alibi_slopes is None else _per_head("alibi_slopes", alibi_slopes, lead, heads)
        self.threads = self._threads(threads)
        small = {"q_offset": q_offset, "kv_lengths": kv_lengths, "sinks": sinks, "alibi_slopes": alibi_slopes}
        self.inputs.update((name, array) for name, array in small.items() if isinstance(array, np.ndarray))

    def _take_arrays(self, query, key, value):
        """Shapes agree; self.query, .key, .value have `lead` and three axes more."""
        q, k = _four_axes(query), _four_axes(key)
        v = k[..., :0] if value is None else _four_axes(value)
        self.heads, self.q_len, dim = q.shape[-3:]
        kv_heads, self.kv_len, key_dim = k.shape[-3:]
        if max(dim, v.shape[-1]) > LONGEST:
            raise ValueError(f"query has shape {query.shape}: the last axes must not be longer than {LONGEST}")
        self._check_sizes(dim, key_dim)
        if v.shape[-3:-1] != k.shape[-3:-1]:
            raise ValueError(
                f"key has shape {key.shape} and value {value.shape}: they must have the same heads and the same keys"
            )
        check_heads(self.heads, kv_heads)
        if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
            q, k, v = self._broadcast_lead(q, k, v)
        self.lead, self.value_dim = q.shape[:-3], v.shape[-1]
        self.query, self.key, self.value = q, k, v

    def _check_sizes(self, dim, key_dim):
        """That a query can be compared with a key."""
        if dim != key_dim:
            shapes = f"query has shape {self.inputs['query'].shape} and key {self.inputs['key'].shape}"
            raise ValueError(f"{shapes}: the last axes must be equal")

    def _cost_of_score(self):
        """In multiply-adds."""
        return self.query.shape[-1]

    def _place_window(self, left, right):
        """Query i sees keys from i + begin_shift up to, not including, i + end_shift; None: no bound."""
        self.begin_shift = self.end_shift = None
        if left is None and right is None:
            return
        offsets = self.q_offset
        if offsets is None:
            lengths = np.full(math.prod(self.lead), self.kv_len) if self.kv_lengths is None else self.kv_lengths
            offsets = lengths - self.q_len
        limit = self.q_len + self.kv_len + 1  # beyond it every query sees nothing, or everything
        if left is not None:
            self.begin_shift = _sum_within(limit, offsets, -left)
        if right is not None:
            self.end_shift = _sum_within(limit, offsets, right + 1)

    def _broadcast_lead(self, *arrays):
        try:
            lead = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
        except ValueError:
            shapes = ", ".join(f"{name} {x.shape}" for name, x in self.inputs.items() if x is not None)
            raise ValueError(f"{shapes}: the axes before the heads must broadcast") from None
        return [np.broadcast_to(x, lead + x.shape[-3:]) for x in arrays]

    def _threads(self, threads):
        if threads is None and _core.is_small(
            math.prod(self.lead), self.heads, self.q_len, self.kv_len, self._cost_of_score(), self.value_dim
        ):
            return 1
        return _threads.count(threads)

    def plan(self, kernel):
        return Plan(*_core.plan(
            kernel, self.query, self.key, self.value, scale=self.scale,
            bounded=self.begin_shift is not None or self.end_shift is not None, threads=self.threads,
        ))  # fmt: skip

    def visible_pairs(self):
        """Pairs of query and key, over all heads, that causal, window and lengths leave visible."""
        batches = math.prod(self.lead)
        lengths = np.full(batches, self.kv_len) if self.kv_lengths is None else self.kv_lengths
        pairs = 0
        for batch, length in enumerate(lengths.tolist()):
            query = np.arange(self.q_len)
            begin = 0 if self.begin_shift is None else np.clip(query + self.begin_shift[batch], 0, length)
            end = length if self.end_shift is None else np.clip(query + self.end_shift[batch], 0, length)
            pairs += int(np.sum(np.maximum(end - begin, 0) + 0 * query))
        return pairs * self.heads

    def trim(self, array):
        """Without the axes that none of the inputs had; `array` has `lead` and (H, M[, E]) as its axes."""
        extra = len(self.lead) + 3 - self.rank
        return array.reshape(array.shape[extra:]) if extra else array

    def new_out(self, out=None):
        """The array for the result, in the layout of query; or `out`, checked."""
        shape = (*self.lead, self.heads, self.q_len, self.value_dim)[-self.rank :]
        if out is not None:
            check_out(out, shape, self.dtype, self.inputs)
            return out
        if self.like.ndim == self.rank:
            return np.empty_like(self.like, shape=shape, subok=False)
        return np.empty(shape, self.dtype)

    def new_lse(self):
        return np.empty((*self.lead, self.heads, self.q_len), sum_dtype(self.dtype))

    def result(self, kernel, out, return_lse, **more):
        """`out`, or a new array, filled; with return_lse (out, lse)."""
        return_lse = flag("return_lse", return_lse)
        out, lse = self.new_out(out), self.new_lse() if return_lse else None
        self.run(kernel, out=out, lse=lse, **more)
        return (out, self.trim(lse[..., None])[..., 0]) if return_lse else out

    def run(self, kernel, *, out=None, weights=None, lse=None, **more):
        """Fill `out` or `weights` (lead, H, M, E or N) and `lse` (lead, H, M).  There may be `more` of what `attend`
        takes: scales of int8, with one axis of batches, or v."""
        if self.query.shape[-1] == 0:  # nothing to compare: every row sees nothing
            sinks = -np.inf if self.sinks is None else self.sinks.reshape(*self.lead, self.heads, 1)
            for result, empty in ((out, 0), (weights, 0), (lse, sinks)):
                if result is not None:
                    result[...] = empty
            return
        arrays = dict(
            query=self.query, key=self.key, value=self.value, out=_four_axes(out), weights=weights,
            lse=None if lse is None else lse[..., None], mask=self.mask, bias=self.bias,
        )  # fmt: skip
        arrays, numbers = self.in_order(arrays, self.numbers() | dict(sinks=self.sinks))
        _core.attend(kernel, **arrays, **numbers, scale=self.scale, softcap=self.softcap, threads=self.threads, **more)

    def numbers(self):
        """What differs between batches, besides the arrays: one axis for all of `lead`."""
        return dict(
            begin_shift=self.begin_shift, end_shift=self.end_shift, q_offset=self.q_offset, kv_lengths=self.kv_lengths,
            alibi_slopes=self.alibi_slopes,
        )  # fmt: skip

    def in_order(self, arrays, numbers, shared_bias=None):
        """Both, with the batches in the order in which those of query lie in memory.  Axes of `lead` along which
        `shared_bias` is broadcast come first."""
        axes = range(len(self.lead))
        if len(axes) == 1:
            return arrays, numbers
        shared = [shared_bias is not None and shared_bias.strides[axis] == 0 for axis in axes]
        order = sorted(axes, key=lambda axis: (0, 0) if shared[axis] else (1, -abs(self.query.strides[axis])))
        if order == list(axes):
            return arrays, numbers
        batches = np.arange(math.prod(self.lead)).reshape(self.lead).transpose(order).ravel()
        axes = (*order, *range(len(order), len(order) + 3))
        return (
            {name: None if x is None else x.transpose(axes) for name, x in arrays.items()},
            {name: None if x is None else x[batches] for name, x in numbers.items()},
        )


def _four_axes(array):
    """A view with axes for heads and batch; for the optional arrays, None stays None."""
    if array is None or array.ndim > 3:
        return array
    return array[(None,) * (4 - array.ndim)]


def plain_array(name, array):
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, and what it hides would count: give its data")
    try:
        return np.asarray(array)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be an array, or what NumPy makes one of: {error}") from None


def _overlaps_itself(array):
    """By strides: each must step over all that the smaller ones reach."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def is_float(dtype):
    """Whether it can be computed with."""
    if dtype.name == "bfloat16":
        _core.know_bfloat16(dtype)
    return dtype.name in FLOATS and dtype.isnative


def sum_dtype(dtype):
    """Of sums, softmax and lse: that of the query, but no narrower than float32."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def check_widths(inputs):
    """Key and value, if any, are no wider than query; and there is no product of a bfloat16 and a float16."""
    query = inputs["query"]
    for name in ("key", "value"):
        array = inputs[name]
        if array is not None and array.itemsize > query.itemsize:
            raise TypeError(f"{name} has dtype {array.dtype}: it must not be wider than query, {query.dtype}")
    dtypes = {name: array.dtype.name for name, array in inputs.items() if array is not None}
    if {"float16", "bfloat16"} <= set(dtypes.values()):
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{given}: float16 and bfloat16 must not meet in one call")


def broadcast_mask(mask, pairs, name="mask"):
    """`mask` as an array, and what it is for the `pairs` of query and key."""
    mask = plain_array(name, mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {mask.dtype}: it must be boolean; numbers to add are given as bias")
    return mask, _broadcast(name, mask, pairs)


def broadcast_bias(bias, pairs, name="bias"):
    bias = plain_array(name, bias)
    if bias.dtype == np.bool_:
        raise TypeError(f"{name} has dtype bool: it must be floating; who may attend is given as mask")
    bias = _float_array(name, bias, fewest_axes=0)
    return bias, _broadcast(name, bias, pairs)


def _float_array(name, array, fewest_axes=2):
    array = plain_array(name, array)
    if not is_float(array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}: it must be {' or '.join(FLOATS)}, in native byte order")
    if array.ndim < fewest_axes:
        raise ValueError(f"{name} has shape {array.shape}: it must have at least two axes")
    if array.ndim > MOST_AXES:
        raise ValueError(f"{name} has {array.ndim} axes: it must have at most {MOST_AXES}")
    return array


def check_heads(heads, kv_heads):
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"query has {heads} heads and key has {kv_heads}: the heads of query must be a multiple of those of key"
        )


def flag(name, given):
    if given is not True and given is not False and not isinstance(given, np.bool_):
        raise TypeError(f"{name} is {given!r}: it must be True or False")
    return bool(given)


def may_hold(dtype, result):
    """Whether an array of `dtype` takes a result whose dtype is `result`: that, or, unrounded, a wider one of ours."""
    return dtype == result or (is_float(dtype) and dtype.itemsize > result.itemsize)


def check_out(out, shape, dtype, inputs, wider=True):
    """`out` can take a result of `shape` and `dtype` without touching the inputs (name: array)."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out is of type {type(out).__name__}: it must be an array")
    if out.shape != shape or not (may_hold(out.dtype, dtype) if wider else out.dtype == dtype):
        given, rule = f"shape {out.shape} and dtype {out.dtype}", f"{dtype}{', or a wider one' if wider else ''}"
        raise ValueError(f"out has {given}: the result has {shape} and {rule}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if out.size and _overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides}: its elements must not overlap one another")
    for name, array in inputs.items():
        if array is not None and np.shares_memory(out, array):
            raise ValueError(f"out overlaps {name}: inputs are never written")


def _broadcast(name, array, shape):
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} has shape {array.shape}: it must broadcast to {shape}") from None


def _window(window, causal):
    """(left, right), None for no bound; causal is right = 0."""
    causal = flag("causal", causal)
    left, right = (None, None) if window is None else _sides(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _sides(window):
    rule = "it must be (left, right), each a whole number or None"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {window!r}: {rule}")
    if len(window) != 2:
        raise ValueError(f"window is {window!r}: {rule}")
    try:
        if any(isinstance(side, (bool, np.bool_)) for side in window):
            raise TypeError
        return [None if side is None else operator.index(side) for side in window]
    except TypeError:
        raise TypeError(f"window is {window!r}: {rule}") from None


def _sum_within(limit, numbers, number):
    """numbers + number, clipped to +-limit, exact whatever their size."""
    if not numbers.size or max(abs(int(numbers.min())), abs(int(numbers.max())), abs(number)) >= 2**61:
        numbers = numbers.astype(object)
    return np.clip(numbers + number, -limit, limit).astype(np.int64)


def _whole_numbers(name, given, lead):
    """One for each batch, as int64."""
    numbers = plain_array(name, given)
    if numbers.dtype == object and all(isinstance(number, int) for number in numbers.flat):
        raise ValueError(f"{name} is {given}: it must fit into 64 bits with a sign")
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must be a whole number, or one for each batch")
    if numbers.dtype == np.uint64 and (numbers > INT64.max).any():
        raise ValueError(f"{name} is {given}: it must fit into 64 bits with a sign")
    return np.ascontiguousarray(_broadcast(name, numbers.astype(np.int64), lead)).reshape(-1)


def _lengths(kv_lengths, lead, kv_len):
    """`kv_len` is a number, or one for each."""
    lengths = _whole_numbers("kv_lengths", kv_lengths, lead)
    if ((lengths < 0) | (lengths > kv_len)).any():
        raise ValueError(f"kv_lengths are {kv_lengths}: they must be from 0 to the {kv_len} keys there are")
    return lengths


def _per_head(name, given, lead, heads):
    numbers = plain_array(name, given)
    if numbers.dtype.kind not in "fiu" and numbers.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {numbers.dtype}: it must hold numbers, one for each head")
    whole = _broadcast(name, numbers.astype(np.float64), (*lead, heads))
    return np.ascontiguousarray(whole).reshape(math.prod(lead), heads)


def _number(name, given):
    try:
        if isinstance(given, (str, bytes, bool, np.bool_)):
            raise TypeError
        number = float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {given!r}: it must be a number or None") from None
    except OverflowError:
        raise ValueError(f"{name} is {given}: it must be finite") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: it must be finite")
    return number


def _scale(scale, dim):
    return 1 / math.sqrt(dim or 1) if scale is None else _number("scale", scale)


def _softcap(softcap):
    """0 stands for none, in the kernels only."""
    if softcap is None:
        return 0.0
    cap = _number("softcap", softcap)
    if cap <= 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0, or None")
    return cap
