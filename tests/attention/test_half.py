"""Half types, float16 and bfloat16: what is stored in 16 bits, and computed in float32."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import arithmetic, assert_same_bits, eps, judge, rounds_weights, units
from support.draw import HALF, MIXED, WIDE, draw, float16, float32, float64, inf, nan, rng
from support.kernels import KERNELS, PAIRS_OF_BFLOAT16, WIDENING, on_kernels
from support.options import OPTIONS, options_for
from support.processes import run_python
from support.together import both, check

import sdpa
from sdpa import reference

ON_EACH = on_kernels(HALF)
ROWS = pytest.mark.parametrize("rows", [1, 3, 20, 70])  # few, and many
SMALLEST = {float16: 2.0**-24, bfloat16: 2.0**-133}


def widened(*arrays):
    return [x.astype(float32) if x.itemsize == 2 else x for x in arrays]


def bits(first, last, dtype):
    """The numbers whose bits are those of the whole numbers from first to last."""
    return np.arange(first, last + 1, dtype=np.uint16).view(dtype)


# Which dtypes.

FLOATS = WIDE | HALF
TRIPLES = list(itertools.product(FLOATS, repeat=3))


def clashes(names):
    """The arguments that must not come together."""
    dtypes = dict(zip(["query", "key", "value"], names))
    width = {name: np.dtype(FLOATS[dtype]).itemsize for name, dtype in dtypes.items()}
    halves = [name for name, dtype in dtypes.items() if dtype in HALF]
    both_halves = {*HALF} <= {*names}
    return [["query", name] for name in ("key", "value") if width[name] > width["query"]] + [halves] * both_halves


@pytest.mark.parametrize("names", [names for names in TRIPLES if clashes(names)], ids=" ".join)
def test_dtypes_that_are_refused(names):
    """With the names and the dtypes of arguments that clash."""
    arrays = [x.astype(FLOATS[name]) for x, name in zip(draw(), names)]
    with pytest.raises(TypeError) as caught:
        sdpa.attention(*arrays)
    message, dtypes = str(caught.value), dict(zip(["query", "key", "value"], names))
    assert any(all(name in message and dtypes[name] in message for name in clash) for clash in clashes(names))


@pytest.mark.parametrize("name", ["attention_weights", "explain", "scaled_dot_product_attention"])
def test_float16_with_bfloat16_is_refused_by_every_function(name):
    query, key, value = (x.astype(dtype) for x, dtype in zip(draw(G=4), (bfloat16, float16, bfloat16)))
    arrays = (query, key) if name == "attention_weights" else (query, key, value)
    with pytest.raises(TypeError, match=r"query.*bfloat16.*key.*float16|key.*float16.*query.*bfloat16"):
        getattr(sdpa, name)(*arrays)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS, indirect=True)
@pytest.mark.parametrize("names", [names for names in TRIPLES if not clashes(names)], ids=" ".join)
def test_dtypes_that_go_together(kernel, names):
    for M, N, D, E in [(1, 70, 5, 3), (4, 131, 20, 12), (33, 150, 17, 19)]:
        query, key, value = (x.astype(FLOATS[name]) for x, name in zip(draw(M=M, N=N, D=D, E=E), names))
        check(query, key, value, causal=True)
        weights, exact = sdpa.attention_weights(query, key), reference.attention_weights(query, key)
        assert weights.dtype == query.dtype
        size = max(eps(query.dtype), 10 * eps(arithmetic(query.dtype)))
        np.testing.assert_allclose(weights.astype(float), exact, rtol=size, atol=1e-7)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_dtypes_of_results(dtype, rank):
    arrays = [x[(0,) * (4 - rank)] if rank < 5 else x[None] for x in draw(dtype=dtype)]
    out, lse = both(*arrays)
    assert out.dtype == sdpa.attention(*arrays).dtype == dtype and lse.dtype == float32
    assert out.shape == (*arrays[0].shape[:-1], 12) and lse.shape == out.shape[:-1]
    assert sdpa.attention_weights(*arrays[:2]).dtype == dtype


@pytest.mark.parametrize("name", FLOATS)
@ON_EACH
def test_bias_of_any_dtype(kernel, name, dtype):
    arrays = draw(dtype=dtype)
    bias = rng(0).standard_normal((37, 133)).astype(FLOATS[name])
    bias[rng(1).random(bias.shape) < 0.3] = -inf
    check(*arrays, bias=bias)
    for one, other in zip(both(*arrays, bias=bias), both(*arrays, bias=bias.astype(float64))):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("of", [float32, float64, float16, bfloat16])
def test_options_in_half_types(kernel, name, of):
    """Any dtype of query: the numbers count, not their dtype."""
    arrays, half = draw(dtype=of), HALF[name]
    bias = np.where(rng(1).random((4, 37, 133)) < 0.3, -inf, rng(0).standard_normal((4, 37, 133)))
    sinks, slopes = rng(2).standard_normal(4).astype(half), rng(3).random((2, 4)).astype(half)
    narrow = dict(bias=bias.astype(half), sinks=sinks, alibi_slopes=slopes)
    wide = {name: option.astype(float64) for name, option in narrow.items()}
    for one, other in zip(both(*arrays, **narrow), both(*arrays, **wide)):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_a_scale_and_a_cap_in_half_types(dtype):
    arrays = draw(dtype=dtype)
    expected = sdpa.attention(*arrays, scale=0.5, softcap=2.0)
    assert_same_bits(sdpa.attention(*arrays, scale=dtype(0.5), softcap=dtype(2)), expected)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_out(dtype):
    query, key, value = draw(E=20, dtype=dtype)
    for other in {float16, bfloat16} - {dtype}:
        with pytest.raises(ValueError, match=rf"out.*{np.dtype(other)}.*{np.dtype(dtype)}"):
            sdpa.attention(query, key, value, out=np.zeros(query.shape, other))
    before = query.copy()
    with pytest.raises(ValueError, match="out overlaps query"):
        sdpa.attention(query, key, value, out=query)
    assert_same_bits(query, before)
    turned = query.swapaxes(1, 2).copy().swapaxes(1, 2)
    assert sdpa.attention(turned, key, value).strides == turned.strides


def test_ml_dtypes_is_not_needed():
    code = """
import sys
if {missing}:
    sys.modules["ml_dtypes"] = None  # what is not installed
import numpy as np, sdpa
x = np.ones((2, 30, 8), np.float16)
sdpa.attention(x, x, x, bias=x[0, :, :1], sinks=x[0, 0, :2])
sdpa.attention_weights(x.astype(np.float32), x)
sdpa.merge(*zip(sdpa.attention(x, x, x, return_lse=True)))
sdpa.reference.attention(x, x, x, dtype=np.float16)
print(sdpa.explain(x, x, x).dtype, sys.modules.get("ml_dtypes", "absent"))
"""
    for missing, found in (False, "absent"), (True, "None"):
        assert run_python(code.format(missing=missing)) == f"float16 {found}"


# Nothing but the result is rounded.


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [*HALF.values(), *MIXED.values()], ids=[*HALF, *MIXED])
def test_bits_are_those_of_widened_arrays(kernel, dtype, name):
    for M, N in (37, 133), (3, 300):
        arrays = draw(M=M, N=N, dtype=dtype)
        wide = [x.astype(arithmetic(arrays[0].dtype)) for x in arrays]
        options = options_for(*arrays[:2], name)
        out, lse = both(*arrays, **options)
        expected, expected_lse = both(*wide, **options)
        assert_same_bits(out, expected.astype(arrays[0].dtype))
        assert_same_bits(lse, expected_lse)
        weights, expected = (sdpa.attention_weights(*given[:2], **options) for given in (arrays, wide))
        assert_same_bits(weights, expected.astype(arrays[0].dtype))


@pytest.mark.parametrize("dtype", [*HALF.values(), *MIXED.values()], ids=[*HALF, *MIXED])
def test_bits_are_those_of_widened_arrays_of_any_shape(kernel, dtype):
    for D, E in itertools.product((1, 3, 8, 16, 31, 64, 80), (1, 7, 16, 33, 64)):
        for M, N in (1, 129), (5, 16), (16, 1), (33, 17), (70, 135):
            arrays = draw(1, 2, 1, M, N, D, E, dtype=dtype)
            wide = [x.astype(arithmetic(arrays[0].dtype)) for x in arrays]
            expected = sdpa.attention(*wide, causal=True).astype(arrays[0].dtype)
            assert_same_bits(sdpa.attention(*arrays, causal=True), expected)


@pytest.mark.parametrize("kernel", [KERNELS[name] for name in PAIRS_OF_BFLOAT16], ids=PAIRS_OF_BFLOAT16, indirect=True)
def test_weights_are_rounded_where_pairs_are_multiplied(kernel):
    many, few = draw(M=37, dtype=bfloat16), draw(M=2, dtype=bfloat16)
    assert rounds_weights(*many) and rounds_weights(*few) == (kernel.name != "amx")
    for arrays in many, few:
        assert not rounds_weights(arrays[0].astype(float32), *arrays[1:])
        same = sdpa.attention(*arrays) == sdpa.attention(*widened(*arrays)).astype(bfloat16)
        assert same.all() == (not rounds_weights(*arrays))


@ROWS
@ON_EACH
def test_scale_meets_scores_not_queries(kernel, dtype, rows):
    """One key: lse is the score.  A query times 1/3 is not a number of 16 bits."""
    from_one = {float16: (0x3C00, 0x3C3F), bfloat16: (0x3F80, 0x3FBF)}[dtype]
    query = np.repeat(bits(*from_one, dtype)[:, None, None], rows, axis=1)
    key = np.full((1, 1, 1), 16, dtype)
    lse = both(query, key, key, scale=1 / 3)[1]
    np.testing.assert_allclose(lse, query[..., 0].astype(float) * 16 / 3, rtol=3e-7)


@ROWS
@ON_EACH
def test_scores_are_not_rounded(kernel, dtype, rows):
    """Nor do they overflow: the products add up to 2**18, which the scale brings down."""
    query, key, value = draw(1, 1, 1, rows, 1, 64, 4, dtype=dtype)
    score = query.astype(float) @ key.astype(float).swapaxes(-1, -2)
    np.testing.assert_allclose(both(query, key, value, scale=1)[1], score[..., 0], rtol=1e-5, atol=1e-5)
    query, key = np.full((1, 1, rows, 4096), 8, dtype), np.full((1, 1, 1, 4096), 8, dtype)
    np.testing.assert_allclose(both(query, key, value, scale=1e-4)[1], 26.2144, rtol=1e-6)


@ROWS
@pytest.mark.parametrize("keys", [255, 256, 257, 4097])
@ON_EACH
def test_sums_do_not_stop_growing(kernel, dtype, rows, keys):
    """In bfloat16 256 + 1 is 256."""
    query, key = np.ones((rows, 1), dtype), np.zeros((keys, 1), dtype)
    value = np.tile(np.array([1, 3, 5], dtype), (keys, 1))
    out, lse = both(query, key, value)
    assert (out == value[0]).all()
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)


SITUATIONS = {
    "normal": lambda q, k: ((q, k), {}, 1),
    "causal": lambda q, k: ((q, k), dict(causal=True), 1),
    "large scores": lambda q, k: ((q * 8, k), {}, 2),
    "softcap": lambda q, k: ((q * 4, k), dict(softcap=3.0), 2),
    "bias": lambda q, k: ((q, k), dict(bias=rng(1).standard_normal((200, 1200)) * 3), 2),
    "alibi": lambda q, k: ((q, k), dict(alibi_slopes=np.array([0.5, 0.1])), 2),
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
@ON_EACH
def test_errors_beside_those_of_numpy(kernel, dtype, situation):
    """At most those of a computation whose scores, probabilities and results are 16 bits wide: the largest error and
    the root of the mean square."""
    query, key, value = draw(1, 2, 1, 200, 1200, 64, 16, dtype=dtype)
    (query, key), options, factor = situation(query, key)
    arrays = query, key, value
    exact, naive = reference.attention(*arrays, **options), reference.attention(*arrays, dtype=dtype, **options)
    own, naive = (np.abs(x.astype(float) - exact) for x in (sdpa.attention(*arrays, **options), naive))
    assert own.max() <= factor * naive.max()
    assert np.sqrt((own**2).mean()) <= factor * np.sqrt((naive**2).mean())


# Rounding of the result: to nearest, to even between two.


@ROWS
@pytest.mark.parametrize("sign", [1, -1])
@ON_EACH
def test_halfway_between_any_two_numbers(kernel, dtype, sign, rows):
    """Two keys of the same weight hold neighbours: all of them up to half of the largest, denormals too."""
    numbers = sign * bits(0, {float16: 0x77FF, bfloat16: 0x7EFF}[dtype], dtype)
    low, high = numbers[:-1].astype(float32), numbers[1:].astype(float32)
    value = np.stack([numbers[:-1], numbers[1:]])
    out = sdpa.attention(np.zeros((rows, 1), dtype), np.zeros((2, 1), dtype), value)
    even = np.where(np.arange(low.size) % 2, high, low)
    assert (out == even).all()


@pytest.mark.parametrize("kernel", WIDENING.values(), ids=WIDENING, indirect=True)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_a_bit_above_and_below_halfway(kernel, dtype):
    """Three and one parts, seven and one, ... between two neighbours, as float32 sums them exactly."""
    numbers = bits(0, {float16: 0x77FF, bfloat16: 0x7D7F}[dtype], dtype)
    for keys, of_high in (4, 1), (4, 3), (16, 7), (16, 9):
        value = np.stack([numbers[1:]] * of_high + [numbers[:-1]] * (keys - of_high))
        out = sdpa.attention(np.zeros((20, 1), dtype), np.zeros((keys, 1), dtype), value)
        assert (out == numbers[of_high * 2 > keys :][: numbers.size - 1]).all()


@ROWS
@ON_EACH
def test_every_number_comes_out_as_it_went_in(kernel, dtype, rows):
    """One key of each bit pattern: infinities and denormals too, and NaN stays NaN."""
    value = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(64, 1, 1024)
    out = sdpa.attention(np.ones((64, rows, 3), dtype), np.ones((64, 1, 3), dtype), value)
    with np.errstate(invalid="ignore"):  # of signalling NaN, where NumPy widens with an instruction, as on Arm
        expected, out = value.astype(float32), out.astype(float32)
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


@ROWS
@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000])
@ON_EACH
def test_any_nan_stays_nan(kernel, dtype, rows, pattern):
    """Rounding its bits up or off would make it 0 or inf."""
    query, key, value = draw(1, 1, 1, rows, 5, 4, 45, dtype=dtype)
    out, lse = both(query, key, value, bias=np.array([pattern], np.uint32).view(float32))
    assert np.isnan(out).all() and np.isnan(lse).all()
    assert np.isnan(sdpa.merge([out], [lse])[0]).all()


# The ends of the range.


@ROWS
@pytest.mark.parametrize("keys", [1, 2, 3, 130, 300])
@ON_EACH
def test_constant_values_of_any_size_come_out_as_they_are(kernel, dtype, rows, keys):
    """All powers of 2 whose sum has a place in float32, denormal ones and those whose product with a weight is."""
    powers = 2.0 ** np.arange(*{float16: (-24, 16), bfloat16: (-133, 115)}[dtype])
    query, key, _ = draw(1, 2, 1, rows, keys, 8, 1, dtype=dtype)
    value = np.broadcast_to(np.concatenate([powers, -powers]).astype(dtype), (1, 1, keys, 2 * powers.size))
    for options in {}, dict(causal=True, q_offset=max(keys - rows, 0)):
        out = sdpa.attention(query, key, value, **options)
        assert units(out, value[:, :, :1].astype(float), np.abs(value[:, :, :1].astype(float)), dtype) <= 0.5
    assert (out[..., 0] == value[0, 0, 0, 0]).all()


@ROWS
@ON_EACH
def test_values_that_are_denormal(kernel, dtype, rows):
    """Different ones: within a unit, which is the smallest of them."""
    query, key, _ = draw(1, 2, 1, rows, 133, 8, 1, dtype=dtype)
    numbers = rng(0).integers(-127, 128, (1, 1, 133, 21)) * SMALLEST[dtype]
    check(query, key, numbers.astype(dtype))
    some = np.where(rng(1).random((133, 1)) < 0.1, numbers, rng(2).standard_normal(numbers.shape))
    check(query, key, some.astype(dtype))


@ROWS
@pytest.mark.parametrize("spread", [1, 3, 8])
@ON_EACH
def test_values_of_all_sizes(kernel, dtype, rows, spread):
    """Each feature has its own, and so has the product with a weight; each key alone in some, and all in others."""
    exponents = np.arange(*{float16: (-24, 12), bfloat16: (-133, 100)}[dtype])
    query, key, value = draw(1, 2, 1, rows, 133, 8, exponents.size)
    if spread == 8 and rounds_weights(*(x.astype(dtype) for x in (query, key, value))):
        pytest.skip("small weights times small values may be lost: see csrc/forward/bfloat16.h")
    alone = np.arange(exponents.size) % 133 == np.arange(133)[:, None]
    value = np.concatenate([value, value * alone], axis=-1) * np.tile(2.0**exponents, 2)
    check((query * spread).astype(dtype), key.astype(dtype), value.astype(dtype))


@ROWS
@pytest.mark.parametrize("size", [-60, 60, 100])
@ON_EACH
def test_large_queries_and_small_keys(kernel, dtype, rows, size):
    size = size if dtype == bfloat16 else size // 8
    query, key, value = draw(1, 2, 1, rows, 133, 8, 3)
    check((query * 2.0**size).astype(dtype), (key * 2.0**-size).astype(dtype), value.astype(dtype))


@ROWS
@pytest.mark.parametrize("denormal", ["query", "key"])
@ON_EACH
def test_a_denormal_times_a_large_number(kernel, dtype, rows, denormal):
    """Scores of about 1."""
    small = rng(0).integers(-127, 128, (2, 1, rows, 9)) * SMALLEST[dtype]
    large = rng(1).choice([-1.0, 0.5, 1], (2, 1, 133, 9)) * {float16: 2.0**15, bfloat16: 2.0**126}[dtype]
    if denormal == "key":
        small, large = (rng(0).integers(-127, 128, (2, 1, 133, 9)) * SMALLEST[dtype], large[:, :, :rows])
    query, key = (small, large) if denormal == "query" else (large, small)
    value = draw(2, 1, 1, rows, 133, 9, 5, dtype=dtype)[2]
    scale = {float16: 4.0, bfloat16: 1.0}[dtype]
    check(query.astype(dtype), key.astype(dtype), value, scale=scale)
    assert np.ptp(both(query.astype(dtype), key.astype(dtype), value, scale=scale)[1]) > 0.01


@ROWS
@on_kernels({"bfloat16": bfloat16})
def test_products_that_are_denormal_in_float32(kernel, dtype, rows):
    """A large scale makes scores of them."""
    query, key, value = draw(1, 2, 1, rows, 133, 9, 5)
    arrays = (query * 2.0**-62).astype(dtype), (key * 2.0**-66).astype(dtype), value.astype(dtype)
    out, lse = both(*arrays, scale=2.0**126)
    exact, exact_lse = reference.attention(*arrays, scale=2.0**126, return_lse=True)
    np.testing.assert_allclose(out.astype(float), exact, atol=0.02)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-3)


@ROWS
@ON_EACH
def test_the_largest_numbers(kernel, dtype, rows):
    """In float16 they stay finite, however many there are: sums are float32."""
    query, key, _ = draw(1, 2, 1, rows, 133, 8, 1, dtype=dtype)
    largest = {float16: 65504.0, bfloat16: float(ml_dtypes.finfo(bfloat16).max) / 256}[dtype]
    value = np.broadcast_to(np.array([largest, -largest], dtype), (1, 1, 133, 2))
    out = sdpa.attention(query, key, value)
    assert (np.abs(out.astype(float)) <= largest * (1 + eps(dtype))).all() and np.isfinite(out).all()
    np.testing.assert_allclose(np.abs(out.astype(float)), largest, rtol=eps(dtype))


@ROWS
@pytest.mark.parametrize("garbage", [inf, -inf, nan])
@pytest.mark.parametrize("place", ["query", "key", "value"])
@ON_EACH
def test_what_is_not_finite_and_visible(kernel, dtype, rows, garbage, place):
    """As in the oracle, bit patterns aside."""
    arrays = dict(zip(["query", "key", "value"], draw(1, 2, 1, rows, 9, 5, 3, dtype=dtype)))
    arrays[place][0, 0, -1, 1] = garbage
    for options in {}, dict(causal=True), dict(softcap=2.0):
        expected = reference.attention(**arrays, return_lse=True, **options)
        for actual, exact in zip(both(**arrays, **options), expected):
            np.testing.assert_allclose(actual.astype(float), exact, rtol=2 * eps(dtype), atol=2 * eps(dtype))


# Odd numbers of things, beside other things.


@pytest.mark.parametrize("rows", range(1, 21))
@ON_EACH
def test_odd_sizes(kernel, dtype, rows):
    for N, D, E in itertools.product((1, 2, 3, 31, 129), (1, 2, 5, 17, 33), (1, 16, 47)):
        check(*draw(1, 2, 1, rows, N, D, E, dtype=dtype), causal=N > rows)


def surrounded(x, before, behind, filling):
    """`x` as a part of a larger array, with something else before and behind each row."""
    whole = np.full((*x.shape[:-2], x.shape[-2] + 2, before + x.shape[-1] + behind), filling, x.dtype)
    view = whole[..., 1:-1, before : before + x.shape[-1]]
    view[...] = x
    return view


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127])
@on_kernels(HALF, {"float32 over bfloat16": (float32, bfloat16), "float32 over float16": (float32, float16)})
def test_nan_beside_a_row_has_no_influence(kernel, dtype, size):
    """Rows that begin at any even address, odd numbers of elements apart."""
    for rows, keys in (2, 7), (19, 33):
        arrays = draw(1, 2, 1, rows, keys, size, size, dtype=dtype)
        expected = both(*arrays, causal=True)
        weights = sdpa.attention_weights(*arrays[:2])
        for before, behind, filling in (0, 1, nan), (1, 1, inf), (1, 0, nan), (3, 14, inf):
            views = [surrounded(x, before, behind, filling) for x in arrays]
            for one, other in zip(both(*views, causal=True), expected):
                assert_same_bits(one, other)
            assert_same_bits(sdpa.attention_weights(*views[:2]), weights)


@pytest.mark.parametrize("garbage", [nan, inf, -inf, "denormal"])
@pytest.mark.parametrize("rows", [2, 19])
@ON_EACH
def test_a_hidden_key_beside_a_visible_one(kernel, dtype, rows, garbage):
    """Keys 2j and 2j + 1 may be multiplied as a pair."""
    garbage = SMALLEST[dtype] * 3 if garbage == "denormal" else garbage
    query, key, value = draw(1, 2, 1, rows, 12, 6, 5, dtype=dtype)
    for hidden in range(12):
        mask = np.arange(12) != hidden
        expected = both(query, key, value, mask=mask)
        struck = key.copy(), value.copy()
        for x in struck:
            x[:, :, hidden] = garbage
        for one, other in zip(both(query, *struck, mask=mask), expected):
            assert_same_bits(one, other)
        bias = np.where(mask, 0.5, -inf).astype(dtype)
        for one, other in zip(both(query, *struck, bias=bias), both(query, key, value, bias=bias)):
            assert_same_bits(one, other)


@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("garbage", [nan, inf, "denormal", "smallest normal"])
@pytest.mark.parametrize("rows", [3, 40])
@ON_EACH
def test_rows_that_do_not_see_a_key_keep_their_bits(kernel, dtype, rows, garbage, place):
    """What is computed otherwise for the rows that see an unusual number."""
    number = {"denormal": SMALLEST[dtype], "smallest normal": float(ml_dtypes.finfo(dtype).tiny)}.get(garbage, garbage)
    arrays = dict(zip(["query", "key", "value"], draw(1, 2, 1, rows, rows, 6, 5, dtype=dtype)))
    expected = both(**arrays, causal=True)
    for struck in range(1, rows, 3):
        changed = arrays | {place: arrays[place].copy()}
        changed[place][:, :, struck, ::2] = number
        for one, other in zip(both(**changed, causal=True), expected):
            assert_same_bits(one[:, :, :struck], other[:, :, :struck])


@pytest.mark.parametrize("garbage", [nan, inf, "denormal", "smallest normal", "largest"])
@pytest.mark.parametrize("rows", [3, 40])
@ON_EACH
def test_a_row_beside_an_unusual_one_keeps_its_bits(kernel, dtype, rows, garbage):
    number = {
        "denormal": SMALLEST[dtype],
        "smallest normal": float(ml_dtypes.finfo(dtype).tiny),
        "largest": float(ml_dtypes.finfo(dtype).max),
    }.get(garbage, garbage)
    query, key, value = draw(1, 4, 2, rows, 133, 7, 5, dtype=dtype)
    expected = both(query, key, value)
    for struck in range(0, rows, 7):
        changed = query.copy()
        changed[:, 1::2, struck] = number
        others = np.ones(query.shape[:-1], bool)
        others[:, 1::2, struck] = False
        for one, other in zip(both(changed, key, value), expected):
            assert_same_bits(one[others], other[others])


@pytest.mark.parametrize("rows", [3, 40])
@ON_EACH
def test_unusual_numbers_in_another_head_change_no_bit(kernel, dtype, rows):
    query, key, value = draw(2, 4, 2, rows, 133, 7, 5, dtype=dtype)
    expected = both(query, key, value)
    for number in SMALLEST[dtype], nan, inf:
        changed = query.copy(), key.copy(), value.copy()
        changed[1][1, 0, 5:9] = changed[2][1, 0, 6:8] = number
        changed[0][1, :2] = number
        for one, other in zip(both(*changed), expected):
            assert_same_bits(one[0], other[0])
            assert_same_bits(one[1, 2:], other[1, 2:])


# Blocks of keys are converted once for several tasks, heads and batches.


@on_kernels(HALF, MIXED)
@pytest.mark.parametrize("rows", [2, 70])
def test_batches_that_share_keys_and_differ_in_length(kernel, dtype, rows):
    query, key, value = draw(4, 2, 1, rows, 300, 7, 5, dtype=dtype)
    lengths = np.array([50, 300, 51, 129])
    for shared in range(2):  # the batches of K and V, or the heads too
        query = query if not shared else query.reshape(1, 8, rows, 7).swapaxes(0, 1)
        lengths = lengths if not shared else lengths.repeat(2)
        out, lse = both(query, key[:1], value[:1], kv_lengths=lengths, causal=True, threads=1)
        for batch, length in enumerate(lengths):
            alone = both(query[batch], key[0, :, :length], value[0, :, :length], causal=True)
            assert_same_bits(out[batch], alone[0])
            assert_same_bits(lse[batch], alone[1])


@pytest.mark.parametrize("rows", [2, 70, 300])
@ON_EACH
def test_values_that_are_a_part_of_the_keys(kernel, dtype, rows):
    query, key, _ = draw(2, 2, 1, rows, 300, 24, 1, dtype=dtype)
    for part in key[..., :16], key[..., 3:10], key[..., ::-1], key[:, :, ::-1]:
        for one, other in zip(both(query, key, part, causal=True), both(query, key, part.copy(), causal=True)):
            assert_same_bits(one, other)


@pytest.mark.parametrize("number", [nan, inf, "denormal"])
@pytest.mark.parametrize("threads", [1, 2])
@ON_EACH
def test_tasks_side_by_side_of_which_some_see_an_unusual_value(kernel, dtype, threads, number):
    """Rows from 100 on see it, in one feature."""
    query, key, value = draw(1, 2, 1, 300, 300, 9, 7, dtype=dtype)
    expected = both(query, key, value, causal=True)
    value[:, :, 100, 3] = SMALLEST[dtype] if number == "denormal" else number
    arrays = query, key, value
    out, lse = both(*arrays, causal=True, threads=threads)
    assert_same_bits(out[:, :, :100], expected[0][:, :, :100])
    assert_same_bits(lse, expected[1])
    if number == "denormal":
        judge(out, lse, *arrays, causal=True)
    else:
        np.testing.assert_array_equal(out[:, :, 100:, 3].astype(float), number)
        others = np.delete(np.arange(7), 3)
        judge(out[..., others], lse, query, key, value[..., others], causal=True)


# Mixed dtypes at the ends of the range.


@pytest.mark.parametrize("dtype", MIXED.values(), ids=MIXED)
def test_wide_queries_over_narrow_keys(kernel, dtype):
    """A half-width cache: results as exact as their own dtype, also where its numbers are denormal."""
    wide, narrow = dtype
    query, key, value = draw(M=19, dtype=dtype)
    check(query * 3, key, value, causal=True, softcap=20.0)
    tiny = SMALLEST.get(narrow, 2.0**-149)
    value = (rng(0).integers(-127, 128, value.shape) * tiny).astype(narrow)
    out = sdpa.attention(query, key, value)
    assert out.dtype == wide and (np.abs(out) > 0).all()
    exact = reference.attention(query, key, value)
    np.testing.assert_allclose(out.astype(float64), exact, rtol=0, atol=tiny * 1e-2 + 2.0**-146 * (wide == float32))
