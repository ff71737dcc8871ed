"""Masks that are not made, against those that transformers makes."""

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

import sdpa.torch  # noqa: E402
from sdpa.huggingface import _masks  # noqa: E402
from sdpa.huggingface._attention import attention  # noqa: E402
from sdpa.huggingface._lazy import Lazy  # noqa: E402
from sdpa.huggingface._patterns import Pattern, pattern_of  # noqa: E402

boolean = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
causal, both = masking_utils.causal_mask_function, masking_utils.and_masks
NEW = hasattr(masking_utils, "bidirectional_mask_function")
new_names = pytest.mark.skipif(not NEW, reason="transformers 4 has no such masks")
# Queries, keys, position of the first query and of the first key.
PLACES = {
    "prompt": (9, 9, 0, 0),
    "one token": (1, 10, 9, 0),
    "several tokens": (3, 10, 7, 0),
    "static, prompt": (5, 16, 0, 0),
    "static, one token": (1, 16, 11, 0),
    "static, several tokens": (3, 16, 5, 0),
    "sliding": (2, 6, 9, 5),
}
LEFT = {"none": (0, 0, 0), "left": (0, 3, 1), "as much": (2, 2, 2)}


def padding_of(name, stop):
    """Whether tokens are real, for those that came so far."""
    at = torch.arange(stop)
    if name in LEFT:
        return None if name == "none" else at >= torch.tensor(LEFT[name])[:, None]
    if name == "right":
        return at < torch.tensor([stop, max(1, stop - 4), 1])[:, None]
    return torch.stack([at != 2, at % 2 == 0, at >= 0])


def function_of(name, place, padding):
    if name == "causal":
        return causal
    if name == "sliding":
        return masking_utils.sliding_window_causal_mask_function(3)
    if name == "bidirectional":
        return masking_utils.bidirectional_mask_function
    if name == "local":
        return masking_utils.sliding_window_bidirectional_mask_function(2)
    if name.startswith("chunks"):
        return masking_utils.chunked_causal_mask_function(4, torch.tensor(LEFT.get(padding, LEFT["none"])))
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 2]])
    inner = causal if name == "packed" else masking_utils.sliding_window_causal_mask_function(2)
    return both(inner, masking_utils.packed_sequence_mask_function(numbers))


def masks_of(function, place, padding, **more):
    queries, keys, first_query, first_key = PLACES[place]
    place = dict(batch_size=3, kv_length=keys, kv_offset=first_key, mask_function=function)
    if NEW:
        place |= dict(q_length=queries, q_offset=torch.tensor(first_query))  # as a static cache counts
    else:
        place |= dict(cache_position=torch.arange(first_query, first_query + queries))
    place["attention_mask"] = padding_of(padding, first_query + queries)
    return _masks.mask(**place, **more), boolean(**place, allow_is_causal_skip=False)


def tensors_of(place, seed=0):
    queries, keys, *_ = PLACES[place]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, heads, rows, 8, generator=generator) for heads, rows in ((4, queries), (2, keys), (2, keys))]


def close_where_seen(out, expected, mask, place, padding):
    """`out` (B, M, H, E) is `expected` (B, H, M, E) in the rows that are not padding and see a key."""
    queries, _, first_query, _ = PLACES[place]
    real = padding_of(padding, first_query + queries)
    seen = mask.any(-1)[:, 0]
    seen = seen if real is None else seen & real[:, first_query:]
    assert seen.any()
    torch.testing.assert_close(out[seen], expected.transpose(1, 2)[seen], atol=1e-5, rtol=1e-5)


class Module(torch.nn.Module):
    is_causal = True


NAMES = ["causal", "sliding", "chunks", *(["bidirectional", "local"] if NEW else [])]
PADDINGS = [*LEFT, "right", "holes"]
CASES = list(itertools.product(NAMES, PLACES, PADDINGS))
CASES += [("packed", "prompt", "none"), ("packed and sliding", "prompt", "none")]


@pytest.mark.parametrize(("name", "place", "padding"), CASES, ids=" - ".join)
def test_patterns(name, place, padding):
    mask, expected = masks_of(function_of(name, place, padding), place, padding)
    assert type(mask) is Lazy and mask.shape == expected.shape and mask.dtype == torch.bool and mask.ndim == 4
    query, key, value = tensors_of(place)
    out, weights = attention(Module(), query, key, value, mask)
    assert weights is None and out.is_contiguous()
    close_where_seen(out, sdpa.torch.attention(query, key, value, mask=expected), expected, place, padding)
    assert mask._made is None or (name == "chunks" and padding == "holes")
    assert mask.logical_not().equal(~expected)
    assert mask[:, :, 1:].equal(expected[:, :, 1:]) and torch.where(mask, 1, 0).sum() == expected.sum()


@pytest.mark.parametrize("function", [
    masking_utils.or_masks(causal, lambda b, h, q, k: k < 2),
    both(causal, lambda b, h, q, k: k != 1),
    lambda b, h, q, k: k <= q + 1,
])  # fmt: skip
def test_functions_that_are_not_known_become_masks(function):
    assert pattern_of(function) is None
    mask, expected = masks_of(function, "prompt", "right", use_vmap=True)
    assert type(mask) is torch.Tensor and mask.equal(expected)
    query, key, value = tensors_of("prompt")
    out, _ = attention(Module(), query, key, value, mask)
    close_where_seen(out, sdpa.torch.attention(query, key, value, mask=expected), expected, "prompt", "right")


def test_patterns_are_as_narrow_as_all_of_them():
    narrow = both(masking_utils.sliding_window_causal_mask_function(5), masking_utils.sliding_window_overlay(3))
    assert pattern_of(narrow) == Pattern(left=2, right=0)
    assert pattern_of(both(causal, both(causal, causal))) == Pattern(right=0)


@new_names
def test_nothing_hidden_is_no_mask():
    everything = masking_utils.bidirectional_mask_function
    assert masks_of(everything, "prompt", "none", allow_is_bidirectional_skip=True)[0] is None
    assert type(masks_of(everything, "prompt", "none")[0]) is Lazy
    assert type(masks_of(everything, "prompt", "left", allow_is_bidirectional_skip=True)[0]) is Lazy


@new_names
def test_a_static_cache_that_counts_on():
    """Its counter is a tensor that has changed before somebody makes the mask."""
    counter = torch.tensor(4)
    given = dict(batch_size=1, q_length=2, kv_length=9, mask_function=causal)
    expected = boolean(**given, q_offset=4)
    mask = _masks.mask(**given, q_offset=counter)
    counter.add_(2)
    assert (~mask).equal(~expected)


def test_lazy_masks_are_copied_and_pickled_as_masks():
    mask, expected = masks_of(causal, "prompt", "right")
    assert copy.deepcopy(mask).equal(expected) and pickle.loads(pickle.dumps(mask)).equal(expected)
    assert "True" in repr(mask) and len(mask) == 3 and mask.numel() == expected.numel()


def test_no_mask_means_what_it_means_for_transformers():
    """Causal from the first key on, for more than one query of a causal module."""
    query, key, value = tensors_of("static, prompt")
    seen = torch.ones(5, 16, dtype=torch.bool).tril()
    for more, expected in (
        ({}, sdpa.torch.attention(query, key, value, mask=seen)),
        ({"is_causal": False}, sdpa.torch.attention(query, key, value)),
        ({"sliding_window": 2}, sdpa.torch.attention(query, key, value, mask=seen.triu(-1))),
    ):
        out, _ = attention(Module(), query, key, value, None, **more)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    out, _ = attention(Module(), query[:, :, :1], key, value, None)
    torch.testing.assert_close(out, sdpa.torch.attention(query[:, :, :1], key, value).transpose(1, 2))


@pytest.mark.parametrize("made", [False, True])
def test_packed_by_where_sequences_begin(made):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    numbers = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]])
    mask = boolean(
        batch_size=1, kv_length=9, mask_function=both(causal, masking_utils.packed_sequence_mask_function(numbers)),
        allow_is_causal_skip=False, **({"q_length": 9} if NEW else {"cache_position": torch.arange(9)}),
    )  # fmt: skip
    expected = sdpa.torch.attention(query, key, value, mask=mask).transpose(1, 2)
    given = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=4, max_length_k=4)
    out, _ = attention(Module(), query, key, value, mask if made else None, **({} if made else given))
    torch.testing.assert_close(out, expected)


def test_masks_that_are_added_and_biases():
    query, key, value = tensors_of("several tokens")
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 4, 3, 10, generator=generator)
    lazy, mask = masks_of(causal, "several tokens", "left")
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = sdpa.torch.attention(query, key, value, mask=mask, bias=bias).transpose(1, 2)
    for given in (lazy, mask, added):
        out, _ = attention(Module(), query, key, value, given, position_bias=bias)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    out, weights = attention(Module(), query, key, value, lazy, position_bias=bias, output_attentions=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not weights[~mask.expand_as(weights)].any()
    out, _ = attention(Module(), query, key, value, torch.nn.functional.pad(mask, (0, 5)), position_bias=bias)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_weights_of_a_row_that_sees_no_key():
    """In float64, with all of its biases -inf: zeros, and gradients that are numbers."""
    query, key, value = (x.double().requires_grad_() for x in tensors_of("several tokens"))
    bias = torch.zeros(3, 10, dtype=torch.float64)
    bias[1], bias[2, 4:] = -torch.inf, -torch.inf
    out, weights = attention(Module(), query, key, value, bias, output_attentions=True)
    expected = sdpa.torch.attention(query, key, value, bias=bias).transpose(1, 2)
    close = dict(atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(out, expected, **close)
    assert not weights[:, :, 1].any() and not weights[:, :, 2, 4:].any()
    inputs = query, key, value
    for got, grad in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))):
        torch.testing.assert_close(got, grad, **close)
