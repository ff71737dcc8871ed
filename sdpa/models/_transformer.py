"""What encoders and decoders have in common: embeddings, and the layers."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from .._checks import float_dtype, sum_dtype
from .._runtime.threads import count
from ._families import shapes
from ._frequencies import frequencies_of
from ._progress import Progress


class Transformer:
    """A model with all of its weights."""

    def __init__(self, folder, family, settings, dtype, threads, pieces):
        self.folder, self.config, self.settings = folder, folder.config, settings
        self.pieces, self.threads = pieces, threads
        weights = Weights(folder, family, settings, pieces)
        tables = {part: weights.arrays.get((part, None, "weight")) for part in ("words", "places", "types")}
        self._tables = {part: table for part, table in tables.items() if table is not None}
        self.dtype = weights.dtype = float_dtype(tables["words"].dtype if dtype is None else dtype)
        self._post_norm = not family.decoder
        self._first_norm, self._last_norm = weights.norm("first_norm"), weights.norm("last_norm")
        with Progress(f"loading {folder.path.name}") as progress:
            self.layers = [weights.layer(number) for number in progress(range(settings.layers))]
            self._head = weights.linear("words" if settings.tied else "head") if family.decoder else None
        self._tokenizer = None

    @property
    def tokenizer(self):
        """The tokenizers.Tokenizer of the folder."""
        if self._tokenizer is None:
            self._tokenizer = self.folder.tokenizer()
        return self._tokenizer

    @property
    def longest(self):
        """How many tokens a sequence may have, or None."""
        return len(self._tables["places"]) - self.settings.first_place if "places" in self._tables else None

    def __repr__(self):
        s = self.settings
        heads = f"{s.heads} heads of {s.head_dim}" + f" on {s.kv_heads}" * (s.kv_heads != s.heads)
        return (
            f"<sdpa.models.{type(self).__name__} {self.config['model_type']}, {s.layers} layers of {s.width}, {heads}, "
            f"{s.words} words, {self.dtype.name}>"
        )

    def _embedded(self, ids, places, types=None):
        """(T, E): the sum of the embeddings of words, places and types, normed if the model does that."""
        x = self._tables["words"][ids].astype(sum_dtype(self.dtype), copy=False)  # rounded once, at the end
        if "places" in self._tables:
            if places.max(initial=-1) >= self.longest:
                raise ValueError(f"a sequence has {places.max() + 1} tokens: the model has places for {self.longest}")
            x += self._tables["places"][places + self.settings.first_place]
        if "types" in self._tables:
            x += self._tables["types"][0 if types is None else types]
        x = x.astype(self.dtype, copy=False)
        return x if self._first_norm is None else self._first_norm(x, threads=self.threads)

    def _through(self, x, attend, turn=None):
        """Carry x (T, E) through all layers.

        attend(number, query, key, value, threads) : attention in the layer of that number, of heads (T, heads, D).
        turn(heads, threads) : the rotary embedding, in place.
        """
        threads = count(self.threads)  # once: each call would ask the environment and the system for 2 us
        for number, layer in enumerate(self.layers):
            look = partial(self._look, number, layer, attend, turn, threads)
            if self._post_norm:
                x = layer.attention_norm(layer.leave(look(x), residual=x, threads=threads), threads=threads)
                x = layer.feed_norm(layer.feed_forward(x, residual=x, threads=threads), threads=threads)
            else:
                x = layer.leave(look(layer.attention_norm(x, threads=threads)), residual=x, threads=threads)
                x = layer.feed_forward(layer.feed_norm(x, threads=threads), residual=x, threads=threads)
        return x

    def _look(self, number, layer, attend, turn, threads, x):
        s = self.settings
        heads = layer.enter(x, threads=threads).reshape(len(x), s.heads + 2 * s.kv_heads, s.head_dim)
        query, key, value = heads[:, : s.heads], heads[:, s.heads : -s.kv_heads], heads[:, -s.kv_heads :]
        if layer.query_norm is not None:
            query, key = layer.query_norm(query, threads=threads), layer.key_norm(key, threads=threads)
        if turn is not None:
            turn(query, threads)
            turn(key, threads)
        return attend(number, query, key, value, threads).reshape(len(x), s.heads * s.head_dim)

    def _turn(self, positions, length):
        """A function that turns heads (T, heads, D) in place; None for a model without rotary embedding.

        positions : (T,), the positions of the tokens.    length : the length of the longest sequence so far.
        """
        if self.settings.rope is None:
            return None
        frequencies, factor = frequencies_of(self.settings.rope, length)
        angle = positions[:, None] * frequencies
        cos, sin = ((factor * of(angle)).astype(sum_dtype(self.dtype)) for of in (np.cos, np.sin))

        def turn(heads, threads):
            heads = heads.swapaxes(0, 1)
            self.pieces.rotary(heads, None, cos=cos, sin=sin, out=heads, threads=threads)

        return turn


class Weights:
    """The tensors of a model by (part, layer or None, "weight" or "bias"), and the pieces that compute with them."""

    def __init__(self, folder, family, settings, pieces):
        """Find all tensors, and check their shapes, before anything is computed."""
        self.folder, self.family, self.settings = folder, family, settings
        self.pieces = pieces
        self.files, self.arrays = folder.tensors(), {}
        with_head = f"{family.prefix}{family.tensors['words']}.weight" in self.files
        self._prefix = family.prefix if with_head else ""
        wanted, biases = shapes(settings), family.biases(folder.config)
        for part, layer, name in self._names():
            norm, table = part.endswith("norm"), layer is None
            self._find(part, layer, "weight", name, wanted[part], family.transposed and not norm and not table)
            if family.layer_norm if norm else not table and (biases is None or part in biases):
                self._find(part, layer, "bias", name, wanted[part][:1])

    def _names(self):
        """(part, layer or None, name) of each, one after the other: the first one that is missing ends it, however many
        layers config.json speaks of."""
        family, prefix = self.family, self._prefix
        for part, name in family.tensors.items():
            yield part, None, prefix + name
        if family.decoder and not self.settings.tied:
            yield "head", None, "lm_head"
        for layer in range(self.settings.layers):
            for part, name in family.layer_tensors.items():
                yield part, layer, prefix + family.layer.format(layer) + name

    def _find(self, part, layer, kind, name, shape, transposed=False):
        old = f"{name}.{dict(weight='gamma', bias='beta')[kind]}"  # in the first BERTs
        name = f"{name}.{kind}"
        file = self.files.get(name) or self.files.get(old)
        shape = shape[::-1] if transposed else shape
        if file is None:
            raise ValueError(f"{self.folder.path}: no file has the tensor {name!r}, of shape {shape}: it must be there")
        array = file.checked(name if name in self.files else old, shape)
        self.arrays[part, layer, kind] = array.T if transposed else array

    def get(self, part, layer=None, kind="weight"):
        """An array in the dtype of the model, or None."""
        array = self.arrays.get((part, layer, kind))
        return None if array is None else array.astype(self.dtype, copy=False)

    def linear(self, *parts, layer=None):
        """One projection with the rows of all these parts."""
        weight, bias = ([self.get(part, layer, kind) for part in parts] for kind in ("weight", "bias"))
        if len(parts) > 1:
            weight, bias = [np.concatenate(weight)], [None if bias[0] is None else np.concatenate(bias)]
        return self.pieces.Linear(weight[0], bias[0])

    def norm(self, part, layer=None):
        """The norm as a function of x; None if the model has no such norm."""
        if (part, layer, "weight") not in self.arrays:
            return None
        options = dict(weight=self.get(part, layer), eps=self.settings.eps)
        if self.family.layer_norm:
            return partial(self.pieces.layer_norm, bias=self.get(part, layer, "bias"), **options)
        return partial(self.pieces.rms_norm, **options)

    def layer(self, number):
        there = self.family.layer_tensors
        enter = [part for part in ("query_key_value", "query", "key", "value") if part in there]
        feed = {
            f"{part}_{kind}": self.get(part, number, kind)
            for part in ("up", "gate", "down") if part in there
            for kind in ("weight", "bias")
        }  # fmt: skip
        norms = ("attention_norm", "feed_norm", "query_norm", "key_norm")
        return SimpleNamespace(
            enter=self.linear(*enter, layer=number),
            leave=self.linear("out", layer=number),
            feed_forward=self.pieces.FeedForward(**feed, activation=self.settings.activation),
            **{norm: self.norm(norm, number) for norm in norms},
        )
