"""The architectures: the names of their settings and tensors, and what else differs between them."""

from collections.abc import Callable
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
    slides = layer >= config.get("max_window_layers", 28) if kinds is None else kinds[layer] == "sliding_attention"
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
_roberta = _bert._replace(prefix="roberta.", first_place=lambda config: config.get("pad_token_id", 1) + 1)
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
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r}: it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for key, value in ONLY.items():
        if config.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {config[key]!r}: it must be {value!r}")
    s = SimpleNamespace()
    for name, usual in KEYS.items():
        key, *default = family.keys.get(name, usual)
        given = config.get(key)
        value = default[0] if given is None and default else given
        if name == "activation":
            if value not in ACTIVATIONS:
                raise ValueError(f"{path}: {key} is {value!r}: it must be one of {', '.join(ACTIVATIONS)}")
            value = ACTIVATIONS[value]
        elif (type(value) is not int or value < 1) and default != [value]:
            raise ValueError(f"{path}: {key} is {value!r}: it must be a whole number of 1 or more")
        setattr(s, name, value)
    s.kv_heads, s.head_dim, s.inner = s.kv_heads or s.heads, s.head_dim or s.width // s.heads, s.inner or 4 * s.width
    if s.heads % s.kv_heads:
        raise ValueError(f"{path}: {s.heads} heads on {s.kv_heads}: the former must be a multiple of the latter")
    s.eps, s.first_place = config.get(*family.eps), family.first_place(config)
    s.windows = [family.window(config, layer) for layer in range(s.layers)]
    scale = s.head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    s.scales = [scale / (i + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1) for i in range(s.layers)]
    s.tied = config.get("tie_word_embeddings", family is _gpt2)
    s.rope = None  # the argument of frequencies_of
    if family.decoder and "places" not in family.tensors:
        s.rope = config | dict(head_dim=s.head_dim)
        try:
            frequencies_of(s.rope)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return family, s


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
