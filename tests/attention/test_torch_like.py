"""scaled_dot_product_attention: the meaning of torch's function of that name."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import HALF, draw, rng
from support.kernels import on_kernels

import sdpa
from sdpa import reference, scaled_dot_product_attention

MASK = rng(0).random((2, 4, 37, 133)) < 0.7
BIAS = rng(1).standard_normal((37, 133))
CASES = {  # torch's options, ours
    "plain": ({}, {}),
    "causal, at the top left": (dict(is_causal=True), dict(mask=np.tri(37, 133, dtype=bool))),
    "boolean mask": (dict(attn_mask=MASK), dict(mask=MASK)),
    "mask of keys": (dict(attn_mask=MASK[0, 0, :1]), dict(mask=MASK[0, 0, :1])),
    "additive mask": (dict(attn_mask=BIAS), dict(bias=BIAS)),
    "narrow additive mask": (dict(attn_mask=BIAS.astype(np.float32)), dict(bias=BIAS.astype(np.float32))),
    "scale": (dict(scale=0.3), dict(scale=0.3)),
    "scale 0": (dict(scale=0.0), dict(scale=0.0)),
    "no dropout": (dict(dropout_p=0.0), {}),
}


@pytest.mark.parametrize("torch, ours", CASES.values(), ids=CASES)
def test_semantics(kernel, torch, ours):
    arrays = draw(G=4, dtype=np.float64)
    expected = reference.attention(*arrays, **ours)
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, **torch), expected, atol=1e-13)
    np.testing.assert_allclose(reference.scaled_dot_product_attention(*arrays, **torch), expected, atol=1e-13)


@pytest.mark.parametrize("M, N, drawing", [(2, 4, "1000 1100"), (3, 2, "10 11 11"), (2, 2, "10 11")])
def test_causal_is_aligned_at_the_top_left(kernel, M, N, drawing):
    """The values are one-hot, so the output shows who sees whom."""
    out = scaled_dot_product_attention(np.ones((M, 1)), np.ones((N, 1)), np.eye(N), is_causal=True)
    assert [" ".join(str(int(x > 0)) for x in row).replace(" ", "") for row in out] == drawing.split()


def test_a_positional_call(kernel):
    arrays = draw(G=4)
    out = scaled_dot_product_attention(*arrays, MASK, 0.0, False, 0.5)
    assert_same_bits(out, sdpa.attention(*arrays, mask=MASK, scale=0.5))


@on_kernels(HALF, half="best")
@pytest.mark.parametrize("options", [torch for torch, _ in CASES.values()], ids=CASES)
def test_half_types(kernel, options, dtype):
    arrays = draw(G=4, dtype=dtype)
    exact = reference.scaled_dot_product_attention(*arrays, **options)
    size = 1e-2 if dtype == bfloat16 else 1e-3
    out = scaled_dot_product_attention(*arrays, **options)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(float), exact, rtol=size, atol=size)
    if "attn_mask" in options and options["attn_mask"].dtype != bool:
        narrow = options | dict(attn_mask=options["attn_mask"].astype(dtype))
        exact = reference.scaled_dot_product_attention(*arrays, **narrow)
        np.testing.assert_allclose(
            scaled_dot_product_attention(*arrays, **narrow).astype(float), exact, rtol=size, atol=size
        )


def test_grouped_heads_need_the_flag(kernel):
    arrays = draw()
    assert_same_bits(scaled_dot_product_attention(*arrays, enable_gqa=True), sdpa.attention(*arrays))
    with pytest.raises(ValueError, match=r"\[4, 2, 2\] heads.*enable_gqa"):
        scaled_dot_product_attention(*arrays)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(dropout_p=0.5), ValueError, r"dropout_p is 0\.5.*must be 0"),
        (dict(attn_mask=MASK, is_causal=True), ValueError, "is_causal.*attn_mask"),
        (dict(attn_mask=np.ones((37, 133), int)), TypeError, "attn_mask.*int64"),
        (dict(attn_mask=np.ones((36, 133), bool)), ValueError, r"^attn_mask.*\(36, 133\)"),
        (dict(scale="big"), TypeError, "scale is 'big'"),
    ],
    ids=["dropout", "mask and causal", "integer mask", "shape of mask", "scale"],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*draw(G=4), **options)


@pytest.mark.parametrize("options", [torch for torch, _ in CASES.values()], ids=CASES)
def test_as_torch_itself(kernel, options):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    arrays = draw(G=4, dtype=np.float64)
    if "attn_mask" in options and options["attn_mask"].dtype == np.float32:
        options = options | dict(attn_mask=options["attn_mask"].astype(np.float64))  # torch wants that of query
    theirs = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, arrays), **theirs).numpy()
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, **options), expected, atol=1e-12)


def test_grouped_heads_as_torch_itself(kernel):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    arrays = draw(dtype=np.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, arrays), enable_gqa=True).numpy()
    np.testing.assert_allclose(scaled_dot_product_attention(*arrays, enable_gqa=True), expected, atol=1e-12)
