"""Gradients of attention over several ranks: those of queries stay where they are, those of keys travel home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._attention.backward import attention_backward as backward_here
from .._attention.gradients import Gradients
from .._checks import may_hold, plain_array
from .._options import InputOptions, takes
from ._agreement import finish, join, ready, room
from ._calls import Dense
from ._layout import check_layout
from ._ring import Mail, Shelf, Travel, pieces

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

# Each call of gradients has its own part of those of all its keys, which is added to the others: that takes 15 % of the
# time of a call with 256 rows and 2 % of one with 2048.
LEAST_ROWS = 2048

ATTENTION_BACKWARD = takes("attention_backward", InputOptions)


@ATTENTION_BACKWARD
def attention_backward(
    comm: Any, grad_out: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike,
    *, layout: str = "contiguous", grad_lse: ArrayLike | None = None, **options: Unpack[InputOptions],
) -> Gradients:  # fmt: skip
    """Gradients of `sdpa.distributed.attention`: each rank gets the gradients of its rows.

    Parameters
    ----------
    comm
        The communicator.  All its ranks call this.
    grad_out, query, key, value, out, lse, grad_lse
        As for `sdpa.attention_backward`, the rows of this rank; out and lse are what `attention` returned on this rank.
    layout
        The same as in the call of `attention`, and so are the options.
    {options}

    Returns
    -------
    Gradients(query, key, value, bias, sinks), with the shapes and dtypes of the inputs of this rank
        Sums are float32 at least, and no part is rounded on its way between ranks.  The gradient of a bias covers the
        rows of this rank.  The gradient of sinks is the sum over all ranks, and the same on all of them.
    """
    results: dict[str, Any] = {"grad_out": grad_out, "out": out, "lse": lse, "grad_lse": grad_lse}
    group = join(comm)
    if group.size == 1:
        check_layout(layout)
        return backward_here(query=query, key=key, value=value, **results, **options)
    call = Dense(
        group, query, key, value, options, ATTENTION_BACKWARD, layout, lambda call: take_results(call, results),
        **{"whether grad_lse is given": results["grad_lse"] is not None},
    )  # fmt: skip
    return differentiate(call, results)


def take_results(call, results):
    """Checks {name: given}, which become arrays."""
    results.update({name: as_result(call, name, given) for name, given in results.items()})


def as_result(call, name, given):
    """`given` as an array, of the shape and the dtype of the result, or of its lse."""
    if given is None and name == "grad_lse":
        return None
    array = plain_array(name, given)
    of_rows = name.endswith("lse")
    shape, dtype = (call.out_shape[:-1], call.sums) if of_rows else (call.out_shape, call.query.dtype)
    if array.dtype != dtype and not (name == "out" and may_hold(array.dtype, dtype)):
        rule = f"it must be {dtype}{' or wider' if name == 'out' else ''}"
        raise TypeError(f"{name} has dtype {array.dtype}: for a query of {call.query.dtype} {rule}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}: for these query, key and value it must be {shape}")
    return array


def differentiate(call, results):
    """The gradients of what this rank gave."""
    mail = Mail(call.group)
    slopes, returns = ready(call.group, lambda: (Slopes(call, results, mail.progress), Returns(call, mail)))
    for step, held in enumerate(ready(call.group, lambda: Travel(call, mail))):
        mail.attempt(slopes.add_block, held, returns.begin(step))
        returns.end()
    returns.begin(call.group.size)
    returns.end()
    grads = mail.attempt(slopes.gradients, returns.own)
    finish(call.group, mail.failure)
    return grads if grads.sinks is None else grads._replace(sinks=summed_over_ranks(call, grads.sinks))


def summed_over_ranks(call, own):
    """The sum over the ranks in their order, so that the bits are the same on all ranks and every time."""
    all_ranks = np.empty((call.group.size, *own.shape))
    call.group.comm.Allgather(own, all_ranks)
    given = np.asarray(call.sinks)
    return all_ranks.sum(axis=0).astype(np.float64 if given.dtype.kind in "iu" else given.dtype)


class Slopes:
    """The gradients that stay on this rank: of query and bias for the keys so far, not rounded."""

    def __init__(self, call, results, progress):
        self.call, self.results, self.progress = call, results, progress
        self.query = np.empty(call.query.shape, call.sums)
        self.begun = set()
        self.bias = np.zeros(call.pairs["bias"].shape, call.sums) if "bias" in call.pairs else None

    def add_block(self, held, into):
        """Add the gradients that the rows of this rank and the keys of a block have of each other."""
        for c, (key, value) in held.items():
            for i in self.call.own_rows:
                if self.call.seen[i, c]:
                    self.add(i, self.call.k_chunks[c], key, value, into[c])

    def add(self, i, k, key, value, into):
        """Add the gradients that chunk `i` of rows and keys `k` have of each other; the part of the keys goes to
        `into`."""
        call = self.call
        for piece in pieces(call, call.q_chunks[i], k, LEAST_ROWS):
            of_query = Totals([call.rows_of(self.query, piece)], i in self.begun)
            rooms = [*of_query.rooms(call.group, "part of query"), *into.rooms(call.group, "part of keys")]
            part = call.differentiate(piece, k, key, value, rooms, **self.results)
            with np.errstate(over="ignore", invalid="ignore"):
                of_query.add(part[:1])
                into.add(part[1:3])
                if self.bias is not None:
                    call.add_to_pairs(self.bias, part.bias, piece, k)
            self.progress()
        self.begun.add(i)

    def gradients(self, of_own_keys):
        """All gradients but those of sinks, in the dtypes of the inputs."""
        call = self.call
        grads = [np.empty_like(x, subok=False) for x in (call.query, call.key, call.value)]
        with np.errstate(over="ignore", invalid="ignore"):
            for i in call.own_rows:
                rows = call.q_chunks[i]
                call.rows_of(grads[0], rows)[...] = call.rows_of(self.query, rows) if i in self.begun else 0
            for c, of_chunk in of_own_keys.items():
                for grad, total in zip(grads[1:], of_chunk.arrays):
                    call.rows_of(grad, call.k_chunks[c])[...] = total if of_chunk.begun else 0
            bias = None if self.bias is None else self.bias.reshape(call.bias.shape).astype(call.bias.dtype)
        return Gradients(*grads, bias, None if call.sinks is None else self._of_sinks())

    def _of_sinks(self):
        """The gradient of sinks by the rows of this rank, float64."""
        call, results = self.call, self.results
        grad_out, out = (results[name].astype(call.sums, copy=False) for name in ("grad_out", "out"))
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.einsum("...e,...e->...", grad_out, out)
            if results["grad_lse"] is not None:
                delta -= results["grad_lse"]
        return call.gradient_of_sinks(out, results["lse"], delta, results["grad_lse"])


class Totals:
    """Arrays of which each is a sum; before they have begun, they hold anything."""

    def __init__(self, arrays, begun=False):
        self.arrays, self.begun = arrays, begun

    def rooms(self, group, name):
        """Where what is to be added next may be computed: in place, if it is the first."""
        if not self.begun:
            return self.arrays
        return [room(group, f"{name} {i}", x.shape, x.dtype) for i, x in enumerate(self.arrays)]

    def add(self, more):
        for total, new in zip(self.arrays, more):
            if self.begun:
                total += new
            elif new is not total:
                total[...] = new
        self.begun = True


class Returns:
    """The gradients of keys and values on their way back.  Where the right neighbour needs a chunk, too, the sum so far
    goes on to it, and else to the owner: the way that the keys took, one step behind them.  So each step adds in an
    order that is always the same."""

    def __init__(self, call, mail):
        self.mail, self.route, self.rank = mail, call.route, call.group.rank
        self.shelf = Shelf(call, [call.sums] * 2)
        own = [c for c, owner in enumerate(self.route.owners) if owner == self.rank]
        self.own = self._lay_out(self.shelf.room("own sums", own), own)
        steps = [dict(self.route.arrivals(self.rank, step)) for step in range(1, self.route.size)]
        # One of the sums is on its way while the next is summed.
        self.sums = [self.shelf.room(f"sums {i}", *steps) for i in range(2)]
        self.arriving = self.shelf.room("arriving", *steps)
        self.returning = self.shelf.room("returning", own)
        self.requests, self.under_way, self.adding = [], [], []

    def begin(self, step):
        """Where this step adds its gradients of keys, {chunk: Totals}; and what comes in meanwhile."""
        route, size = self.route, self.route.size
        self.held = self.own
        if step:
            arrivals = dict(route.arrivals(self.rank, step) if step < size else [])
            self.held = self._lay_out(self.sums[step % 2], arrivals)
            left = (self.rank - 1) % size
            others = [c for c, source in arrivals.items() if route.owners[c] != left == source]
            self._receive(self.arriving, others, left, self.held)
        if step > 1:
            last = (self.rank + step - 1) % size
            back = [c for c in self.own if route.needs[last, c] and route.next_holder(last, c) == self.rank]
            self._receive(self.returning, back, last, self.own)
        return self.held

    def end(self):
        """Add what has come in, and send the sums of this step on."""
        self.mail.wait(self.requests)
        self.mail.wait(self.under_way)
        if self.mail.failure is None:
            with np.errstate(over="ignore", invalid="ignore"):
                for totals, more in self.adding:
                    totals.add(more.arrays)
        self.adding.clear()
        for c, totals in self.held.items():
            if c not in self.own:
                to = self.route.next_holder(self.rank, c)
                self.under_way += [self.mail.send(x, to, self._tag(c, i)) for i, x in enumerate(totals.arrays)]

    def _receive(self, memory, chunks, source, into):
        for c, arriving in self._lay_out(memory, chunks).items():
            self.requests += [self.mail.receive(x, source, self._tag(c, i)) for i, x in enumerate(arriving.arrays)]
            self.adding.append((into[c], arriving))

    def _lay_out(self, memory, chunks):
        return {c: Totals(arrays) for c, arrays in self.shelf.lay_out(memory, chunks).items()}

    def _tag(self, c, i):
        """Others than those of the keys, which travel at the same time."""
        return 2 * (len(self.route.owners) + c) + i
