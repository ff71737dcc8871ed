"""Gradients of `attention` and `attention_varlen`, without holding the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core
from .._options import PACKED, InputOptions, takes
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
    """Gradients of `attention`: given dL/d`out` for a number L, such as a loss, return dL/d`query` and so on.

    Parameters
    ----------
    grad_out
        The gradient of L with respect to `out`, with the shape of `out` and the dtype of query.
    query, key, value
        The arrays that `attention` was given.  The options must be the same, too.
    out, lse
        What `attention` returned for these arguments with return_lse=True.  If query has a half type, give `attention`
        an `out` of float32: the gradients of query and key are differences, in which the rounding of a narrow `out` may
        be large.
    grad_lse
        The gradient of L with respect to `lse`.  None if L was computed from `out` alone.
    {options}

    Returns
    -------
    Gradients(query, key, value, bias, sinks), a named tuple
        Each is the gradient of L with respect to that input, and has the input's shape and dtype.  Sums are float32 at
        least.  The gradients of bias and sinks are None if the call had none.  The gradient of integer sinks is
        float64.  There are no gradients with respect to scale, softcap and alibi_slopes.

    Notes
    -----
    Gradients of broadcast inputs are summed over the broadcast axes, and the gradient of a key/value head over the
    query heads that share it.  A query and a key that do not see each other add exactly 0, whatever the arrays hold for
    them, NaN included.  So the gradient of a query that sees no key is 0, as is the gradient of a key that no query
    sees.  The lse of a query that sees no key is its sink: the gradient of that sink gets the query's grad_lse.

    The scores are computed again, a block at a time.  The bits do not depend on the number of threads.

    Examples
    --------
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


ATTENTION_VARLEN_BACKWARD = takes("attention_varlen_backward", InputOptions, PACKED)


@ATTENTION_VARLEN_BACKWARD
def attention_varlen_backward(
    grad_out: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike, *,
    cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None, grad_lse: ArrayLike | None = None,
    **options: Unpack[InputOptions],
) -> Gradients:  # fmt: skip
    """`attention_backward` for packed sequences: the gradients of `attention_varlen`.

    The axes are::

        grad_out, out : (T, H, E)    lse, grad_lse : (T, H)    query : (T, H, D)    key : (U, G, D)    value : (U, G, E)

    Each gradient has the shape of its input.  Gradients of a bias, or of sinks, that sequences share are summed over
    the sequences.

    Parameters
    ----------
    grad_out, query, key, value, out, lse, grad_lse
        As for `attention_backward`.
    cu_seqlens_q, cu_seqlens_k
        The same as in the call of `attention_varlen`, and so are the options.
    {options}

    Examples
    --------
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
