"""Gradients of `attention`: every one of them, without holding the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from .._options import InputOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from .gradients import Gradients


ATTENTION_BACKWARD = takes("attention_backward", InputOptions)


@ATTENTION_BACKWARD
def attention_backward(
    grad_out: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike, *,
    grad_lse: ArrayLike | None = None, **options: Unpack[InputOptions],
) -> Gradients:  # fmt: skip
    """How a number L, such as a loss, that was computed from the results of `attention` changes with its inputs.

    Parameters
    ----------
    grad_out : the derivatives of L by the elements of `out`, in an array of its shape and of the dtype of query.
    query, key, value, and the options : as they were given to `attention`.
    out, lse : what `attention` returned for them, with return_lse=True.  Where query is of a half type, better give
        `attention` an `out` of float32: gradients of query and key are differences, in which its rounding may be large.
    grad_lse : the derivatives of L by the elements of `lse`, likewise; None where L was computed from `out` alone.
    threads : as for `attention`.

    Returns
    -------
    Gradients(query, key, value, bias, sinks), a named tuple: the derivatives of L by each input, in an array of its
    shape and dtype; sums are float32 at least.  bias and sinks are None where the call had none; the gradient of sinks
    that are whole numbers is float64.  There is none of scale, softcap and alibi_slopes.

    What was used several times, a broadcast input or a key/value head that query heads share, gets the sum over its
    uses.  A query and a key that do not see each other add exactly 0, whatever the arrays hold for them, NaN included:
    the gradient of a query that sees no key is 0, as is that of a key that no query sees.  The lse of such a query is
    its sink, which gets its grad_lse.

    The scores are computed anew, a block at a time.  The bits do not depend on the number of threads.

    >>> import numpy as np, sdpa
    >>> query, key, value = np.array([[1.0]]), np.array([[0.0], [np.log(3.0)]]), np.array([[8.0], [4.0]])
    >>> out, lse = sdpa.attention(query, key, value, return_lse=True)        # weights 1/4 and 3/4
    >>> sdpa.attention_backward(np.array([[1.0]]), query, key, value, out, lse).value
    array([[0.25],
           [0.75]])
    """
    return _core.attention_backward(
        kernels.default, grad_out, query, key, value, out, lse, grad_lse, options, ATTENTION_BACKWARD
    )


ATTENTION_VARLEN_BACKWARD = takes("attention_varlen_backward", InputOptions)


@ATTENTION_VARLEN_BACKWARD
def attention_varlen_backward(
    grad_out: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike, *,
    cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None, grad_lse: ArrayLike | None = None,
    **options: Unpack[InputOptions],
) -> Gradients:  # fmt: skip
    """`attention_backward` for what `attention_varlen` computed: arrays and options as there.

        grad_out, out : (T, H, E)    lse, grad_lse : (T, H)    query : (T, H, D)    key : (U, G, D)    value : (U, G, E)

    Gradients have the shapes of what was given; a bias or sinks that sequences share gets the sum over them.

    >>> import numpy as np, sdpa
    >>> query = np.ones((3, 1, 1))
    >>> value = np.array([2.0, 4.0, 7.0]).reshape(3, 1, 1)
    >>> out, lse = sdpa.attention_varlen(query, query, value, cu_seqlens_q=[0, 2, 3], causal=True, return_lse=True)
    >>> grads = sdpa.attention_varlen_backward(
    ...     np.ones((3, 1, 1)), query, query, value, out, lse, cu_seqlens_q=[0, 2, 3], causal=True)
    >>> grads.value.ravel().round(6).tolist()
    [1.5, 0.5, 1.0]
    """
    return _core.attention_varlen_backward(
        kernels.default, grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, grad_lse, options,
        ATTENTION_VARLEN_BACKWARD,
    )  # fmt: skip
