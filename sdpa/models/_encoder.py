"""Encoders: every token sees all of its sequence."""

from pathlib import Path

import numpy as np

from .._checks import plain_array, sum_dtype
from ._batch import Batch
from ._transformer import Transformer

PLACES_AT_ONCE = 8192  # of (B, S) that `embed` takes in one pass: bounds its memory


class Encoder(Transformer):
    """A model like BERT, which `load` makes.  A call returns a vector for each token, `embed` one for each text."""

    def __init__(self, *given):
        super().__init__(*given)
        self.pooling = _pooling(self.folder)
        about = self.folder.json("sentence_bert_config.json", {})
        self._cut = _longest(self.folder, "sentence_bert_config.json", "max_seq_length")
        self._cut = self._cut or _longest(self.folder, "tokenizer_config.json", "model_max_length") or self.longest
        self._cut = int(min(self._cut, self.longest))
        self._lower = bool(about.get("do_lower_case"))

    def __call__(self, ids, *, lengths=None, mask=None, token_types=None):
        """Return the vectors of the last layer, (B, S, E), or (S, E) for a single sequence.

        Parameters
        ----------
        ids : (B, S) or (S,), int; or a list of sequences of any lengths
        lengths : (B), int
            The number of tokens of each sequence.  Places past the length are not computed: their vectors are zero.
        mask : (B, S), boolean
            True where there is a token; the other places are not computed either.
        token_types : (B, S), int
            Default 0.
        """
        batch = Batch(ids, self.settings.words, lengths, mask)
        return batch.result(self._packed(batch, self._types(batch, token_types)))

    def embed(self, inputs, *, lengths=None, mask=None, token_types=None):
        """Return a vector of unit length for each text, (B, E), or (E,) for a single text; float32 at least.

        Parameters
        ----------
        inputs
            A text, a list of texts, or ids as in a call.  The tokenizer cuts long texts.
        lengths, mask, token_types
            As in a call.

        Notes
        -----
        The vector of a text is the mean of its tokens' vectors, unless modules.json in the folder says otherwise.
        """
        if text := isinstance(inputs, str):
            inputs = [inputs]
        if isinstance(inputs, (list, tuple)) and all(isinstance(one, str) for one in inputs):
            inputs = self.tokens(inputs) if inputs else np.zeros((0, 1), np.int64)
        batch = Batch(inputs, self.settings.words, lengths, mask)
        types = self._types(batch, token_types)
        if not batch.counts.all():
            raise ValueError(f"sequence {np.argmin(batch.counts)} has no token: it must have one or more")
        size = max(1, PLACES_AT_ONCE // max(1, batch.ids.shape[1]))
        vectors = np.zeros((len(batch.ids), self.settings.width * len(self.pooling)), sum_dtype(self.dtype))
        for begin in range(0, len(vectors), size):
            rows = slice(begin, begin + size)
            part = batch.part(rows)
            x = self._packed(part, None if types is None else types[rows]).astype(vectors.dtype, copy=False)
            vectors[rows] = np.concatenate([POOLINGS[name](x, part) for name in self.pooling], axis=-1)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors if batch.batched and not text else vectors[0]

    def tokens(self, texts):
        """Return the ids of each text, cut to the length that the model takes."""
        tokenizer = self.tokenizer
        tokenizer.enable_truncation(self._cut)
        encodings = tokenizer.encode_batch([text.lower() if self._lower else text for text in texts])
        return [encoding.ids for encoding in encodings]

    def _types(self, batch, given):
        if given is None:
            return None
        types = np.atleast_2d(plain_array("token_types", given))
        if "types" not in self._tables:
            raise ValueError("token_types are given: for this model they must be None")
        if types.dtype.kind not in "iu":
            raise TypeError(f"token_types have dtype {types.dtype}: they must be whole numbers")
        count = len(self._tables["types"])
        if types.shape != batch.ids.shape or (types.size and not 0 <= types.min() <= types.max() < count):
            rule = f"they must have that of ids, {batch.ids.shape}, and be from 0 to below {count}"
            raise ValueError(f"token_types have shape {types.shape}: {rule}")
        return types

    def _packed(self, batch, types):
        """(T, E)"""
        places = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
        if self.settings.first_place:  # RoBERTa counts the tokens that are no padding, which stays before the first
            real = batch.ids != self.settings.first_place - 1
            places = np.where(real, np.cumsum(real, axis=1) - 1, -1)
        x = self._embedded(*map(batch.packed, (batch.ids, places)), None if types is None else batch.packed(types))

        def attend(number, query, key, value, threads):
            return self.pieces.attention_varlen(query, key, value, cu_seqlens_q=batch.ends, threads=threads)

        return self._through(x, attend)


def _longest(folder, file, key):
    """How many tokens a text may have, by that file, or None."""
    given = folder.json(file, {}).get(key)
    if given is not None and (type(given) not in (int, float) or not given >= 1):
        raise ValueError(f"{folder.path / file}: {key} is {given!r:.60}: it must be a number of 1 or more")
    return given


def _pooling(folder):
    """The names of the POOLINGS that modules.json asks for, a file of sentence-transformers."""
    names, modules = ["mean"], folder.path / "modules.json"
    for module in folder.json("modules.json", []):
        kind, place = (str(module.get(key)) if isinstance(module, dict) else "" for key in ("type", "path"))
        kind = kind.rpartition(".")[2]
        if kind == "Pooling":
            if place != Path(place).name or not place.isprintable():
                raise ValueError(f"{modules}: path is {place!r:.60}: it must be the name of a folder beside it")
            path = f"{place}/config.json"
            about = folder.json(path)
            names = about.get("pooling_mode") or [
                name for key, name in OLDER.items() if about.get(f"pooling_mode_{key}")
            ]
            names = [names] if isinstance(names, str) else names
            known = isinstance(names, list) and all(isinstance(name, str) and name in POOLINGS for name in names)
            if not names or not known:
                raise ValueError(f"{folder.path / path}: pooling is {names!r:.60}: it must be of {', '.join(POOLINGS)}")
        elif kind not in ("Transformer", "Normalize"):
            raise ValueError(f"{modules}: a module is {kind}: it must be Transformer, Pooling or Normalize")
    return names


def _sum(x, batch):
    return np.add.reduceat(x, batch.ends[:-1])


def _weighted_mean(x, batch):
    """The weights are 1, 2, 3, ..."""
    weight = np.arange(1, len(x) + 1) - np.repeat(batch.ends[:-1], batch.counts)
    return _sum(x * weight[:, None].astype(x.dtype), batch) / (batch.counts * (batch.counts + 1) / 2)[:, None]


# From the packed vectors x (T, E) of a batch to one vector for each sequence, (B, E).
POOLINGS = {
    "mean": lambda x, batch: _sum(x, batch) / batch.counts[:, None],
    "mean_sqrt_len_tokens": lambda x, batch: _sum(x, batch) / np.sqrt(batch.counts)[:, None],
    "weightedmean": _weighted_mean,
    "max": lambda x, batch: np.maximum.reduceat(x, batch.ends[:-1]),
    "cls": lambda x, batch: x[batch.ends[:-1]],
    "lasttoken": lambda x, batch: x[batch.ends[1:] - 1],
}
# Older folders have a key "pooling_mode_..." for each name, which is true or false.
OLDER = dict(
    mean_tokens="mean", mean_sqrt_len_tokens="mean_sqrt_len_tokens", weightedmean_tokens="weightedmean",
    max_tokens="max", cls_token="cls", lasttoken="lasttoken",
)  # fmt: skip
