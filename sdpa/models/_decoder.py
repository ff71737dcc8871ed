"""Decoders: every token sees those before it, and says what the next may be."""

from functools import partial

import numpy as np

from .._checks import may_attend, number, plain_array, sum_dtype, whole_number
from ._batch import Batch
from ._transformer import Transformer

CHUNK = 512  # tokens of each prompt that are read in one pass: bounds the memory


class Decoder(Transformer):
    """A model like GPT, which `load` makes.  A call returns logits, `generate` continues a prompt."""

    def __call__(self, ids, *, caches=None, lengths=None):
        """Return the logits of the token after each token, (B, S, words), or (S, words) for a single sequence; their
        dtype is float32 at least.

        Parameters
        ----------
        ids : (B, S) or (S,), int; or a list of sequences of any lengths
        caches
            Caches from `new_caches`.  The ids continue the tokens in the caches, and are appended to them.
        lengths : (B), int
            The number of tokens of each sequence.  Logits past the length are 0.
        """
        batch = Batch(ids, self.settings.words, lengths)
        return batch.result(self._logits(self._packed(batch, caches)))

    def new_caches(self, batch=1, *, comm=None, **options):
        """Return an empty KVCache for each layer.  The options are those of KVCache, with two other defaults.

        Parameters
        ----------
        batch : int
            The number of sequences.
        dtype
            That of the model, which is the default, or a narrower one.
        window
            Default: the window of the layer.
        comm
            A communicator of mpi4py, over whose ranks the tokens are spread: each cache is an
            `sdpa.distributed.KVCache`.  All ranks then make the same calls, and generate what rank 0 draws.
        """
        s, options = self.settings, {"dtype": self.dtype, **options}
        make = self.pieces.KVCache if comm is None else partial(_spread_cache(), comm)
        return [make(batch, s.kv_heads, s.head_dim, **{"window": s.window(n), **options}) for n in range(s.layers)]

    def generate(
        self, prompt, max_new_tokens, *, temperature=0, top_k=None, top_p=None, seed=None, stop=None, caches=None
    ):
        """Return an iterator over the tokens that follow the prompt, at most max_new_tokens.

        Parameters
        ----------
        prompt
            Ids (S,): the iterator gives numbers.  Ids (B, S), or a list of sequences of any lengths: it gives arrays
            (B), with -1 for sequences that have ended.  A text: it gives pieces of text.
        max_new_tokens : int
            The most tokens that follow.
        temperature
            With 0, the likeliest token follows.  Else the logits are divided by the temperature, and a token is drawn
            from their softmax.
        top_k
            Draw from the k likeliest tokens only.
        top_p
            Draw from the likeliest tokens only that together have a probability of p.
        seed
            The seed of the random numbers, for `numpy.random.default_rng`.
        stop
            One or several tokens that end a sequence, and are given as its last token.  Default: the tokens that the
            folder names.  With () nothing ends a sequence.
        caches
            Caches from `new_caches`, to choose their dtype, or to continue the tokens in them.

        Examples
        --------
        >>> for piece in model.generate("Once upon a time", 100):               # doctest: +SKIP
        ...     print(piece, end="", flush=True)
        """
        text = isinstance(prompt, str)
        batch = Batch(self.tokenizer.encode(prompt).ids if text else prompt, self.settings.words)
        count = whole_number("max_new_tokens", max_new_tokens, least=0)
        draw = _draw(temperature, top_k, top_p, seed)
        stop = self._ends() if stop is None else stop
        stop = plain_array("stop", [] if stop is None else stop)
        if stop.dtype.kind not in "iu" and stop.size:
            raise TypeError(f"stop is {stop}: it must be a token or several, which are whole numbers")
        if not batch.ids.size or not batch.counts.all():
            raise ValueError(f"prompt has sequences of {batch.counts.tolist()} tokens: each must have one or more")
        caches = self.new_caches(len(batch.ids)) if caches is None else caches
        most = int((self._before(caches, batch) + batch.counts).max()) + count - 1
        if self.longest is not None and most > self.longest:
            raise ValueError(f"prompt and max_new_tokens are {most} tokens: the model has places for {self.longest}")
        tokens = self._generated(batch, count, _drawn_once(draw, caches), stop, caches)
        if text:
            return self.pieces_of_text(int(token[0]) for token in tokens)
        return tokens if batch.batched else (int(token[0]) for token in tokens)

    def _ends(self):
        """The tokens that end a sequence, as the folder names them, or None."""
        about, name = self.folder.json("generation_config.json", {}), "generation_config.json"
        if "eos_token_id" not in about:
            about, name = self.config, "config.json"
        ends = about.get("eos_token_id")
        if not all(type(one) is int and abs(one) < 2**63 for one in ([ends] if type(ends) is not list else ends)):
            if ends is not None:
                path = self.folder.path / name
                raise ValueError(f"{path}: eos_token_id is {ends!r:.60}: it must be a token or a list of tokens")
        return ends

    def _generated(self, batch, count, draw, stop, caches):
        """Give arrays (B) of tokens."""
        last = np.zeros((len(batch.ids), self.settings.width), self.dtype)
        for begin in range(0, batch.ids.shape[1] if count else 0, CHUNK):
            part = batch.part(slice(None), slice(begin, begin + CHUNK))
            x, there = self._packed(part, caches), part.counts > 0
            last[there] = x[part.ends[1:][there] - 1]
        ended = np.zeros(len(last), bool)
        for done in range(count):
            token = draw(self._logits(last))
            yield np.where(ended, -1, token)
            ended |= np.isin(token, stop)
            if ended.all() or done == count - 1:
                return
            last = self._packed(Batch(token[:, None], np.inf), caches)

    def pieces_of_text(self, tokens):
        """Turn an iterable of tokens into an iterator over pieces of text, each of which has whole characters."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for token in tokens:
            if piece := stream.step(self.tokenizer, token):
                yield piece

    def _packed(self, batch, caches):
        """The vectors of the last layer, (T, E).  The tokens are appended to the caches."""
        before = self._before(caches, batch)
        places = batch.packed(before[:, None] + np.arange(batch.ids.shape[1]))
        s = self.settings

        def attend(number, query, key, value, threads):
            options = dict(scale=s.scale(number), threads=threads)
            if caches is None:
                window = s.window(number)
                window = None if window is None else (window - 1, None)
                options |= dict(cu_seqlens_q=batch.ends, causal=True, window=window)
                return self.pieces.attention_varlen(query, key, value, **options)
            query, key, value = (batch.spread(heads).swapaxes(1, 2) for heads in (query, key, value))
            caches[number].append(key, value, None if batch.mask is None else batch.counts)
            return batch.packed(caches[number].attend(query, **options).swapaxes(1, 2))

        x = self._embedded(batch.packed(batch.ids), places)
        turn = self._turn(places, int((before + batch.counts).max(initial=0)))
        try:
            return self._through(x, attend, turn)
        except BaseException:
            for cache in caches or ():  # the layers before the error have appended
                cache.truncate(before)
            raise

    def _logits(self, x):
        """(T, E) to (T, words)"""
        out = np.empty((len(x), self.settings.words), sum_dtype(self.dtype))
        return self._head(self._last_norm(x, threads=self.threads), out=out, threads=self.threads)

    def _before(self, caches, batch):
        """The number of tokens of each sequence that are in the caches."""
        if caches is None:
            return np.zeros(len(batch.ids), np.int64)
        if len(caches) != self.settings.layers or len(caches[0].lengths) != len(batch.ids):
            sizes = f"one for each of the {self.settings.layers} layers, with a batch of {len(batch.ids)}"
            raise ValueError(f"caches are {caches}: they must be {sizes}")
        for cache in caches:
            if not may_attend(self.dtype, cache.dtype):
                raise TypeError(f"caches have dtype {cache.dtype}: it must be that of the model, or a narrower one")
        return np.array(caches[0].lengths)


def _spread_cache():
    from ..distributed import KVCache

    return KVCache


def _drawn_once(draw, caches):
    """Where caches are spread over ranks, which may have other random numbers: what rank 0 draws, on all of them."""
    group = getattr(caches[0], "_group", None)
    return draw if group is None else lambda logits: group.comm.bcast(draw(logits))


def _draw(temperature, top_k, top_p, seed):
    """A function that chooses a token for each row of logits (B, words)."""
    temperature, top_p = number("temperature", temperature), 1.0 if top_p is None else number("top_p", top_p)
    top_k = None if top_k is None else whole_number("top_k", top_k)
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be 0 or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: it must be above 0, and 1 at most")
    random = np.random.default_rng(seed)

    def draw(logits):
        if temperature == 0:
            return logits.argmax(axis=-1)
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
        ranked = np.take_along_axis(logits, order, axis=-1).astype(np.float64)
        weight = np.exp((ranked - ranked[:, :1]) / temperature)
        weight /= weight.sum(axis=-1, keepdims=True)
        weight[np.cumsum(weight, axis=-1) - weight >= top_p] = 0  # the likelier tokens have enough
        reached = np.cumsum(weight, axis=-1)
        chosen = (reached <= random.random((len(logits), 1)) * reached[:, -1:]).sum(axis=-1)
        return np.take_along_axis(order, chosen[:, None], axis=-1)[:, 0]

    return draw
