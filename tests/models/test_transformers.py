"""Whole models against those of the transformers library, where that and torch are installed: CONTRIBUTING says how."""

import warnings

import numpy as np
import pytest
from support.warned import WARNINGS_OF_OTHERS

import sdpa

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = WARNINGS_OF_OTHERS

ENCODERS = {
    "bert": {},
    "bert tanh": dict(hidden_act="gelu_new", type_vocab_size=3),
    "roberta": dict(pad_token_id=1, type_vocab_size=1),
    "xlm-roberta": dict(pad_token_id=1, layer_norm_eps=1e-5),
    "distilbert": dict(dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=32),
}
LLAMA = dict(num_key_value_heads=2)
ROPES = {
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=8.0, original_max_position_embeddings=16),
    "yarn with mscale": dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.2, mscale_all_dim=0.7,
        beta_fast=16, beta_slow=2, truncate=False,
    ),
    "yarn with factor": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "longrope": dict(
        factor=4.0, original_max_position_embeddings=16, short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    ),
    "proportional": dict(partial_rotary_factor=0.5),
}  # fmt: skip
DECODERS = {
    "llama": LLAMA,
    "llama with biases": LLAMA | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama with large heads": LLAMA | dict(head_dim=20),
    "mistral": LLAMA | dict(sliding_window=5),
    "mistral without a window": LLAMA | dict(sliding_window=None),
    "qwen2": LLAMA | dict(tie_word_embeddings=True),
    "qwen2 with windows": LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": LLAMA | dict(head_dim=16),
    "qwen3 with biases": LLAMA | dict(head_dim=16, attention_bias=True),
    "gpt2": dict(n_embd=48, n_layer=2, n_head=4, n_positions=64),
    "gpt2 scaled": dict(
        n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=100, scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
    ),
} | {
    f"llama {name}": LLAMA | dict(rope_parameters=dict(rope_type=name, rope_theta=1000.0) | rope)
    for name, rope in ROPES.items()
}  # fmt: skip
SIZES = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=32,
)  # fmt: skip


def made(name, options, folder, dtype=None, kind=None):
    """A random model of transformers, saved to a folder."""
    family = name.split()[0]
    sizes = dict(vocab_size=97) if family in ("distilbert", "gpt2") else SIZES
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    kind = kind or (transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModel)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key.lower() and "weight" in key else 0.0, 0.15)
    if dtype is not None:
        model = model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model


def ids_of(*shape, seed=0):
    return np.random.default_rng(seed).integers(2, 97, shape)


@torch.no_grad()
def logits_of(model, ids, **more):
    return model(torch.tensor(ids), **more).logits.float().numpy()


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, tmp_path):
    theirs, ours = made(name, ENCODERS[name], tmp_path), sdpa.models.load(tmp_path)
    ids, lengths = ids_of(3, 15), np.array([15, 1, 8])
    mask = np.arange(15) < lengths[:, None]
    ids[~mask] = theirs.config.pad_token_id
    types = {} if name == "distilbert" else {"token_types": ids % ours.config["type_vocab_size"]}
    more = {"token_type_ids": torch.tensor(types["token_types"])} if types else {}
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask), **more).last_hidden_state.numpy()
    for given in (dict(lengths=lengths), dict(mask=mask)):
        out = ours(ids, **given, **types)
        np.testing.assert_allclose(out[mask], expected[mask], atol=1e-4)
        assert not out[~mask].any()
    reversed_mask = mask[:, ::-1].copy()
    ids, types = ids[:, ::-1].copy(), {key: value[:, ::-1] for key, value in types.items()}
    more = {"token_type_ids": torch.tensor(types["token_types"].copy())} if types else {}
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), attention_mask=torch.tensor(reversed_mask), **more).last_hidden_state
    out = ours(ids, mask=reversed_mask, **types)
    np.testing.assert_allclose(out[reversed_mask], expected.numpy()[reversed_mask], atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, tmp_path):
    """Logits, past the length of training, and the greedy tokens."""
    theirs, ours = made(name, DECODERS[name], tmp_path), sdpa.models.load(tmp_path)
    for length in (3, 12, 40):
        ids = ids_of(2, length)
        expected = logits_of(theirs, ids)
        np.testing.assert_allclose(ours(ids), expected, atol=1e-4)
        exact = sdpa.models.load(tmp_path, pieces=sdpa.reference)(ids)
        np.testing.assert_allclose(exact, expected, atol=1e-4)
    ids = ids_of(1, 7)
    theirs.generation_config.eos_token_id = None
    greedy = theirs.generate(torch.tensor(ids), max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 7:]
    assert list(ours.generate(ids[0], 30, stop=())) == greedy.tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_batches_of_different_lengths(name, tmp_path):
    theirs, ours = made(name, DECODERS[name], tmp_path), sdpa.models.load(tmp_path)
    prompts = [ids_of(length, seed=length).tolist() for length in (4, 9, 1)]
    found = np.stack(list(ours.generate(prompts, 12, stop=())), axis=1)
    for prompt, tokens in zip(prompts, found):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights(name, dtype, tmp_path):
    """Computed in float32 they are those of transformers in float32; in the half type about as far from that."""
    theirs = made(name, DECODERS[name], tmp_path, getattr(torch, dtype))
    ids = ids_of(2, 9)
    half = logits_of(theirs, ids)
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = logits_of(wide, ids)
    np.testing.assert_allclose(sdpa.models.load(tmp_path, dtype="float32")(ids), expected, atol=1e-4)
    ours = sdpa.models.load(tmp_path)
    assert ours.dtype.name == dtype
    assert np.abs(ours(ids) - expected).max() < 2 * np.abs(half - expected).max()


def test_a_model_without_its_head(tmp_path):
    """Saved without the head, names have no prefix; and an encoder saved with one has it."""
    theirs = made("bert", {}, tmp_path, kind=transformers.AutoModelForMaskedLM)
    ids = ids_of(2, 9)
    with torch.no_grad():
        expected = theirs.bert(torch.tensor(ids)).last_hidden_state.numpy()
    np.testing.assert_allclose(sdpa.models.load(tmp_path)(ids), expected, atol=1e-4)
    tied = dict(num_key_value_heads=2, tie_word_embeddings=True)
    theirs = made("llama", tied, tmp_path / "bare")
    theirs.model.save_pretrained(tmp_path / "bare")
    np.testing.assert_allclose(sdpa.models.load(tmp_path / "bare")(ids), logits_of(theirs, ids), atol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen3VL"])
def test_mrope(kind):
    """Angles of Qwen2-VL and Qwen3-VL: each pair is turned by a position of its own."""
    name = f"{kind[:5]}_VL".lower()
    configuration = getattr(transformers, f"{kind}TextConfig")
    modeling = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    embedding = getattr(modeling, "Qwen2VLRotaryEmbedding" if kind == "Qwen2VL" else "Qwen3VLTextRotaryEmbedding")
    rope = dict(rope_type="default", mrope_section=[4, 2, 2], rope_theta=1000.0, mrope_interleaved=kind == "Qwen3VL")
    own = dict(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope)
    positions = np.random.default_rng(0).integers(0, 50, (3, 2, 7))
    cos, sin = embedding(configuration(**own))(torch.zeros(1), torch.tensor(positions))
    frequencies, factor = sdpa.models.frequencies_of(own)
    angle = sdpa.models.mrope_positions(own, positions) * frequencies
    assert factor == 1
    np.testing.assert_allclose(np.cos(angle), cos[..., :8], atol=1e-5)
    np.testing.assert_allclose(np.sin(angle), sin[..., :8], atol=1e-5)
