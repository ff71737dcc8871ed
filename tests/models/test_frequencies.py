"""Kinds of rotary embedding: by hand, and properties; test_transformers.py compares models."""

import math

import numpy as np
import pytest

from sdpa.models import frequencies_of, mrope_positions

SIZES = dict(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)  # heads of 8
PLAIN = 100.0 ** -np.array([0, 0.25, 0.5, 0.75])


def of(rope=None, length=0, **config):
    frequencies, factor = frequencies_of(SIZES | {"rope_theta": 100.0} | config | {"rope_scaling": rope}, length)
    assert frequencies.dtype == np.float64
    return frequencies, factor


def test_plain():
    for found in (of(), of({"type": "default"}), of({"type": "mrope", "mrope_section": [1, 1, 2]})):
        np.testing.assert_allclose(found[0], PLAIN, rtol=1e-15)
        assert found[1] == 1
    new = frequencies_of(SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    np.testing.assert_allclose(new[0], PLAIN, rtol=1e-15)
    np.testing.assert_allclose(of(rope_theta=10000.0)[0], [1, 0.1, 0.01, 0.001], rtol=1e-14)
    assert len(of(head_dim=20)[0]) == 10
    np.testing.assert_allclose(of(partial_rotary_factor=0.5)[0], [1, 0.1], rtol=1e-15)


def test_linear_and_proportional():
    np.testing.assert_allclose(of({"type": "linear", "factor": 4.0})[0], PLAIN / 4, rtol=1e-15)
    np.testing.assert_allclose(of({"rope_type": "proportional", "partial_rotary_factor": 0.5})[0], [*PLAIN[:2], 0, 0])


def test_dynamic_stretches_past_the_length_of_training():
    rope = {"type": "dynamic", "factor": 2.0}
    np.testing.assert_allclose(of(rope, 64)[0], PLAIN)
    base = 100 * (2 * 128 / 64 - 1) ** (8 / 6)
    np.testing.assert_allclose(of(rope, 128)[0], base ** -np.array([0, 0.25, 0.5, 0.75]))


def test_llama3_keeps_high_frequencies_and_divides_low_ones():
    rope = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    original = 2 * math.pi * 10  # the pairs make 10, 3.16, 1 and 0.316 turns over it
    found = of(rope | {"original_max_position_embeddings": original})[0]
    stays = (10**0.5 - 1) / 3
    np.testing.assert_allclose(found, PLAIN * [1, stays + (1 - stays) / 8, 1 / 8, 1 / 8])


def test_yarn():
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8, beta_slow=2)
    found, factor = of(rope)
    first, last = (8 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(100)) for turns in (8, 2))
    ramp = np.clip((np.arange(4) - math.floor(first)) / (math.ceil(last) - math.floor(first)), 0, 1)
    np.testing.assert_allclose(found, PLAIN * (1 - ramp + ramp / 4))
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert of(rope | {"attention_factor": 1.5})[1] == 1.5
    expected = (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)
    assert of(rope | {"mscale": 0.5, "mscale_all_dim": 2.0})[1] == pytest.approx(expected)
    ramp = np.clip((np.arange(4) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(of(rope | {"truncate": False})[0], PLAIN * (1 - ramp + ramp / 4))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_has_two_sets(kind):
    rope = dict(type=kind, short_factor=[1, 2, 3, 4], long_factor=[5, 6, 7, 8])
    config = dict(original_max_position_embeddings=16)
    np.testing.assert_allclose(of(rope, 16, **config)[0], PLAIN / [1, 2, 3, 4])
    np.testing.assert_allclose(of(rope, 17, **config)[0], PLAIN / [5, 6, 7, 8])
    assert of(rope, **config)[1] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


def test_mrope_takes_pairs_from_three_positions():
    positions = np.array([[10, 11], [20, 21], [30, 31]])
    config = SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    assert mrope_positions(config, positions).tolist() == [[10, 20, 30, 30], [11, 21, 31, 31]]
    config = dict(head_dim=20, rope_parameters={"mrope_section": [4, 3, 3], "mrope_interleaved": True})
    config |= dict(hidden_size=1, num_attention_heads=1)
    assert mrope_positions(config, positions[:, 0]).tolist() == [10, 20, 30, 10, 20, 30, 10, 20, 30, 10]
    with pytest.raises(ValueError, match=r"mrope_section is \[4, 3, 3\]: it must have 4 pairs in all"):
        mrope_positions(SIZES | {"rope_parameters": {"mrope_section": [4, 3, 3]}}, positions)
