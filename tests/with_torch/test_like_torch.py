"""sdpa.torch.scaled_dot_product_attention against torch's own."""

import itertools
import re
import warnings

import numpy as np
import pytest
from support.torch_tensors import tensors

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")

ours, TORCH = adapter.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention

# (query, key, value); all that torch takes, GQA apart.
AXES = {
    "2 axes": ((5, 8), (6, 8), (6, 3)),
    "keys without heads": ((4, 5, 8), (6, 8), (6, 8)),
    "a query without heads": ((5, 8), (4, 6, 8), (4, 6, 8)),
    "3 axes": ((4, 5, 8), (4, 6, 8), (4, 6, 3)),
    "4 axes": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "5 axes": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    "one key head": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "broadcast batches": ((2, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
}
MASKS = {"(M, N)": (5, 6), "(1, N)": (1, 6), "(M, 1)": (5, 1), "heads": (4, 5, 6), "batches": (2, 1, 1, 6)}


def compare(*inputs, tolerance=None, **options):
    """Results and gradients of both."""
    results = []
    for call in ours, TORCH:
        out = call(*inputs, **options)
        wanted = [x for x in (*inputs, options.get("attn_mask")) if x is not None and x.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), wanted) if wanted else ()
        results.append((out, *grads))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shapes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_axes(shapes, is_causal):
    compare(*tensors(*shapes, requires_grad=True), is_causal=is_causal)


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", ["boolean", "float", "float with a gradient"])
def test_masks(shape, kind):
    inputs = tensors(*AXES["4 axes"], requires_grad=True)
    (mask,) = tensors(shape, seed=1)
    if kind == "boolean":
        mask = mask > -0.3
    compare(*inputs, attn_mask=mask.requires_grad_(kind == "float with a gradient"), scale=0.3)


def test_a_hidden_row():
    inputs = tensors(*AXES["4 axes"])
    mask = torch.ones(5, 6).bool()
    mask[2] = False
    compare(*inputs, attn_mask=mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(is_causal):
    compare(
        *tensors((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), requires_grad=True), is_causal=is_causal, enable_gqa=True
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.float64, 1e-12)])
def test_dtypes(dtype, tolerance):
    compare(*tensors(*AXES["4 axes"], dtype=dtype), is_causal=True, tolerance=tolerance)


def test_dropout_is_torchs_own_and_a_warning_says_so_once(monkeypatch):
    adapter._like_torch._warned.clear()
    inputs = tensors(*AXES["4 axes"])
    with pytest.warns(UserWarning, match=r"dropout_p is 0\.5"):
        torch.manual_seed(0)
        got = ours(*inputs, dropout_p=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(*inputs, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(got, TORCH(*inputs, dropout_p=0.5))


WRONG = {
    "heads": (ValueError, "enable_gqa", ((4, 5, 8), (2, 6, 8), (2, 6, 8)), {}),
    "both": (ValueError, "is_causal", AXES["3 axes"], dict(is_causal=True, attn_mask=torch.ones(5, 6))),
    "shape": (ValueError, r"attn_mask has shape \(3, 3\)", AXES["3 axes"], dict(attn_mask=torch.ones(3, 3).bool())),
    "floats": (ValueError, r"attn_mask has shape \(3, 3\)", AXES["3 axes"], dict(attn_mask=torch.ones(3, 3))),
    "meta": (TypeError, "attn_mask is on meta", AXES["3 axes"], dict(attn_mask=torch.ones(5, 6, device="meta"))),
    "whole numbers": (TypeError, "attn_mask has dtype", AXES["3 axes"], dict(attn_mask=torch.ones(5, 6).int())),
}


@pytest.mark.parametrize("error, message, shapes, options", WRONG.values(), ids=WRONG)
def test_errors(error, message, shapes, options):
    with pytest.raises(error, match=message):
        ours(*tensors(*shapes), **options)


def test_compiled_and_mapped():
    torch.compiler.reset()
    inputs = tensors(*AXES["4 axes"])
    call = torch.compile(lambda *x: ours(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(*inputs), TORCH(*inputs, is_causal=True))
    for in_dims in itertools.product((0, None), repeat=3):
        if any(dim == 0 for dim in in_dims):
            batched = [x if dim == 0 else x[0] for x, dim in zip(inputs, in_dims)]
            got, expected = (torch.func.vmap(call, in_dims=in_dims)(*batched) for call in (ours, TORCH))
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name, wrong", [("query", None), ("key", [[1.0]]), ("value", np.ones((4, 6, 8)))])
def test_what_is_no_tensor_is_named(name, wrong):
    given = dict(zip(("query", "key", "value"), tensors(*AXES["3 axes"])))
    with pytest.raises(TypeError, match=f"{name} is of type {type(wrong).__name__}"):
        ours(**given | {name: wrong})
    with pytest.raises(TypeError, match="attn_mask is of type list"):
        ours(**given, attn_mask=[[True]])


KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "sparse (torch.sparse_csr)": lambda x: x[0].to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "on meta": lambda x: x.to("meta"),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "NestedTensor": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_an_array_are_named(kind, name):
    given = dict(zip(("query", "key", "value"), tensors(*AXES["3 axes"])))
    with pytest.raises(TypeError, match=re.escape(name) + " is .*" + re.escape(kind)):
        ours(**given | {name: KINDS[kind](given[name])})


def test_one_head_for_none():
    query, key = tensors((2, 0, 5, 8), (2, 1, 6, 8))
    assert ours(query, key, key).shape == TORCH(query, key, key).shape
