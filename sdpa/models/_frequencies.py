"""The kinds of rotary embedding.  Each kind is a function that returns (frequencies, factor) for a config.json.

A pair of features is turned by the angle position * frequency, and multiplied by the factor.  Kinds have the names of
Hugging Face's "rope_type".  Two kinds depend on `length`, the length of the longest sequence so far.
"""

import math

import numpy as np


def frequencies_of(config, length=0):
    """Return (frequencies, factor) for the contents of a config.json, in which the parameters are called
    "rope_parameters" or, as older files have it, "rope_scaling"."""
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"rope_type is {kind!r:.60}: it must be one of {', '.join(KINDS)}")
    try:
        with np.errstate(all="ignore"):
            frequencies, factor = KINDS[kind](rope, length)
            frequencies, factor = np.asarray(frequencies, np.float64), float(factor)
    except KeyError as missing:
        raise ValueError(f"rope_parameters have no {missing}: for rope_type {kind!r} it must be there") from None
    except (TypeError, ValueError, ArithmeticError):
        frequencies, factor = np.zeros(0), math.nan
    if not (np.isfinite(frequencies).all() and math.isfinite(factor)):
        raise ValueError(f"rope_parameters are {rope}: they must be numbers, as rope_type {kind!r} needs them")
    if frequencies.ndim != 1 or 2 * len(frequencies) > rope["head_dim"]:
        shape, most = frequencies.shape, rope["head_dim"] // 2
        raise ValueError(f"rope_parameters are {rope}: they give frequencies {shape}, and must give {most} at most")
    return frequencies, factor


def rope_parameters(config):
    """The parameters in config.json, and the sizes that the kinds need."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if not all(isinstance(one, (str, int, float, list, type(None))) for one in rope.values()):
        raise ValueError(f"rope_parameters are {rope}: they must be the same for all layers")
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rope["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    longest = rope["max_position_embeddings"] = config.get("max_position_embeddings", 2048)
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope["original_max_position_embeddings"] = original or longest
    return rope


def turned(rope):
    """How many features of a head are turned.  With a partial rotary factor these are the first ones only."""
    return int(rope["head_dim"] * rope["partial_rotary_factor"])


def plain(rope, length=0):
    """base ** (-2 i / dim)"""
    dim = turned(rope)
    return rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim), 1.0


def linear(rope, length=0):
    """Positions are divided by a factor."""
    return plain(rope)[0] / rope["factor"], 1.0


def dynamic(rope, length=0):
    """NTK: the longer a sequence is than those of training, the larger the base."""
    dim, factor, longest = turned(rope), rope["factor"], rope["max_position_embeddings"]
    stretch = factor * max(length, longest) / longest - (factor - 1)
    return plain(rope | {"rope_theta": rope["rope_theta"] * stretch ** (dim / (dim - 2))})


def llama3(rope, length=0):
    """Low frequencies are divided by a factor, high frequencies stay, and those between are a mean of both."""
    frequencies, _ = plain(rope)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the length of training
    stays = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (stays + (1 - stays) / rope["factor"]), 1.0


def yarn(rope, length=0):
    """As llama3, but the mean is a ramp over the pairs, and there is a factor that sharpens the softmax."""
    frequencies, _ = plain(rope)
    dim, original = turned(rope), rope["original_max_position_embeddings"]
    factor = rope["factor"] or rope["max_position_embeddings"] / original

    def pair(turns):  # that makes so many turns over the length of training
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / (last - first or 0.001), 0, 1)

    def sharper(by):
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        by, over = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = sharper(by) / sharper(over) if by and over else sharper(1)
    return frequencies * (1 - ramp + ramp / factor), scale


def longrope(rope, length=0):
    """Each frequency is divided by its own number, which differs between short and long sequences."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain(rope)[0] / np.asarray(rope["long_factor" if length > original else "short_factor"]), scale


def proportional(rope, length=0):
    """With a partial rotary factor all features belong to pairs, and the last pairs are not turned."""
    whole = rope | {"partial_rotary_factor": 1.0}
    frequencies = plain(whole)[0] / rope.get("factor", 1.0)
    frequencies[turned(rope) // 2 :] = 0
    return frequencies, 1.0


KINDS = {
    "default": plain, "mrope": plain, "linear": linear, "dynamic": dynamic, "llama3": llama3, "yarn": yarn,
    "longrope": longrope, "su": longrope, "proportional": proportional,
}  # fmt: skip


def mrope_positions(config, positions):
    """Return the position of each pair, (..., dim / 2), from positions in time, height and width, (3, ...).

    mrope_section is the number of pairs for time, for height and for width.  The pairs for time come first (Qwen2-VL);
    with mrope_interleaved pairs alternate, and the pairs that remain are for time (Qwen3-VL).
    """
    rope = rope_parameters(config)
    sections, count = rope["mrope_section"], turned(rope) // 2
    if sum(sections) != count:
        raise ValueError(f"mrope_section is {sections}: it must have {count} pairs in all")
    if rope.get("mrope_interleaved", False):
        axis = np.zeros(count, int)
        for which in range(1, len(sections)):
            axis[which : which + len(sections) * sections[which] : len(sections)] = which
    else:
        axis = np.repeat(np.arange(len(sections)), sections)
    return np.moveaxis(np.asarray(positions)[axis], 0, -1)
