"""Options of attention by name, made for arrays of any length."""

import numpy as np

from support.draw import inf, rng

# Options by name, made for B = 2, H = 4 (G = 2) and any M and N.

GEOMETRY = {
    "causal": lambda B, H, M, N: dict(causal=True),
    "window": lambda B, H, M, N: dict(window=(N // 3, 4)),
    "window of the past": lambda B, H, M, N: dict(window=(40, -2)),
    "open window": lambda B, H, M, N: dict(window=(None, 3)),
    "offset": lambda B, H, M, N: dict(q_offset=N // 2 - M // 2),
    "offset per batch": lambda B, H, M, N: dict(q_offset=np.array([N - M - 5, -2])),
    "lengths": lambda B, H, M, N: dict(kv_lengths=np.array([N // 2, max(N - 1, 0)])),
    "lengths with 0": lambda B, H, M, N: dict(kv_lengths=np.array([0, N])),
}
SEEN = {
    "mask": lambda B, H, M, N: dict(mask=rng(1).random((B, H, M, N)) < 0.6),
    "mask of keys": lambda B, H, M, N: dict(mask=rng(2).random((B, 1, 1, N)) < 0.6),
    "mask of rows": lambda B, H, M, N: dict(mask=rng(3).random((M, 1)) < 0.6),
    "mask of whole blocks": lambda B, H, M, N: dict(mask=np.arange(N) % 256 >= 128),
    "bias": lambda B, H, M, N: dict(bias=rng(4).standard_normal((B, H, M, N))),
    "bias of heads": lambda B, H, M, N: dict(bias=rng(5).standard_normal((H, 1, N)).astype(np.float32)),
    "bias that hides": lambda B, H, M, N: dict(bias=np.where(rng(6).random((M, N)) < 0.4, -inf, 0.5)),
}
SCORES = {
    "scale": lambda B, H, M, N: dict(scale=0.3),
    "scale below 0": lambda B, H, M, N: dict(scale=-0.25),
    "scale 0": lambda B, H, M, N: dict(scale=0),
    "softcap": lambda B, H, M, N: dict(softcap=1.5),
    "wide softcap": lambda B, H, M, N: dict(softcap=1e4),
    "sinks": lambda B, H, M, N: dict(sinks=np.linspace(-3, 6, H)),
    "alibi": lambda B, H, M, N: dict(alibi_slopes=np.linspace(-0.05, 0.5, H)),
    "alibi per batch": lambda B, H, M, N: dict(alibi_slopes=rng(7).random((B, H))),
}
ON_HEADS = "sinks", "softcap", "alibi"  # what is done to scores and sums of heads, all at once
OPTIONS = {"nothing": lambda B, H, M, N: {}} | GEOMETRY | SEEN | SCORES


def options_for(query, key, *names):
    """The named options, for the sizes of these arrays."""
    together = {}
    for name in names:
        together |= OPTIONS[name](*query.shape[:-1], key.shape[-2])
    return together
