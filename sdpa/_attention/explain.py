"""What a call would do, and why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .. import _core
from .._fields import documented
from .._options import AttentionOptions, takes
from .._runtime import kernels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


@documented
class Explanation(NamedTuple):
    """How one call is computed.  `str(explanation)` is a readable text.

    Attributes
    ----------
    kernel : str
        What computes it, one of `kernels`.
    engine : str
        The engine of the kernel, for many rows or for few.
    dtype : str
        The dtype of the query, in which the call is computed.
    rows_per_task : int
        The rows of a task, the piece of work that one thread takes.
    keys_per_block : int
        The keys that a task goes through at a time.
    tasks : int
        How many tasks there are.
    threads : int
        How many threads take them.
    flops : int
        The operations, as `explain` counts them.
    bytes : int
        The bytes of inputs and result, as `explain` counts them.
    scratch_bytes : int
        The memory that the call takes beside inputs and results.
    why : tuple of str
        The reasons.
    """

    kernel: str
    engine: str
    dtype: str
    rows_per_task: int
    keys_per_block: int
    tasks: int
    threads: int
    flops: int
    bytes: int
    scratch_bytes: int
    why: tuple

    def __str__(self):
        fields = [f"{name:16}{value}" for name, value in zip(self._fields[:-1], self)]
        return "\n".join(fields + [f"{'because' if i == 0 else '':16}{reason}" for i, reason in enumerate(self.why)])


EXPLAIN = takes("explain", AttentionOptions)


@EXPLAIN
def explain(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[AttentionOptions]) -> Explanation:
    """How a call of `attention` with these arguments is computed: the kernel, its blocks, threads, work, and reasons.

    `flops` counts a multiplication and an addition per feature of each pair of query and key that causal, window and
    lengths leave visible.  `bytes` counts query, key, value and the result once each.

    Parameters
    ----------
    query, key, value
        As for `attention`.
    {options}

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> x = np.zeros((1, 8, 512, 64), np.float32)
    >>> sdpa.explain(x, x, x).flops
    536870912
    """
    kernel = kernels.default
    call = _core.plan_call(kernel, query, key, value, options, EXPLAIN)
    plan, pairs = call.plan(), call.visible_pairs()
    dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    given = sum(array.nbytes for array in (call.query, call.key, call.value))
    out_bytes = math.prod(call.result_shape(value_dim)) * call.query.itemsize
    return Explanation(
        kernel=kernel.name,
        engine="few rows: features in lanes" if plan.few_rows else "many rows: rows in lanes",
        dtype=str(call.query.dtype),
        rows_per_task=plan.rows,
        keys_per_block=plan.keys,
        tasks=plan.tasks,
        threads=plan.threads,
        flops=2 * pairs * (dim + value_dim),
        bytes=given + out_bytes,
        scratch_bytes=plan.scratch_bytes,
        why=tuple(_reasons(call, kernel, plan)),
    )


def _reasons(call, kernel, plan):
    best = kernels.kernels()[0]
    if kernel.name == best:
        yield f"{kernel.name} is the best kernel that this CPU runs"
    else:
        yield f"{kernel.name} was asked for by SDPA_KERNEL; the best on this CPU is {best}"
    if plan.few_rows:
        yield "few rows share a key/value head: memory is the limit, so K and V are read once, features in lanes"
    else:
        yield f"a vector holds {plan.lanes} rows of {call.query.dtype}, a task up to {plan.most_rows} rows"
    at_once = f", for {plan.bundle} tasks at once" if plan.bundle > 1 else ""
    if plan.pairs and plan.few_rows:
        yield "pairs of bfloat16 are multiplied: of features of K as it lies, and of rows of V"
    elif plan.pairs:
        yield f"pairs of bfloat16 are multiplied; V is interleaved a block at a time{at_once}"
    elif plan.converted:
        yield f"K or V is copied to vectors a block at a time{at_once}"
    if plan.parts > 1:
        shared = ", shared by the threads," if plan.parts_shared else ""
        yield f"the keys are cut into {plan.parts} parts{shared} that are summed on their own and then joined"
    if plan.threads == 1 and call.threads == 1:
        yield "one thread: the call is small, or one was asked for"
    elif plan.threads < call.threads:
        yield f"there {'is 1 task' if plan.tasks == 1 else f'are {plan.tasks} tasks'} for {call.threads} threads"
    else:
        yield f"{call.threads} threads may be used"
    group = call.heads // max(call.kv_heads, 1)
    if group > 1:
        yield f"the {group} query heads of a key/value head share its tasks, so K and V are read once for all"
