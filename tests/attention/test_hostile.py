"""Arrays that few calls hold and that whoever sends them may choose: values too large to sum, NaN and inf in bulk,
denormals, long sums.  What they give; benchmarks/studies/hostile.py says how long they take."""

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import arithmetic, assert_same_bits, exactly, judge, plainly
from support.draw import HALF, WIDE, draw, float32, float64, inf, nan, rng
from support.kernels import on_kernels
from support.together import both

import sdpa
from sdpa import reference

# Those for which the oracle has a wider one: where long double is double, float64 has none.
HELD = {name: dtype for name, dtype in WIDE.items() if plainly(dtype) == arithmetic(dtype)}
EACH = on_kernels(HELD, {"bfloat16": bfloat16})
ROWS = pytest.mark.parametrize("rows", [1, 3, 40])  # few, and many


def engine(*arrays):
    return sdpa.explain(*arrays).engine


def largest(dtype):
    return float(ml_dtypes.finfo(dtype).max)


def large_values(shape, dtype, seed=0):
    """Of all sizes below the largest number; that itself; both signs of it in turns; ordinary ones."""
    value = (rng(seed).uniform(-1, 1, shape) * largest(dtype)).astype(dtype)
    value[..., 1] = largest(dtype)
    value[..., ::2, 2], value[..., 1::2, 2] = largest(dtype), -largest(dtype)
    value[..., 3] = rng(seed + 1).standard_normal(shape[:-1])
    return value


def judge_large(out, lse, query, key, value, **options):
    """By a power of 2 smaller, the same numbers do not overflow in NumPy."""
    assert np.isfinite(out.astype(float)).all()
    small_out, small_value = ((x * x.dtype.type(2.0**-20)).astype(x.dtype) for x in (out, value))
    judge(small_out, lse, query, key, small_value, **options)


OPTIONS = {
    "nothing": lambda M, N: {},
    "causal": lambda M, N: dict(causal=True),
    "mask": lambda M, N: dict(mask=rng(1).random((M, N)) < 0.7),
    "bias": lambda M, N: dict(bias=np.where(rng(2).random((M, N)) < 0.3, -inf, 0.5)),
    "softcap": lambda M, N: dict(softcap=3.0),
    "scale 0": lambda M, N: dict(scale=0),
    "small scale": lambda M, N: dict(scale=1e-30),
    "sinks and lengths": lambda M, N: dict(sinks=np.array([-2.0, 3.0]), kv_lengths=np.array([N - 5, N // 2])),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@EACH
def test_values_too_large_to_sum(kernel, dtype, options):
    for rows, keys in (1, 60), (3, 133), (40, 133), (1, 2100), (20, 3300):
        query, key, _ = draw(2, 2, 1, rows, keys, 8, 1, dtype=dtype)
        value = large_values((2, 1, keys, 7), dtype)
        given = options(rows, keys)
        judge_large(*both(query, key, value, **given), query, key, value, **given)


@ROWS
@EACH
def test_large_scores_and_values(kernel, dtype, rows):
    """The highest score comes last, and what was summed before it shrinks to nothing; or all are the highest."""
    key = np.linspace(0, 1, 700)[:, None].astype(dtype)
    value = large_values((700, 5), dtype)
    for size in 1, 1e3, 1e9:
        query = np.full((rows, 1), size, dtype)
        for keys in key, np.ones_like(key):
            judge_large(*both(query, keys, value), query, keys, value)


@pytest.mark.parametrize("rows, keys", [(1, 2500), (20, 2500), (20, 5000)])
@EACH
def test_a_part_of_the_keys_is_large(kernel, dtype, rows, keys):
    """Parts of the keys: some overflow alone, some only together."""
    query, key, _ = draw(1, 2, 1, rows, keys, 8, 1, dtype=dtype)
    for size, where in (1, slice(1000, 1500)), (2.0**-9, slice(0, keys)), (2.0**-3, slice(keys - 10, keys)):
        value = draw(1, 2, 1, rows, keys, 1, 7, dtype=dtype)[2]
        value[..., where, :4] = largest(dtype) * size
        for threads in 1, 2:
            judge_large(*both(query, key, value, threads=threads), query, key, value)


@EACH
def test_rows_that_do_not_overflow_keep_their_bits(kernel, dtype):
    for rows in 7, 150:
        query, key, value = draw(1, 2, 1, rows, rows, 8, 9, dtype=dtype)
        expected = both(query, key, value, causal=True)
        for number in largest(dtype), -largest(dtype):
            changed = value.copy()
            changed[..., rows // 2 :, ::2] = number
            results = both(query, key, changed, causal=True)
            for one, other in zip(results, expected):
                assert_same_bits(one[:, :, : rows // 2], other[:, :, : rows // 2])
            for cut in rows // 2 + 2, rows // 4:
                if engine(query[:, :, cut:], key, value) == engine(query, key, value):
                    for one, other in zip(both(query[:, :, cut:], key, changed, causal=True), results):
                        assert_same_bits(one, other[:, :, cut:])


@ROWS
@EACH
def test_what_is_hidden_changes_no_bit_beside_large_values(kernel, dtype, rows):
    query, key, _ = draw(1, 2, 1, rows, 200, 8, 1, dtype=dtype)
    value = large_values((1, 1, 200, 9), dtype)
    mask = rng(3).random(200) < 0.8
    expected = both(query, key, value, mask=mask)
    for garbage in nan, inf, -largest(dtype):
        changed = value.copy()
        changed[..., ~mask, ::2] = garbage
        for one, other in zip(both(query, key, changed, mask=mask), expected):
            assert_same_bits(one, other)


@EACH
def test_large_values_in_sequences_and_pages(kernel, dtype):
    query = draw(1, 2, 1, 60, 1, 8, 1, dtype=dtype)[0][0].swapaxes(0, 1).copy()
    key = draw(1, 2, 1, 1, 400, 8, 1, dtype=dtype)[1][0].swapaxes(0, 1).copy()
    value = large_values((400, 1, 8), dtype)
    starts, key_starts = np.array([0, 2, 60]), np.array([0, 100, 400])
    out, lse = sdpa.attention_varlen(
        query, key, value, cu_seqlens_q=starts, cu_seqlens_k=key_starts, return_lse=True
    )  # fmt: skip
    cache = sdpa.PagedKVCache(64, 16, 1, 8, dtype=np.dtype(dtype))
    for b in range(2):
        q, k, v = (
            x[s[b] : s[b + 1]].swapaxes(0, 1) for x, s in ((query, starts), (key, key_starts), (value, key_starts))
        )
        judge_large(out[starts[b] : starts[b + 1]].swapaxes(0, 1), lse[starts[b] : starts[b + 1]].T, q, k, v)
        number = cache.allocate()
        cache.append(number, k, v)
        assert_same_bits(cache.attend(q, number, causal=False), sdpa.attention(q, k, v))


@ROWS
def test_large_values_in_caches(kernel, rows):
    """int8 itself is exact to 1/254 of the largest of a row."""
    query, key, _ = draw(1, 2, 1, rows, 300, 32, 1)
    value = large_values((1, 1, 300, 32), float32)
    for dtype, size in (float32, 1e-5), (np.int8, 0.02):
        cache = sdpa.KVCache(1, 1, 32, dtype=dtype)
        cache.append(key, value)
        out = cache.attend(query, causal=False)
        exact = reference.attention(query, key, value)
        assert np.isfinite(out).all() and (np.abs(out - exact) <= size * largest(float32)).all()


@EACH
def test_merge_of_large_results(kernel, dtype):
    query, key, _ = draw(1, 2, 1, 3, 900, 8, 1, dtype=dtype)
    value = large_values((1, 1, 900, 9), dtype)
    parts = [both(query, key[:, :, s], value[:, :, s]) for s in (slice(0, 10), slice(10, 500), slice(500, 900))]
    out, _ = sdpa.merge(*zip(*parts))
    exact = reference.attention(query, key, value, dtype=exactly(dtype))
    size = 8 * float(ml_dtypes.finfo(dtype).eps) * largest(dtype)
    assert np.isfinite(out.astype(float)).all() and (np.abs(out.astype(exactly(dtype)) - exact) <= size).all()


def test_merge_does_not_round_to_inf():
    most = np.float32(largest(float32))
    for lses in rng(0).standard_normal((20, 50, 1)).astype(float32):
        out, _ = sdpa.merge([np.full((1, 2), most)] * 50, list(lses))
        assert np.isfinite(out).all() and (out > 0.999 * most).all()
    out, _ = sdpa.merge([np.full((1, 2), most), np.full((1, 2), inf, float32)], [np.zeros(1, float32)] * 2)
    assert (out == inf).all()


# NaN and inf in bulk.

FILLINGS = {
    "all NaN": lambda x, some: np.full_like(x, nan),
    "some NaN": lambda x, some: np.where(some < 0.02, nan, x),
    "some inf": lambda x, some: np.where(some < 0.02, inf, x),
    "inf of both signs": lambda x, some: np.where(some < 0.01, inf, np.where(some > 0.99, -inf, x)),
    "all of them": lambda x, some: np.select([some < 0.02, some > 0.98, some > 0.96], [nan, inf, -inf], x),
}
BESIDE_THE_LARGEST = {
    "inf beside the largest": lambda x, some: np.where(some < 0.01, inf, np.sign(x) * largest(x.dtype))
}


def each(fillings):
    return pytest.mark.parametrize("fill", fillings.values(), ids=fillings)


def filled(x, fill):
    return fill(x, rng(9).random(x.shape)).astype(x.dtype)


def assert_alike(actual, expected, size, limit=1.0):
    """NaN and inf in the same places, and numbers near those."""
    actual = actual.astype(expected.dtype)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(actual), finite)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    actual, expected = actual[finite], expected[finite]
    assert (np.abs(actual - expected) <= size * np.maximum(limit, np.abs(expected))).all()


@each(FILLINGS | BESIDE_THE_LARGEST)
@pytest.mark.parametrize("name", ["nothing", "causal", "mask", "bias"])
@on_kernels(WIDE, HALF, half="best")
def test_values_that_are_not_finite(kernel, dtype, name, fill):
    for rows in 3, 40:
        check_not_finite(dtype, rows, fill, OPTIONS[name](rows, 150))


def check_not_finite(dtype, rows, fill, options):
    query, key, value = draw(1, 2, 1, rows, 150, 20, 13, dtype=dtype)
    value = filled(value, fill)
    with np.errstate(all="ignore"):
        expected = reference.attention(query, key, value, dtype=exactly(dtype), **options)
    most = np.abs(value[np.isfinite(value)].astype(float)).max(initial=1)
    assert_alike(sdpa.attention(query, key, value, **options), expected, float(ml_dtypes.finfo(dtype).eps) * 16, most)


@each(FILLINGS)
@pytest.mark.parametrize("name", ["nothing", "causal", "mask"])
@on_kernels({"float32": float32}, HALF, half="best")
def test_gradients_that_are_not_finite(kernel, dtype, name, fill):
    query, key, value = draw(1, 2, 1, 70, 150, 20, 13, dtype=dtype)
    options = OPTIONS[name](70, 150)
    out, lse = both(query, key, value, **options)
    grad_out = filled(draw(1, 2, 1, 70, 1, 13, 1, dtype=dtype, seed=4)[0], fill)
    with np.errstate(all="ignore"):
        expected = reference.attention_backward(grad_out, query, key, value, out, lse, **options)
    grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, **options)
    for field in "query", "key", "value":
        assert_alike(getattr(grads, field), getattr(expected, field), float(ml_dtypes.finfo(dtype).eps) * 32 + 1e-4)


# Denormals, and what meets them.


@pytest.mark.parametrize("share", [0.02, 1])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@on_kernels({"bfloat16": bfloat16})
def test_small_values(kernel, dtype, options, share):
    """Below 2**-95, denormals among them, beside larger ones in the same block."""
    query, key, value = draw(1, 2, 1, 70, 150, 20, 33, dtype=dtype)
    exponents = rng(5).integers(-133, -90, (*value.shape[:-2], 1, 33))
    small = (value.astype(float64) * 2.0**exponents).astype(dtype)
    value = np.where(rng(6).random(value.shape) < share, small, value)
    judge(*both(query, key, value, **options), query, key, value, **options)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("D", [7, 20, 64])
@on_kernels({"bfloat16": bfloat16})
def test_denormal_queries_and_keys(kernel, dtype, rows, D):
    """Scores of about 1, of denormals and the largest numbers side by side."""
    numbers = rng(7).integers(-127, 128, (1, 2, rows, D)) * 2.0**-133
    large = rng(8).choice([-1.0, 0.5, 1], (1, 2, 150, D)) * 2.0**125
    query, key = numbers.copy(), large.copy()
    for x in query, key:
        x[..., ::3] = rng(9).standard_normal(x[..., ::3].shape)
    swapped = large[:, :, :rows], rng(2).integers(-127, 128, (1, 2, 150, D)) * 2.0**-133
    value = draw(1, 2, 2, 1, 150, 1, 5, dtype=dtype)[2]
    for q, k in (query, key), swapped:
        q, k = q.astype(dtype), k.astype(dtype)
        for options in {}, dict(causal=True, q_offset=0), dict(mask=rng(3).random((rows, 150)) < 0.6):
            judge(*both(q, k, value, scale=0.5, **options), q, k, value, scale=0.5, **options)


# Long sums.


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("D", [300, 4096, 16384])
@on_kernels(HELD)
def test_rows_of_many_positive_features(kernel, dtype, rows, D):
    for seed in range(2):
        query, key = (rng(seed).random((n, D)).astype(dtype) for n in (rows, 20))
        value = rng(seed).standard_normal((20, 5)).astype(dtype)
        judge(*both(query, key, value), query, key, value)
