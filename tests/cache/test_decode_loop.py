"""A small decoder that generates text with a cache, and decoding over a shared prefix, as docs/ shows both."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.draw import float16, float32

import sdpa

# ---- begin: docs/tutorials/decoder.md
LAYERS, HEADS, KV_HEADS, DIM, WORDS = 3, 8, 2, 32, 500
WIDTH = HEADS * DIM


def random_weights(rng):
    """The weights of a decoder like those of the Llama family, as random numbers."""

    def draw(*shape):
        return rng.standard_normal(shape, np.float32) / np.float32(shape[0]) ** 0.5

    shapes = (WIDTH, WIDTH + 2 * KV_HEADS * DIM), (WIDTH, WIDTH), (WIDTH, 6 * WIDTH), (3 * WIDTH, WIDTH)
    return draw(WORDS, WIDTH), [[draw(*shape) for shape in shapes] for _ in range(LAYERS)], draw(WIDTH, WORDS)


# ---- end


# ---- begin: docs/tutorials/decoder.md
def norm(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def decoder(weights, words, start, attend):
    """Logits (B, M, WORDS) of the words (B, M) from position `start` on."""
    embedding, layers, last = weights
    x = norm(embedding[words])
    for number, (enter, leave, widen, narrow) in enumerate(layers):
        heads = (norm(x) @ enter).reshape(*words.shape, -1, DIM).swapaxes(1, 2)  # (B, heads, M, DIM)
        query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        a = attend(number, sdpa.rotary(query, start), sdpa.rotary(key, start), value)
        x = x + a.swapaxes(1, 2).reshape(x.shape) @ leave
        gate, up = np.split(norm(x) @ widen, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ narrow
    return norm(x) @ last


# ---- end


# ---- begin: docs/tutorials/decoder.md
def generate(weights, prompt, count, **options):
    """The `count` likeliest words after `prompt` (B, M), one after the other, and their logits."""
    caches = [sdpa.KVCache(len(prompt), KV_HEADS, DIM, **options) for _ in range(LAYERS)]

    def attend(number, query, key, value):
        caches[number].append(key, value)
        return caches[number].attend(query)

    words, new, logits = prompt, prompt, []
    for _ in range(count):
        logits.append(decoder(weights, new, words.shape[1] - new.shape[1], attend)[:, -1])
        new = logits[-1].argmax(axis=-1)[:, None]
        words = np.concatenate([words, new], axis=1)
    return words, np.stack(logits, axis=1)


# ---- end


def at_once(number, query, key, value):
    return sdpa.attention(query, key, value, causal=True)


@pytest.fixture(scope="module")
def weights():
    return random_weights(np.random.default_rng(0))


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(1).integers(WORDS, size=(2, 20))


def test_a_decode_loop_gives_the_logits_of_the_model_without_cache(weights, prompt):
    words, logits = generate(weights, prompt, 60)
    assert words.shape == (2, 80) and (words[:, :20] == prompt).all()
    whole = decoder(weights, words[:, :-1], 0, at_once)[:, 19:]
    np.testing.assert_allclose(logits, whole, atol=1e-4)  # they have a standard deviation of 1
    assert (whole.argmax(axis=-1) == words[:, 20:]).mean() > 0.98  # two may be equally likely
    assert len(np.unique(words[:, 20:])) > 20


@pytest.mark.parametrize("dtype, error", [(float16, 3e-4), (bfloat16, 3e-3), (np.int8, 1e-2)], ids=str)
def test_with_a_smaller_cache(weights, prompt, dtype, error):
    """Numbers are rounded: the logits of the first word, before the sequences part."""
    exact = decoder(weights, prompt, 0, at_once)[:, -1]
    _, logits = generate(weights, prompt, 1, dtype=dtype)
    assert np.sqrt(np.mean((logits[:, 0] - exact) ** 2)) < error


def test_speculation(weights, prompt):
    """Guesses are checked several at a time, and what was wrong is forgotten: the same words come out."""
    expected, _ = generate(weights, prompt[:1], 30)
    caches = [sdpa.KVCache(1, KV_HEADS, DIM) for _ in range(LAYERS)]

    def attend(number, query, key, value):
        caches[number].append(key, value)
        return caches[number].attend(query)

    words, rng = prompt[:1, :1], np.random.default_rng(2)
    while words.shape[1] < 50:
        start, end = len(caches[0]), words.shape[1]
        guess = expected[:, end : end + 4].copy()
        guess[rng.random(guess.shape) < 0.3] = 0  # some are wrong
        new = np.concatenate([words[:, start:], guess], axis=1)
        likeliest = decoder(weights, new, start, attend).argmax(axis=-1)[0, end - start - 1 :]
        if end < 20:  # the prompt is given
            likeliest[: 20 - end] = prompt[0, end : end + len(likeliest[: 20 - end])]
        right = np.cumprod(np.append(guess[0] == likeliest[: guess.shape[1]], False)).sum()
        words = np.append(words[0], likeliest[: right + 1])[None]
        for cache in caches:
            cache.truncate(min(len(cache), words.shape[1] - 1))
    assert (words[:, :50] == expected).mean() > 0.98


def test_forks_of_a_prompt(weights, prompt):
    """Several answers from one prompt, which is read once."""
    prompt = prompt[:1]
    caches = [sdpa.KVCache(1, KV_HEADS, DIM) for _ in range(LAYERS)]

    def attend(number, query, key, value):
        caches[number].append(key, value)
        return caches[number].attend(query)

    decoder(weights, prompt, 0, attend)
    read = caches
    for word in (3, 4, 5):
        caches = [cache.fork() for cache in read]
        logits = decoder(weights, np.array([[word]]), 20, attend)
        whole = decoder(weights, np.append(prompt[0], word)[None], 0, at_once)[:, -1:]
        np.testing.assert_allclose(logits, whole, atol=1e-4)
    assert all(len(cache) == 20 for cache in read)


# ---- begin: docs/how_to/caches.md
def attend_shared(query, prefix, own):
    """Attention of query (B, H, 1, D) to the tokens of two caches: `prefix`, of batch 1, which all batches share, and
    `own`, of batch B.  The queries of all batches are rows of one call over the prefix, which reads it only once."""
    rows = query.swapaxes(0, 2)  # (1, H, B, D)
    out, lse = prefix.attend(rows, causal=False, return_lse=True)
    of_prefix = out.swapaxes(0, 2), lse.swapaxes(0, 2)
    return sdpa.merge(*zip(of_prefix, own.attend(query, return_lse=True)))[0]


# ---- end


@pytest.mark.parametrize("lengths", [None, [1, 4, 0, 7]], ids=["equal", "ragged"])
def test_a_shared_prefix(lengths):
    """Cascade decoding gives what each batch with a copy of the prefix gives."""
    normal = np.random.default_rng(3).standard_normal
    prefix, own = sdpa.KVCache(1, 2, 16, dtype=float32), sdpa.KVCache(4, 2, 16, dtype=float32)
    common, rest = normal((2, 1, 2, 100, 16)).astype(float32), normal((2, 4, 2, 7, 16)).astype(float32)
    prefix.append(*common)
    own.append(*rest, lengths=lengths)
    query = normal((4, 8, 1, 16)).astype(float32)
    whole = [np.concatenate([np.broadcast_to(x, (4, *x.shape[1:])), y], axis=2) for x, y in zip(common, rest)]
    kv_lengths = 100 + np.array(lengths or [7] * 4)
    expected = sdpa.reference.attention(query, *whole, kv_lengths=kv_lengths)
    np.testing.assert_allclose(attend_shared(query, prefix, own), expected, atol=1e-6)
