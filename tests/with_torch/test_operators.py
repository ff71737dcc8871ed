"""Calls that torch.compile, torch.export, torch.func, autocast or a dispatch mode watches: what direct calls give."""

import pytest
from support.torch_tensors import tensors

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SHAPES = ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))
OPTIONS = {
    "none": {},
    "positions": dict(causal=True, window=(3, None), q_offset=1, kv_lengths=torch.tensor([6, 4])),
    "scores": dict(scale=0.4, softcap=3.0, bias=torch.ones(5, 6), sinks=torch.ones(4), alibi_slopes=torch.ones(4)),
    "mask": dict(mask=torch.ones(5, 6).tril().bool(), threads=1),
}
LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_torch_checks_of_an_operator(options, dtype, layout):
    query, key, value = (layout(x).requires_grad_() for x in tensors(*SHAPES, dtype=dtype))
    given = adapter._operators.one_by_one(options)
    torch.library.opcheck(torch.ops.sdpa.attention.default, (query, key, value, True, *given))


def test_what_torch_checks_of_the_other_operators():
    packed = tensors((5, 4, 8), (7, 2, 8), (7, 2, 3), requires_grad=True)
    starts = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
    given = adapter._operators.one_by_one(dict(causal=True))
    torch.library.opcheck(torch.ops.sdpa.attention_varlen.default, (*packed, *starts, False, *given))
    x = packed[0].detach().transpose(0, 1).requires_grad_()
    torch.library.opcheck(
        torch.ops.sdpa.rotary.default, (x, torch.arange(5), 1e4, None, False, None, None, None, None)
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_compiled_call_gives_the_same_bits(options, dtype):
    torch.compiler.reset()

    def step(*inputs):
        out, lse = adapter.attention(*inputs, return_lse=True, **options)
        return out, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = tensors(*SHAPES, dtype=dtype, requires_grad=True)
    grad_outs = tensors((2, 4, 5, 3), dtype=dtype) + tensors((2, 4, 5))
    for got, expected in zip(compiled(*inputs), step(*inputs)):
        assert torch.equal(got, expected) and got.stride() == expected.stride() and got.dtype == expected.dtype
    grads = [torch.autograd.grad(call(*inputs), inputs, grad_outs) for call in (compiled, step)]
    for got, expected in zip(*grads):
        assert torch.equal(got, expected)


def test_one_compiled_graph_serves_all_lengths():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def call(query, key, value):
        return adapter.attention(query, key, value, causal=True, window=(4, 0), q_offset=key.shape[2] - query.shape[2])

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in (5, 6), (3, 9), (8, 8):
        inputs = tensors((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 3))
        assert torch.equal(compiled(*inputs), call(*inputs))
    assert len(graphs) == 1


def test_inductor():
    """The compiler that people use: forward and backward, with pointwise work around the call."""
    torch.compiler.reset()

    def call(query, key, value):
        return adapter.attention(query * 2, key + 1, value.sin(), causal=True).cos()

    inputs = tensors((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 3), requires_grad=True)
    results = []
    for function in torch.compile(call, fullgraph=True, dynamic=True), call:
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


class Layer(torch.nn.Module):
    def forward(self, query, key, value):
        return adapter.attention(query, key, value, causal=True)


def test_export():
    inputs = tensors(*SHAPES)
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Layer(), tuple(inputs), dynamic_shapes=({2: rows}, None, None))
    inputs[0] = tensors((2, 4, 9, 8))[0]
    assert torch.equal(program.module()(*inputs), Layer()(*inputs))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 2, 0), (0, None, 1)], ids=str)
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_vmap(axes, in_dims):
    shapes = [shape[4 - axes :] for shape in ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4))]
    inputs = tensors(
        *(shape if dim is None else (*shape[:dim], 4, *shape[dim:]) for shape, dim in zip(shapes, in_dims))
    )

    def call(query, key, value):
        return adapter.attention(query, key, value, causal=True, return_lse=True)

    got = torch.func.vmap(call, in_dims=in_dims)(*inputs)
    each = [call(*(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims))) for i in range(4)]
    for found, expected in zip(got, zip(*each)):
        torch.testing.assert_close(found, torch.stack(expected))


def test_vmap_over_options_and_their_gradients():
    query, key, value, bias, sinks = tensors((3, 2, 5, 8), (2, 6, 8), (2, 6, 4), (3, 5, 6), (3, 2))
    lengths = torch.tensor([6, 2, 4])

    def loss(query, key, value, bias, sinks, lengths):
        return adapter.attention(query, key, value, bias=bias, sinks=sinks, kv_lengths=lengths).square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))
    got = torch.func.vmap(gradient, in_dims=(0, None, None, 0, 0, 0))(query, key, value, bias, sinks, lengths)
    each = []
    for i in range(3):
        inputs = [x.clone().requires_grad_() for x in (query[i], key, value, bias[i], sinks[i])]
        each.append(torch.autograd.grad(loss(*inputs, lengths[i]), inputs))
    for found, expected in zip(got, zip(*each)):
        torch.testing.assert_close(found, torch.stack(expected))


def test_vmap_of_packed_sequences():
    query, key, value = tensors((3, 5, 2, 8), (3, 5, 2, 8), (3, 5, 2, 4))
    call = torch.func.vmap(lambda *x: adapter.attention_varlen(*x, cu_seqlens_q=torch.tensor([0, 2, 5]), causal=True))
    each = [adapter.attention_varlen(*x, cu_seqlens_q=[0, 2, 5], causal=True) for x in zip(query, key, value)]
    assert torch.equal(call(query, key, value), torch.stack(each))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_computes_in_its_dtype(compiled):
    torch.compiler.reset()
    query, key, value = tensors(*SHAPES)
    call = torch.compile(adapter.attention, fullgraph=True, backend="aot_eager") if compiled else adapter.attention
    with torch.autocast("cpu", torch.bfloat16):
        got = call(query, key, value)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, adapter.attention(*(x.bfloat16() for x in (query, key, value))))
    with torch.autocast("cpu", torch.bfloat16):
        assert adapter.attention(*(x.double() for x in (query, key, value))).dtype == torch.float64


def test_a_dispatch_mode_sees_the_call():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        adapter.attention(*tensors(*SHAPES))
    assert torch.ops.sdpa.attention.default in seen


def test_tensors_without_memory_get_their_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out, lse = adapter.attention(*(torch.empty(shape) for shape in SHAPES), return_lse=True)
    assert out.shape == (2, 4, 5, 3) and lse.shape == (2, 4, 5)


def test_out_of_a_watched_call():
    query, key, value = tensors(*SHAPES)
    out = torch.empty(2, 4, 5, 3)
    compiled = torch.compile(lambda out: adapter.attention(query, key, value, out=out), backend="aot_eager")
    compiled(out)
    assert torch.equal(out, adapter.attention(query, key, value))


def test_a_second_derivative_is_refused():
    query, key, value = tensors(*SHAPES)
    loss = torch.func.grad(lambda x: adapter.attention(x, key, value).sum())
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda x: loss(x).sum())(query)


def test_an_unknown_option_is_named():
    (x,) = tensors((2, 4, 8))
    with pytest.raises(TypeError, match="did you mean 'causal'"):
        torch.func.vmap(lambda x: adapter.attention(x, x, x, casual=True))(x)


def test_forward_mode_is_refused():
    """A tangent that was lost would be a derivative of 0."""
    x = torch.randn(1, 2, 3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        calls = {
            "value": lambda: adapter.attention(x, x, dual),
            "key": lambda: adapter.scaled_dot_product_attention(x, dual, x),
            "bias": lambda: adapter.attention(x, x, x, bias=dual[..., :3]),
            r"outs\[1\]": lambda: adapter.merge([x, dual], [x[..., 0], x[..., 0]]),
            "x": lambda: adapter.rotary(dual, 0),
        }
        for name, call in calls.items():
            with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
                call()
        assert adapter.attention(x, x, x).shape == x.shape


def test_the_operator_of_torch_refuses_dropout_here():
    x = torch.randn(1, 2, 3, 4)
    with adapter.enabled(), pytest.raises(ValueError, match=r"dropout_p is 0\.5"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)
    with adapter.enabled(), pytest.raises(ValueError, match=r"dropout_p is 0\.5"):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 2, 2, 0.5, False, False)
