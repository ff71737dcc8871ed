"""The cache that generate is given, next to transformers' DynamicCache."""

import copy

import numpy as np
import pytest
from support.warned import WARNINGS_OF_OTHERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import families  # noqa: E402

import sdpa.huggingface  # noqa: E402
import sdpa.torch  # noqa: E402
from sdpa.huggingface import Cache  # noqa: E402

pytestmark = WARNINGS_OF_OTHERS
NEW = int(transformers.__version__.split(".")[0]) >= 5
CLOSE = dict(atol=2e-4, rtol=2e-5)
# Windows of 4, chunks of 4, two kinds of layers, keys larger than values, no window.
FAMILIES = ["mistral", "llama4_text", "gemma2", "deepseek_v3", "gpt2"]


@pytest.fixture(autouse=True)
def registered():
    sdpa.huggingface.register()


def logits(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, past_key_values=cache, attention_mask=mask, use_cache=True).logits


def pair(name):
    """A model with our attention and our cache, and one with its own."""
    ours, theirs = families.made(name), families.made(name)
    ours.set_attn_implementation("cpu_attention")
    return (ours, Cache(ours.config)), (theirs, transformers.DynamicCache(config=theirs.config))


@pytest.mark.parametrize("attention", ["cpu_attention", "eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_of_several_tokens(name, attention):
    """Whatever the attention is, with padding on the left: a prompt, single tokens, and more at once."""
    (ours, cache), (theirs, dynamic) = pair(name)
    if attention == "sdpa" and name == "gemma2":
        pytest.skip("transformers' sdpa has no softcap")
    ours.set_attn_implementation(attention)
    ids, mask = families.tokens(3, 20), families.padded([20, 18, 15], "left")
    at = 0
    for count in (7, 1, 1, 5, 3, 1, 2):
        new, seen = ids[:, at : at + count], mask[:, : at + count]
        found, expected = logits(ours, cache, new, seen), logits(theirs, dynamic, new, seen)
        real = mask[:, at : at + count].bool()
        torch.testing.assert_close(found[real], expected[real], **CLOSE)
        at += count
    assert cache.get_seq_length() == 20
    for layer, other in zip(cache.layers, dynamic.layers):
        real = mask[:, None, -other.keys.shape[2] :, None]
        torch.testing.assert_close(layer.keys * real, other.keys * real, **CLOSE)
        torch.testing.assert_close(layer.values * real, other.values * real, **CLOSE)
        new = 2 if NEW else torch.arange(2)
        assert layer.get_mask_sizes(new) == other.get_mask_sizes(new)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_generate_does_to_batches(name):
    ours, theirs = pair(name)
    ids = families.tokens(2, 9)
    for model, cache in ours, theirs:
        logits(model, cache, ids)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([1, 0, 5, 5, 3, 2]))
        cache.batch_select_indices(torch.tensor([0, 2, 3, 4]))
        cache.batch_select_indices(torch.tensor([True, False, True, True]))
    more = families.tokens(3, 2, seed=1)
    torch.testing.assert_close(logits(*ours, more), logits(*theirs, more), **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_crop(name):
    """Tokens of the last append can be taken back; with past recording, any."""
    (ours, cache), (theirs, dynamic) = pair(name)
    ids = families.tokens(2, 16)
    if not NEW:
        dynamic = transformers.DynamicCache()  # its windows cannot be cropped
    for each in (cache, dynamic) if NEW else (cache,):
        each.activate_past_recording() if name != "gpt2" else None
    for model, each in (ours, cache), (theirs, dynamic):
        logits(model, each, ids[:, :9])
        logits(model, each, ids[:, 9:12])
        each.crop(-2)
    torch.testing.assert_close(logits(ours, cache, ids[:, 10:]), logits(theirs, dynamic, ids[:, 10:]), **CLOSE)
    for each in cache, dynamic:
        each.crop(-5)
        assert each.get_seq_length() == 11
    torch.testing.assert_close(logits(ours, cache, ids[:, 11:13]), logits(theirs, dynamic, ids[:, 11:13]), **CLOSE)
    cache.crop(10)  # the length, as in transformers 4
    assert cache.get_seq_length() == 10


def test_crop_of_a_window_that_has_moved_on():
    (model, cache), _ = pair("mistral")
    ids = families.tokens(1, 12)
    logits(model, cache, ids[:, :9])
    logits(model, cache, ids[:, 9:])
    cache.crop(-2)
    expected = logits(model, None, ids[:, :11])[:, -1]
    torch.testing.assert_close(logits(model, cache, ids[:, 10:11])[:, -1], expected, **CLOSE)
    with pytest.raises(ValueError, match="window of 4 has dropped"):
        cache.crop(-8)


def test_recording_may_begin_late():
    (model, cache), _ = pair("mistral")
    ids = families.tokens(1, 12)
    logits(model, cache, ids[:, :3])
    cache.activate_past_recording()
    for at in range(3, 12):
        logits(model, cache, ids[:, at : at + 1])
    cache.crop(-7)
    expected = logits(model, None, ids[:, :6])[:, -1]
    torch.testing.assert_close(logits(model, cache, ids[:, 5:6])[:, -1], expected, **CLOSE)


@pytest.mark.parametrize("kind", ["beams", "assisted", "prompt lookup", "sampled"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama4_text", "qwen3"])
def test_generate(name, kind):
    if not NEW and kind in ("assisted", "prompt lookup"):
        pytest.skip("assisted generation of transformers 4 wants its own caches")
    (ours, cache), (theirs, _) = pair(name)
    ids = families.tokens(1, 7)
    how = dict(max_new_tokens=14, do_sample=False, attention_mask=torch.ones_like(ids))
    if kind == "beams":
        how |= dict(num_beams=4, num_return_sequences=2)
    elif kind == "assisted":
        how |= dict(assistant_model=families.made(name, dict(num_hidden_layers=2), seed=1))
    elif kind == "prompt lookup":
        how |= dict(prompt_lookup_num_tokens=3)
    else:
        how |= dict(do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    expected = theirs.generate(ids, **how)
    torch.manual_seed(0)
    assert ours.generate(ids, past_key_values=cache, **how).tolist() == expected.tolist()


def test_a_prompt_for_several_answers():
    """A deep copy shares the memory of the prompt until one of the two appends."""
    (model, cache), _ = pair("gemma2")
    ids, ends = families.tokens(1, 9), families.tokens(3, 4, seed=2)
    logits(model, cache, ids)
    for end in ends[:, None]:
        fork = copy.deepcopy(cache)
        assert np.shares_memory(fork.layers[1].kv.keys, cache.layers[1].kv.keys)
        expected = logits(model, None, torch.cat([ids, end], 1))[:, -4:]
        torch.testing.assert_close(logits(model, fork, end), expected, **CLOSE)
    assert cache.get_seq_length() == 9
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].keys is None and not cache.is_initialized
    torch.testing.assert_close(logits(model, cache, ids), logits(model, None, ids), **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", torch.bfloat16, np.float32])
@pytest.mark.parametrize("attention", ["cpu_attention", "eager"])
def test_dtypes(dtype, attention):
    model = families.made("llama").to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    model.set_attn_implementation(attention)
    cache = Cache(model.config, dtype=dtype)
    ids = families.tokens(2, 12)
    exact = logits(model, None, ids)
    found = torch.cat([logits(model, cache, ids[:, :8]), *(logits(model, cache, ids[:, [i]]) for i in range(8, 12))], 1)
    assert found.dtype == exact.dtype
    narrow = {"int8": 0.05, "bfloat16": 0.1, torch.bfloat16: 0.05, "float16": 5e-3}.get(dtype, 1e-5)
    error = (found - exact).float().norm() / exact.float().norm()
    assert error < narrow and (error > 0 or dtype in ("float32", "bfloat16"))
    wanted = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else "float32"
    assert all(layer.kv.dtype.name == wanted for layer in cache.layers)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_window_for_models_without_one(keep):
    model = families.made("llama")
    model.set_attn_implementation("cpu_attention")
    cache = Cache(model.config, window=5, keep=keep)
    ids = families.tokens(2, 14)
    found = torch.cat([logits(model, cache, ids[:, [at]]) for at in range(14)], 1)
    at = torch.arange(14)
    seen = (at <= at[:, None]) & ((at > at[:, None] - 5) | (at < keep))
    expected = logits(model, None, ids, seen[None, None])
    torch.testing.assert_close(found, expected, **CLOSE)
    assert cache.is_sliding == [True, True] and len(cache.layers[0].kv.keys[0, 0]) == 5 + keep


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_masks_of_ones_own(added, record):
    """Boolean or added, over the keys that a layer with a window says it has, of which all are kept or few."""
    (model, cache), (theirs, dynamic) = pair("mistral")
    if record:
        cache.activate_past_recording()
    ids = families.tokens(2, 12)
    for each, past in (model, cache), (theirs, dynamic):
        logits(each, past, ids[:, :10])
    seen = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 1, 1]], dtype=torch.bool)[None, None].expand(2, 1, 2, 5)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    expected = logits(theirs, dynamic, ids[:, 10:], mask)
    torch.testing.assert_close(logits(model, cache, ids[:, 10:], mask if added else seen), expected, **CLOSE)


def test_no_mask_of_several_tokens():
    """The last query sees the last key."""
    from sdpa.huggingface._attention import attention

    (model, cache), _ = pair("llama")
    logits(model, cache, families.tokens(2, 7))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2, 2))
    keys, values = cache.update(key, value, 0)
    out, _ = attention(model.model.layers[0].self_attn, query, keys, values, None)
    expected = sdpa.torch.attention(query, keys + 0, values + 0, causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_keys_are_not_copied():
    """Nor made: attention reads them in the cache."""
    (model, cache), _ = pair("llama")
    made = []
    ids = families.tokens(2, 9)
    logits(model, cache, ids)
    update = cache.update

    def watched(*args, **kwargs):
        made.extend(update(*args, **kwargs))
        return made[-2:]

    cache.update = watched
    logits(model, cache, ids[:, :1])
    assert len(made) == 4 and all(tensor._made is None for tensor in made)
    layer = cache.layers[0]
    assert np.shares_memory((layer.keys.view(2, 2, 10, 8)).numpy(), layer.kv.keys)


def test_keys_that_are_gone():
    (model, cache), _ = pair("mistral")
    ids = families.tokens(1, 9)
    logits(model, cache, ids)
    keys = cache.layers[0].keys
    for _ in range(8):
        logits(model, cache, ids[:, :1])
    with pytest.raises(RuntimeError, match="not in the cache any more"):
        keys.sum()


def test_gradients_are_refused():
    (model, cache), _ = pair("llama")
    loss = model(families.tokens(1, 5), past_key_values=cache).logits.sum()
    with pytest.raises(RuntimeError, match=r"sdpa\.huggingface\.Cache, which keeps numbers only"):
        loss.backward()


@pytest.mark.parametrize("attention", ["cpu_attention", "eager"])
def test_gradients_of_keys_alone_are_refused(attention):
    """Else those of the last weights would be all that there are."""
    (model, cache), _ = pair("llama")
    model.set_attn_implementation(attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".k_proj" in name or "lm_head" in name)
    ids = families.tokens(1, 5)
    with pytest.raises(RuntimeError, match="keeps numbers only"):
        model(ids, past_key_values=cache).logits.sum().backward()
    model.requires_grad_(False)
    cache.reset()
    model.lm_head.requires_grad_(True)
    model(ids, past_key_values=cache).logits.sum().backward()
    assert model.lm_head.weight.grad.any()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(size=3), TypeError, "Cache does not take size, but capacity, dtype, group, keep, window"),
        (dict(dtype="int4"), TypeError, "dtype"),
        (dict(group=48), ValueError, "group is 48: it must be a power of 2"),
        (dict(capacity=-1), ValueError, "capacity"),
    ],
)
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        Cache(families.made("llama").config, **options)


def test_wrong_configurations():
    with pytest.raises(TypeError, match="config is of type LlamaForCausalLM"):
        Cache(families.made("llama"))


def test_capacity():
    (model, _), _ = pair("llama")
    cache = Cache(model.config, capacity=8)
    logits(model, cache, families.tokens(1, 8))
    with pytest.raises(ValueError, match="capacity is 8"):
        logits(model, cache, families.tokens(1, 1))
    assert (cache.get_max_length() if NEW else cache.get_max_cache_shape()) == 8
