"""The oracle: scaled dot-product attention as its definition, in plain NumPy.

This package is slow on purpose: whole score matrices, no blocks, no tricks. The compiled library is checked against
it, so they share no code. Functions have the names and the arguments of the library, so that one call can stand for the
other. They have one more keyword, `dtype`: the dtype of all arithmetic and of the results (None means float64). With a
dtype of 16 bits, float16 or ml_dtypes.bfloat16, the oracle computes what arrays of that dtype give: inputs, scores,
probabilities and results are rounded to the dtype, while exponentials, sums and the lse are float32. `threads` is
accepted and has no effect here.

Axes: B batch, H query heads, G key/value heads (H a multiple of G), M queries, N keys, D and E the sizes of a
key and of a value. Query head h attends to key/value head h // (H / G)::

    query : (B, H, M, D)    key : (B, G, N, D)    value : (B, G, N, E)
    out   : (B, H, M, E)    lse : (B, H, M)       mask, bias : broadcast to (B, H, M, N)

Arrays of three axes have no B, arrays of two axes have neither B nor H. There may be more leading axes than B. They
broadcast, and the result has as many axes as the largest of the three arrays.  In detail::

    scores   scale * (query . key), then softcap * tanh(. / softcap), then + bias - slope * |position - j|
    visible  key j to query i, if mask, bias, causal, window and kv_lengths all let it
    softmax  exp(score) of the visible keys, divided by their sum; sinks add exp(sink) to the sum
    out      the sum over the visible keys of weight * value

`Linear`, `FeedForward`, `layer_norm`, `rms_norm`, `rotary` and `KVCache` are the other pieces of a transformer.
`sdpa.models.load(folder, pieces=sdpa.reference)` makes whole models of them.

`additive_attention` has a network of one layer in place of query . key.

A query that sees no key gets weights 0 and output 0, and its lse is the sink of its head, or -inf without sinks. No
query sees a key of size 0 (D = 0). Whatever a hidden key or value holds, NaN and inf included, has no influence. What a
visible key or value holds has the influence that arithmetic gives it.
"""

from .._attention.gradients import Gradients
from ._additive import AdditiveGradients, additive_attention, additive_attention_backward
from ._attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_weights,
    merge,
    scaled_dot_product_attention,
)
from ._cache import KVCache
from ._dense import FeedForward, Linear
from ._layer import MultiHeadAttention
from ._norms import layer_norm, rms_norm
from ._rotary import rotary

__all__ = [
    "AdditiveGradients",
    "FeedForward",
    "Gradients",
    "KVCache",
    "Linear",
    "MultiHeadAttention",
    "additive_attention",
    "additive_attention_backward",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "layer_norm",
    "merge",
    "rms_norm",
    "rotary",
    "scaled_dot_product_attention",
]
