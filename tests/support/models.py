"""Random models, small, in folders as Hugging Face writes them."""

import json

import numpy as np
import pytest

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int8": "I8"}
WORDS, WIDTH, HEADS, INNER, LAYERS, PLACES = 97, 48, 4, 80, 2, 40


def safetensors(tensors, **changes):
    """The bytes of a file; `changes` replace entries of its header."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(array).tobytes()
        place = [begin, len(data)]
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(header | changes).encode()
    text += b" " * (-len(text) % 8)  # as the library of that name aligns what follows
    return len(text).to_bytes(8, "little") + text + data


def _encoder_layer(names, width, inner):
    shapes = {}
    for name in names[:4]:
        shapes |= {f"{name}.weight": (width, width), f"{name}.bias": (width,)}
    for name in names[4:6]:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    shapes |= {f"{names[6]}.weight": (inner, width), f"{names[6]}.bias": (inner,)}
    return shapes | {f"{names[7]}.weight": (width, inner), f"{names[7]}.bias": (width,)}


def _bert(config, prefix=""):
    layer = _encoder_layer(
        ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
         "attention.output.LayerNorm", "output.LayerNorm", "intermediate.dense", "output.dense"),
        config["hidden_size"], config["intermediate_size"],
    )  # fmt: skip
    width = config["hidden_size"]
    embeddings = {
        "word_embeddings.weight": (config["vocab_size"], width),
        "position_embeddings.weight": (config["max_position_embeddings"], width),
        "token_type_embeddings.weight": (config["type_vocab_size"], width),
        "LayerNorm.weight": (width,),
        "LayerNorm.bias": (width,),
    }
    shapes = {f"{prefix}embeddings.{name}": shape for name, shape in embeddings.items()}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"{prefix}encoder.layer.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _distilbert(config):
    layer = _encoder_layer(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm",
         "output_layer_norm", "ffn.lin1", "ffn.lin2"),
        config["dim"], config["hidden_dim"],
    )  # fmt: skip
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], config["dim"]),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], config["dim"]),
        "embeddings.LayerNorm.weight": (config["dim"],),
        "embeddings.LayerNorm.bias": (config["dim"],),
    }
    for i in range(config["n_layers"]):
        shapes |= {f"transformer.layer.{i}.{name}": shape for name, shape in layer.items()}
    return {f"distilbert.{name}": shape for name, shape in shapes.items()}


def _llama(config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    kind = config["model_type"]
    linear = {
        "self_attn.q_proj": (query, width), "self_attn.k_proj": (key, width), "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    layer = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    for name, shape in linear.items():
        layer[f"{name}.weight"] = shape
        of_attention = config.get("attention_bias") or (kind == "qwen2" and "o_proj" not in name)
        if config.get("mlp_bias") if name.startswith("mlp") else of_attention:
            layer[f"{name}.bias"] = shape[:1]
    if kind == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _gpt2(config):
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width
    layer = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "mlp.c_fc": (width, inner)}
    layer |= {"mlp.c_proj": (inner, width), "ln_1": (width,), "ln_2": (width,)}
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    for i in range(config["n_layer"]):
        for name, shape in layer.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


_OF_BERT = dict(
    vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER,
    max_position_embeddings=PLACES, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12, pad_token_id=0,
)  # fmt: skip
_OF_LLAMA = dict(
    vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
    intermediate_size=INNER, max_position_embeddings=PLACES, hidden_act="silu", rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_theta=1000.0,
)  # fmt: skip
FAMILIES = {
    "bert": (_OF_BERT, _bert),
    "roberta": (_OF_BERT | dict(pad_token_id=1, type_vocab_size=1), lambda config: _bert(config, "roberta.")),
    "xlm-roberta": (_OF_BERT | dict(pad_token_id=1), _bert),
    "distilbert": (
        dict(
            vocab_size=WORDS, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER, activation="gelu",
            max_position_embeddings=PLACES,
        ),
        _distilbert,
    ),
    "llama": (_OF_LLAMA, _llama),
    "mistral": (_OF_LLAMA | dict(sliding_window=5), _llama),
    "qwen2": (_OF_LLAMA | dict(tie_word_embeddings=True, use_sliding_window=False), _llama),
    "qwen3": (_OF_LLAMA | dict(head_dim=16), _llama),
    "gpt2": (
        dict(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=PLACES, eos_token_id=96),
        _gpt2,
    ),
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def draw_tensors(kind, dtype=np.float32, seed=0, **changes):
    """config.json, and the tensors by name."""
    config, shapes = FAMILIES[kind]
    config = {"model_type": kind, **config, **changes}
    normal = np.random.default_rng(seed).standard_normal
    tensors = {}
    for name, shape in shapes(config).items():
        norm = "norm" in name.lower() or ".ln_" in name
        tensors[name] = (0.15 * normal(shape) + (norm and name.endswith("weight"))).astype(dtype)
    return config, tensors


def write_model(folder, kind, *, dtype=np.float32, shards=1, seed=0, **changes):
    """A random model in `folder`, which it returns; `changes` are entries of config.json."""
    write(folder, *draw_tensors(kind, dtype, seed, **changes), shards=shards)
    return folder


def write(folder, config, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
        return
    names, where = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        (folder / file).write_bytes(safetensors({name: tensors[name] for name in names[i::shards]}))
        where |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def words_tokenizer(folder, **about):
    """Words apart at spaces, [CLS] before and [SEP] behind."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "on", "the", "mat", "A"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=30)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "sentence_bert_config.json").write_text(json.dumps(about))
    return folder


def bytes_tokenizer(folder):
    """Bytes apart, so that a character may need several tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    letters = set("abcdefghijklmnopqrstuvwxyzĠÃ¼")  # the last two are an ü
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter not in letters, letter))[:WORDS]
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def ids_of(*shape, seed=0):
    """None of which is padding."""
    return np.random.default_rng(seed).integers(2, WORDS, shape)
