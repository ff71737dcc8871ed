"""The signatures of the contract, and that the oracle has the same."""

import inspect
import operator

import pytest

import sdpa
from sdpa import reference

OPTIONS = (
    "mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None, "
    "scale=None, softcap=None, sinks=None, alibi_slopes=None"
)
OF_CACHES = OPTIONS.replace("causal=False", "causal=True")
RESULTS = "return_lse=False, out=None, threads=None"
CONTRACT = {
    "additive_attention": f"(query, key, value, w_query, w_key, v, *, {OPTIONS}, {RESULTS})",
    "attention": f"(query, key, value, *, {OPTIONS}, {RESULTS})",
    "explain": f"(query, key, value, *, {OPTIONS}, {RESULTS})",
    "attention_backward": f"(grad_out, query, key, value, out, lse, *, grad_lse=None, {OPTIONS}, threads=None)",
    "attention_varlen": f"(query, key, value, *, cu_seqlens_q, cu_seqlens_k=None, {OPTIONS}, {RESULTS})",
    "attention_varlen_backward": (
        f"(grad_out, query, key, value, out, lse, *, cu_seqlens_q, cu_seqlens_k=None, grad_lse=None, {OPTIONS}, "
        f"threads=None)"
    ),
    "attention_weights": f"(query, key, *, {OPTIONS}, threads=None)",
    "merge": "(outs, lses, *, out=None)",
    "rotary": (
        "(x, positions, *, base=10000.0, frequencies=None, interleaved=False, dim=None, cos=None, sin=None, out=None, "
        "threads=None)"
    ),
    "scaled_dot_product_attention": (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
    ),
}


DISTRIBUTED = {
    "attention": f"(comm, query, key, value, *, layout='contiguous', split='sequence', {OPTIONS}, {RESULTS})",
    "attention_backward": (
        f"(comm, grad_out, query, key, value, out, lse, *, layout='contiguous', grad_lse=None, {OPTIONS}, threads=None)"
    ),
    "attention_varlen": (
        f"(comm, query, key, value, *, cu_seqlens_q, cu_seqlens_k=None, layout='contiguous', {OPTIONS}, {RESULTS})"
    ),
    "attention_varlen_backward": (
        f"(comm, grad_out, query, key, value, out, lse, *, cu_seqlens_q, cu_seqlens_k=None, layout='contiguous', "
        f"grad_lse=None, {OPTIONS}, threads=None)"
    ),
    "explain": f"(comm, query, key, value, *, layout='contiguous', split='sequence', {OPTIONS}, {RESULTS})",
    "gather": "(comm, array, *, axis=-2, layout='contiguous', root=0)",
    "rows": "(length, rank, size, layout='contiguous')",
    "scatter": "(comm, array, *, axis=-2, layout='contiguous', root=0)",
}


CACHES = {
    "KVCache": (
        "(batch, kv_heads, head_dim, *, value_dim=None, dtype=float32, capacity=None, window=None, keep=0, group=32)"
    ),
    "KVCache.append": "(self, key, value, lengths=None)",
    "KVCache.attend": f"(self, query, *, {OF_CACHES.replace('kv_lengths=None, ', '')}, {RESULTS})",
    "KVCache.truncate": "(self, n)",
    "KVCache.fork": "(self)",
    "KVCache.save": "(self, path)",
    "KVCache.load": "(path, mmap=False)",
    "PagedKVCache": "(pages, page_size, kv_heads, head_dim, *, value_dim=None, dtype=float32)",
    "PagedKVCache.allocate": "(self, tokens=0)",
    "PagedKVCache.append": "(self, sequences, key, value, cu_seqlens=None)",
    "PagedKVCache.attend": f"(self, query, sequences, *, cu_seqlens_q=None, {OF_CACHES}, {RESULTS})",
    "PagedKVCache.fork": "(self, sequence)",
    "PagedKVCache.free": "(self, sequence)",
    "PagedKVCache.truncate": "(self, sequence, n)",
    "PagedKVCache.length": "(self, sequence)",
    "PagedKVCache.pages_of": "(self, sequence)",
}
VIEWS = {"KVCache": ("keys", "values", "lengths", "nbytes"), "PagedKVCache": ("free_pages", "nbytes")}


LAYER = {
    "MultiHeadAttention": (
        "(embed_dim, num_heads, *, kv_heads=None, head_dim=None, value_dim=None, kdim=None, vdim=None, "
        "in_proj_weight=None, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, in_proj_bias=None, "
        "out_proj_weight, out_proj_bias=None, bias_k=None, bias_v=None, add_zero_attn=False, rotary=None, "
        "qk_norm=None, pre_norm=None, post_norm=None, batch_first=True, threads=None)"
    ),
    "MultiHeadAttention.__call__": (
        "(self, x, context=None, *, value_context=None, cache=None, sequences=None, cu_seqlens=None, positions=None, "
        "residual=None, return_weights=False, mask=None, bias=None, causal=None, window=None, q_offset=None, "
        "kv_lengths=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, threads=None)"
    ),
    "MultiHeadAttention.from_torch": (
        "(module, *, num_heads=None, prefix='', batch_first=None, add_zero_attn=None, rotary=None, qk_norm=None, "
        "pre_norm=None, post_norm=None, threads=None)"
    ),
    "MultiHeadAttention.from_keras": (
        "(layer, *, prefix='', rotary=None, qk_norm=None, pre_norm=None, post_norm=None, threads=None)"
    ),
    "MultiHeadAttention.from_flax": (
        "(params, *, rotary=None, qk_norm=None, pre_norm=None, post_norm=None, threads=None)"
    ),
    "MultiHeadAttention.new_cache": "(self, batch=1, **options)",
}


def parameters(function):
    """Without annotations."""
    every = inspect.signature(function).parameters.items()
    return {name: parameter.replace(annotation=inspect.Parameter.empty) for name, parameter in every}


@pytest.mark.parametrize("name, signature", LAYER.items(), ids=LAYER)
def test_signature_of_the_layer(name, signature):
    found = operator.attrgetter(name)(sdpa)
    assert str(inspect.Signature(list(parameters(found).values()))) == signature
    assert inspect.getdoc(found)


def test_the_oracle_has_the_layer_without_caches():
    assert parameters(reference.MultiHeadAttention) == parameters(sdpa.MultiHeadAttention)
    own, given = (parameters(module.MultiHeadAttention.__call__) for module in (reference, sdpa))
    assert own.pop("dtype").default is None
    assert own.items() == given.items() - {(name, given[name]) for name in ("cache", "sequences", "cu_seqlens")}
    assert list(own) == [name for name in given if name in own]


@pytest.mark.parametrize("name, signature", CACHES.items(), ids=CACHES)
def test_signature_of_caches(name, signature):
    found = operator.attrgetter(name)(sdpa)
    assert str(inspect.signature(found)).replace("<class 'numpy.float32'>", "float32") == signature
    assert inspect.getdoc(found)


@pytest.mark.parametrize("name, views", VIEWS.items(), ids=VIEWS)
def test_properties_of_caches(name, views):
    for view in views:
        found = inspect.getattr_static(getattr(sdpa, name), view)
        assert isinstance(found, property) and inspect.getdoc(found)


@pytest.mark.parametrize("name, signature", CONTRACT.items(), ids=CONTRACT)
def test_signature(name, signature):
    assert str(inspect.signature(getattr(sdpa, name))) == signature


@pytest.mark.parametrize("name", [name for name in CONTRACT if name != "explain"])
def test_the_oracle_takes_the_same_and_a_dtype(name):
    own = inspect.signature(getattr(reference, name)).parameters.copy()
    assert own.pop("dtype").default is None
    assert own == inspect.signature(getattr(sdpa, name)).parameters


@pytest.mark.parametrize("name", sdpa.__all__)
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(sdpa, name))


@pytest.mark.parametrize("name, signature", DISTRIBUTED.items(), ids=DISTRIBUTED)
def test_signature_over_ranks(name, signature):
    found = getattr(sdpa.distributed, name)
    given = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values()]
    assert str(inspect.Signature(given)) == signature
    assert inspect.getdoc(found)
    assert name in sdpa.distributed.__all__
