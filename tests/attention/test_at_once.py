"""Short sequences: where one block holds all keys, results are written as they are summed, row by row.  Where an `out`
with gaps between its columns asks for the other way, every bit must be the same."""

import numpy as np
import pytest
from support.accuracy import assert_same_bits, judge
from support.draw import HALF, MIXED, WIDE, draw, float32, inf, nan, rng
from support.kernels import on_kernels
from support.options import OPTIONS, options_for

import sdpa

EACH_DTYPE = on_kernels(WIDE, HALF, MIXED, half="best")
EACH_OPTION = pytest.mark.parametrize("name", OPTIONS)
SIZES = [(16, 16, 64), (37, 33, 16), (49, 49, 32), (64, 128, 48), (100, 77, 112), (11, 5, 144), (150, 100, 64)]


def with_gaps(like):
    """An array of that shape whose columns are two numbers apart."""
    return np.zeros((*like.shape[:-1], 2 * like.shape[-1]), like.dtype)[..., ::2]


def check_both_ways(*arrays, **options):
    out, lse = sdpa.attention(*arrays, return_lse=True, **options)
    other, other_lse = sdpa.attention(*arrays, return_lse=True, out=with_gaps(out), **options)
    assert_same_bits(out, np.ascontiguousarray(other))
    assert_same_bits(lse, other_lse)
    return out, lse


@EACH_DTYPE
@EACH_OPTION
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_option(kernel, name, sizes, dtype):
    M, N, E = sizes
    query, key, value = draw(M=M, N=N, D=E, E=E, dtype=dtype)
    check_both_ways(query, key, value, **options_for(query, key, name))


@EACH_DTYPE
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_oracle(kernel, causal, dtype):
    arrays = draw(M=49, N=60, D=32, E=32, dtype=dtype)
    judge(*check_both_ways(*arrays, causal=causal), *arrays, causal=causal)


@EACH_DTYPE
@pytest.mark.parametrize("what", [nan, inf, -inf, 3e38, 1e-39, -0.0], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_rare_values(kernel, what, causal, dtype):
    """These are found after rows were written, which are written again then."""
    query, key, value = draw(M=40, N=50, D=16, E=48, dtype=dtype)
    with np.errstate(over="ignore", under="ignore"):
        value[rng(1).random(value.shape) < 0.01] = what
    check_both_ways(query, key, value, causal=causal)


@on_kernels({"float32": float32})
def test_many_heads(kernel, dtype):
    """So many that what the next head reads is asked for; the last head has none behind it."""
    query, key, value = draw(B=200, H=12, G=12, M=16, N=16, D=32, E=32, dtype=dtype)
    out, _ = check_both_ways(query, key, value)
    for b in 0, 100, 199:
        assert_same_bits(out[b], sdpa.attention(query[b], key[b], value[b]))
