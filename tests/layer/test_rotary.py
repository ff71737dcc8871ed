"""Rotary embedding: hand-worked numbers, and the compiled function against the oracle."""

import inspect
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import arithmetic, assert_same_bits, eps, exactly, units
from support.draw import HALF, WIDE, float16, float32, float64, inf, nan, rng
from support.layouts import LAYOUTS, read_only

import sdpa
from sdpa import _core, reference

DTYPES = WIDE | HALF
PAIRS = {"halves": dict(interleaved=False), "neighbours": dict(interleaved=True)}
PI = np.pi

both = pytest.mark.parametrize("rotary", [sdpa.rotary, reference.rotary], ids=["compiled", "oracle"])
of_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
of_pairs = pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)


def tables(cos, sin, **more):
    return dict(cos=cos, sin=sin, **more)


def normal(*shape, dtype=float32, seed=0):
    return rng(seed).standard_normal(shape).astype(dtype)


def sizes(x, options):
    """|a| + |b| of the pair that an element belongs to; 0 for those that are copied."""
    options = {name: options[name] for name in ("interleaved", "dim") if name in options}
    turned = reference.rotary(np.abs(x.astype(float64)), np.full(x.shape[-2], PI / 4), base=1, **options)
    size = np.sqrt(2) * np.abs(reference.rotary(turned, np.zeros(x.shape[-2]), base=1, **options))
    other = reference.rotary(turned, np.full(x.shape[-2], PI / 2), base=1, **options)
    return np.maximum(size, np.sqrt(2) * np.abs(other))


def judge(out, x, positions, **options):
    """`out` is as accurate as NumPy with angles in float64."""
    dtype, wide = x.dtype, arithmetic(x.dtype)
    assert out.dtype == dtype and out.shape == x.shape
    exact = reference.rotary(x, positions, dtype=exactly(dtype), **options)
    naive = reference.rotary(x, positions, dtype=wide, **options)
    scale = sizes(x, options)
    most = (2 * units(naive, exact, scale, wide) + 2) * eps(wide) / eps(dtype)
    if dtype == float64:  # an angle is rounded twice
        most += 2 * np.abs(np.asarray(positions, float64)).max(initial=0) + 2 * x.shape[-2]
    if wide != dtype:
        most += 0.5
    assert units(out.astype(exactly(dtype)), exact, scale, dtype) <= most


# What is known without computing.


@both
@of_pairs
@of_dtypes
def test_position_0_changes_nothing(rotary, dtype, pairs):
    x = normal(2, 3, 5, 16, dtype=dtype)
    out = rotary(x, np.zeros(5, int), **pairs)
    np.testing.assert_array_equal(out.astype(float64), x.astype(float64))


@both
def test_quarter_turns(rotary):
    """With base 1 the position is the angle."""
    x = np.array([[3.0, 4.0]] * 5)
    expected = [[3, 4], [-4, 3], [-3, -4], [4, -3], [-4, 3]]
    np.testing.assert_allclose(rotary(x, np.array([0, 1, 2, 3, -3]) * PI / 2, base=1), expected, atol=1e-15)


@both
def test_an_eighth_turn(rotary):
    np.testing.assert_allclose(rotary(np.array([[1.0, 0.0]]), PI / 4), [[0.5**0.5, 0.5**0.5]], rtol=1e-15)


@both
def test_frequencies_and_pairs(rotary):
    """Base 100 and four features: the second pair turns a tenth as fast.  Which features are a pair."""
    x, position = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), [PI / 2, PI * 5]  # 5 turns: a half, 2.5
    out = rotary(x, position, base=100)
    np.testing.assert_allclose(out, [[0, 0, 1, 0], [0, 0, 0, 1]], atol=1e-14)
    out = rotary(x, position, base=100, interleaved=True)
    np.testing.assert_allclose(out, [[0, 1, 0, 0], [0, -1, 0, 0]], atol=1e-14)
    second = rotary(np.array([[0.0, 0.0, 1.0, 0.0]]), PI * 5, base=100, interleaved=True)
    np.testing.assert_allclose(second, [[0, 0, 0, 1]], atol=1e-14)


@both
@of_pairs
def test_features_past_dim_are_copied(rotary, pairs):
    """The frequencies are those of `dim`, not of the size of a row."""
    x = normal(2, 7, 20, dtype=float64)
    out = rotary(x, 3, dim=8, **pairs)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(out[..., :8], rotary(x[..., :8].copy(), 3, **pairs))


@both
@of_pairs
def test_lengths_stay_and_only_distances_count(rotary, pairs):
    q, k = normal(6, 64, dtype=float64), normal(6, 64, dtype=float64, seed=1)
    m, n = rng(2).integers(-1000, 1000, 6), rng(3).integers(-1000, 1000, 6)
    turned = rotary(q, m, **pairs)
    np.testing.assert_allclose((turned**2).sum(-1), (q**2).sum(-1))
    products = [(rotary(q, m + by, **pairs) * rotary(k, n + by, **pairs)).sum(-1) for by in (0, 17, -900)]
    np.testing.assert_allclose(products[1:], [products[0]] * 2, atol=1e-10)
    np.testing.assert_allclose(rotary(turned, -m, **pairs), q, atol=1e-12)


def test_neighbours_are_halves_in_another_order():
    x = normal(3, 9, 24)
    apart = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    out, expected = sdpa.rotary(x, 5, interleaved=True), sdpa.rotary(apart, 5)
    assert_same_bits(np.concatenate([out[..., ::2], out[..., 1::2]], -1), expected)


# Against the oracle.  Sizes leave tails in vectors, in blocks of rows and in parts of heads.

POSITIONS = {
    "number": lambda B, H, S: 11,
    "negative number": lambda B, H, S: -5,
    "floating number": lambda B, H, S: np.float32(2.75),
    "array of no axis": lambda B, H, S: np.array(9),
    "rows": lambda B, H, S: rng(1).integers(-50, 50, S),
    "list": lambda B, H, S: list(range(S)),
    "small integers": lambda B, H, S: np.arange(S).astype(np.uint8),
    "floating": lambda B, H, S: (np.arange(S) / 4).astype(float32),
    "half": lambda B, H, S: (np.arange(S) / 4).astype(bfloat16),
    "batches": lambda B, H, S: rng(2).integers(0, 4096, (B, S)),
    "one batch for all": lambda B, H, S: rng(3).integers(0, 4096, (1, S)),
    "heads": lambda B, H, S: rng(4).random((B, H, S)) * 100,
    "heads for all batches": lambda B, H, S: rng(5).random((1, H, S)) * 100,
    "batches for all heads": lambda B, H, S: rng(6).random((B, 1, S)) * 100,
    "large": lambda B, H, S: 10**6 - np.arange(S),
    "past what is reduced quickly": lambda B, H, S: 1_600_000 + np.arange(S) * 10**6 - S * 10**6 // 2,
}


@of_pairs
@of_dtypes
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_as_accurate_as_numpy(positions, dtype, pairs):
    x = normal(2, 3, 37, 44, dtype=dtype)
    at = positions(2, 3, 37)
    judge(sdpa.rotary(x, at, **pairs), x, at, **pairs)


@of_pairs
@of_dtypes
@pytest.mark.parametrize("dim", [0, 2, 4, 30, 62, 64])
def test_partial(dim, dtype, pairs):
    x = normal(2, 5, 64, dtype=dtype)
    out = sdpa.rotary(x, 100, dim=dim, **pairs)
    judge(out, x, 100, dim=dim, **pairs)
    assert_same_bits(out[..., dim:], x[..., dim:])


@of_dtypes
@pytest.mark.parametrize("base", [0.5, 1, 500_000, 1e6, np.float32(1e4), 1e300])
def test_base(base, dtype):
    x = normal(9, 32, dtype=dtype)
    judge(sdpa.rotary(x, 3, base=base), x, 3, base=base)


def test_float32_is_numpy_with_angles_in_float64():
    """Cosine and sine are rounded once, at positions that float32 angles would miss by far."""
    x = normal(1, 400, 128)
    positions = rng(1).integers(0, 10**6, 400)
    angle = positions[:, None] * 10000.0 ** (-np.arange(64) / 64)
    cos, sin = np.cos(angle).astype(float32), np.sin(angle).astype(float32)
    a, b = x[..., :64], x[..., 64:]
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    wrong = sdpa.rotary(x, positions) != expected
    assert wrong.mean() < 1e-3
    np.testing.assert_allclose(sdpa.rotary(x, positions), expected, atol=1e-6)


def test_angles_near_multiples_of_a_quarter():
    """Where what remains after whole quarters is almost nothing, and on both sides of the middle between two."""
    near = np.array([k * PI / 4 + d for k in [*range(-9, 10), 10**4, 10**6, 2037171] for d in (0, 1e-9, -1e-9, 1e-17)])
    x = np.broadcast_to(np.array([1.0, 0.0]), (len(near), 2))
    out = sdpa.rotary(x, near)
    np.testing.assert_allclose(out[:, 0], np.cos(near), rtol=0, atol=2.5e-16)
    np.testing.assert_allclose(out[:, 1], np.sin(near), rtol=2e-15, atol=1e-25)


RANKS = [(5, 8), (1, 8), (3, 5, 8), (2, 3, 5, 8), (2, 1, 3, 5, 8), (2, 2, 2, 3, 5, 8), (1, 40, 1, 8), (70, 1, 8)]


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_ranks(shape):
    """Positions with all axes, without heads, of rows only; any axis but that of rows may be 1."""
    x = normal(*shape)
    *lead, rows, _ = shape
    shapes = {(), (rows,), (*lead, rows), (*lead[:-1], rows)}
    for full in ([*lead, rows], [*lead[:-1], rows]):
        shapes |= {(*kept, rows) for kept in itertools.product(*({1, n} for n in full[:-1]))}
    for of in sorted(shapes, key=lambda s: (len(s), s)):
        at = rng(1).integers(0, 99, of)
        judge(sdpa.rotary(x, at), x, at)


def test_two_axes_are_batches_and_rows():
    """Also where heads and rows would fit."""
    x = np.broadcast_to(normal(6, 8), (4, 4, 6, 8))
    at = rng(1).integers(0, 99, (4, 6))
    out = sdpa.rotary(x, at)
    for b, h in np.ndindex(4, 4):
        assert_same_bits(out[b, h], sdpa.rotary(x[b, h], at[b]))
    assert_same_bits(sdpa.rotary(x, at[:, None, :]), out)
    assert_same_bits(sdpa.rotary(x, at[None]), out.swapaxes(0, 1))  # (1, H, S)


@of_pairs
@of_dtypes
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, dtype, pairs):
    x = layout(normal(2, 3, 19, 22, dtype=dtype))
    before = x.copy()
    expected = sdpa.rotary(np.ascontiguousarray(x), 5, dim=18, **pairs)
    assert_same_bits(sdpa.rotary(x, 5, dim=18, **pairs), expected)
    at = np.arange(38).reshape(2, 19)
    assert_same_bits(sdpa.rotary(x, at, **pairs), sdpa.rotary(before, at, **pairs))
    assert_same_bits(x, before)


WRITABLE = {name: layout for name, layout in LAYOUTS.items() if not name.startswith(("one", "read"))}


@of_pairs
@of_dtypes
@pytest.mark.parametrize("layout", WRITABLE.values(), ids=WRITABLE)
def test_out_and_in_place(layout, dtype, pairs):
    x = normal(2, 3, 19, 22, dtype=dtype)
    expected = sdpa.rotary(x, 5, dim=18, **pairs)
    out = layout(np.zeros_like(x))
    assert sdpa.rotary(x, 5, dim=18, out=out, **pairs) is out
    assert_same_bits(out, expected)
    own = layout(x.copy())
    assert sdpa.rotary(own, 5, dim=18, out=own, **pairs) is own
    assert_same_bits(own, expected)
    own = layout(x.copy())
    assert_same_bits(sdpa.rotary(own, 5, dim=18, out=own[:], **pairs), expected)  # another view of the same


def test_out_between_the_rows_of_x():
    """It does not overlap, although it lies within."""
    both_halves = normal(6, 16)
    x, out = both_halves[:, :8], both_halves[:, 8:]
    expected = sdpa.rotary(x.copy(), 5)
    assert_same_bits(sdpa.rotary(x, 5, out=out), expected)


@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "Fortran order"])
def test_the_result_is_laid_out_like_x(layout):
    x = LAYOUTS[layout](normal(2, 3, 5, 8))
    assert sdpa.rotary(x, 0).strides == x.strides


SHAPES = {
    "many rows": ((1, 2, 700, 16), (700,)),
    "batches": ((9, 4, 70, 16), (9, 70)),
    "one row of many heads": ((40, 33, 1, 16), ()),
    "batches of one row": ((300, 3, 1, 16), (300, 1)),
    "heads": ((2, 5, 130, 16), (5, 130)),
    "long rows": ((1, 2, 9, 9000), (9,)),
}


@of_dtypes
@pytest.mark.parametrize("shape, of", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_threads_or_on_other_rows(shape, of, dtype):
    x = normal(*shape, dtype=dtype)
    at = rng(1).integers(0, 10**6, of if of != (5, 130) else (1, 5, 130))
    one = sdpa.rotary(x, at, threads=1)
    judge(one, x, at)
    for threads in (2, 3, 7):
        assert_same_bits(sdpa.rotary(x, at, threads=threads), one)
    each = np.broadcast_to(at[..., None, :] if at.ndim == 2 else at, x.shape[:-1])
    if at.ndim:
        b, h, s = (n // 2 for n in x.shape[:-1])
        assert_same_bits(sdpa.rotary(x[b, h, s : s + 1], each[b, h, s : s + 1]), one[b, h, s : s + 1])


def test_above_the_limit_for_one_thread():
    x = normal(1, 8, 300, 64)
    assert not _core.rotates_alone(x)
    assert_same_bits(sdpa.rotary(x, 5), sdpa.rotary(x, 5, threads=1))


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_all_numbers_of_16_bits(dtype):
    """Position 0 gives each back; inf and NaN stay."""
    x = np.zeros((2**16, 2), dtype)
    x[:, 0] = np.arange(2**16).astype(np.uint16).view(dtype)
    out = sdpa.rotary(x, np.zeros(2**16))[:, 0]
    with np.errstate(invalid="ignore"):  # ml_dtypes: isnan of a signalling NaN
        number = ~np.isnan(x[:, 0])
    assert_same_bits(out[number], x[:, 0][number])
    assert np.isnan(out[~number]).all()


@of_pairs
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("scale", [1e-42, 1e-8, 1e-6, 3e-5, 1, 1e4, 3e4, 1e38])
def test_rounding_to_16_bits(dtype, scale, pairs):
    """Denormal and too large results, too; the oracle rounds with NumPy and ml_dtypes."""
    with np.errstate(over="ignore", under="ignore"):
        x = (normal(1, 500, 32, dtype=float64) * scale).astype(dtype)
    x = np.where(np.isfinite(x), x, dtype(1))
    at = np.ones(500)
    assert_same_bits(sdpa.rotary(x, at, base=1, **pairs), reference.rotary(x, at, base=1, dtype=dtype, **pairs))


@of_dtypes
def test_nan_and_inf_stay_in_their_pair(dtype):
    x = normal(4, 8, dtype=dtype)
    expected = sdpa.rotary(x, 3)
    x[1, 2], x[2, 5] = nan, inf
    out = sdpa.rotary(x, 3)
    assert np.isnan(out[1, [2, 6]]).all() and not np.isfinite(out[2, [1, 5]]).any()
    out[1, [2, 6]], out[2, [1, 5]] = expected[1, [2, 6]], expected[2, [1, 5]]
    assert_same_bits(out, expected)


@both
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 4), (3, 0)], ids=str)
def test_empty_axes(rotary, shape):
    x = np.ones(shape, float32)
    at = np.arange(shape[-2])
    for positions in (0, at, np.broadcast_to(at, (*shape[:-3], shape[-2]))):
        assert rotary(x, positions).shape == shape
    assert rotary(x, 0, out=x) is x


def test_subclasses_lists_and_read_only_positions():
    x, at = normal(3, 4), np.arange(3.0)
    expected = sdpa.rotary(x, at)
    assert_same_bits(sdpa.rotary(x, read_only(at)), expected)
    own = sdpa.rotary(x.view(type("Own", (np.ndarray,), {})), at)
    assert type(own) is np.ndarray
    assert_same_bits(own, expected)
    assert_same_bits(sdpa.rotary(x.tolist(), at.tolist()), sdpa.rotary(x.astype(float64), at))
    assert_same_bits(sdpa.rotary(x, np.array([0, 9, 1, 9, 2])[::2]), expected)


# Frequencies, a position for each pair, tables.


@of_pairs
@of_dtypes
def test_frequencies(dtype, pairs):
    """In any order, of any sign; where there are fewer than pairs, the other features are copied."""
    x, at = normal(2, 3, 19, 22, dtype=dtype), rng(1).integers(0, 99, (2, 19))
    for frequencies in (rng(2).uniform(-3, 3, 9), rng(3).uniform(0, 1, 9).astype(float16), [0, 1e-9, 1, 3, 2]):
        found = sdpa.rotary(x, at, frequencies=frequencies, **pairs)
        judge(found, x, at, frequencies=frequencies, dim=2 * len(frequencies), **pairs)
    backwards = np.arange(11)[::-1]
    assert_same_bits(sdpa.rotary(x, at, frequencies=backwards), sdpa.rotary(x, at, frequencies=backwards.tolist()))


def test_frequencies_of_a_base_are_that_base():
    x = normal(2, 3, 5, 16)
    frequencies = (np.longdouble(100) ** -(np.arange(0, 12, 2) / np.longdouble(12))).astype(float64)
    for at in (7, np.arange(5.0), -3e8):  # the last ones are angles that the C library computes
        assert_same_bits(sdpa.rotary(x, at, frequencies=frequencies), sdpa.rotary(x, at, base=100, dim=12))


def test_the_largest_frequency_may_be_any():
    """Angles that are too large for the fast cosine are seen, wherever they are."""
    x, frequencies = normal(4, 6, dtype=float64), np.array([1e-3, -1e9, 1.0])
    for order in itertools.permutations(range(3)):
        found = sdpa.rotary(x, 7, frequencies=frequencies[list(order)])
        np.testing.assert_allclose(found, reference.rotary(x, 7, frequencies=frequencies[list(order)]), atol=1e-14)


PAIR_SHAPES = [(2, 3, 19, 9), (2, 1, 19, 9), (1, 3, 19, 9), (1, 1, 19, 9), (2, 1, 1, 9), (2, 3, 19, 1), (1, 1, 1, 1)]


@of_pairs
@of_dtypes
@pytest.mark.parametrize("shape", PAIR_SHAPES, ids=str)
def test_a_position_for_each_pair(shape, dtype, pairs):
    x, at = normal(2, 3, 19, 22, dtype=dtype), rng(1).integers(-99, 99, shape)
    judge(sdpa.rotary(x, at, dim=18, **pairs), x, at, dim=18, **pairs)
    large = at * 1e7  # past the angles of the fast cosine
    judge(sdpa.rotary(x, large, dim=18, **pairs), x, large, dim=18, **pairs)


def test_the_same_position_for_each_pair():
    x, at = normal(2, 3, 40, 16), rng(1).integers(0, 1000, (2, 40))
    each = np.repeat(at[:, None, :, None], 8, -1)
    assert_same_bits(sdpa.rotary(x, each), sdpa.rotary(x, at))
    assert_same_bits(sdpa.rotary(x[0, 0], each[0, 0]), sdpa.rotary(x[0, 0], at[0]))
    assert_same_bits(sdpa.rotary(x[0], each[0], threads=2), sdpa.rotary(x[0], at[0]))


def factors(*shape, dtype=float32):
    """Two tables, not of rotations."""
    return tables(normal(*shape, dtype=dtype, seed=8), normal(*shape, dtype=dtype, seed=9))


TABLES = [(19, 9), (1, 9), (2, 19, 9), (1, 19, 9), (2, 3, 19, 9), (2, 1, 19, 9), (1, 3, 19, 9), (2, 3, 1, 9), (9,)]


@of_pairs
@of_dtypes
@pytest.mark.parametrize("shape", TABLES, ids=str)
def test_tables(shape, dtype, pairs):
    """The sums and the roundings are NumPy's, hence the same bits."""
    x = normal(2, 3, 19, 22, dtype=dtype)
    for of in (float16, bfloat16, float32, float64):
        by = factors(*shape, dtype=of)
        found = sdpa.rotary(x, None, **by, **pairs)
        assert_same_bits(found, reference.rotary(x, None, **by, **pairs, dtype=dtype))
    assert_same_bits(sdpa.rotary(x, None, **by, **pairs, dim=18, threads=2), found)
    lists = {name: table.tolist() for name, table in by.items()}
    assert_same_bits(sdpa.rotary(x, None, **lists, **pairs), found)


@pytest.mark.parametrize("shape", RANKS, ids=str)
def test_tables_of_ranks(shape):
    x, (*lead, rows, _) = normal(*shape), shape
    for of in {(rows,), (*lead, rows), (*lead[:-1], rows), (*lead[1:], rows), (*[1] * len(lead), rows)}:
        if len(of) == len(lead) and of[:-1] != tuple(lead[:-1]):
            continue  # that is an axis of batches
        by = factors(*of, 4)
        assert_same_bits(sdpa.rotary(x, None, **by), reference.rotary(x, None, **by, dtype=float32))


def test_tables_of_two_shapes():
    x = normal(2, 3, 5, 8)
    shapes = [(4,), (5, 4), (2, 5, 4), (2, 3, 1, 4)]
    for a, b in itertools.product(shapes, [*shapes, (), (5, 1)]):
        by = tables(normal(*a), np.asarray(normal(*b, seed=1)))
        assert_same_bits(sdpa.rotary(x, None, **by), reference.rotary(x, None, **by, dtype=float32))


POSITIONS = [3, 3.0, np.arange(19) % 7, np.arange(38).reshape(2, 19), np.arange(57).reshape(1, 3, 19)]
POSITIONS += [rng(5).integers(0, 57, shape) for shape in [(2, 1, 19), (2, 3, 19), *PAIR_SHAPES]]


@of_pairs
@of_dtypes
@pytest.mark.parametrize("at", POSITIONS, ids=np.shape)
def test_tables_looked_up(at, dtype, pairs):
    x = normal(2, 3, 19, 22, dtype=dtype)
    for of in (float16, bfloat16, float32, float64):
        by = factors(57, 9, dtype=of)
        for one in (at, np.asarray(at, float32)):
            found = sdpa.rotary(x, one, **by, **pairs)
            assert_same_bits(found, reference.rotary(x, at, **by, **pairs, dtype=dtype))


def test_a_table_looked_up_with_another_of_one_pair():
    x, by = normal(3, 5, 8), tables(normal(9, 4), normal(11, 1, seed=1))
    for at in (2, np.arange(5), rng(1).integers(0, 9, (3, 5, 4))):
        assert_same_bits(sdpa.rotary(x, at, **by), reference.rotary(x, at, **by, dtype=float32))


def test_a_long_table_is_not_copied():
    """It has 2**40 rows: all of them the same."""
    row = np.linspace(0, 1, 4, dtype=float16)
    by = tables(*[np.broadcast_to(row, (2**40, 4))] * 2)
    x = normal(2, 3, 5, 8)
    expected = sdpa.rotary(x, None, cos=row, sin=row)
    for at in (2**39, np.full((2, 5), 2**39), np.full((1, 1, 5, 4), 2**39)):
        assert_same_bits(sdpa.rotary(x, at, **by), expected)


@of_dtypes
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_tables_and_positions(layout, dtype):
    x, whole = normal(2, 3, 19, 22, dtype=dtype), rng(1).integers(0, 9, (2, 3, 19, 11))
    for at in layout(whole.astype(np.float64)), layout(whole):
        assert_same_bits(sdpa.rotary(x, at), sdpa.rotary(x, at.copy()))
        turns = at[0, 0, 0]
        assert_same_bits(sdpa.rotary(x, 3, frequencies=turns), sdpa.rotary(x, 3, frequencies=turns.copy()))
    by = {name: layout(table) for name, table in factors(2, 3, 19, 11).items()}
    assert_same_bits(sdpa.rotary(x, None, **by), reference.rotary(x, None, **by, dtype=dtype))
    by = {name: table[0, 0] for name, table in by.items()}
    assert_same_bits(sdpa.rotary(x, at, **by), reference.rotary(x, at, **by, dtype=dtype))


@of_pairs
@of_dtypes
@pytest.mark.parametrize("layout", WRITABLE.values(), ids=WRITABLE)
def test_tables_out_and_in_place(layout, dtype, pairs):
    x, by = normal(2, 3, 19, 22, dtype=dtype), factors(2, 19, 9)
    expected = sdpa.rotary(x, None, **by, **pairs)
    out = layout(np.zeros_like(x))
    assert sdpa.rotary(x, None, **by, out=out, **pairs) is out
    assert_same_bits(out, expected)
    own = layout(x.copy())
    assert sdpa.rotary(own, None, **by, out=own, **pairs) is own
    assert_same_bits(own, expected)


@pytest.mark.parametrize("shape, of", SHAPES.values(), ids=SHAPES)
def test_bits_of_tables_do_not_depend_on_threads(shape, of):
    x, pairs = normal(*shape), shape[-1] // 2
    of = (shape[-2],) if of == () else of if of != (5, 130) else (1, 5, 130)
    calls = {"tables": dict(positions=None, **factors(*of, pairs))}
    calls["pairs"] = dict(positions=rng(1).integers(0, 99, (shape[0], 1, shape[2], pairs)))
    for by in calls.values():
        one = sdpa.rotary(x, threads=1, **by)
        np.testing.assert_allclose(one, reference.rotary(x, **by), atol=1e-5)
        for threads in (2, 3, 7):
            assert_same_bits(sdpa.rotary(x, threads=threads, **by), one)


@both
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 4), (3, 0)], ids=str)
def test_empty_axes_with_tables(rotary, shape):
    x, pairs = np.ones(shape, float32), shape[-1] // 2
    by = factors(shape[-2], pairs)
    assert rotary(x, None, **by).shape == shape
    assert rotary(x, np.arange(shape[-2]), **by).shape == rotary(x, 0, **by).shape == shape
    assert rotary(x, np.zeros((*shape[:-1], pairs))).shape == shape
    assert rotary(x, 0, frequencies=np.ones(pairs), out=x) is x


def test_tables_that_overflow_are_infinite():
    """Where they have a wider dtype than sums."""
    by = tables(np.full((1, 1), 1e300), np.zeros((1, 1)))
    assert np.isinf(sdpa.rotary(ones(1, 2), None, **by)).all()


# Calls that mean nothing.  x is (2, 4, 6, 8) in float32.


def table(error, **rows):
    return [pytest.param(error, changes, parts, id=name.replace("_", " ")) for name, (changes, parts) in rows.items()]


def ones(*shape, dtype=float32):
    return np.ones(shape, dtype)


TYPES = [np.int64, np.uint8, np.complex64, object, bool, ">f4", ">f2", "U1", ml_dtypes.float8_e5m2]
ERRORS = [pytest.param(TypeError, dict(x=ones(6, 8).astype(t)), ["x", str(np.dtype(t))], id=f"x {t}") for t in TYPES]
ERRORS += [
    pytest.param(TypeError, dict(positions=np.arange(6).astype(t)), ["positions", str(np.dtype(t))], id=f"at {t}")
    for t in [bool, complex, object, "U1", "m8[s]"]
]
ERRORS += table(
    TypeError,
    masked_x=(dict(x=np.ma.ones((6, 8), float32)), ["x", "masked"]),
    masked_positions=(dict(positions=np.ma.ones(6)), ["positions", "masked"]),
    position_True=(dict(positions=True), ["positions", "bool"]),
    frequencies_complex=(dict(frequencies=ones(4, dtype=complex)), ["frequencies", "complex128", "numbers"]),
    frequencies_text=(dict(frequencies="1234"), ["frequencies", "<U4"]),
    cos_boolean=(tables(ones(6, 4, dtype=bool), ones(6, 4)), ["cos", "bool", "numbers"]),
    sin_of_objects=(tables(ones(6, 4), ones(6, 4, dtype=object)), ["sin", "object"]),
    sin_masked=(tables(ones(6, 4), np.ma.ones((6, 4))), ["sin", "masked"]),
    interleaved_1_with_tables=(tables(ones(6, 4), ones(6, 4), interleaved=1), ["interleaved", "1"]),
    dim_floating_with_frequencies=(dict(frequencies=ones(4), dim=8.0), ["dim", "8.0", "whole"]),
    position_text=(dict(positions="1"), ["positions"]),
    too_long_integers=(dict(positions=[2**70] * 6), ["positions", "object"]),
    base_None=(dict(base=None), ["base", "None"]),
    base_text=(dict(base="1"), ["base", "1"]),
    base_True=(dict(base=True), ["base", "True"]),
    base_array=(dict(base=np.ones(2)), ["base"]),
    base_complex=(dict(base=1j), ["base", "1j"]),
    interleaved_1=(dict(interleaved=1), ["interleaved", "1", "True or False"]),
    interleaved_None=(dict(interleaved=None), ["interleaved", "None"]),
    interleaved_array=(dict(interleaved=np.array(True)), ["interleaved"]),
    dim_floating=(dict(dim=4.0), ["dim", "4.0", "whole"]),
    dim_True=(dict(dim=True), ["dim", "True"]),
    dim_text=(dict(dim="4"), ["dim", "4"]),
    out_list=(dict(out=[1]), ["out", "list"]),
    out_masked=(dict(out=np.ma.ones((2, 4, 6, 8), float32)), ["out", "MaskedArray"]),
    threads_floating=(dict(threads=2.0), ["threads", "2.0"]),
)
ERRORS += table(
    ValueError,
    x_of_one_axis=(dict(x=ones(8)), ["x", "(8,)", "two axes"]),
    x_of_no_axis=(dict(x=float32(1)), ["x", "()", "two axes"]),
    odd_x=(dict(x=ones(2, 4, 6, 7)), ["x", "(2, 4, 6, 7)", "even", "dim"]),
    odd_dim=(dict(dim=3), ["dim", "3", "even"]),
    dim_too_large=(dict(dim=10), ["dim", "10", "8"]),
    dim_negative=(dict(dim=-2), ["dim", "-2", "0"]),
    base_0=(dict(base=0), ["base", "0", "above 0"]),
    base_negative=(dict(base=-1e4), ["base", "-10000.0"]),
    base_inf=(dict(base=inf), ["base", "inf", "finite"]),
    base_nan=(dict(base=nan), ["base", "nan"]),
    base_too_long=(dict(base=10**400), ["base", "finite"]),
    base_too_small=(dict(base=1e-320, x=ones(6, 128)), ["base", "1e-320", "angles"]),
    rows=(dict(positions=np.arange(5)), ["positions", "(5,)", "(2, 4, 6, 8)", "(6,) or (2, 6) or (2, 4, 6)"]),
    one_row_for_all=(dict(positions=np.arange(1)), ["positions", "(1,)", "(6,)"]),
    batches=(dict(positions=ones(3, 6)), ["positions", "(3, 6)", "(2, 6)"]),
    heads_and_rows=(dict(positions=ones(4, 6)), ["positions", "(4, 6)", "(2, 6)"]),
    heads=(dict(positions=ones(2, 3, 6)), ["positions", "(2, 3, 6)", "(2, 4, 6)"]),
    last_axis_of_one=(dict(positions=ones(2, 1)), ["positions", "(2, 1)"]),
    too_many_axes=(dict(positions=ones(1, 2, 4, 6, 4)), ["positions", "(1, 2, 4, 6, 4)"]),
    pairs=(dict(positions=ones(2, 4, 6, 3)), ["positions", "(2, 4, 6, 3)", "(2, 4, 6, 4)"]),
    pairs_of_dim=(dict(positions=ones(2, 4, 6, 4), dim=4), ["positions", "(2, 4, 6, 4)", "(2, 4, 6, 2)"]),
    pairs_of_other_batches=(dict(positions=ones(3, 1, 6, 4)), ["positions", "(3, 1, 6, 4)"]),
    a_pair_at_NaN=(dict(positions=np.full((1, 1, 6, 4), nan)), ["positions", "nan"]),
    position_None=(dict(positions=None), ["positions", "None", "cos and sin"]),
    position_None_with_frequencies=(dict(positions=None, frequencies=ones(4)), ["positions", "None"]),
    one_frequency=(dict(frequencies=1.0), ["frequencies", "1.0", "one axis"]),
    frequencies_of_two_axes=(dict(frequencies=ones(6, 4)), ["frequencies", "one axis"]),
    frequency_NaN=(dict(frequencies=[1, nan, 1, 1]), ["frequencies", "nan", "finite"]),
    frequency_inf=(dict(frequencies=[1, -inf, 1, 1]), ["frequencies", "inf", "finite"]),
    frequency_too_large=(dict(frequencies=[1e300]), ["frequencies", "e+300", "angle"]),
    frequencies_not_for_dim=(dict(frequencies=ones(4), dim=6), ["dim is 6", "for 8"]),
    too_many_frequencies=(dict(frequencies=ones(5)), ["dim is 10", "8 features"]),
    cos_alone=(dict(cos=ones(6, 4)), ["cos", "sin", "both or none"]),
    sin_alone=(dict(sin=ones(6, 4)), ["sin", "both or none"]),
    tables_and_frequencies=(tables(ones(6, 4), ones(6, 4), frequencies=ones(4)), ["frequencies", "cos", "only one of"]),
    tables_not_for_dim=(tables(ones(6, 4), ones(6, 4), dim=4), ["dim is 4", "for 8"]),
    too_many_pairs=(tables(ones(6, 5), ones(6, 5)), ["dim is 10", "8 features"]),
    cos_of_no_axis=(tables(float32(1), ones(6, 4), positions=None), ["cos", "()", "axis"]),
    cos_of_other_rows=(tables(ones(5, 4), ones(6, 4), positions=None), ["cos", "(5, 4)", "(2, 4, 6, 4)"]),
    sin_of_other_pairs=(tables(ones(6, 4), ones(6, 3), positions=None), ["sin", "(6, 3)", "(2, 4, 6, 4)"]),
    cos_of_other_batches=(tables(ones(3, 6, 4), ones(6, 4), positions=None), ["cos", "(3, 1, 6, 4)", "(2, 4, 6, 4)"]),
    cos_of_more_axes=(tables(ones(1, 1, 1, 6, 4), ones(6, 4), positions=None), ["cos", "(1, 1, 1, 6, 4)"]),
    cos_of_three_axes=(tables(ones(2, 6, 4), ones(6, 4)), ["cos", "(2, 6, 4)", "positions", "two axes"]),
    sin_of_one_axis=(tables(ones(6, 4), ones(4)), ["sin", "(4,)", "two axes"]),
    first_in_no_table=(tables(ones(9, 4), ones(9, 4), positions=4), ["positions", "4", "the 9 rows of cos"]),
    first_below_the_table=(tables(ones(9, 4), ones(9, 4), positions=-1), ["positions", "-1", "rows of cos"]),
    first_between_rows=(tables(ones(9, 4), ones(9, 4), positions=0.5), ["positions", "0.5", "whole"]),
    past_the_table=(tables(ones(9, 4), ones(5, 4), positions=np.arange(6)), ["positions", "the 5 rows of sin"]),
    below_the_table=(tables(ones(9, 4), ones(9, 4), positions=-np.arange(6)), ["positions", "rows of cos"]),
    between_rows=(tables(ones(9, 4), ones(9, 4), positions=np.arange(6) / 2), ["positions", "0.5", "whole"]),
    rows_with_tables=(tables(ones(9, 4), ones(9, 4), positions=np.arange(5)), ["positions", "(5,)", "(6,)"]),
    sin_not_for_pairs=(tables(ones(9, 4), ones(9, 3), positions=2), ["sin", "(9, 3)", "(9, 4)"]),
    two_axes_for_five=(dict(x=ones(2, 2, 2, 6, 8), positions=ones(2, 6)), ["positions", "(2, 6)", "(2, 2, 6)"]),
    two_axes_for_two=(dict(x=ones(6, 8), positions=ones(1, 6)), ["positions", "(1, 6)", "(6,)"]),
    batch_for_three=(dict(x=ones(4, 6, 8), positions=ones(2, 6)), ["positions", "(2, 6)", "(6,) or (4, 6)"]),
    position_NaN=(dict(positions=nan), ["positions", "nan", "2**53"]),
    position_inf=(dict(positions=-inf), ["positions", "-inf"]),
    a_position_NaN=(dict(positions=[0, 1, 2, nan, 4, 5]), ["positions", "nan"]),
    a_position_inf=(dict(positions=np.array([0, 1, 2, inf, 4, 5], float16)), ["positions", "inf"]),
    large_position=(dict(positions=2**53), ["positions", str(2**53)]),
    huge_position=(dict(positions=10**400), ["positions", "2**53"]),
    last_position=(dict(positions=2**53 - 6), ["positions", str(2**53 - 6), "last row"]),
    negative_position=(dict(positions=-(2**53)), ["positions", "2**53"]),
    large_positions=(dict(positions=np.full(6, 2**63, np.uint64)), ["positions", "2**53"]),
    long_positions=(dict(positions=np.full(6, np.finfo(np.longdouble).max)), ["positions", "2**53"]),
    out_shape=(dict(out=ones(2, 4, 6, 7)), ["out", "(2, 4, 6, 7)", "(2, 4, 6, 8)"]),
    out_dtype=(dict(out=ones(2, 4, 6, 8, dtype=float64)), ["out", "float64", "float32"]),
    out_read_only=(dict(out=read_only(ones(2, 4, 6, 8))), ["out", "read-only"]),
    out_overlaps_itself=(dict(out=np.lib.stride_tricks.as_strided(ones(6, 8), (2, 4, 6, 8), (0, 0, 32, 4))), ["out"]),
    threads_0=(dict(threads=0), ["threads", "0"]),
)


@pytest.mark.parametrize("error, changes, parts", ERRORS)
def test_errors(error, changes, parts):
    arguments = {"x": ones(2, 4, 6, 8), "positions": 0, **changes}
    with pytest.raises(error, match=re.escape(parts[0])) as raised:
        sdpa.rotary(arguments.pop("x"), arguments.pop("positions"), **arguments)
    for part in parts:
        assert part in str(raised.value)


OVERLAPS = {
    "shifted": lambda m: (m[:48].reshape(6, 8), m[8:56].reshape(6, 8)),
    "shifted by one": lambda m: (m[:48].reshape(6, 8), m[1:49].reshape(6, 8)),
    "transposed": lambda m: (m.reshape(8, 8), m.reshape(8, 8).T),
    "backwards": lambda m: (m.reshape(8, 8), m.reshape(8, 8)[::-1]),
    "repeated x": lambda m: (np.broadcast_to(m[:8], (8, 8)), m.reshape(8, 8)),
}


@pytest.mark.parametrize("views", OVERLAPS.values(), ids=OVERLAPS)
def test_out_that_overlaps_x_otherwise(views):
    memory = normal(64)
    x, out = views(memory)
    before = memory.copy()
    with pytest.raises(ValueError, match="out overlaps x"):
        sdpa.rotary(x, 3, out=out)
    assert_same_bits(memory, before)


def test_in_place_where_x_cannot_be_written():
    x = read_only(ones(6, 8))
    with pytest.raises(ValueError, match="out is read-only"):
        sdpa.rotary(x, 3, out=x)
    x = np.broadcast_to(ones(8), (6, 8))
    x.flags.writeable = True
    with pytest.raises(ValueError, match="must not overlap one another"):
        sdpa.rotary(x, 3, out=x)


def test_out_that_overlaps_a_table():
    x = ones(6, 8)
    for cos, sin in ((x[:, :4], ones(6, 4)), (ones(6, 4), x[:, :4]), (ones(6, 4), x.reshape(-1)[:24].reshape(6, 4))):
        with pytest.raises(ValueError, match=r"out overlaps (cos|sin)"):
            sdpa.rotary(x, None, cos=cos, sin=sin, out=x)


def test_out_that_overlaps_positions():
    x = ones(6, 8, dtype=float64)
    for positions in (x[:, 0], x[0, :6]):
        with pytest.raises(ValueError, match="out overlaps positions"):
            sdpa.rotary(x, positions, out=x)


def test_signature():
    own = (
        "(x, positions, *, base=10000.0, frequencies=None, interleaved=False, dim=None, cos=None, sin=None, out=None, "
        "threads=None)"
    )
    assert str(inspect.signature(sdpa.rotary)) == own
    assert str(inspect.signature(reference.rotary)) == own[:-1] + ", dtype=None)"


@pytest.mark.parametrize(
    "changes",
    [
        dict(dim=3), dict(base=0), dict(positions=[nan] * 6), dict(positions=ones(3, 6)), dict(x=ones(8)),
        dict(frequencies=1.0), dict(cos=float32(1), sin=ones(6, 4)),
    ],
)  # fmt: skip
def test_errors_of_the_oracle(changes):
    arguments = {"x": ones(2, 4, 6, 8), "positions": 0, **changes}
    with pytest.raises(ValueError, match=next(iter(changes))):
        reference.rotary(**arguments)
