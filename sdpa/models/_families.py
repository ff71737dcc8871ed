"""The architectures: the names of their settings and tensors, and what else differs between them."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from ._frequencies import frequencies_of

ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "silu": "silu", "swish": "silu",
}  # fmt: skip
# The key of each setting in config.json, and a default if the key may be missing.
KEYS = dict(
    words=("vocab_size",), width=("hidden_size",), layers=("num_hidden_layers",), heads=("num_attention_heads",),
    kv_heads=("num_key_value_heads", None), head_dim=("head_dim", None), inner=("intermediate_size",),
    places=("max_position_embeddings", 2048), types=("type_vocab_size", 2), activation=("hidden_act",),
)  # fmt: skip
# Keys that may have only one value, because models with another value compute something else.
ONLY = dict(add_cross_attention=False, is_decoder=False, position_embedding_type="absolute")
LARGEST = 2**40, 2**16  # of all sizes, and of a head, whose frequencies are computed before there are tensors


def _number(value, least=-math.inf, most=math.inf):
    return type(value) in (int, float) and least <= value <= most and abs(value) < 1e300


_flag = "true or false", lambda value: type(value) is bool
_eps = "a number from 0 to 1", lambda value: _number(value, 0, 1)
_whole = "a whole number", lambda value: type(value) is int and abs(value) <= LARGEST[0]
_object = "an object", lambda value: isinstance(value, dict)
# What other settings must be, where they are there and not null.
RULES = dict(
    attention_bias=_flag, mlp_bias=_flag, tie_word_embeddings=_flag, use_sliding_window=_flag, scale_attn_weights=_flag,
    scale_attn_by_inverse_layer_idx=_flag, layer_norm_eps=_eps, rms_norm_eps=_eps, layer_norm_epsilon=_eps,
    pad_token_id=_whole, max_window_layers=_whole, rope_parameters=_object, rope_scaling=_object,
    sliding_window=("a whole number of 1 or more", lambda value: _whole[1](value) and value >= 1),
    layer_types=("a list of names", lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value)),
    rope_theta=("a number above 0", lambda value: _number(value, 1e-300)),
    partial_rotary_factor=("a number from 0 to 1", lambda value: _number(value, 0, 1)),
)  # fmt: skip


class Family(NamedTuple):
    """A model_type.  Names of tensors are written without ".weight" and ".bias"."""

    prefix: str  # of all names but that of the head; files of a model without a head leave it out
    tensors: dict  # part: name
    layer: str  # the prefix of names in a layer
    layer_tensors: dict
    eps: tuple  # the key in config.json, and the default
    decoder: bool = False
    layer_norm: bool = True  # or rms_norm
    transposed: bool = False  # weights are (in, out)
    keys: dict = {}  # noqa: RUF012 (only the keys that differ from KEYS)
    biases: Callable = lambda config: None  # the projections with a bias; None: all
    window: Callable = lambda config, layer: None
    first_place: Callable = lambda config: 0


def _llama_biases(config):
    attention = ("query", "key", "value", "out") if config.get("attention_bias") else ()
    return attention + (("gate", "up", "down") if config.get("mlp_bias") else ())


def _qwen_window(config, layer):
    kinds = config.get("layer_types")
    begin = config.get("max_window_layers")
    slides = layer >= (28 if begin is None else begin) if kinds is None else kinds[layer] == "sliding_attention"
    return config.get("sliding_window", 4096) if slides and config.get("use_sliding_window") else None


_bert = Family(
    "bert.",
    dict(
        words="embeddings.word_embeddings", places="embeddings.position_embeddings",
        types="embeddings.token_type_embeddings", first_norm="embeddings.LayerNorm",
    ),
    "encoder.layer.{}.",
    dict(
        query="attention.self.query", key="attention.self.key", value="attention.self.value",
        out="attention.output.dense", attention_norm="attention.output.LayerNorm", up="intermediate.dense",
        down="output.dense", feed_norm="output.LayerNorm",
    ),
    ("layer_norm_eps", 1e-12),
)  # fmt: skip


def _first_place(config):
    """RoBERTa's positions begin after that of padding."""
    return 2 if config.get("pad_token_id") is None else config["pad_token_id"] + 1


_roberta = _bert._replace(prefix="roberta.", first_place=_first_place)
_distilbert = Family(
    "distilbert.",
    dict(
        words="embeddings.word_embeddings", places="embeddings.position_embeddings", first_norm="embeddings.LayerNorm"
    ),
    "transformer.layer.{}.",
    dict(
        query="attention.q_lin", key="attention.k_lin", value="attention.v_lin", out="attention.out_lin",
        attention_norm="sa_layer_norm", up="ffn.lin1", down="ffn.lin2", feed_norm="output_layer_norm",
    ),
    ("layer_norm_eps", 1e-12),
    keys=dict(
        width=("dim",), layers=("n_layers",), heads=("n_heads",), inner=("hidden_dim",), activation=("activation",),
        places=("max_position_embeddings", 512),
    ),
)  # fmt: skip
_llama = Family(
    "model.",
    dict(words="embed_tokens", last_norm="norm"),
    "layers.{}.",
    dict(
        query="self_attn.q_proj", key="self_attn.k_proj", value="self_attn.v_proj", out="self_attn.o_proj",
        attention_norm="input_layernorm", gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
        feed_norm="post_attention_layernorm",
    ),
    ("rms_norm_eps", 1e-6),
    decoder=True, layer_norm=False, biases=_llama_biases,
)  # fmt: skip
_gpt2 = Family(
    "transformer.",
    dict(words="wte", places="wpe", last_norm="ln_f"),
    "h.{}.",
    dict(
        query_key_value="attn.c_attn", out="attn.c_proj", attention_norm="ln_1", up="mlp.c_fc", down="mlp.c_proj",
        feed_norm="ln_2",
    ),
    ("layer_norm_epsilon", 1e-5),
    decoder=True, transposed=True,
    keys=dict(
        width=("n_embd",), layers=("n_layer",), heads=("n_head",), inner=("n_inner", None),
        places=("n_positions", 1024), activation=("activation_function", "gelu_new"),
    ),
)  # fmt: skip
FAMILIES = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "distilbert": _distilbert,
    "llama": _llama,
    "mistral": _llama._replace(window=lambda config, layer: config.get("sliding_window", 4096)),
    "qwen2": _llama._replace(biases=lambda config: ("query", "key", "value"), window=_qwen_window),
    "qwen3": _llama._replace(
        layer_tensors=_llama.layer_tensors | dict(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
        window=_qwen_window,
        keys=dict(head_dim=("head_dim", 128)),
    ),
    "gpt2": _gpt2,
}


def family_and_settings(folder):
    """The family and the settings that config.json describes.  A value that is not known raises ValueError."""
    config, path = folder.config, folder.path / "config.json"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r:.60}: it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for key, value in ONLY.items():
        if config.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {config[key]!r:.60}: it must be {value!r}")
    for key, (rule, holds) in RULES.items():
        if config.get(key) is not None and not holds(config[key]):
            raise ValueError(f"{path}: {key} is {config[key]!r:.60}: it must be {rule}")
    s = _sizes(config, path, family)
    if s.heads % s.kv_heads:
        raise ValueError(f"{path}: {s.heads} heads on {s.kv_heads}: the former must be a multiple of the latter")
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != s.layers:
        raise ValueError(f"{path}: layer_types are {len(kinds)}: they must be {s.layers}, one for each layer")
    key, default = family.eps
    s.eps = default if config.get(key) is None else config[key]
    s.first_place = family.first_place(config)
    if not 0 <= s.first_place < s.places:
        raise ValueError(f"{path}: pad_token_id is {s.first_place - 1}: it must be from 0 to below {s.places - 1}")
    # Of a layer; functions, as nobody knows yet whether there are so many layers.
    s.window = partial(family.window, config)
    s.scale = partial(_scale, config, s.head_dim)
    s.tied = config.get("tie_word_embeddings", family is _gpt2)
    s.rope = None  # the argument of frequencies_of
    if family.decoder and "places" not in family.tensors:
        s.rope = config | dict(head_dim=s.head_dim)
        try:
            for length in (0, LARGEST[0]):  # some kinds have others for long sequences
                frequencies_of(s.rope, length)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return family, s


def _sizes(config, path, family):
    """The settings of KEYS."""
    s = SimpleNamespace()
    for name, usual in KEYS.items():
        key, *default = family.keys.get(name, usual)
        given = config.get(key)
        value, most = default[0] if given is None and default else given, LARGEST[name == "head_dim"]
        if name == "activation":
            if not isinstance(value, str) or value not in ACTIVATIONS:
                raise ValueError(f"{path}: {key} is {value!r:.60}: it must be one of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        elif (type(value) is not int or not 1 <= value <= most) and default != [value]:
            raise ValueError(f"{path}: {key} is {value!r:.60}: it must be a whole number of 1 or more, up to {most}")
        setattr(s, name, value)
    s.kv_heads, s.head_dim, s.inner = s.kv_heads or s.heads, s.head_dim or s.width // s.heads, s.inner or 4 * s.width
    if not 1 <= s.head_dim <= LARGEST[1]:
        raise ValueError(f"{path}: {s.heads} heads have {s.head_dim} numbers each: they must be 1 to {LARGEST[1]}")
    return s


def _scale(config, head_dim, layer):
    scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1)


def shapes(s):
    """The shape of the weight of each part, (out, in)."""
    query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
    ins = dict(query=query, key=key, value=key, query_key_value=query + 2 * key, gate=s.inner, up=s.inner)
    norms = ("first_norm", "attention_norm", "feed_norm", "last_norm")
    return (
        {part: (rows, s.width) for part, rows in ins.items()}
        | dict(out=(s.width, query), down=(s.width, s.inner), query_norm=(s.head_dim,), key_norm=(s.head_dim,))
        | dict(words=(s.words, s.width), places=(s.places, s.width), types=(s.types, s.width), head=(s.words, s.width))
        | dict.fromkeys(norms, (s.width,))
    )
