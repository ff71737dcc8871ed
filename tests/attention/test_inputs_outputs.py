"""What a call reads and writes: inputs, `out`, and numbers at the limits of 64 bits."""

import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits, rounds_weights
from support.draw import HALF, draw, float16, float32, float64, nan, rng
from support.kernels import on_kernels
from support.layouts import LAYOUTS, LEADING
from support.processes import run_python

import sdpa
from sdpa import reference


@on_kernels({"float32": float32}, HALF, half="best")
def test_inputs_are_never_written(kernel, dtype):
    arrays = dict(zip(["query", "key", "value"], draw(M=70, N=140, dtype=dtype)))
    arrays["value"][0, 0, 5] = nan
    options = dict(
        mask=rng(0).random((70, 140)) < 0.8, bias=rng(1).standard_normal((4, 1, 140)), q_offset=np.array([70, 2]),
        kv_lengths=np.array([140, 90]), sinks=np.ones(4), alibi_slopes=np.ones((2, 4)),
    )  # fmt: skip
    everything = arrays | options
    before = {name: x.copy() for name, x in everything.items()}
    for x in everything.values():
        x.flags.writeable = False
    sdpa.attention(**everything, causal=True)
    sdpa.attention_weights(**{name: x for name, x in everything.items() if name != "value"}, causal=True)
    for name, x in everything.items():
        assert x.tobytes() == before[name].tobytes(), name


@on_kernels({"float32": float32}, HALF, half="best")
def test_query_is_key_is_value(kernel, dtype):
    x = draw(G=4, N=70, D=16, E=16, dtype=dtype)[1]
    for y in (x, x.swapaxes(1, 2), x[..., ::-1]):
        assert_same_bits(sdpa.attention(y, y, y), sdpa.attention(y.copy(), y.copy(), y.copy()))


def test_inputs_that_overlap_in_part(kernel):
    packed = rng(0).standard_normal((40, 3 * 16 - 4)).astype(np.float32)
    views = packed[:30, :16], packed[5:, 8:24], packed[5:, 20:30]
    assert_same_bits(sdpa.attention(*views), sdpa.attention(*[x.copy() for x in views]))


@on_kernels({"float32": float32}, HALF)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one ") and name != "read-only"])
def test_out_is_filled_and_returned(kernel, layout, dtype):
    arrays = draw(E=40, dtype=dtype)
    expected = sdpa.attention(*arrays)
    out = LAYOUTS[layout](np.full(expected.shape, nan, dtype))
    assert sdpa.attention(*arrays, out=out) is out
    assert_same_bits(out, expected)
    result, lse = sdpa.attention(*arrays, out=out, return_lse=True)
    assert result is out and lse.shape == expected.shape[:-1]


WIDER = {"float16": [float32, float64], "bfloat16": [float32, float64], "float32": [float64]}


def calls_with_out(query, key, value):
    """All that takes `out`, with what it gives from the whole of its arguments; M tokens of two heads."""
    M = query.shape[2]
    yield "dense", lambda **more: sdpa.attention(query, key, value, causal=True, **more)
    turned = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    where = dict(cu_seqlens_q=[0, 1, M], cu_seqlens_k=[0, 20, key.shape[2]])
    yield "packed", lambda **more: sdpa.attention_varlen(*turned, **where, **more)
    for name, options in {"cache": {}, "int8": dict(dtype=np.int8), "window": dict(window=30, keep=2)}.items():
        cache = sdpa.KVCache(2, 2, 32, value_dim=40, **dict(dtype=query.dtype) | options)
        cache.append(key, value)
        yield name, lambda cache=cache, **more: cache.attend(query, **more)
    pages = sdpa.PagedKVCache(40, 8, 2, 32, value_dim=40, dtype=query.dtype)
    pages.append(pages.allocate(), key[0], value[0])
    yield "pages", lambda **more: pages.attend(query[0], 0, **more)
    yield "packed pages", lambda **more: pages.attend(turned[0], [0], cu_seqlens_q=[0, M], **more)
    network = dict(w_query=np.ones((3, 32)), w_key=np.ones((3, 32)), v=np.ones(3))
    yield "additive", lambda **more: sdpa.additive_attention(query, key, value, **network, **more)
    parts = [sdpa.attention(query, key, value, window=(None, n), return_lse=True) for n in (0, -40)]
    yield "merge", lambda **more: sdpa.merge(*zip(*parts), **more)[0]


@on_kernels({"float32": float32}, HALF)
@pytest.mark.parametrize("M", [2, 70], ids=["few rows", "many rows"])
def test_a_wider_out_takes_the_unrounded_result(kernel, dtype, M):
    """What it takes is as exact as sums in float32, and rounded it is the result."""
    query, key, value = draw(H=2, M=M, N=150, D=32, E=40, dtype=dtype)
    exact = dict(dense=reference.attention(query, key, value, causal=True))
    for name, call in calls_with_out(query, key, value):
        expected = call()
        for wider in WIDER[np.dtype(dtype).name]:
            for layout in LAYOUTS["contiguous"], LAYOUTS["every third column"], LAYOUTS["heads inside"]:
                out = layout(np.full(expected.shape, nan, wider))
                assert call(out=out) is out or name == "merge"
                assert_same_bits(out.astype(dtype), expected)
                assert dtype == float32 or (out != expected).any(), name
                assert_same_bits(out, out.astype(float32).astype(wider))
                if name == "dense" and not rounds_weights(query, key, value):
                    np.testing.assert_allclose(out, exact[name], rtol=1e-5, atol=2e-6)


def test_no_other_dtype_of_out():
    arrays = draw(H=2, N=150, D=32, E=40, dtype=float16)
    for _, call in calls_with_out(*arrays):
        shape = call().shape
        for dtype in bfloat16, np.int64, np.complex128, ">f4":
            with pytest.raises(ValueError, match=f"out has shape .*{np.dtype(dtype)}.*float16, or a wider one"):
                call(out=np.zeros(shape, dtype))


@pytest.mark.parametrize("M, E", [(2, 13), (35, 13), (35, 45)])
@on_kernels({"float32": float32}, HALF)
def test_nothing_around_out_is_written(kernel, dtype, M, E):
    arrays = draw(M=M, E=E, dtype=dtype)
    around = np.full((2, 4, M + 2, E + 2), 7, dtype)
    sdpa.attention(*arrays, out=around[:, :, 1:-1, 1:-1])
    inside = np.zeros(around.shape, bool)
    inside[:, :, 1:-1, 1:-1] = True
    assert (around[~inside] == 7).all() and (around[inside] != 7).all()


@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "Fortran order"])
def test_out_is_laid_out_like_query(kernel, layout):
    query, key, value = draw(E=20)
    query = LAYOUTS[layout](query)
    assert sdpa.attention(query, key, value).strides == np.empty_like(query).strides


@pytest.mark.parametrize("M", [2, 30], ids=["few rows", "many rows"])
@pytest.mark.parametrize("layout", LEADING)
def test_leading_axes_are_one_call(kernel, layout, M):
    """Whatever their strides; with everything that may differ from batch to batch."""
    query, key, value = (x.reshape(2, 3, *x.shape[1:]) for x in draw(B=6, M=M, N=150))
    options = dict(
        mask=rng(1).random((2, 3, 4, M, 150)) < 0.7, bias=rng(2).standard_normal((2, 3, 1, 1, 150)),
        q_offset=np.arange(120, 126).reshape(2, 3), kv_lengths=np.arange(145, 151).reshape(2, 3),
        sinks=rng(3).standard_normal((2, 3, 4)), alibi_slopes=rng(4).random((2, 3, 4)),
    )  # fmt: skip
    given = dict(query=query, key=key, value=value) | options
    views = {name: LEADING[layout](x) for name, x in given.items()}
    copies = {name: np.array(x, order="C") for name, x in views.items()}
    out = LEADING["turned"](np.full((*views["query"].shape[:-1], 12), nan, np.float32))
    result, lse = sdpa.attention(**views, causal=True, return_lse=True, out=out)
    expected, expected_lse = sdpa.attention(**copies, causal=True, return_lse=True)
    assert_same_bits(result, expected)
    assert_same_bits(lse, expected_lse)
    del views["value"], copies["value"]
    weights = sdpa.attention_weights(**views, causal=True)
    assert_same_bits(weights, sdpa.attention_weights(**copies, causal=True))
    for index in np.ndindex(weights.shape[:-3]):
        alone = {name: x[index] for name, x in copies.items()}
        assert_same_bits(weights[index], sdpa.attention_weights(**alone, causal=True))


def overlapping():
    memory = np.ones((4, 8, 8))
    memory[0, 0, 0] = 0  # as an integer, too
    first = memory[0, 0]
    return memory, {
        "query": memory[:, ::-1],
        "key": memory[:2],
        "value": memory[::2],
        "mask": memory[0].view(bool)[:, :8],
        "bias": memory[1],
        "sinks": first[:4],
        "alibi_slopes": first[4:],
        "kv_lengths": first[:1].view(np.int64).reshape(()),
        "q_offset": first[:1].view(np.int64).reshape(()),
    }


@pytest.mark.parametrize("name", overlapping()[1])
def test_out_that_overlaps_an_input(name):
    arrays = dict(query=np.ones((4, 8, 8)), key=np.ones((2, 8, 8)), value=np.ones((2, 8, 8)))
    out, views = overlapping()
    before = out.copy()
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        sdpa.attention(**arrays | {name: views[name]}, out=out)
    assert_same_bits(out, before)


def test_out_may_lie_between_the_elements_of_an_input(kernel):
    memory = np.ones((2, 4, 8, 6), np.float32)
    query, out = memory[..., ::2], memory[..., 1::2]
    assert sdpa.attention(query, query.copy(), query.copy(), out=out) is out


GUARD = """
import ctypes, mmap
import numpy as np, sdpa
from ml_dtypes import bfloat16
PAGE = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def guarded(x, at_end):
    \"\"\"A copy between two pages that cannot be touched, close to one of them.\"\"\"
    inner = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = PAGE + (inner - x.nbytes if at_end else 0)
    view = np.frombuffer(memory, x.dtype, x.size, offset).reshape(x.shape)
    view[...] = x
    assert protect(start, PAGE, 0) == protect(start + PAGE + inner, PAGE, 0) == 0
    return view

normal = np.random.default_rng(0).standard_normal
for at_end in True, False:
    for dtype in bfloat16, np.float16, np.float32, np.float64:
        for M, N, D, E in [(1, 1, 1, 1), (5, 7, 3, 2), (17, 19, 9, 33), (33, 130, 20, 11), (70, 150, 64, 64)]:
            arrays = [guarded(normal(shape).astype(dtype), at_end) for shape in [(2, M, D), (1, N, D), (1, N, E)]]
            mask, bias = guarded(normal((M, N)) < 1, at_end), guarded(normal((2, M, N)).astype(dtype), at_end)
            out = guarded(np.zeros((2, M, E), dtype), at_end)
            turned = [guarded(np.ascontiguousarray(x.swapaxes(-1, -2)), at_end).swapaxes(-1, -2) for x in arrays]
            for given in arrays, turned:
                sdpa.attention(*given)
                sdpa.attention(*given, out=out, causal=True)
                sdpa.attention(*given, out=out, mask=mask, bias=bias, window=(9, 3))
                sdpa.attention(*given, out=out, mask=mask[:1], kv_lengths=(N + 1) // 2)
                sdpa.attention_weights(*given[:2], mask=mask)
            given[2][..., -1, -1] = np.nan
            sdpa.attention(*given, out=out, causal=True)
print("nothing was touched")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mprotect")
@pytest.mark.parametrize("name", sdpa.kernels())
def test_nothing_beside_the_arrays_is_touched(name):
    assert run_python(GUARD, SDPA_KERNEL=name) == "nothing was touched"


# Enormous numbers.

HUGE = [2**62, 2**63 - 1, -(2**62), -(2**63) + 1, -(2**63), 10**30, -(10**30)]


@pytest.mark.parametrize("offset", [None, 0, 2**62, 2**63 - 1, -(2**62), -(2**63)])
@pytest.mark.parametrize("side", HUGE)
@pytest.mark.parametrize("other", [None, 0, "same"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_enormous_windows_and_offsets(kernel, side, offset, other, left):
    arrays = draw(1, 1, 1, M=5, N=6, D=2, E=2)
    other = side if other == "same" else other
    options = dict(window=(side, other) if left else (other, side), q_offset=offset)
    out, lse = sdpa.attention(*arrays, return_lse=True, **options)
    expected, expected_lse = reference.attention(*arrays, return_lse=True, **options)
    assert (np.isneginf(lse) == np.isneginf(expected_lse)).all()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, -(2**62), -(2**63)])
def test_enormous_offsets_with_causal_and_alibi(kernel, offset):
    out, lse = sdpa.attention(*draw(M=5, N=6), causal=True, q_offset=offset, alibi_slopes=np.ones(4), return_lse=True)
    assert np.isfinite(out).all() and (np.isneginf(lse) == (offset < 0)).all()


@pytest.mark.parametrize("offset", [2**63, -(2**63) - 1, 10**30, -(10**30)])
def test_offsets_beyond_64_bits_are_refused(offset):
    with pytest.raises(ValueError, match=f"q_offset.*{offset}"):
        sdpa.attention(*draw(M=5, N=6), q_offset=offset)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_byte_but_0_is_true(kernel, dtype):
    arrays, mask = draw(dtype=dtype), rng(0).random((37, 133)) < 0.5
    odd = np.where(mask, 255, 0).astype(np.uint8).view(bool)
    assert_same_bits(sdpa.attention(*arrays, mask=odd), sdpa.attention(*arrays, mask=mask))


@pytest.mark.parametrize("shape", [(1, 1, 0, 4), (0, 1, 3, 4), (1, 0, 3, 4)])
def test_an_empty_out(kernel, shape):
    query, out = np.zeros(shape, np.float32), np.empty(shape, np.float32)
    key = np.zeros((shape[0], shape[1], 3, 4), np.float32)
    assert sdpa.attention(query, key, key, out=out) is out
    assert sdpa.merge([query], [query[..., 0]], out=out)[0] is out


def test_a_key_that_scratch_cannot_hold():
    size = 2**58
    query = np.broadcast_to(np.float32(1), (1, size))
    with pytest.raises(ValueError, match=f"query has shape .*{size}.*must not be longer"):
        sdpa.attention(query, query, np.ones((1, 1), np.float32))
