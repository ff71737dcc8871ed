"""sdpa.torch.attention and attention_varlen: what the library gives on arrays, from tensors; and their gradients."""

import inspect

import numpy as np
import pytest
from support.processes import run_python
from support.torch_tensors import tensors

import sdpa

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def arrays(*given):
    return [sdpa.torch._tensors.array_of("x", x) for x in given]


def same_bits(tensor, array):
    (got,) = arrays(tensor)
    assert got.dtype == array.dtype and got.shape == array.shape and got.strides == array.strides
    assert got.tobytes() == array.tobytes()


LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other token": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_is_that_of_arrays_and_lies_like_the_query(kernel, dtype, layout):
    query, key, value = map(layout, tensors((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16), dtype=dtype))
    out, lse = adapter.attention(query, key, value, causal=True, return_lse=True)
    expected, expected_lse = sdpa.attention(*arrays(query, key, value), causal=True, return_lse=True)
    same_bits(out, expected)
    same_bits(lse, expected_lse)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "merge", "rotary", "scaled_dot_product_attention"])
def test_signatures_are_those_of_the_library(name):
    signatures = [inspect.signature(getattr(where, name)) for where in (adapter, sdpa)]
    ours, theirs = ({p.name: (p.kind, p.default) for p in signature.parameters.values()} for signature in signatures)
    assert ours == theirs


def test_documentation_speaks_of_tensors():
    assert "bias : floating tensor" in adapter.attention.__doc__
    assert "Default: torch.get_num_threads()." in adapter.attention_varlen.__doc__


def test_no_tensor_is_copied():
    for tensor in tensors((3, 4)) + tensors((3, 4), dtype=torch.bfloat16):
        array = sdpa.torch._tensors.array_of("x", tensor[:, 1:])
        assert array.__array_interface__["data"][0] == tensor[:, 1:].data_ptr()
        assert sdpa.torch._tensors.tensor_of(array).data_ptr() == tensor[:, 1:].data_ptr()


def test_options_may_be_tensors_or_arrays():
    query, key, value, bias, sinks = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3), (4, 5, 6), (4,))
    options = dict(bias=bias, sinks=sinks, kv_lengths=torch.tensor([6, 4]), softcap=5.0, window=(3, None))
    mask = torch.rand(5, 6) > 0.3
    out = adapter.attention(query, key, value, mask=mask, **options)
    as_arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    expected = sdpa.attention(*arrays(query, key, value), mask=mask.numpy(), **as_arrays)
    same_bits(out, expected)
    same_bits(adapter.attention(query, key, value, mask=mask.numpy(), **as_arrays), expected)


def test_out_is_filled_and_returned():
    query, key, value = tensors((2, 5, 8), (2, 6, 8), (2, 6, 3))
    out = torch.empty(2, 5, 3)
    result, lse = adapter.attention(query, key, value, out=out, return_lse=True)
    assert result is out and lse.shape == (2, 5)
    same_bits(out, sdpa.attention(*arrays(query, key, value)))


def test_packed_sequences():
    query, key, value = tensors((5, 4, 8), (9, 2, 8), (9, 2, 3), dtype=torch.bfloat16)
    starts = dict(cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 5, 9], dtype=torch.int32))
    out = adapter.attention_varlen(query, key, value, causal=True, **starts)
    as_arrays = {name: x.numpy() for name, x in starts.items()}
    same_bits(out, sdpa.attention_varlen(*arrays(query, key, value), causal=True, **as_arrays))


def test_threads_are_those_of_torch(monkeypatch):
    """A call that says nothing asks torch, unless it is so small that one thread does it."""
    asked = []
    known = sdpa.torch._eager.ATTENTION.options._replace(most=lambda: asked.append(1) or 1)
    monkeypatch.setattr(sdpa.torch._attention, "ATTENTION", sdpa.torch._eager.ATTENTION._replace(options=known))
    small, large = tensors((4, 8, 16), (4, 300, 64))
    adapter.attention(small, small, small)
    assert not asked
    adapter.attention(large, large, large)
    assert asked
    adapter.attention(large, large, large, threads=2)
    assert len(asked) == 1
    assert sdpa.torch._eager.ATTENTION.options.most is torch.get_num_threads


class Subclass(torch.Tensor):
    pass


def without_memory(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


WRONG = {
    "without memory": without_memory,
    "a subclass": lambda x: x.as_subclass(Subclass),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "an array": lambda x: x.numpy(),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x[0, 0], x[0, 1]]),
    "integers": lambda x: x.int(),
    "complex": lambda x: x.to(torch.complex64),
}


@pytest.mark.filterwarnings("ignore:.*(quant|prototype)")
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_no_dense_tensor_on_the_cpu_is_named(wrong, name):
    given = dict(zip(("query", "key", "value", "bias"), tensors(*[(1, 2, 4, 4)] * 4)))
    if wrong is WRONG["an array"] and name == "bias":
        pytest.skip("options may be arrays")
    given[name] = wrong(given[name])
    with pytest.raises(TypeError, match=name):
        adapter.attention(**given)


def test_an_unknown_option_is_named():
    (x,) = tensors((2, 4, 8))
    with pytest.raises(TypeError, match="did you mean 'causal'"):
        adapter.attention(x, x, x, casual=True)


def test_a_negative_view_is_resolved():
    x = torch.randn(2, 4, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(adapter.attention(x, x, x), adapter.attention(*[x.resolve_neg()] * 3))


# ---------------------------------------------------------------------------------------------------------- gradients

OPTIONS = {
    "none": {},
    "causal": dict(causal=True),
    "window": dict(window=(2, 1), q_offset=1),
    "lengths": dict(kv_lengths=torch.tensor([3, 6])),
    "softcap": dict(softcap=2.0, scale=0.7),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_gradients_by_differences(options, heads):
    shapes = (2, heads[0], 5, 4), (2, heads[1], 6, 4), (2, heads[1], 6, 3), (heads[0], 1, 6), (heads[0],)
    inputs = tensors(*shapes, dtype=torch.float64, requires_grad=True)

    def call(query, key, value, bias, sinks):
        return adapter.attention(query, key, value, bias=bias, sinks=sinks, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, inputs)


def test_gradients_of_packed_sequences_by_differences():
    inputs = tensors((5, 2, 4), (7, 2, 4), (7, 2, 3), (2,), dtype=torch.float64, requires_grad=True)
    starts = dict(cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 3, 7]))
    assert torch.autograd.gradcheck(
        lambda query, key, value, sinks: adapter.attention_varlen(query, key, value, sinks=sinks, **starts), inputs
    )


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradients_of_narrow_types_are_those_of_an_unrounded_result(kernel, dtype):
    query, key, value, grad_out = tensors((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 4), (1, 2, 5, 4), dtype=dtype)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = adapter.attention(*inputs, causal=True)
    assert out.dtype == dtype
    out.backward(grad_out)
    q, k, v, grad = arrays(*inputs, grad_out)
    wide = sdpa.attention(q, k, v, causal=True, return_lse=True, out=np.empty((1, 2, 5, 4), np.float32))
    expected = sdpa.attention_backward(grad, q, k, v, *wide, causal=True)
    for got, array in zip(inputs, expected):
        same_bits(got.grad, array)


@pytest.mark.parametrize(
    "shapes", [((5, 8), (6, 8)), ((3, 5, 8), (3, 6, 8)), ((2, 3, 5, 8), (3, 6, 8)), ((3, 5, 8), (2, 3, 6, 8))], ids=str
)
def test_gradients_of_a_half_type_in_all_numbers_of_axes(shapes):
    inputs = tensors(shapes[0], shapes[1], shapes[1], dtype=torch.float16, requires_grad=True)
    out = adapter.attention(*inputs)
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs)
    assert out.shape == sdpa.attention(*arrays(*inputs)).shape


def test_no_scores_are_kept():
    inputs = tensors((1, 1, 64, 4), (1, 1, 512, 4), (1, 1, 512, 4), requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        adapter.attention(*inputs)
    assert max(kept) <= max(x.numel() for x in inputs)


def test_gradients_only_where_they_are_wanted():
    query, key, value = tensors((2, 4, 8), (2, 4, 8), (2, 4, 8))
    key.requires_grad_()
    adapter.attention(query, key, value).sum().backward()
    assert key.grad is not None and query.grad is None and value.grad is None
    with torch.no_grad():
        assert not adapter.attention(query, key, value).requires_grad
    with torch.inference_mode():
        assert adapter.attention(query, key, value).is_inference()


def test_gradients_of_the_lse_alone():
    inputs = tensors((2, 4, 8), (2, 4, 8), (2, 4, 8), requires_grad=True)
    adapter.attention(*inputs, return_lse=True)[1].sum().backward()
    lse = torch.logsumexp(inputs[0] @ inputs[1].mT / 8**0.5, -1)
    expected = torch.autograd.grad(lse.sum(), inputs[:2])
    for x, grad in zip(inputs, (*expected, torch.zeros_like(inputs[2]))):
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("options", [
    {"mask": torch.ones(3, 3).tril().bool()}, {"kv_lengths": torch.tensor([2, 3])}, {"alibi_slopes": torch.ones(4)},
], ids=["mask", "kv_lengths", "alibi_slopes"])  # fmt: skip
def test_an_option_that_changes_before_its_gradients_is_noticed(options):
    inputs = tensors((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8), requires_grad=True)
    adapter.attention(*inputs, **options).sum().backward()
    out = adapter.attention(*inputs, **options)
    for option in options.values():
        option.copy_(option.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_are_those_of_the_sequences_there_were():
    inputs = tensors((5, 4, 8), (5, 4, 8), (5, 4, 8), requires_grad=True)
    starts = torch.tensor([0, 2, 5])
    expected = torch.autograd.grad(adapter.attention_varlen(*inputs, cu_seqlens_q=starts).square().sum(), inputs)
    out = adapter.attention_varlen(*inputs, cu_seqlens_q=starts)
    starts[1] = 4
    for got, grad in zip(torch.autograd.grad(out.square().sum(), inputs), expected):
        assert torch.equal(got, grad)


def test_a_second_derivative_is_refused_when_it_is_asked_for():
    inputs = tensors((2, 4, 8), (2, 4, 8), (2, 4, 8), requires_grad=True)
    grads = torch.autograd.grad(adapter.attention(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grads[0].sum().backward()


def test_an_input_without_a_gradient_that_wants_one_is_named():
    (x,) = tensors((2, 4, 8), requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        adapter.attention(x, x, x, alibi_slopes=torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="out is given"):
        adapter.attention(x, x, x, out=torch.empty(2, 4, 8))


def test_importing_the_library_does_not_import_torch():
    assert run_python("import sys, sdpa; print('torch' in sys.modules)") == "False"
