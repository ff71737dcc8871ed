"""attention_weights, and merge of partial results over disjoint keys."""

import itertools

import numpy as np
import pytest
from support.accuracy import allowed, arithmetic, assert_same_bits, eps, exactly, plainly, units
from support.draw import HALF, WIDE, draw, float16, float32, float64, inf, nan, rng
from support.kernels import on_kernels
from support.layouts import LAYOUTS
from support.options import OPTIONS, SCORES, options_for

import sdpa
from sdpa import reference

# attention_weights


def check_weights(query, key, **options):
    dtype = query.dtype.type
    weights = sdpa.attention_weights(query, key, **options)
    exact = reference.attention_weights(query, key, dtype=exactly(dtype), **options)
    naive = reference.attention_weights(query, key, dtype=plainly(dtype), **options)
    assert weights.dtype == dtype and weights.shape == exact.shape
    scale = exact.max(axis=-1, keepdims=True)
    assert units(weights, exact, scale, dtype) <= allowed(units(naive, exact, scale, plainly(dtype)), dtype)
    assert (weights[exact == 0] == 0).all()


@on_kernels(WIDE, HALF, {"float64 over float32": (float64, float32)}, half="best")
@pytest.mark.parametrize("name", OPTIONS)
def test_weights(kernel, name, dtype):
    query, key, _ = draw(dtype=dtype)
    check_weights(query, key, **options_for(query, key, name))


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("sizes", list(itertools.product([1, 16, 17, 65], [1, 2, 15, 127, 128, 129, 260])), ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_weights_of_shapes(kernel, sizes, causal, dtype):
    check_weights(*draw(1, 2, 1, *sizes, dtype=dtype)[:2], causal=causal)


@pytest.mark.parametrize("name", OPTIONS)
def test_sums_of_weights(kernel, name):
    """1, less with sinks, 0 for a row that sees nothing."""
    query, key, value = draw()
    options = options_for(query, key, name)
    sums = sdpa.attention_weights(query, key, **options).sum(axis=-1, dtype=np.float64)
    lse = sdpa.attention(query, key, value, return_lse=True, **options)[1]
    expected = np.where(lse == -inf, 0.0, 1.0)
    if name == "sinks":
        expected -= np.exp(options["sinks"][:, None] - lse.astype(np.float64))
        assert (sums < 0.99).any()
    np.testing.assert_allclose(sums, expected, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_times_values(kernel, name):
    query, key, value = draw(dtype=np.float64)
    options = options_for(query, key, name)
    product = sdpa.attention_weights(query, key, **options) @ value.repeat(2, axis=1)
    np.testing.assert_allclose(product, sdpa.attention(query, key, value, **options), atol=1e-13)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_weights_of_fewer_and_more_axes(kernel, rank):
    query, key = (x[(0,) * (4 - rank)] if rank < 5 else x[None] for x in draw(G=1)[:2])
    assert sdpa.attention_weights(query, key).shape == (*query.shape[:-1], 133)
    check_weights(query, key, causal=True)


# merge

BOUNDARIES = {
    "one part": [],
    "two": [64],
    "at blocks": [128, 256],
    "five": [1, 50, 129, 200],
    "empty parts": [0, 90, 90, 260],
    "parts that see nothing": [5, 200, 255],
}
GEOMETRIES = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(60, 10)),
    "before all keys": dict(causal=True, q_offset=-20),
    "softcap": dict(softcap=2.0, scale=0.5),
    "alibi": dict(alibi_slopes=np.array([0.5, 0.25, -0.01, 0])),
}


def parts_of(query, key, value, boundaries, **options):
    """Partial results over the keys between the boundaries, placed as they stand in the whole."""
    keys = key.shape[-2]
    offset = options.pop("q_offset", keys - query.shape[-2])
    for begin, end in itertools.pairwise([0, *boundaries, keys]):
        part = key[..., begin:end, :], value[..., begin:end, :]
        yield sdpa.attention(query, *part, q_offset=offset - begin, return_lse=True, **options)


def assert_close(actual, expected):
    for one, other in zip(actual, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        tolerance = (30 if one.itemsize > 2 else 4) * eps(one.dtype)
        np.testing.assert_allclose(one.astype(arithmetic(one.dtype)), other, rtol=tolerance, atol=tolerance)


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("options", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("boundaries", BOUNDARIES.values(), ids=BOUNDARIES)
def test_merge_of_parts_is_the_whole(kernel, boundaries, options, dtype):
    arrays = draw(N=260, dtype=dtype)
    whole = sdpa.attention(*arrays, return_lse=True, **options)
    assert_close(sdpa.merge(*zip(*parts_of(*arrays, boundaries, **options))), whole)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_merge_of_any_partition(kernel, parts, seed):
    """Each row has its own partition of the keys."""
    arrays = draw(dtype=np.float64, seed=seed)
    share = rng(seed).integers(0, parts, (2, 4, 37, 133))
    share[:, :, ::5] = 0  # rows of which the other parts see nothing
    results = [sdpa.attention(*arrays, mask=share == part, return_lse=True) for part in range(parts)]
    assert parts == 1 or (results[1][1][:, :, 0] == -inf).all()
    assert_close(sdpa.merge(*zip(*results)), sdpa.attention(*arrays, return_lse=True))


def test_merge_twice(kernel):
    arrays = draw(N=260, dtype=np.float64)
    parts = list(parts_of(*arrays, [30, 128, 129, 200]))
    once = sdpa.merge(*zip(*parts))
    left, right = sdpa.merge(*zip(*parts[:2])), sdpa.merge(*zip(*parts[2:]))
    assert_close(sdpa.merge([left[0], right[0]], [left[1], right[1]]), once)
    assert_close(sdpa.merge(*zip(*parts[::-1])), once)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_merge_of_one_part_is_that_part(dtype):
    out, lse = sdpa.attention(*draw(M=150, N=40, dtype=dtype), causal=True, return_lse=True)
    merged_out, merged_lse = sdpa.merge([out], [lse])
    assert_same_bits(merged_out, out)
    assert_same_bits(merged_lse, lse)
    assert not np.shares_memory(merged_out, out)


@pytest.mark.parametrize("M", [2, 37], ids=["few rows", "many rows"])
@pytest.mark.parametrize("hidden", [None, 0, 1], ids=["both seen", "first blind", "second blind"])
@pytest.mark.parametrize("of", [0, 1])
def test_sinks_belong_into_one_part(kernel, of, hidden, M):
    """Whichever: also into one of which every second row sees nothing."""
    query, key, value = draw(M=M, dtype=np.float64)
    sinks = np.array([0.0, 3.0, -2.0, 8.0])
    rows = np.arange(M)[:, None] % 2 == 0
    parts, masks = (slice(0, 50), slice(50, None)), np.ones((2, M, 1), bool)
    if hidden is not None:
        masks[hidden] = rows
    results = [
        sdpa.attention(
            query, key[:, :, part], value[:, :, part], mask=masks[i], sinks=sinks if i == of else None, return_lse=True
        )
        for i, part in enumerate(parts)
    ]
    mask = np.repeat(masks, [50, 83], axis=0)[..., 0].T
    whole = sdpa.attention(query, key, value, mask=mask, sinks=sinks, return_lse=True)
    assert_close(sdpa.merge(*zip(*results)), whole)


def test_a_blind_part_keeps_its_sink(kernel):
    """q = 1, k = 0, v = 1 and 3: weights 1/2 for the second key and for the sink."""
    one, sink = np.ones((1, 1)), dict(sinks=[0.0], return_lse=True)
    blind, seen = np.zeros((1, 1), bool), sdpa.attention(one, 0 * one, 3 * one, return_lse=True)
    cache = sdpa.KVCache(1, 1, 1, dtype=np.float64)
    cache.append(0 * one[None, None], one[None, None])
    window = sdpa.KVCache(1, 1, 1, window=1, keep=1, dtype=np.float64)
    window.append(0 * one[None, None], one[None, None])
    int8 = sdpa.KVCache(1, 1, 1, dtype=np.int8)
    int8.append(0 * one[None, None], one[None, None])
    pages = sdpa.PagedKVCache(1, 1, 1, 1, dtype=np.float64)
    pages.append(pages.allocate(), 0 * one[None], one[None])
    token = one[:, None]
    packed = dict(cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1], **sink)
    parts = {
        "dense": sdpa.attention(one, 0 * one, one, mask=blind, **sink),
        "no key": sdpa.attention(one, one[:0], one[:0], **sink),
        "no feature": sdpa.attention(one[:, :0], one[:, :0], one, **sink),
        "additive": sdpa.additive_attention(one, one, one, one, one, one[0], mask=blind, **sink),
        "additive without a feature": sdpa.additive_attention(one, one, one, one[:0], one[:0], one[0, :0], **sink),
        "packed": sdpa.attention_varlen(token, 0 * token, token, kv_lengths=0, **packed),
        "packed, hidden": sdpa.attention_varlen(token, 0 * token, token, mask=blind, **packed),
        "cache": cache.attend(one, mask=blind, **sink),
        "window": window.attend(one, mask=blind, **sink),
        "int8": int8.attend(one, mask=blind, **sink),
        "pages": pages.attend(one[None], 0, mask=blind, **sink),
        "the oracle": reference.attention(one, 0 * one, one, mask=blind, **sink),
    }
    for name, (out, lse) in parts.items():
        assert out.item() == 0 and lse.item() == 0, name
        merged = sdpa.merge([out.reshape(1, 1), seen[0]], [lse.reshape(1), seen[1]])
        assert merged[0].item() == 1.5 and merged[1].item() == pytest.approx(np.log(2)), name


def test_merge_of_parts_that_see_nothing():
    outs, lses = [np.full((2, 3), nan), np.ones((2, 3))], [np.full(2, -inf), np.array([0.5, -inf])]
    out, lse = sdpa.merge(outs, lses)
    assert out.tolist() == [[1, 1, 1], [0, 0, 0]] and lse.tolist() == [0.5, -inf]
    out, lse = sdpa.merge(outs[:1] * 3, lses[:1] * 3)
    assert (out == 0).all() and (lse == -inf).all()


@pytest.mark.parametrize("size", [-1e4, 0, 1e4])
def test_merge_by_hand(size):
    lses = [np.array([np.log(3) + size]), np.array([0.0 + size])]
    out, lse = sdpa.merge([np.array([[8.0]]), np.array([[4.0]])], lses)
    assert out.item() == pytest.approx(7) and lse.item() == pytest.approx(np.log(4) + size)


def test_merge_keeps_nan_of_a_part_with_keys():
    out, lse = sdpa.merge([[[nan, 1.0]], [[5.0, 1.0]]], [[0.0], [0.0]])
    assert np.isnan(out[0, 0]) and out[0, 1] == 1
    out, lse = sdpa.merge([[[nan, 1.0]], [[5.0, 1.0]]], [[-1e4], [0.0]])  # its weight is 0, but it saw keys
    assert np.isnan(out[0, 0]) and out[0, 1] == 1 and lse[0] == 0
    out, lse = sdpa.merge([[[1.0]], [[1.0]]], [[nan], [0.0]])
    assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("seed", range(10))
def test_merge_as_the_oracle(seed):
    outs = rng(seed).standard_normal((3, 2, 4, 5))
    lses = rng(seed).standard_normal((3, 2, 4)) * 10
    lses[rng(seed).random(lses.shape) < 0.3] = -inf
    assert_close(sdpa.merge(outs, lses), reference.merge(outs, lses))


@pytest.mark.parametrize("columns", [511, 512, 513, 1100])
@pytest.mark.parametrize("step", [1, -2])
def test_merge_of_long_rows(columns, step):
    """Which it takes a stretch at a time."""
    outs = rng(columns).standard_normal((3, 2, 2 * columns)).astype(float32)[..., ::step][..., :columns]
    lses = rng(1).standard_normal((3, 2)).astype(float32)
    lses[0, 0] = -inf
    outs[0, 0] = nan
    assert_close(sdpa.merge(outs, lses), [x.astype(float32) for x in reference.merge(outs, lses)])


def test_merge_of_parts_of_several_dtypes():
    """The result has that of the first."""
    outs, lses = rng(1).standard_normal((4, 3, 7)), rng(2).standard_normal((4, 3))
    dtypes = [float32, float64, *HALF.values()]
    for first in range(4):
        order = [dtypes[first], *dtypes[:first], *dtypes[first + 1 :]]
        of, sums = (
            [x.astype(dtype) for x, dtype in zip(outs, order)],
            [x.astype(dtype) for x, dtype in zip(lses, order)],
        )
        out, lse = sdpa.merge(of, sums)
        exact, exact_lse = reference.merge([x.astype(float64) for x in of], [x.astype(float64) for x in sums])
        assert out.dtype == order[0] and lse.dtype == (float64 if order[0] == float64 else float32)
        np.testing.assert_allclose(out.astype(float64), exact, rtol=eps(order[0]), atol=eps(order[0]))
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def test_merge_of_unaligned_parts():
    outs, lses = rng(1).standard_normal((2, 3, 7)).astype(float32), np.zeros((2, 3), float32)
    memory = np.zeros(outs.nbytes + 1, np.uint8)
    shifted = memory[1:].view(float32).reshape(outs.shape)
    shifted[...] = outs
    into = np.zeros(outs[0].nbytes + 1, np.uint8)[1:].view(float32).reshape(outs[0].shape)
    assert_same_bits(sdpa.merge(shifted, lses, out=into)[0], sdpa.merge(outs, lses)[0])


def test_merge_on_any_number_of_threads(monkeypatch):
    """Each row is summed by one."""
    outs, lses = rng(1).standard_normal((2, 3, 900, 130)).astype(float32), rng(2).standard_normal((2, 3, 900))
    results = []
    for threads in 1, 2, 7:
        monkeypatch.setenv("SDPA_NUM_THREADS", str(threads))
        results.append(sdpa.merge(outs, lses))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])
    assert_close(results[0], [x.astype(float32) for x in reference.merge(outs, lses)])


def test_merge_of_one_row_gives_numbers():
    out, lse = sdpa.merge([np.ones(3, float32)] * 2, [float32(0)] * 2)
    assert out.tolist() == [1, 1, 1] and isinstance(lse, float32) and lse == pytest.approx(np.log(2))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one ")])
def test_merge_of_layouts_and_into_out(layout):
    outs, lses = zip(*parts_of(*draw(), [40, 90]))
    expected = sdpa.merge(outs, lses)
    views = [LAYOUTS[layout](x) for x in outs], [LAYOUTS[layout](x) for x in lses]
    before = [x.copy() for x in views[0]]
    out = LAYOUTS["heads inside"](np.full_like(outs[0], nan))
    result, lse = sdpa.merge(*views, out=out)
    assert result is out
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])
    for x, y in zip(views[0], before):
        assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("seed", range(10))
def test_merge_of_half_types_is_rounded_once(dtype, seed):
    """Sums are float32: the error of the result is half a unit."""
    outs = rng(seed).standard_normal((5, 3, 40, 7)).astype(dtype)
    lses = (rng(seed + 100).standard_normal((5, 3, 40)) * 3).astype(np.float32)
    lses[rng(seed).random(lses.shape) < 0.3] = -inf
    lses[:, 0, 0] = -inf
    out, lse = sdpa.merge(outs, lses)
    exact, exact_lse = reference.merge(outs, lses)
    assert out.dtype == dtype and lse.dtype == np.float32
    assert units(out, exact, np.abs(exact), dtype) <= 0.5 + 20 * eps(float32) / eps(dtype) * 10
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_merge_of_one_half_part_is_that_part(dtype):
    out, lse = sdpa.attention(*draw(M=150, N=40, dtype=dtype), causal=True, return_lse=True)
    into = np.full_like(out, nan)
    merged_out, merged_lse = sdpa.merge([out], [lse], out=into)
    assert merged_out is into
    assert_same_bits(merged_out, out)
    assert_same_bits(merged_lse, lse)


def test_merge_of_a_half_type_that_overflows():
    """In the result only: 60000 + 60000, halved, is 60000."""
    outs, lses = np.full((2, 1, 1), 60000, float16), np.zeros((2, 1), np.float32)
    assert sdpa.merge(outs, lses)[0] == 60000
    outs[0] = inf
    assert sdpa.merge(outs, lses)[0] == inf


def test_merge_of_empty_arrays():
    out, lse = sdpa.merge(np.ones((2, 0, 4)), np.ones((2, 0)))
    assert out.shape == (0, 4) and lse.shape == (0,)
    assert sdpa.merge(np.ones((2, 3, 0)), np.zeros((2, 3)))[1] == pytest.approx(np.log(2))


OUTS, LSES = np.ones((2, 3, 4)), np.zeros((2, 3))
SHARED = np.ones((2, 3, 4))


@pytest.mark.parametrize(
    "outs, lses, out, error, message",
    [
        ([], [], None, ValueError, "outs has 0 parts"),
        (OUTS, LSES[:1], None, ValueError, "outs has 2 parts and lses 1"),
        ([OUTS[0], OUTS[0, :2]], LSES, None, ValueError, r"outs.*\(2, 4\).*lses"),
        (OUTS, [LSES[0], LSES[0, :2]], None, ValueError, r"outs.*lses.*\(2,\)"),
        (None, None, None, TypeError, "outs is None.*sequence of arrays"),
        (OUTS, None, None, TypeError, "lses is None.*sequence of arrays"),
        (5, LSES, None, TypeError, "outs is 5.*sequence of arrays"),
        ("ab", LSES, None, TypeError, "outs has dtype <U1"),
        ({"a": 1}, LSES, None, TypeError, "outs has dtype <U1"),
        ([None, None], LSES, None, TypeError, "outs has dtype object"),
        (OUTS, [None, None], None, TypeError, "lses has dtype object"),
        ([[[1.0], [1.0, 2.0]]], LSES, None, ValueError, "outs must be an array"),
        (OUTS, OUTS, None, ValueError, "lses the same without the last axis"),
        (OUTS.astype(int), LSES, None, TypeError, "outs has dtype int64"),
        (OUTS, LSES.astype(bool), None, TypeError, "lses has dtype bool"),
        (OUTS, LSES, np.ones((3, 3)), ValueError, r"out has shape \(3, 3\)"),
        (OUTS, LSES, np.ones((3, 4), np.float32), ValueError, "out.*float32.*float64"),
        (OUTS, LSES, "text", TypeError, "out.*str"),
        (SHARED, LSES, SHARED[0], ValueError, r"out overlaps outs\[0\]"),
        (SHARED, LSES, SHARED[1], ValueError, r"out overlaps outs\[1\]"),
        (SHARED, SHARED[:, :, 0], SHARED[0], ValueError, "out overlaps"),
    ],
    ids=["none", "fewer lses", "shape of outs", "shape of lses", "None", "lses None", "a number", "text", "a dict",
         "outs of None", "lses of None", "unlike lengths", "rank of lses", "integers", "booleans", "shape of out",
         "dtype of out", "no array", "overlap", "overlap of another", "overlap with lses"],
)  # fmt: skip
def test_merge_errors(outs, lses, out, error, message):
    with pytest.raises(error, match=message):
        sdpa.merge(outs, lses, out=out)
    assert (SHARED == 1).all()


@pytest.mark.parametrize("name", [name for name in SCORES if name != "sinks"])
def test_parts_hidden_by_lengths(kernel, name):
    """Half of the keys by kv_lengths, the other by mask."""
    query, key, value = draw(dtype=np.float64)
    options = options_for(query, key, name)
    place = dict(q_offset=96, return_lse=True)
    first = sdpa.attention(query, key, value, kv_lengths=60, **place, **options)
    rest = sdpa.attention(query, key, value, mask=np.arange(133) >= 60, **place, **options)
    whole = sdpa.attention(query, key, value, **place, **options)
    assert_close(sdpa.merge([first[0], rest[0]], [first[1], rest[1]]), whole)
