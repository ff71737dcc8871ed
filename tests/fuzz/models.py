"""Whole models of random kinds and sizes, in float64 as the oracle, and through caches as without."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draw import float64, rng
from support.models import DECODERS, ENCODERS, write_model
from support.problems import PROPERTY, examples
from test_decoders import ROPES

import sdpa

SMALL = st.integers(1, 4)


@st.composite
def configs(choose, kind):
    """Entries of config.json."""
    heads, layers, inner = choose(SMALL), choose(st.integers(1, 3)), choose(st.integers(1, 30))
    width = heads * 2 * choose(SMALL)
    if kind == "gpt2":
        return dict(n_embd=width, n_layer=layers, n_head=heads, n_inner=inner) | choose(optional(
            scale_attn_by_inverse_layer_idx=st.booleans(), scale_attn_weights=st.booleans(),
        ))  # fmt: skip
    if kind == "distilbert":
        return dict(dim=width, n_layers=layers, n_heads=heads, hidden_dim=inner)
    config = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner)
    if kind in ENCODERS:
        return config | choose(optional(hidden_act=st.sampled_from(["gelu", "gelu_new", "relu", "silu"])))
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    config |= dict(num_key_value_heads=choose(st.sampled_from(groups)), head_dim=12)
    return config | choose(optional(
        attention_bias=st.booleans(), mlp_bias=st.booleans(), tie_word_embeddings=st.booleans(),
        rope_scaling=st.sampled_from(list(ROPES.values())), rope_theta=st.floats(2, 1e6),
    ))  # fmt: skip


def optional(**strategies):
    return st.fixed_dictionaries({}, optional=strategies)


@st.composite
def batches(choose, vocabulary):
    """Token ids (B, S), and how many of each sequence are real."""
    shape = choose(st.integers(1, 3)), choose(st.integers(1, 30))
    random = rng(choose(st.integers(0, 999)))
    return random.integers(2, vocabulary, shape), random.integers(0, shape[1] + 1, shape[0])


def both(folder):
    return [sdpa.models.load(folder, dtype=float64), sdpa.models.load(folder, pieces=sdpa.reference)]


@settings(PROPERTY, max_examples=examples(100))
@given(st.data(), st.sampled_from(ENCODERS), st.integers(0, 99))
def encoders(data, kind, number):
    with tempfile.TemporaryDirectory() as place:
        config = data.draw(configs(kind))
        model, exact = both(write_model(Path(place) / "model", kind, seed=number, **config))
        ids, lengths = data.draw(batches(97))
        given_lengths = dict(lengths=lengths) if data.draw(st.booleans()) else {}
        found, expected = model(ids, **given_lengths), exact(ids, **given_lengths)
        np.testing.assert_allclose(found, expected, atol=1e-10)
        for b, length in enumerate(lengths if given_lengths else ()):
            assert not found[b, length:].any()
        np.testing.assert_allclose(model.embed(ids), exact.embed(ids), atol=1e-10)


@settings(PROPERTY, max_examples=examples(100))
@given(st.data(), st.sampled_from(DECODERS), st.integers(0, 99))
def decoders(data, kind, number):
    with tempfile.TemporaryDirectory() as place:
        config = data.draw(configs(kind))
        model, exact = both(write_model(Path(place) / "model", kind, seed=number, **config))
        ids, lengths = data.draw(batches(97))
        given_lengths = dict(lengths=lengths) if data.draw(st.booleans()) else {}
        expected = exact(ids, **given_lengths)
        np.testing.assert_allclose(model(ids, **given_lengths), expected, atol=1e-9)
        if given_lengths or config.get("rope_scaling", {}).get("rope_type") in ("dynamic", "longrope"):
            return  # of which frequencies depend on the length so far
        caches, places = model.new_caches(len(ids), dtype=float64), data.draw(st.lists(st.integers(0, ids.shape[1])))
        parts = [part for part in np.split(ids, sorted(places), axis=1) if part.size]
        steps = [model(part, caches=caches) for part in parts]
        np.testing.assert_allclose(np.concatenate(steps, axis=1), expected, atol=1e-9)


@settings(PROPERTY, max_examples=examples(100))
@given(st.tuples(*[st.integers(0, 12)] * 3).filter(sum), st.booleans(), st.lists(SMALL, max_size=2), st.integers(0, 99))
def positions_of_three(sections, interleaved, shape, number):
    """Each pair takes that of time, of height or of width."""
    count = sum(sections)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=list(sections), mrope_interleaved=interleaved)
    config = dict(hidden_size=2 * count, num_attention_heads=1, head_dim=2 * count, rope_parameters=rope)
    positions = rng(number).integers(0, 1000, (3, *shape)).astype(float64)
    found = sdpa.models.mrope_positions(config, positions)
    for pair in range(count):
        if interleaved:
            which = pair % 3 if pair // 3 < sections[pair % 3] else 0
        else:
            which = int(pair >= sections[0]) + int(pair >= sections[0] + sections[1])
        np.testing.assert_array_equal(found[..., pair], positions[which])


PROPERTIES = {"encoders": encoders, "decoders": decoders, "positions of three": positions_of_three}
