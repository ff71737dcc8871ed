"""What the adapters of peers share: threads, refusing a workload, and masks."""

import os

import numpy as np

from benchmarks.measure.oracle import visible

THREADS = len(os.sched_getaffinity(0))
MASK_LIMIT = 1 << 26  # elements of the largest mask made for an implementation without causal or window
SCORES_LIMIT = 1 << 28  # scores that an implementation may keep in memory


class Unsupported(Exception):
    """The implementation cannot do this workload."""


def require(condition, reason):
    if not condition:
        raise Unsupported(reason)


def require_scores_fit(workload):
    """For implementations that keep all scores in memory."""
    scores = workload.B * workload.H * workload.M * workload.N
    require(scores <= SCORES_LIMIT, f"it would keep {scores} scores in memory")


def causal_or_mask(workload, options, form):
    """(True, None) if a top-left causal flag says it all, else (False, the mask that `form` makes)."""
    if workload.causal and workload.M == workload.N:
        return True, None
    return False, form(workload, options)


def boolean_mask(workload, options):
    """Which keys each row sees, (B or 1, 1, M or 1, N); None where all."""
    if workload.causal or workload.window:
        require(workload.M * workload.N <= MASK_LIMIT, "it would need a mask of M x N")
    mask = visible(workload, np.arange(workload.M), options)
    return None if mask is None else mask.reshape((-1, 1, *mask.shape[-2:]))


def mask_or_bias(workload, options):
    """The boolean mask, or else the bias, or None."""
    mask = boolean_mask(workload, options)
    return options.get("bias") if mask is None else mask


def additive_mask(workload, options):
    """The same as floats to add: 0 and -inf, or the bias, or None."""
    mask = mask_or_bias(workload, options)
    if mask is None or mask.dtype != np.bool_:
        return mask
    return np.where(mask, workload.dtype.type(0), workload.dtype.type(-np.inf))


def full_mask(mask, workload):
    """The mask as (B or 1, H or 1, M, N), for implementations that do not repeat a row."""
    return np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:-2], workload.M, workload.N)))


def as_bits(array):
    """The same memory as unsigned integers: of some dtypes libraries know the bits, not the name."""
    return array.view(f"u{array.dtype.itemsize}")
