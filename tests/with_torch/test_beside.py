"""sdpa.torch.merge and sdpa.torch.rotary."""

import numpy as np
import pytest
from support.torch_tensors import tensors

import sdpa

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")


def parts(**options):
    query, key, value = tensors((2, 3, 8), (2, 7, 8), (2, 7, 4), dtype=torch.float64, **options)
    sizes = slice(0, 2), slice(2, 6), slice(6, 7)
    return (query, key, value), [
        adapter.attention(query, key[:, rows], value[:, rows], return_lse=True) for rows in sizes
    ]


def test_merged_parts_are_the_whole():
    inputs, found = parts()
    out, lse = adapter.merge(*zip(*found))
    for got, expected in zip((out, lse), adapter.attention(*inputs, return_lse=True)):
        torch.testing.assert_close(got, expected)
    given = torch.empty(2, 3, 4, dtype=torch.float64)
    assert adapter.merge(*zip(*found), out=given)[0] is given and torch.equal(given, out)


def test_gradients_of_merged_parts():
    inputs, found = parts(requires_grad=True)
    got = torch.autograd.grad(adapter.merge(*zip(*found))[0].square().sum(), inputs)
    expected = torch.autograd.grad(adapter.attention(*inputs).square().sum(), inputs)
    for found, grad in zip(got, expected):
        torch.testing.assert_close(found, grad)


def test_a_part_that_saw_nothing_is_left_out_of_the_gradients():
    outs = tensors((1, 2, 4), (1, 2, 4), requires_grad=True)
    lses = [torch.tensor([[0.5, -torch.inf]]), torch.tensor([[-torch.inf, -torch.inf]])]
    out, lse = adapter.merge(outs, [x.requires_grad_() for x in lses])
    expected, expected_lse = sdpa.merge([x.detach().numpy() for x in outs], [x.detach().numpy() for x in lses])
    np.testing.assert_allclose(out.detach(), expected)
    np.testing.assert_allclose(lse.detach(), expected_lse)
    out.sum().backward()
    assert torch.equal(outs[0].grad, torch.tensor([1.0, 0.0]).reshape(1, 2, 1).expand(1, 2, 4))
    assert all(x.grad.isfinite().all() for x in (*outs, *lses))


ROTARY = {
    "a number": dict(positions=3),
    "rows": dict(positions=torch.arange(5)),
    "interleaved": dict(positions=torch.arange(5), interleaved=True, dim=4, base=500.0),
    "frequencies": dict(positions=[0, 1, 2, 3, 9], frequencies=torch.tensor([1.0, 0.5, 0.1])),
    "tables": dict(positions=None, cos=torch.ones(5, 4), sin=torch.full((5, 4), 2.0)),
    "looked up": dict(positions=torch.tensor([4, 1, 1, 0, 2]), cos=torch.rand(6, 4), sin=torch.rand(6, 4)),
}


@pytest.mark.parametrize("options", ROTARY.values(), ids=ROTARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary(options, dtype):
    (x,) = tensors((2, 3, 5, 8), dtype=dtype)
    as_arrays = {name: y.numpy() if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    expected = torch.from_numpy(sdpa.rotary(x.float().numpy(), **as_arrays)).to(dtype)
    assert torch.equal(adapter.rotary(x, **options), expected)
    out = torch.empty_like(x)
    assert adapter.rotary(x, **options, out=out) is out and torch.equal(out, expected)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: adapter.rotary(x, **options), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("options", ROTARY.values(), ids=ROTARY)
def test_gradients_of_rotary_by_differences(options):
    (x,) = tensors((2, 5, 8), dtype=torch.float64, requires_grad=True)
    options = {name: y.double() if name in ("cos", "sin") else y for name, y in options.items()}
    assert torch.autograd.gradcheck(lambda x: adapter.rotary(x, **options), x)
    with pytest.raises(ValueError, match="out is given"):
        adapter.rotary(x, **options, out=torch.empty(2, 5, 8))


def test_only_x_has_a_gradient():
    (x, table) = tensors((5, 8), (5, 4))
    with pytest.raises(ValueError, match="cos requires a gradient"):
        adapter.rotary(x, None, cos=table.requires_grad_(), sin=table)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parts_that_do_not_fit(requires_grad):
    one, other = tensors((2, 3, 8), (2, 1, 8), requires_grad=requires_grad)
    lse = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="outs has 1 parts and lses 2"):
        adapter.merge([one], [lse, lse])
    with pytest.raises(ValueError, match="all outs must be alike"):
        adapter.merge([one, other], [lse, lse])
    with pytest.raises(TypeError, match="x is of type NoneType"):
        adapter.rotary(None, 3)


def test_autograd_knows_that_out_is_written():
    (x,) = tensors((2, 3, 8))
    for write in (
        lambda out: adapter.attention(x, x, x, out=out),
        lambda out: adapter.rotary(x, 3, out=out),
        lambda out: adapter.merge([x], [x[..., 0]], out=out),
    ):
        out = torch.ones(2, 3, 8)
        product = torch.ones(2, 3, 8, requires_grad=True) * out
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    with torch.inference_mode():
        out = torch.empty(2, 3, 8)
        assert adapter.attention(x, x, x, out=out) is out
