"""Gradients of attention over several ranks: those of queries stay where they are, those of keys travel home."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._attention.backward import attention_backward as backward_here
from .._attention.gradients import Gradients
from .._checks import may_hold, plain_array
from .._options import InputOptions, takes
from ._agreement import finish, join, room
from ._calls import Dense
from ._layout import check_layout
from ._ring import LEAST_ROWS_BACKWARD, Block, Mail, Tally, Travel, pieces, ready, room_for

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

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
    results = {"grad_out": grad_out, "out": out, "lse": lse, "grad_lse": grad_lse}
    return spread(comm, results, query, key, value, layout, options, Tally())


def spread(comm, results, query, key, value, layout, options, tally):
    """`attention_backward`, which also counts the bytes that it sends."""
    group = join(comm)
    if group.size == 1:
        check_layout(layout)
        return backward_here(query=query, key=key, value=value, **results, **options)
    call = Dense(
        group, query, key, value, options, ATTENTION_BACKWARD, layout, lambda call: take_results(call, results),
        **{"whether grad_lse is given": results["grad_lse"] is not None},
    )  # fmt: skip
    return differentiate(call, results, tally)


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


def differentiate(call, results, tally):
    """The gradients of the inputs of this rank."""
    mail = Mail(call.group.comm, tally)
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
        for piece in pieces(call, call.q_chunks[i], k, LEAST_ROWS_BACKWARD):
            totals = [call.rows_of(self.query, piece), *into.arrays]
            begun = [i in self.begun, into.begun, into.begun]
            rooms = [
                self._room_for(n, total.shape) if more else total for n, (total, more) in enumerate(zip(totals, begun))
            ]
            part = call.differentiate(piece, k, key, value, rooms, **self.results)
            with np.errstate(over="ignore", invalid="ignore"):
                for total, new, more in zip(totals, part, begun):
                    if more:
                        total += new
                    elif new is not total:
                        total[...] = new
                if self.bias is not None:
                    call.add_to_pairs(self.bias, part.bias, piece, k)
            into.begun = True
            self.progress()
        self.begun.add(i)

    def _room_for(self, number, shape):
        size = math.prod(shape) * self.call.sums.itemsize
        return room(self.call.group, f"part {number}", size).view(self.call.sums).reshape(shape)

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
    """The sums of the gradients of key and value.  Before the sums have begun, the arrays may hold anything."""

    def __init__(self, arrays):
        self.arrays, self.begun = arrays, False


class Returns:
    """The gradients of keys and values on their way back.  Where the right neighbour needs a chunk, too, the sum so far
    goes on to it, and else to the owner: the way that the keys took, one step behind them.  So each step adds in an
    order that is always the same."""

    def __init__(self, call, mail):
        self.call, self.mail, self.route, self.rank = call, mail, call.route, call.group.rank
        size, chunks = self.route.size, call.k_chunks
        self.shapes = [[call.of_all(x, chunk.count).shape for x in (call.key, call.value)] for chunk in chunks]
        own = [c for c, chunk in enumerate(chunks) if chunk.rank == self.rank]
        self.own = self._lay_out(Block(call.group, "own sums", self._room(own)), own)
        steps = [[c for c, _ in self.route.arrivals(self.rank, step)] for step in range(1, size)]
        most = max((self._room(each) for each in steps), default=0)
        # One of the sums is on its way while the next is summed.
        self.sums = [Block(call.group, f"sums {i}", most) for i in range(2)]
        self.arriving = Block(call.group, "arriving", most)
        self.returning = Block(call.group, "returning", self._room(self.own))
        self.requests, self.under_way, self.adding = [], [], []

    def _room(self, chunks):
        return sum(room_for(self.shapes[c], [self.call.sums] * 2) for c in chunks)

    def begin(self, step):
        """Where this step adds its gradients of keys, {chunk: [of key, of value]}; and what comes in meanwhile."""
        route, size = self.route, self.route.size
        self.held = self.own
        if step:
            arrivals = route.arrivals(self.rank, step) if step < size else []
            self.held = self._lay_out(self.sums[step % 2], [c for c, _ in arrivals])
            left = (self.rank - 1) % size
            self._receive(
                self.arriving, [c for c, source in arrivals if route.owners[c] != left == source], left, self.held
            )
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
                    for i, total in enumerate(totals.arrays):
                        np.add(total, more.arrays[i], out=total) if totals.begun else np.copyto(total, more.arrays[i])
                    totals.begun = True
        self.adding.clear()
        for c, totals in self.held.items():
            if c not in self.own:
                for i, array in enumerate(totals.arrays):
                    self.under_way.append(self.mail.send(array, self.route.next_holder(self.rank, c), self._tag(c, i)))

    def _receive(self, block, chunks, source, into):
        for c, arriving in self._lay_out(block, chunks).items():
            for i, array in enumerate(arriving.arrays):
                self.requests.append(self.mail.receive(array.reshape(-1).view(np.uint8), source, self._tag(c, i)))
            self.adding.append((into[c], arriving))

    def _lay_out(self, block, chunks):
        arrays = block.lay_out([shape for c in chunks for shape in self.shapes[c]], [self.call.sums] * 2 * len(chunks))
        return {c: Totals([next(arrays)[0], next(arrays)[0]]) for c in chunks}

    def _tag(self, c, i):
        """Tags that differ from those of the keys, which travel at the same time."""
        return 2 * (len(self.shapes) + c) + i
