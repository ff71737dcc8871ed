"""How chunks of keys and values travel: see Route in _layout.py for who sends what to whom."""

import math
import time
from dataclasses import dataclass

import numpy as np

from ._agreement import Elsewhere, finish, room

NOTHING = np.empty(0, np.uint8)
PIECE_FLOPS = 2e9  # of a call, 20 to 50 ms of one thread: between such calls MPI gets to move what is under way
LEAST_ROWS = 256  # of such a call
# Each call of gradients has its own part of those of all its keys, which is added to the others: that takes 15 % of the
# time of a call with 256 rows and 2 % of one with 2048.
LEAST_ROWS_BACKWARD = 2048


@dataclass
class Tally:
    """What one rank has sent, and how long it has waited for others."""

    bytes_sent: int = 0
    messages: int = 0
    seconds_waiting: float = 0.0


class Mail:
    """Messages of one rank.  A rank that has failed sends nothing in place of each array that it still owes, so that
    nobody waits for it; who gets nothing has failed, too."""

    def __init__(self, comm, tally):
        self.comm, self.tally, self.failure = comm, tally, None

    def receive(self, room, source, tag):
        return self.comm.Irecv(room, source, tag), room.size

    def send(self, array, to, tag):
        data = NOTHING if self.failure is not None else array.reshape(-1).view(np.uint8)
        self.tally.bytes_sent += data.size
        self.tally.messages += 1
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


class Block:
    """Room for the arrays of several chunks, one behind the other."""

    def __init__(self, group, name, size):
        self.room = room(group, name, size)

    def lay_out(self, shapes, dtypes):
        """Pairs (array, its bytes), of these shapes and dtypes."""
        begin = 0
        for shape, dtype in zip(shapes, dtypes):
            data = self.room[begin : begin + math.prod(shape) * dtype.itemsize]
            yield data.view(dtype).reshape(shape), data
            begin += _aligned(data.size)


def _aligned(size):
    return -(-size // 64) * 64


def room_for(shapes, dtypes):
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes))


class Travel:
    """Iterates over the blocks of keys that this rank needs, {chunk: (key, value)}: first its own, then those of the
    other ranks, one for each step.  While a block is in use, the next one is on its way into the other of two buffers.
    """

    def __init__(self, call, mail):
        self.route, self.rank, self.mail = call.route, call.group.rank, mail
        self.arrays = call.key, call.value
        self.dtypes = [x.dtype for x in self.arrays]
        self.shapes = [[call.of_all(x, chunk.count).shape for x in self.arrays] for chunk in call.k_chunks]
        self.own = self._pack_own(call)
        arrivals = [self.route.arrivals(self.rank, step) for step in range(1, self.route.size)]
        most = max((sum(room_for(self.shapes[c], self.dtypes) for c, _ in each) for each in arrivals), default=0)
        number = min(2, sum(map(bool, arrivals)))
        self.blocks = [Block(call.group, f"block {i}", most) for i in range(number)]

    def _pack_own(self, call):
        """The chunks of this rank that some rank needs, as they travel: in C order."""
        chunks = [c for c, owner in enumerate(self.route.owners) if owner == self.rank and self.route.needs[:, c].any()]
        block = Block(call.group, "own", sum(room_for(self.shapes[c], self.dtypes) for c in chunks))
        places = block.lay_out([shape for c in chunks for shape in self.shapes[c]], self.dtypes * len(chunks))
        own = {}
        for c in chunks:
            own[c] = [next(places)[0], next(places)[0]]
            for array, of_rank in zip(own[c], self.arrays):
                array[...] = call.rows_of(of_rank, call.k_chunks[c])
        return own

    def __iter__(self):
        held = self.own
        for step in range(1, self.route.size + 1):
            requests, coming = self._start(step, held) if step < self.route.size else ([], {})
            yield {c: arrays for c, arrays in held.items() if self.route.needs[self.rank, c]}
            self.mail.wait(requests)
            held = coming

    def _start(self, step, held):
        """Sends what is due in this step; the requests, and the arrays into which the next block arrives."""
        requests, coming = [], {}
        arrivals = self.route.arrivals(self.rank, step)
        if arrivals:
            block = self.blocks[step % len(self.blocks)]
            shapes = [shape for c, _ in arrivals for shape in self.shapes[c]]
            places = block.lay_out(shapes, self.dtypes * len(arrivals))
            for c, source in arrivals:
                (key, key_data), (value, value_data) = next(places), next(places)
                coming[c] = key, value
                requests += [
                    self.mail.receive(key_data, source, 2 * c),
                    self.mail.receive(value_data, source, 2 * c + 1),
                ]
        for c, to in self.route.departures(self.rank, step):
            for i, array in enumerate(held[c] if c in held else self.own[c]):
                requests.append(self.mail.send(array, to, 2 * c + i))
        return requests, coming


def ready(group, make):
    """What `make()` returns, when it has on all ranks: from here on nothing should fail."""
    made, failure = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    finish(group, failure)
    return made


def pieces(call, q, k, least=LEAST_ROWS):
    """The rows of chunk `q` in the pieces that are computed at once for the keys of chunk `k`."""
    flops = 2 * call.rows_at_position * k.count * (call.query.shape[-1] + call.value.shape[-1])
    number = max(1, min(q.count // least, round(q.count * flops / PIECE_FLOPS)))
    rows = max(64, -(-q.count // number // 64) * 64)  # a task of the kernels has up to 64 rows
    return [q.part(begin, min(begin + rows, q.count)) for begin in range(0, q.count, rows)]
