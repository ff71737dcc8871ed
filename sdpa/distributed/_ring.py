"""How chunks of keys and values travel: see Route in _layout.py for who sends what to whom."""

import itertools
import math
import time

import numpy as np

from ._agreement import Elsewhere, room

NOTHING = np.empty(0, np.uint8)
# Of a call: 30 to 70 ms of one thread.  Between such calls MPI gets to move what is under way.  Two ranks of one
# thread, 16384 positions: 724 ms with 2e9, 690 with 6e9, 664 with 20e9, as larger pieces read their keys from nearer
# caches.
PIECE_FLOPS = 6e9


class Mail:
    """Messages of one rank.  A rank that has failed sends nothing in place of each array that it still owes, so that
    nobody waits for it; who gets nothing has failed, too."""

    def __init__(self, group):
        self.comm, self.tally, self.failure = group.comm, group.tally, None

    def receive(self, array, source, tag):
        return self.comm.Irecv(_bytes(array), source, tag), array.nbytes

    def send(self, array, to, tag):
        data = NOTHING if self.failure is not None else _bytes(array)
        self.tally.bytes_sent += data.size
        return self.comm.Isend(data, to, tag), 0

    def wait(self, requests):
        from mpi4py import MPI

        begin, status = time.perf_counter(), MPI.Status()
        for request, size in requests:
            request.Wait(status)
            if size and not status.Get_count() and self.failure is None:
                self.failure = Elsewhere("a block did not arrive")
        requests.clear()
        self.tally.seconds_waiting += time.perf_counter() - begin

    def attempt(self, work, *arguments):
        """`work(*arguments)`, unless something failed before.  If this fails, the messages that are due are exchanged
        all the same, and the error is raised by `finish`."""
        if self.failure is not None:
            return None
        try:
            return work(*arguments)
        except BaseException as error:
            self.failure = error
            return None

    def progress(self):
        """MPI moves data only while somebody calls it."""
        self.comm.Iprobe()


def _bytes(array):
    """Of an array in C order.  MPI has no name for bfloat16."""
    return array.reshape(-1).view(np.uint8)


class Shelf:
    """Places for two arrays of each chunk of keys: key and value, or their gradients, of these dtypes."""

    def __init__(self, call, dtypes):
        self.group, self.dtypes = call.group, dtypes
        self.shapes = [[call.of_all(x, chunk.count).shape for x in (call.key, call.value)] for chunk in call.k_chunks]

    def room(self, name, *alternatives):
        """Memory for one of these lists of chunks at a time."""
        return room(self.group, name, (max((self._ends(chunks)[-1] for chunks in alternatives), default=0),))

    def lay_out(self, memory, chunks):
        """{chunk: [array, array]}, one after the other."""
        ends, places = iter(self._ends(chunks)), {}
        begin = next(ends)
        for c in chunks:
            places[c] = []
            for shape, dtype in zip(self.shapes[c], self.dtypes):
                data = memory[begin : begin + math.prod(shape) * dtype.itemsize]
                places[c].append(data.view(dtype).reshape(shape))
                begin = next(ends)
        return places

    def _ends(self, chunks):
        """Of the arrays, after 0; each begins at a whole line of the caches."""
        sizes = (math.prod(shape) * dtype.itemsize for c in chunks for shape, dtype in zip(self.shapes[c], self.dtypes))
        return list(itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0))


class Travel:
    """Iterates over the blocks of keys that this rank needs, {chunk: [key, value]}: first its own, then those of the
    other ranks, one for each step.  While a block is in use, the next one is on its way into the other of two buffers.
    """

    def __init__(self, call, mail):
        self.route, self.rank, self.mail = call.route, call.group.rank, mail
        self.shelf = Shelf(call, [call.key.dtype, call.value.dtype])
        own = [c for c, owner in enumerate(self.route.owners) if owner == self.rank and self.route.needs[:, c].any()]
        self.own = {c: [call.rows_of(x, call.k_chunks[c]) for x in (call.key, call.value)] for c in own}
        apart = [c for c, arrays in self.own.items() if not all(x.flags.c_contiguous for x in arrays)]
        for c, copies in self.shelf.lay_out(self.shelf.room("own", apart), apart).items():
            for copy, array in zip(copies, self.own[c]):
                copy[...] = array
            self.own[c] = copies  # in C order, as they travel
        steps = [dict(self.route.arrivals(self.rank, step)) for step in range(1, self.route.size)]
        self.blocks = [self.shelf.room(f"block {i}", *steps) for i in range(min(2, sum(map(bool, steps))))]

    def __iter__(self):
        held = self.own
        for step in range(1, self.route.size + 1):
            requests, coming = self._start(step, held) if step < self.route.size else ([], {})
            yield {c: arrays for c, arrays in held.items() if self.route.needs[self.rank, c]}
            self.mail.wait(requests)
            held = coming

    def _start(self, step, held):
        """Sends what is due in this step; the requests, and the arrays into which the next block arrives."""
        arrivals = dict(self.route.arrivals(self.rank, step))
        coming = self.shelf.lay_out(self.blocks[step % len(self.blocks)], arrivals) if arrivals else {}
        requests = [
            self.mail.receive(array, arrivals[c], 2 * c + i)
            for c, arrays in coming.items()
            for i, array in enumerate(arrays)
        ]
        for c, to in self.route.departures(self.rank, step):
            requests += [self.mail.send(array, to, 2 * c + i) for i, array in enumerate(held.get(c) or self.own[c])]
        return requests, coming


def pieces(call, q, k, least):
    """The rows of chunk `q` in the pieces that are computed at once for the keys of chunk `k`, of `least` rows or more
    each, unless there are fewer."""
    flops = 2 * call.rows_at_position * k.count * (call.query.shape[-1] + call.value.shape[-1])
    number = max(1, min(q.count // least, round(q.count * flops / PIECE_FLOPS)))
    rows = max(64, -(-q.count // number // 64) * 64)  # a task of the kernels has up to 64 rows
    return [q.part(begin, min(begin + rows, q.count)) for begin in range(0, q.count, rows)]
