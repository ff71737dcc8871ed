"""The attention operators of torch itself, on the CPU: what calls of them are computed with while they are replaced.

torch's composite attention decomposes into the first pair, with masks as floats and heads ungrouped; compiled graphs
and exported programs call it, too.  The second pair is behind torch.nn.attention.varlen, without a kernel for the CPU.
"""

from __future__ import annotations

import warnings

import torch

from . import _eager
from ._eager import ATTENTION, ATTENTION_VARLEN, Call
from ._operators import laid_out

DENSE = "_scaled_dot_product_flash_attention_for_cpu"
FLASH = "_flash_attention"


class Replaced:
    """The kernels, from the time it is made until `remove` is called."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*operators may also be overridden")
                for name, kernel in KERNELS.items():
                    self._library.impl(name, kernel, "CPU")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._library._destroy()


def dense(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    _refuse_dropout(dropout_p)
    out = torch.empty_like(query)
    options = _options(is_causal, attn_mask, scale) | {"return_lse": True, "out": out}
    _, lse = _eager.compute(ATTENTION, query, key, value, (), options)
    if attn_mask is not None:
        lse.masked_fill_(lse == -torch.inf, 0.0)  # as torch's kernel has it, whose gradients may follow
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # as torch's kernel has it


def dense_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):  # fmt: skip
    call = Call(ATTENTION, (), _eager.without_tensors(_options(is_causal, attn_mask, scale)), (), True)
    grads = _eager.gradients(call, grad_out, None, query, key, value, out, logsumexp)
    return tuple(grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads)


def _refuse_dropout(dropout_p):
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}: this library has no random numbers")


def _options(is_causal, attn_mask, scale):
    options = {"scale": scale}
    if is_causal:
        options |= {"causal": True, "q_offset": 0}
    if attn_mask is not None:
        options["bias"] = attn_mask
    return options


def flash(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, block_table=None, num_splits=None,
    **others,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    options = _windowed(is_causal, scale, window_size_left, window_size_right)
    options |= {"kv_lengths": seqused_k, "return_lse": True} | others  # which have the same names here
    if cum_seq_q is None:  # (B, S, H, D)
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        out, lse = _eager.compute(ATTENTION, *heads_first, (), options)
        out = out.transpose(1, 2)
    else:
        if block_table is not None:
            key, value, cum_seq_k = _gathered(key, value, block_table)
        out, lse = _eager.compute(ATTENTION_VARLEN, query, key, value, _starts(cum_seq_q, cum_seq_k), options)
        lse = lse.T.contiguous()
    return out, lse, torch.zeros(2, dtype=torch.uint64), query.new_empty(0), query.new_empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    options = _windowed(is_causal, scale, window_size_left, window_size_right)
    given = query, key, value
    if cum_seq_q is None:
        call = Call(ATTENTION, (), options, (), True)
        heads_first = [x.transpose(1, 2) for x in (grad_out, *given, out)]
        grads = _eager.gradients(call, heads_first[0], None, *heads_first[1:], logsumexp)
        grads = [grad.transpose(1, 2) for grad in grads]
    else:
        call = Call(ATTENTION_VARLEN, _starts(cum_seq_q, cum_seq_k), options, (), True)
        grads = _eager.gradients(call, grad_out, None, *given, out, logsumexp.T)
    return tuple(laid_out(grad, x) for grad, x in zip(grads, given))


def _windowed(is_causal, scale, left, right):
    """torch writes -1 for a side without a bound."""
    window = tuple(None if side is None or side < 0 else side for side in (left, right))
    return {"causal": is_causal, "scale": scale, "window": window}


def _starts(*starts):
    return tuple(None if x is None else x.numpy() for x in starts)


def _gathered(key, value, block_table):
    """The pages of the sequences one after the other, and where each sequence begins."""
    sequences, pages = block_table.shape
    rows = pages * key.shape[1]
    flat = block_table.reshape(-1)
    packed = [x[flat].reshape(sequences * rows, *x.shape[2:]) for x in (key, value)]
    return *packed, torch.arange(sequences + 1) * rows


KERNELS = {
    DENSE: dense, f"{DENSE}_backward": dense_backward, f"{FLASH}_forward": flash, f"{FLASH}_backward": flash_backward,
}  # fmt: skip
