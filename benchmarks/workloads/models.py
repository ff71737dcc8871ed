"""Whole models with random weights: encoders like BERT, decoders like Llama."""

import functools
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.workloads.formulas import Formula, drawn, drawn_weight
from benchmarks.workloads.workload import SHRUNK_LENGTH


@dataclass(frozen=True)
class Model(Formula):
    """Sizes: B sequences of S tokens; weights have the names that Hugging Face gives them."""

    B: int
    S: int
    layers: int
    width: int
    heads: int
    inner: int

    @property
    @abstractmethod
    def config(self):
        """Of config.json."""

    @property
    @abstractmethod
    def linear(self):
        """{name: (outs, ins)} of the projections in a layer."""

    @property
    @abstractmethod
    def layer(self):
        """Before the number of a layer in names of weights."""

    @property
    def head_dim(self):
        return self.width // self.heads

    @property
    def tokens(self):
        return self.B * self.S

    @property
    def flops(self):
        return 2 * self.tokens * self._layer_weights + 4 * self.scores * self.head_dim

    @property
    def _layer_weights(self):
        return self.layers * sum(outs * ins for outs, ins in self.linear.values())

    @property
    def weight_count(self):
        return self._layer_weights

    @property
    def bytes(self):
        return self.read_bytes + self.result_bytes

    def draw(self):
        return self.draw_inputs(), self.draw_weights()

    def draw_inputs(self):
        return {"ids": self.rng.integers(0, self.words, (self.B, self.S))}

    def draw_linear(self, rng):
        return {
            f"{self.layer}.{number}.{name}.weight": drawn_weight(rng, *shape, self.dtype)
            for number in range(self.layers)
            for name, shape in self.linear.items()
        }

    def draw_norm(self, rng, name, bias):
        norm = {f"{name}.weight": drawn(rng, self.width, self.dtype, 0.1, mean=1.0)}
        return norm | ({f"{name}.bias": drawn(rng, self.width, self.dtype, 0.1)} if bias else {})

    def parts(self, weights, number):
        """A function that gives the weight and the bias of a part of a layer."""
        return lambda name: pair(weights, f"{self.layer}.{number}.{name}")

    def to_read(self):
        """What a call reads all of."""
        return [array for name, array in self.draw()[1].items() if "embed" not in name and array.ndim == 2]


def pair(weights, name):
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


@dataclass(frozen=True)
class Encoder(Model):
    """A BERT without its pooler.  Sequences are S tokens long or, padded, between half of that and all."""

    kind = "encoder"
    layer = "encoder.layer"
    eps = 1e-12
    padded: bool = False
    words: int = 1000  # fewer than models have: rows are looked up, whatever their number

    @property
    def config(self):
        return dict(
            model_type="bert", vocab_size=self.words, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, intermediate_size=self.inner, max_position_embeddings=self.S,
            type_vocab_size=1, hidden_act="gelu", layer_norm_eps=self.eps,
        )  # fmt: skip

    @property
    def linear(self):
        square = (self.width, self.width)
        return {
            "attention.self.query": square, "attention.self.key": square, "attention.self.value": square,
            "attention.output.dense": square, "intermediate.dense": (self.inner, self.width),
            "output.dense": (self.width, self.inner),
        }  # fmt: skip

    @property
    def lengths(self):
        """Of the sequences."""
        if not self.padded:
            return np.full(self.B, self.S)
        return self.rng.integers(self.S // 2, self.S + 1, self.B)

    @property
    def tokens(self):
        """Padding is no work."""
        return int(self.lengths.sum())

    @property
    def scores(self):
        return self.layers * self.heads * int((self.lengths**2).sum())

    @property
    def result_bytes(self):
        return self.B * self.S * self.width * self.dtype.itemsize

    def shrunk(self):
        few = replace(self, B=min(self.B, 3), layers=2, width=16 * self.heads, inner=48)
        return few.shortened(SHRUNK_LENGTH // 3)

    def shortened(self, length):
        return replace(self, S=min(self.S, length))

    def draw_inputs(self):
        return super().draw_inputs() | ({"lengths": self.lengths} if self.padded else {})

    def draw_weights(self):
        rng = self.rng
        weights = self.draw_linear(rng)
        weights |= {
            name.replace("weight", "bias"): drawn(rng, len(weight), self.dtype, 0.1) for name, weight in weights.items()
        }
        for number in range(self.layers):
            for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
                weights |= self.draw_norm(rng, f"{self.layer}.{number}.{norm}", bias=True)
        for table, count in (("word", self.words), ("position", self.S), ("token_type", 1)):
            weights[f"embeddings.{table}_embeddings.weight"] = drawn(rng, (count, self.width), self.dtype)
        return weights | self.draw_norm(rng, "embeddings.LayerNorm", bias=True)

    def formula(self, pieces, inputs, weights):
        words, places, types = (
            weights[f"embeddings.{table}_embeddings.weight"] for table in ("word", "position", "token_type")
        )
        x = pieces.add(pieces.add(pieces.rows(words, inputs["ids"]), places), types)
        x = pieces.layer_norm(x, *pair(weights, "embeddings.LayerNorm"), self.eps)
        for number in range(self.layers):
            part = self.parts(weights, number)
            projections = [part(f"attention.self.{name}") for name in ("query", "key", "value")]
            look = pieces.self_attention(x, projections, self.heads, self.heads, lengths=inputs.get("lengths"))
            look = pieces.linear(look, *part("attention.output.dense"))
            x, _ = pieces.added_norm(look, x, *part("attention.output.LayerNorm"), self.eps)
            fed = pieces.feed_forward(x, part("intermediate.dense"), part("output.dense"))
            x, _ = pieces.added_norm(fed, x, *part("output.LayerNorm"), self.eps)
        return (x,)

    def comparable(self, x):
        """(tokens, width), without what stands in the places of padding."""
        return (np.concatenate([rows[:length] for rows, length in zip(x, self.lengths, strict=True)]),)


@dataclass(frozen=True)
class Decoder(Model):
    """A Llama that reads a prompt of S tokens, or one after `cached` others, and gives the logits of the last."""

    kind = "decoder"
    layer = "model.layers"
    eps = 1e-5
    base = 10000.0
    kv_heads: int = 4
    cached: int = 0
    words: int = 32000

    @property
    def config(self):
        return dict(
            model_type="llama", vocab_size=self.words, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, intermediate_size=self.inner,
            max_position_embeddings=self.cached + self.S, hidden_act="silu", rms_norm_eps=self.eps,
            rope_theta=self.base, tie_word_embeddings=False,
        )  # fmt: skip

    @property
    def linear(self):
        key = (self.kv_heads * self.head_dim, self.width)
        return {
            "self_attn.q_proj": (self.width, self.width), "self_attn.k_proj": key, "self_attn.v_proj": key,
            "self_attn.o_proj": (self.width, self.width), "mlp.gate_proj": (self.inner, self.width),
            "mlp.up_proj": (self.inner, self.width), "mlp.down_proj": (self.width, self.inner),
        }  # fmt: skip

    @property
    def scores(self):
        return self.layers * self.B * self.heads * (self.S * self.cached + self.S**2 / (2 if self.S > 1 else 1))

    @property
    def flops(self):
        return super().flops + 2 * self.B * self.width * self.words

    @property
    def weight_count(self):
        return self._layer_weights + self.width * self.words

    @property
    def read_bytes(self):
        """Of the weights, and of the keys and values before."""
        past = 2 * self.layers * self.B * self.kv_heads * self.cached * self.head_dim
        return super().read_bytes + past * self.dtype.itemsize

    @property
    def result_bytes(self):
        return self.B * self.words * self.dtype.itemsize

    @property
    def limited_by_memory(self):
        return self.S == 1

    def to_read(self):
        return super().to_read() + [array for name, array in self.draw_inputs().items() if name != "ids"]

    def shrunk(self):
        few = replace(self, layers=2, width=16 * self.heads, inner=48, words=500)
        return few.shortened(SHRUNK_LENGTH)

    def shortened(self, length):
        return replace(self, S=min(self.S, length), cached=min(self.cached, length))

    def draw_inputs(self):
        """With the keys and values of each layer, (B, kv_heads, cached, head_dim)."""
        inputs, rng = super().draw_inputs(), self.rng
        shape = (self.B, self.kv_heads, self.cached, self.head_dim)
        names = past_names(self.layers) if self.cached else ()
        return inputs | {name: drawn(rng, shape, self.dtype) for names_of_layer in names for name in names_of_layer}

    def draw_weights(self):
        rng = self.rng
        weights = self.draw_linear(rng)
        for number in range(self.layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                weights |= self.draw_norm(rng, f"{self.layer}.{number}.{norm}", bias=False)
        weights["model.embed_tokens.weight"] = drawn(rng, (self.words, self.width), self.dtype)
        weights["lm_head.weight"] = drawn_weight(rng, self.words, self.width, self.dtype)
        return weights | self.draw_norm(rng, "model.norm", bias=False)

    def formula(self, pieces, inputs, weights):
        rotary = *rotary_tables(self.cached + self.S, self.head_dim, self.base), self.cached
        x = pieces.rows(weights["model.embed_tokens.weight"], inputs["ids"])
        parts = [self.parts(weights, number) for number in range(self.layers)]
        # Each norm is of a sum, that of the last layer before.
        norms = [*(part("input_layernorm") for part in parts), pair(weights, "model.norm")]
        normed = pieces.norm(x, *norms[0], self.eps)
        for part, past, next_norm in zip(parts, past_names(self.layers), norms[1:], strict=True):
            projections = [part(f"self_attn.{name}_proj") for name in "qkv"]
            look = pieces.self_attention(
                normed, projections, self.heads, self.kv_heads, causal=True, rotary=rotary,
                past=[inputs[name] for name in past] if self.cached else None,
            )  # fmt: skip
            look = pieces.linear(look, *part("self_attn.o_proj"))
            normed, x = pieces.added_norm(look, x, *part("post_attention_layernorm"), self.eps)
            up, down, gate = (part(f"mlp.{name}_proj") for name in ("up", "down", "gate"))
            fed = pieces.feed_forward(normed, up, down, gate, "silu")
            normed, x = pieces.added_norm(fed, x, *next_norm, self.eps)
        last = pieces.last(normed) if self.S > 1 else normed
        return (pieces.linear(last, *pair(weights, "lm_head")),)

    def comparable(self, logits):
        """(B, words)"""
        return (logits.reshape(self.B, self.words),)


def past_names(layers):
    """Of the inputs with the keys and values of each layer."""
    return [(f"past_key_{number}", f"past_value_{number}") for number in range(layers)]


@functools.cache
def rotary_tables(count, dim, base):
    """cos and sin (count, dim / 2)."""
    angles = np.arange(count)[:, None] * base ** -(np.arange(0, dim, 2) / dim)
    return np.cos(angles), np.sin(angles)


class AcceleratedEncoder(Encoder):
    """The same as a model of transformers, with and without this library."""

    kind = "accelerated_encoder"


class AcceleratedDecoder(Decoder):
    """The same as a model of transformers, with and without this library."""

    kind = "accelerated_decoder"
