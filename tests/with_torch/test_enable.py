"""enable, disable and enabled: what models call is computed here, and torch's again afterwards."""

import contextlib
import os
import threading
import warnings

import pytest
from support.processes import run_python
from support.torch_tensors import tensors

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")
F = torch.nn.functional
TORCH = F.scaled_dot_product_attention
DENSE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions of the compiled part that were called."""
    seen = []

    def counted(function):
        def forward(*args):
            seen.append(function.options.function)
            return function.forward(*args)

        def backward(*args):
            seen.append(function.backward_options.function)
            return function.backward(*args)

        return function._replace(forward=forward, backward=backward)

    dense, packed = counted(adapter._eager.ATTENTION), counted(adapter._eager.ATTENTION_VARLEN)
    for module in adapter._attention, adapter._kernels:
        monkeypatch.setattr(module, "ATTENTION", dense)
        monkeypatch.setattr(module, "ATTENTION_VARLEN", packed)
    monkeypatch.setattr(adapter._like_torch, "AS_TORCH", counted(adapter._like_torch.AS_TORCH))
    return seen


@pytest.fixture(autouse=True)
def nothing_remains():
    yield
    adapter.disable()
    assert not adapter._enable.SWITCH.on
    assert F.scaled_dot_product_attention is TORCH and torch.backends.mha.get_fastpath_enabled()


def test_nothing_happens_on_import(calls):
    inputs = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8))
    F.scaled_dot_product_attention(*inputs)
    assert not calls


MASKS = {
    "none": {},
    "causal": dict(is_causal=True),
    "boolean": dict(attn_mask=torch.ones(5, 6).tril().bool()),
    "float": dict(attn_mask=torch.linspace(-2, 2, 30).reshape(5, 6)),
    "scale": dict(scale=0.2),
    "grouped": dict(enable_gqa=True),
}


@pytest.mark.parametrize("how", ["function", "operator"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_attention_and_its_gradients(options, dtype, how, calls):
    """The function as it stands in torch.nn.functional, and as others imported it before."""
    heads = 2 if "enable_gqa" in options else 4
    inputs = tensors((2, 4, 5, 8), (2, heads, 6, 8), (2, heads, 6, 8), dtype=dtype, requires_grad=True)
    options = {name: x.to(dtype) if getattr(x, "is_floating_point", bool)() else x for name, x in options.items()}

    def results(call):
        out = call(*inputs, **options)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    expected = results(TORCH)
    assert not calls
    with adapter.enabled():
        got = results(F.scaled_dot_product_attention if how == "function" else TORCH)
    assert calls == ["attention", "attention_backward"]
    eps = torch.finfo(dtype).eps
    for x, y in zip(got, expected):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=20 * eps, atol=40 * eps)
    results(F.scaled_dot_product_attention)
    assert len(calls) == 2


def test_the_operator_has_the_strides_of_torchs(calls):
    inputs = [x.transpose(1, 2) for x in tensors((2, 5, 4, 8), (2, 6, 4, 8), (2, 6, 4, 8))]
    expected = DENSE(*inputs)
    grad_out = torch.ones_like(expected[0])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected += backward(grad_out, *inputs, *expected, 0.0, False)
    with adapter.enabled():
        got = DENSE(*inputs)
        got += backward(grad_out, *inputs, *got, 0.0, False)
    assert len(calls) == 2
    for x, y in zip(got, expected):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("mask", ["boolean", "float"])
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_a_block_that_ends_between_a_row_that_sees_no_key_and_its_gradients(inside, mask, calls):
    """One of the two is torch's: what it takes from the other, the log-sum-exp, must mean the same to both."""
    inputs = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), requires_grad=True)
    seen = torch.arange(5)[:, None] != torch.full((6,), 2)
    seen = seen if mask == "boolean" else torch.zeros(5, 6).masked_fill(~seen, -torch.inf)
    expected = torch.autograd.grad(TORCH(*inputs, seen).square().sum(), inputs)
    on, off = adapter.enabled, contextlib.nullcontext
    with on() if inside == "forward" else off():
        out = TORCH(*inputs, seen)
    with on() if inside == "backward" else off():
        got = torch.autograd.grad(out.square().sum(), inputs)
    assert calls == ["attention" if inside == "forward" else "attention_backward"]
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y)


def layer(kind):
    torch.manual_seed(0)
    options = dict(d_model=16, nhead=2, dim_feedforward=32, batch_first=True, dropout=0.0)
    if kind == "encoder":
        return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**options), 2)
    if kind == "encoder layer":
        return torch.nn.TransformerEncoderLayer(**options)
    if kind == "decoder layer":
        return torch.nn.TransformerDecoderLayer(**options)
    return torch.nn.MultiheadAttention(16, 2, batch_first=True)


def run(module, kind):
    x, memory = tensors((3, 6, 16), (3, 4, 16))
    padding = torch.arange(6) >= torch.tensor([6, 4, 2])[:, None]
    if kind == "attention":
        return module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    if kind == "decoder layer":
        return module(x, memory, tgt_key_padding_mask=padding)
    out = module(x, src_key_padding_mask=padding)
    return out.masked_fill(padding[..., None], 0.0)  # the fast path leaves zeros there


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", ["attention", "encoder layer", "encoder", "decoder layer"])
def test_layers(kind, training, calls):
    module = layer(kind).train(training)
    for grad in (True, False) if training else (False,):
        calls.clear()
        with torch.set_grad_enabled(grad):
            expected = run(module, kind)
            assert not calls
            with adapter.enabled():
                got = run(module, kind)
        assert calls
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_graphs_that_were_compiled_before_and_meanwhile(calls):
    torch.compiler.reset()
    inputs = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), requires_grad=True)

    def call(*inputs):
        return F.scaled_dot_product_attention(*inputs).cos()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.compile(call, fullgraph=True)
        expected = before(*inputs)
        assert not calls
        with adapter.enabled():
            torch.testing.assert_close(before(*inputs), expected)
            assert calls == ["attention"]
            torch.compiler.reset()
            meanwhile = torch.compile(call, fullgraph=True)
            got = meanwhile(*inputs)
            torch.autograd.grad(got.sum(), inputs)
            assert calls == ["attention", "attention", "attention_backward"]
        torch.testing.assert_close(got, expected)
        meanwhile(*inputs)
        assert len(calls) == 3


# ---------------------------------------------------------------------------------------------------- what torch keeps


def test_what_is_not_taken_is_torchs(calls):
    inputs = tensors((1, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 3))
    torch.manual_seed(0)
    expected = TORCH(*inputs, dropout_p=0.5)
    with adapter.enabled():
        torch.manual_seed(0)
        assert torch.equal(F.scaled_dot_product_attention(*inputs, dropout_p=0.5), expected)
        assert F.scaled_dot_product_attention(*(x.to("meta") for x in inputs)).shape == expected.shape
    assert not calls
    assert adapter.explain(*inputs, dropout_p=0.5).startswith("computed by torch: dropout_p is 0.5")


@pytest.mark.parametrize("kind", ["causal_lower_right", "causal_upper_left"])
def test_biases_that_know_the_function_by_its_place(kind, calls):
    query, key, value = tensors((1, 2, 3, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    bias = getattr(torch.nn.attention.bias, kind)(3, 6)
    expected = TORCH(query, key, value, attn_mask=bias)
    with adapter.enabled():
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, attn_mask=bias), expected)
    assert calls == ["attention"]


def test_errors_are_torchs():
    x = torch.ones(2, 4, 8)
    with adapter.enabled(), pytest.raises(RuntimeError, match="dtype"):
        F.scaled_dot_product_attention(x, x.double(), x)
    with adapter.enabled(), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4), is_causal=True)


def test_explain():
    inputs = tensors((1, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8))
    assert adapter.explain(*inputs, is_causal=True).flops < adapter.explain(*inputs).flops
    assert "on meta" in adapter.explain(*(x.to("meta") for x in inputs))
    assert "torch.float64" in adapter.explain(inputs[0].double(), *inputs[1:])
    assert torch.func.vmap(lambda *x: torch.tensor("must see" in adapter.explain(*x)), out_dims=None)(*inputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_differentiation_is_torchs():
    x = torch.randn(2, 5, 8)

    def call(x):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5))

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.func.jvp(call, (x,), (x,))
        with adapter.enabled():
            for got, y in zip(torch.func.jvp(call, (x,), (x,)), expected):
                torch.testing.assert_close(got, y)


# ------------------------------------------------------------------------------------------------------ on and off


def test_enable_and_blocks_and_threads():
    on = adapter._enable.SWITCH
    adapter.enable()
    adapter.enable()
    with adapter.enabled():
        adapter.disable()
        assert on.on
        with pytest.raises(ZeroDivisionError), adapter.enabled():
            raise ZeroDivisionError
        assert on.on
    assert not on.on
    inside, leave = threading.Event(), threading.Event()

    def work():
        with adapter.enabled():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    with adapter.enabled():
        thread.start()
        inside.wait(10)
    assert on.on
    leave.set()
    thread.join()
    assert not on.on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child():
    """Within a block, and while another thread turns it on and off."""
    code = """
import os, signal, threading, torch, sdpa.torch
F = torch.nn.functional
x = torch.randn(2, 4, 512, 64)
expected = sdpa.torch.attention(x, x, x).numpy()
def right():
    return (F.scaled_dot_product_attention(x, x, x).numpy() == expected).all()
def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs dies of it
        os._exit(0 if work() else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def work():
    with sdpa.torch.enabled():
        return right()
with sdpa.torch.enabled():
    print(in_child(right), in_child(work))
stop = threading.Event()
def turn():
    while not stop.is_set():
        work()
thread = threading.Thread(target=turn)
thread.start()
print(*[in_child(work) for _ in range(5)])
stop.set()
thread.join()"""
    assert set(run_python(code).split()) == {"0"}


def test_what_others_put_in_its_place_stays(monkeypatch, calls):
    x = torch.ones(1, 2, 4, 8)
    with adapter.enabled():
        ours = F.scaled_dot_product_attention

        def theirs(*args):
            return ours(*args)

        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    assert F.scaled_dot_product_attention is theirs
    theirs(x, x, x)
    assert not calls
    monkeypatch.undo()
    F.scaled_dot_product_attention = TORCH


def test_the_fast_path_is_left_as_it_was():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with adapter.enabled():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_it_is_offered_as_a_flash_attention(calls):
    attention = torch.nn.attention
    adapter.register_flash_attention_impl()
    assert "cpu_attention" in attention.list_flash_attention_impls()
    inputs = tensors((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8))
    expected = TORCH(*inputs)
    attention.activate_flash_attention_impl("cpu_attention")
    try:
        torch.testing.assert_close(TORCH(*inputs), expected)
        assert calls == ["attention"]
    finally:
        attention.restore_flash_attention_impl()
    TORCH(*inputs)
    assert len(calls) == 1


# ---------------------------------------------------------------------------------------------------- packed sequences

WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (2, 1)}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_varlen_attn(window, dtype, calls):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    inputs = tensors((7, 4, 8), (9, 2, 8), (9, 2, 8), dtype=dtype, requires_grad=True)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
    with adapter.enabled():
        out, lse = varlen_attn(
            *inputs, *starts, 4, 5, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )  # fmt: skip
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
    assert calls == ["attention_varlen", "attention_varlen_backward"]
    sides = tuple(None if side < 0 else side for side in window)
    options = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], window=sides, return_lse=True)
    expected, expected_lse = adapter.attention_varlen(*inputs, **options)
    expected_grads = torch.autograd.grad(expected.float().square().sum(), inputs)
    eps = torch.finfo(dtype).eps
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse.T)
    for got, grad in zip(grads, expected_grads):
        torch.testing.assert_close(got, grad, atol=20 * eps, rtol=20 * eps)


def test_varlen_attn_with_pages():
    from torch.nn.attention.varlen import varlen_attn

    (query, keys, values) = tensors((2, 4, 8), (6, 3, 2, 8), (6, 3, 2, 8))
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with adapter.enabled():
        out = varlen_attn(
            query, keys, values, starts, None, 1, 6, enable_gqa=True, seqused_k=lengths, block_table=table
        )  # fmt: skip
    for i in range(2):
        key, value = (x[table[i]].reshape(6, 2, 8)[: lengths[i]].transpose(0, 1) for x in (keys, values))
        expected = adapter.attention(query[i][:, None], key, value)
        torch.testing.assert_close(out[i], expected[:, 0])
