"""Tensors for the tests of sdpa.torch, where torch is installed."""

import pytest


def tensors(*shapes, dtype=None, requires_grad=False, seed=0):
    """Random ones, of float32 by default, the same each time."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype or torch.float32) for shape in shapes
    ]
    return [x.requires_grad_(requires_grad) for x in drawn]
