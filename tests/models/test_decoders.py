"""Decoders against the oracle; caches, windows, chunks; and what they generate."""

import json

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.models import DECODERS, bytes_tokenizer, ids_of, write_model

import sdpa
from sdpa.models import _decoder

ROPES = {
    "plain": {},
    "linear": dict(type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "longrope": dict(
        rope_type="longrope", original_max_position_embeddings=10, short_factor=[1 + i / 9 for i in range(6)],
        long_factor=[1.0 + i for i in range(6)],
    ),
    "proportional": dict(rope_type="proportional", partial_rotary_factor=0.5),
    "partial": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5),
}  # fmt: skip
CASES = {kind: (kind, {}) for kind in DECODERS} | {
    "qwen2 with windows": ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3 with windows": (
        "qwen3", dict(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    ),
    "llama with biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "gpt2 scaled": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, n_inner=100)),
} | {
    f"llama {name}": ("llama", dict(rope_scaling=rope, max_position_embeddings=20)) for name, rope in ROPES.items()
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    kind, changes = CASES[request.param]
    return write_model(tmp_path_factory.mktemp("model") / "m", kind, **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama") / "m", "llama")


def grows(model):
    """Whether frequencies depend on how long the sequence is: those of kept keys are of another length then."""
    return model.config.get("rope_scaling", {}).get("rope_type") in ("dynamic", "longrope")


def test_as_the_oracle(folder):
    """Also past the length of training, and with caches."""
    ids = ids_of(2, 30)
    model, exact = sdpa.models.load(folder), sdpa.models.load(folder, pieces=sdpa.reference)
    expected = exact(ids)
    assert expected.dtype == np.float64 and model(ids).dtype == np.float32
    np.testing.assert_allclose(model(ids), expected, atol=5e-5)
    np.testing.assert_allclose(sdpa.models.load(folder, dtype=np.float64)(ids), expected, atol=1e-11)
    caches = exact.new_caches(2)
    for begin, end in ((0, 7), (7, 8), (8, 30)):
        last = exact(ids[:, begin:end], caches=caches)
    if not grows(exact):
        np.testing.assert_allclose(last, expected[:, 8:], atol=1e-11)


def test_steps_with_caches_are_the_whole(folder):
    model, ids = sdpa.models.load(folder), ids_of(2, 20)
    if grows(model):
        ids = ids[:, :9]
    whole, caches, steps = model(ids), model.new_caches(2), []
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, ids.shape[1])):
        steps.append(model(ids[:, begin:end], caches=caches))
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, atol=5e-5)
    assert [len(cache) for cache in caches] == [ids.shape[1]] * 2


def test_frequencies_grow_with_the_longest_sequence(tmp_path):
    """Dynamic ones and longrope take those for the length so far, as transformers does."""
    folder = write_model(tmp_path / "m", "llama", rope_scaling=ROPES["longrope"], max_position_embeddings=20)
    model, ids = sdpa.models.load(folder), ids_of(1, 11)
    short = write_model(tmp_path / "s", "llama", rope_scaling=ROPES["longrope"] | dict(long_factor=[1.0] * 6),
                        max_position_embeddings=20)  # fmt: skip
    np.testing.assert_array_equal(model(ids[:, :10]), sdpa.models.load(short)(ids[:, :10]))
    assert abs(model(ids) - sdpa.models.load(short)(ids)).max() > 1e-3


def test_a_sequence_does_not_depend_on_its_batch(folder):
    ids, lengths, model = ids_of(3, 9), [9, 0, 4], sdpa.models.load(folder)
    for caches in (None, model.new_caches(3)):
        out = model(ids, lengths=lengths, caches=caches)
        for b, length in enumerate(lengths):
            if length:
                np.testing.assert_allclose(out[b, :length], model(ids[b, :length]), atol=5e-5)
            assert not out[b, length:].any()
    rows = [row[:length].tolist() for row, length in zip(ids, lengths)]
    np.testing.assert_array_equal(model(rows), model(ids, lengths=lengths))
    np.testing.assert_array_equal(model(ids[0]), model(ids[:1])[0])


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.int8, np.float64])
def test_caches_of_other_dtypes(dtype, llama):
    model, ids = sdpa.models.load(llama, dtype=np.float64 if dtype == np.float64 else np.float32), ids_of(2, 20)
    caches = model.new_caches(2, dtype=dtype, capacity=20)
    out = [model(ids[:, :15], caches=caches), model(ids[:, 15:], caches=caches)]
    assert caches[0].dtype == dtype and caches[0].capacity == 20
    error = abs(np.concatenate(out, axis=1) - model(ids)).max()
    assert 1e-5 < error < 0.1 or (dtype == np.float64 and error < 1e-11)


def test_windows_of_layers_are_those_of_their_caches(tmp_path):
    model = sdpa.models.load(
        write_model(tmp_path / "m", *CASES["qwen3 with windows"][:1], **CASES["qwen3 with windows"][1])
    )
    assert [cache.window for cache in model.new_caches(1)] == [4, None]
    assert [cache.window for cache in model.new_caches(1, window=9, keep=2)] == [9, 9]
    half = sdpa.models.load(write_model(tmp_path / "h", "mistral", dtype=bfloat16)).new_caches(3)
    assert [(cache.window, cache.dtype.name, cache.batch) for cache in half] == [(5, "bfloat16", 3)] * 2


@pytest.mark.parametrize("pieces", [None, sdpa.reference], ids=["library", "oracle"])
def test_a_call_that_fails_leaves_the_caches_as_they_were(pieces, llama):
    model, ids = sdpa.models.load(llama, pieces=pieces), ids_of(2, 9)
    caches, fails = model.new_caches(2), [True]
    model(ids, lengths=[3, 5], caches=caches)
    leave = model.layers[1].leave

    def interrupted(x, **options):
        if fails.pop():
            raise KeyboardInterrupt
        return leave(x, **options)

    model.layers[1].leave = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(ids, caches=caches)
    assert [cache.lengths.tolist() for cache in caches] == [[3, 5]] * 2
    fails.append(False)
    found = model(ids[:, :1], caches=caches)[0, 0]
    np.testing.assert_allclose(found, sdpa.models.load(llama)(np.append(ids[0, :3], ids[0, 0]))[-1], atol=5e-5)


# Generating.


def greedy(model, prompt, count):
    """Token by token, without caches."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(np.array(ids))[-1].argmax()))
    return ids[len(prompt) :]


def test_greedy_takes_the_likeliest(folder):
    model, prompt = sdpa.models.load(folder), ids_of(5)
    count = 4 if grows(model) else 12
    expected = greedy(model, prompt, count)
    assert list(model.generate(prompt, count, stop=())) == expected
    assert all(type(token) is int for token in model.generate(prompt.tolist(), 2, stop=()))
    exact = sdpa.models.load(folder, pieces=sdpa.reference)
    assert list(exact.generate(prompt, count, stop=())) == expected


def test_prompts_of_different_lengths(folder):
    model = sdpa.models.load(folder)
    prompts = [ids_of(length, seed=length).tolist() for length in (4, 1, 7)]
    count = 3 if grows(model) else 9
    steps = list(model.generate(prompts, count, stop=()))
    assert len(steps) == count and all(step.shape == (3,) for step in steps)
    for prompt, tokens in zip(prompts, np.stack(steps, axis=1)):
        assert tokens.tolist() == greedy(model, prompt, count)


def test_chunks_of_the_prompt_change_nothing(folder, monkeypatch):
    model = sdpa.models.load(folder)
    if grows(model):
        pytest.skip("frequencies depend on the chunks")
    prompts = [ids_of(length, seed=length).tolist() for length in (9, 2, 6)]
    expected = np.stack(list(model.generate(prompts, 5, stop=())))
    monkeypatch.setattr(_decoder, "CHUNK", 3)
    np.testing.assert_array_equal(np.stack(list(model.generate(prompts, 5, stop=()))), expected)


def test_caches_go_on(llama):
    model, ids = sdpa.models.load(llama), ids_of(12)
    caches = model.new_caches(1, dtype=np.float32)
    expected = list(model.generate(ids, 6, stop=()))
    model(ids[None, :7], caches=caches)
    assert list(model.generate(ids[7:], 6, stop=(), caches=caches)) == expected
    assert len(caches[0]) == 12 + 5  # the last token has not been read


def test_stop(llama):
    model, prompts = sdpa.models.load(llama), [ids_of(3).tolist(), ids_of(5, seed=1).tolist()]
    first, second = np.stack(list(model.generate(prompts, 8, stop=())), axis=1).tolist()
    stop = first[2]
    assert list(model.generate(prompts[0], 8, stop=stop)) == first[: first.index(stop) + 1]
    ends = [tokens.index(stop) + 1 if stop in tokens else 8 for tokens in (first, second)]
    steps = np.stack(list(model.generate(prompts, 8, stop=[stop, 0])), axis=1)
    assert steps.shape[1] == max(ends) > min(ends)
    for tokens, expected, end in zip(steps.tolist(), (first, second), ends):
        assert tokens == expected[:end] + [-1] * (steps.shape[1] - end)


def test_stop_is_that_of_the_folder(tmp_path):
    folder = write_model(tmp_path / "m", "llama")
    first = list(sdpa.models.load(folder).generate([5, 6], 9))
    assert len(set(first)) > 2
    one, other = first[0], next(token for token in first if token != first[0])
    config = json.loads((folder / "config.json").read_text())
    for eos in (other, [other, 0]):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
        assert list(sdpa.models.load(folder).generate([5, 6], 9)) == first[: first.index(other) + 1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": one}))
    assert list(sdpa.models.load(folder).generate([5, 6], 9)) == [one]
    assert list(sdpa.models.load(folder).generate([5, 6], 9, stop=())) == first


def test_nothing_is_generated_before_it_is_asked_for(llama):
    model = sdpa.models.load(llama)
    caches = model.new_caches(1)
    tokens = model.generate(ids_of(5), 10**9, caches=caches)
    assert len(caches[0]) == 0
    next(tokens)
    assert len(caches[0]) == 5
    assert list(model.generate(ids_of(5), 0)) == []


# Drawing.


def draws(logits, count=20000, **options):
    """How often each token is drawn."""
    draw = _decoder._draw(**{"temperature": 1.0, "top_k": None, "top_p": None, "seed": 0} | options)
    tokens = draw(np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits))))
    return np.bincount(tokens, minlength=len(logits)) / count


def test_tokens_are_drawn_from_the_softmax():
    p = np.array([0.1, 0.5, 0.15, 0.25])
    logits = np.log(p) + 3
    np.testing.assert_allclose(draws(logits), p, atol=0.02)
    np.testing.assert_allclose(draws(logits, temperature=0.5), p**2 / (p**2).sum(), atol=0.02)
    np.testing.assert_allclose(draws(logits, temperature=1e6), [0.25] * 4, atol=0.02)
    np.testing.assert_allclose(draws(logits, top_k=2), [0, 2 / 3, 0, 1 / 3], atol=0.02)
    assert draws(logits, top_k=1).tolist() == draws(logits, temperature=0).tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(draws(logits, top_k=99), p, atol=0.02)
    np.testing.assert_allclose(draws(logits, top_p=0.6), [0, 2 / 3, 0, 1 / 3], atol=0.02)
    np.testing.assert_allclose(draws(logits, top_p=0.4), [0, 1, 0, 0], atol=0)
    np.testing.assert_allclose(draws(logits, top_p=1.0), p, atol=0.02)
    both = draws(logits, top_k=3, top_p=0.8, temperature=1.0)  # of the three 5/9, 5/18, 3/18: the first two are 0.83
    np.testing.assert_allclose(both, [0, 2 / 3, 0, 1 / 3], atol=0.02)
    np.testing.assert_allclose(draws([-np.inf, 0, 0, -np.inf]), [0, 0.5, 0.5, 0], atol=0.02)


def test_a_seed_gives_the_same_tokens_again(llama):
    model, prompt = sdpa.models.load(llama), ids_of(4)
    options = dict(temperature=1.5, top_k=50, top_p=0.95, stop=())
    first = list(model.generate(prompt, 20, seed=7, **options))
    assert list(model.generate(prompt, 20, seed=7, **options)) == first
    assert list(model.generate(prompt, 20, seed=8, **options)) != first
    assert list(model.generate(prompt, 20, **options)) != list(model.generate(prompt, 20, **options))


# Errors.


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m: m([[97]]), ValueError, "ids are from 97 to 97: they must be from 0 to below the 97 words"),
        (lambda m: m(ids_of(1, 41)), ValueError, "a sequence has 41 tokens: the model has places for 40"),
        (
            lambda m: m(ids_of(2, 3), caches=m.new_caches(1)),
            ValueError,
            "one for each of the 2 layers, with a batch of 2",
        ),
        (lambda m: m(ids_of(2, 3), caches=m.new_caches(2)[:1]), ValueError, "one for each of the 2 layers"),
        (lambda m: m.generate(ids_of(30), 12), ValueError, "prompt and max_new_tokens are 41 tokens: .* places for 40"),
        (
            lambda m: m.generate([1], 2, caches=m.new_caches(1, dtype=np.float64)),
            TypeError,
            "caches have dtype float64: it must be that of the model, or a narrower one",
        ),
        (lambda m: m.generate([], 3), ValueError, r"sequences of \[0\] tokens: each must have one or more"),
        (lambda m: m.generate([[1], []], 3), ValueError, r"sequences of \[1, 0\] tokens"),
        (lambda m: m.generate([1], -1), ValueError, "max_new_tokens is -1"),
        (lambda m: m.generate([1], 1.5), TypeError, "max_new_tokens is 1.5: it must be a whole number"),
        (lambda m: m.generate([1], 2, temperature=-1), ValueError, "temperature is -1.0: it must be 0 or more"),
        (lambda m: m.generate([1], 2, temperature="x"), TypeError, "temperature is 'x'"),
        (lambda m: m.generate([1], 2, top_k=0), ValueError, "top_k is 0"),
        (lambda m: m.generate([1], 2, top_p=0), ValueError, "top_p is 0.0: it must be above 0, and 1 at most"),
        (lambda m: m.generate([1], 2, stop="."), TypeError, "stop is"),
        (lambda m: m.generate("text", 2), FileNotFoundError, "tokenizer.json is missing"),
    ],
)
def test_what_is_wrong_is_said(call, kind, message, tmp_path):
    """Before anything is generated, and before caches are touched."""
    with pytest.raises(kind, match=message):
        call(sdpa.models.load(write_model(tmp_path / "m", "gpt2")))


# Texts.


def test_texts(llama):
    tokenizer = bytes_tokenizer(llama)
    model, text = sdpa.models.load(llama), "für ünd"
    ids = tokenizer.encode(text).ids
    assert ids
    tokens = list(model.generate(ids, 20, stop=()))
    assert "".join(model.generate(text, 20, stop=())) == tokenizer.decode(tokens).rstrip("\ufffd")
