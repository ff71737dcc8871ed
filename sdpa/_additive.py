"""Additive attention: its weights checked, its projections, and the call."""

import math

import numpy as np

from . import _kernels
from ._layer_parts import weight_array
from ._linear import Linear
from ._problem import Problem, _four_axes, plain_array, sum_dtype


def additive_attention(
    query, key, value, w_query, w_key, v, *, mask=None, bias=None, causal=False, window=None, q_offset=None,
    kv_lengths=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, return_lse=False, out=None, threads=None,
):  # fmt: skip
    """`attention` with a small network in place of the product of query and key, as Bahdanau, Cho and Bengio have it:

        score = scale * sum over a of v[a] * tanh((w_query @ query)[a] + (w_key @ key)[a])

    Axes as in `attention`, A features, and K the size of a key, which may differ from D, that of a query:

        query : (B, H, M, D)    key : (B, G, N, K)    value : (B, G, N, E)    out : (B, H, M, E)

    Parameters
    ----------
    w_query : (A, D), or one for each head, (H, A, D).
    w_key : (A, K), or one for each key/value head, (G, A, K).
    v : (A), or one for each head, (H, A).  Finite.
    scale : default 1.

    The weights are float16, bfloat16, float32 or float64, and are rounded to the type of the sums: float64 for a
    float64 query, else float32.  So are the projections, which take A numbers for each query and each key.  The other
    options, the dtypes and the result are those of `attention`; where A is 0 a query sees no key.

    Key 0 matches by 2 * tanh(log(2) / 2) = 2 / 3, key 1, which cancels the query, by 0: weights 3 and 1.

    >>> import numpy as np, sdpa
    >>> query, key, value = np.array([[np.log(2) / 2]]), np.array([[0.0], [-np.log(2) / 2]]), np.array([[8.0], [4.0]])
    >>> one, scale = np.ones((1, 1)), 3 / 2 * np.log(3)
    >>> sdpa.additive_attention(query, key, value, one, one, np.array([2.0]), scale=scale).round(12)
    array([[7.]])
    """
    problem = AdditiveProblem(
        query, key, value, w_query, w_key, v, mask=mask, bias=bias, causal=causal, window=window, q_offset=q_offset,
        kv_lengths=kv_lengths, scale=1 if scale is None else scale, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, threads=threads,
    )  # fmt: skip
    return problem.result(_kernels.default, out, return_lse)


class AdditiveProblem(Problem):
    """Checked arguments of one call.  Projections take the places of query and key when it runs."""

    def __init__(self, query, key, value, w_query, w_key, v, **options):
        v = plain_array("v", v)
        self.features = v.shape[-1] if v.ndim else 0
        super().__init__(query, key, value, **options)
        heads, kv_heads = self.heads, self.key.shape[-3]
        self.v = _weight("v", v, (heads, None), "A", "H, A")
        self.w_query = _weight("w_query", w_query, (heads, self.features, self.query.shape[-1]), "A, D", "H, A, D")
        self.w_key = _weight("w_key", w_key, (kv_heads, self.features, self.key.shape[-1]), "A, K", "G, A, K")
        if not np.isfinite(self.v).all():
            raise ValueError(f"v is {v}: it must be finite")
        self.inputs.update(w_query=self.w_query, w_key=self.w_key, v=self.v)

    def _check_sizes(self, dim, key_dim):
        """Any will do."""

    def _cost_of_score(self):
        return 5 * self.features  # measured: see the decisions of csrc/README.md

    def run(self, kernel, **results):
        query, key = (self.inputs[name] for name in ("query", "key"))
        self.query = self._project(query, self.w_query)
        self.key = self._project(key, self.w_key)
        self.scale, v = _normalised(self.scale, np.broadcast_to(self.v, (self.heads, self.features)))
        super().run(kernel, v=v, **results)

    def _project(self, array, weight):
        """(lead, heads, rows, A) of (..., rows, D): what is broadcast is projected once."""
        array, dtype = _four_axes(array), sum_dtype(self.dtype)
        if weight.ndim == 2:
            result = Linear(weight)(array, self.threads, dtype)
        else:
            each = [Linear(w)(array[..., head, :, :], self.threads, dtype) for head, w in enumerate(weight)]
            shape = (*array.shape[:-3], 0, array.shape[-2], self.features)
            result = np.stack(each, axis=-3) if each else np.empty(shape, dtype)
        return np.broadcast_to(result, self.lead + result.shape[-3:])


def _weight(name, given, shape, axes, axes_by_head):
    """Of `shape`, or without its first axis, the heads."""
    array = plain_array(name, given)
    if array.ndim == len(shape):
        return weight_array(name, array, shape, f"({axes_by_head})")
    return weight_array(name, array, shape[1:], f"({axes}), or ({axes_by_head}) with one for each of {shape[0]} heads")


def _normalised(scale, v):
    """The same scores, from a v below 2, so that no product with it overflows."""
    v = v.astype(np.float64)
    largest = np.abs(v).max(initial=0)
    power = math.frexp(largest)[1] - 1
    return scale * 2.0**power, np.ascontiguousarray(np.ldexp(v, -power))
