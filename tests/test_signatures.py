"""The signatures of the contract, and that the oracle has the same."""

import inspect

import pytest

import sdpa
from sdpa import reference

OPTIONS = (
    "mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None, "
    "scale=None, softcap=None, sinks=None, alibi_slopes=None"
)
CONTRACT = {
    "attention": f"(query, key, value, *, {OPTIONS}, return_lse=False, out=None, threads=None)",
    "attention_weights": f"(query, key, *, {OPTIONS}, threads=None)",
    "merge": "(outs, lses, *, out=None)",
    "scaled_dot_product_attention": (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
    ),
}


@pytest.mark.parametrize("name, signature", CONTRACT.items(), ids=CONTRACT)
def test_signature(name, signature):
    assert str(inspect.signature(getattr(sdpa, name))) == signature


@pytest.mark.parametrize("name", CONTRACT)
def test_the_oracle_takes_the_same_and_a_dtype(name):
    own = inspect.signature(getattr(reference, name)).parameters.copy()
    assert own.pop("dtype").default is None
    assert own == inspect.signature(getattr(sdpa, name)).parameters


def test_explain_takes_what_attention_takes():
    assert str(inspect.signature(sdpa.explain)) == "(query, key, value, **options)"


@pytest.mark.parametrize("name", sdpa.__all__)
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(sdpa, name))
