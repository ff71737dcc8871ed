"""What raises inside a call that changes a cache, at any time: the cache is as it was, or as the call leaves it."""

import os
import signal
import sys
import threading

import numpy as np
import pytest
from support.draw import float32, float64, rng

import sdpa
from sdpa import KVCache, MultiHeadAttention, PagedKVCache

FOLDER = os.path.dirname(sdpa.__file__)
WHERE = tuple(os.path.join(FOLDER, name) for name in ("_cache", "_layer"))  # nothing else knows of caches
G, D, E = 1, 4, 3


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(number, call):
    """How many instructions of this library's Python code `call` came to, if not to so many: in front of the one with
    that number it is stopped, and None given."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(WHERE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == number:
                raise Interrupt
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return None
    except (TypeError, ValueError, MemoryError):
        pass  # the call was to fail
    finally:
        sys.settrace(before)
    return count


def same(one, other):
    return len(one) == len(other) and all(np.array(x).tobytes() == np.array(y).tobytes() for x, y in zip(one, other))


def check_boundaries(make, call, look, succeed=None, most=25):
    """`make` gives what `call` changes and `look` shows, which may use it up.  A call that fails leaves what was; where
    its undoing is interrupted, maybe what `succeed` leaves.  Of very many boundaries, `most` of all parts."""
    subject, changed, done = make(), make(), make()
    old = look(subject)
    (succeed or call)(changed)
    new = look(changed)
    count = interrupted(None, lambda: call(done))
    assert count >= 1 and same(look(done), new if succeed is None else old)
    for number in range(0, count, 1 + count // most):
        subject = make()
        assert interrupted(number, lambda subject=subject: call(subject)) is None
        seen = look(subject)
        assert same(seen, old) or same(seen, new), f"stopped in front of instruction {number} of {count}"


# KVCache.


def tokens(count, batch=1, dtype=float32, seed=0):
    normal = rng(seed).standard_normal
    return normal((batch, G, count, D)).astype(dtype), normal((batch, G, count, E)).astype(dtype)


def shown(cache):
    """Lengths, tokens and answers: as it is, and with one token more."""
    found = []
    for _ in range(2):
        found.append(cache.lengths.copy())
        for array in cache.keys, cache.values, cache.key_scales, cache.value_scales:
            for b, length in enumerate(cache.lengths if array is not None else ()):
                found.append(array[b, :, : None if cache.window else length].copy())
        try:
            found.append(cache.attend(np.ones((cache.batch, G, 1, D), float32), q_offset=cache.lengths - 1))
        except ValueError:  # dropped before a truncate
            found.append(None)
        cache.append(*tokens(1, cache.batch, seed=9))
    return found


CACHES = {
    "plain": dict(),
    "window": dict(window=5),
    "window, some kept": dict(window=5, keep=2),
    "int8": dict(dtype=np.int8),
    "int8, window": dict(dtype=np.int8, window=5),
    "window, float16, capacity": dict(dtype=np.float16, window=5, capacity=1000),
}
CALLS = {
    "a token": lambda cache: cache.append(*tokens(1, seed=1)),
    "a token of another dtype": lambda cache: cache.append(*tokens(1, dtype=float64, seed=1)),
    "a token without axis": lambda cache: cache.append(*(x[0] for x in tokens(1, seed=1))),
    "some": lambda cache: cache.append(*tokens(3, seed=1)),
    "many": lambda cache: cache.append(*tokens(90, seed=1)),
    "padded": lambda cache: cache.append(*tokens(3, seed=1), lengths=[2]),
    "forgotten": lambda cache: cache.truncate(len(cache) - 1),
    "attended": lambda cache: cache.attend(np.ones((1, G, 1, D), float32)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_a_cache(options, call):
    def make():
        cache = KVCache(1, G, D, value_dim=E, **options)
        for i in range(3):
            cache.append(*tokens(4, seed=i))
        for i in range(2):
            cache.append(*tokens(1, seed=i))
        return cache

    check_boundaries(make, call, shown, most=400 if call is CALLS["a token"] else 25)


@pytest.mark.parametrize("call", [CALLS["a token"], CALLS["some"], lambda cache: cache.fork()])
@pytest.mark.parametrize("options", [dict(), dict(window=5)], ids=str)
def test_caches_that_share_memory(options, call):
    def make():
        cache = KVCache(1, G, D, value_dim=E, **options)
        cache.append(*tokens(9))
        return cache, cache.fork()

    check_boundaries(make, lambda both: call(both[0]), lambda both: shown(both[1]) + shown(both[0]))
    check_boundaries(make, lambda both: call(both[0]), lambda both: shown(both[0]) + shown(both[1]))


@pytest.mark.parametrize("options", [dict(), dict(window=4, keep=1), dict(window=4, dtype=np.int8)], ids=str)
def test_batches_that_differ(options):
    def make():
        cache = KVCache(2, G, D, value_dim=E, **options)
        cache.append(*tokens(9, 2), lengths=[9, 6])
        return cache

    check_boundaries(make, lambda cache: cache.append(*tokens(3, 2, seed=1), lengths=[1, 3]), shown)
    check_boundaries(make, lambda cache: cache.truncate([9, 5]), shown)


# PagedKVCache.


def paged():
    """Three sequences: one alone, and two that share a page that is not full; and pages that are reserved."""
    cache = PagedKVCache(10, 4, G, D, value_dim=E)
    cache.allocate(tokens=6)
    cache.append(0, *(x[0] for x in tokens(3)))
    cache.append(cache.allocate(), *(x[0] for x in tokens(6, seed=1)))
    cache.fork(1)
    return cache


def all_pages(cache):
    """Who has which page, and which tokens; and, once all are freed, that none is lost."""
    found = [cache.free_pages, repr(cache)]
    for sequence in range(10):
        try:
            found += [cache.length(sequence), cache.pages_of(sequence)]
        except ValueError:
            continue
        if cache.length(sequence):
            eye = np.eye(cache.length(sequence), dtype=bool)
            query = np.ones((G, cache.length(sequence), D), float32)
            found += cache.attend(query, sequence, mask=eye, causal=False, return_lse=True)
    one = cache.allocate()
    found.append(one)
    for sequence in range(one + 1):
        try:
            cache.free(sequence)
        except ValueError:
            continue
    found.append(cache.free_pages)
    assert cache.free_pages == cache.pages
    return found


def packed(*counts):
    key, value = (x[0].swapaxes(0, 1) for x in tokens(sum(counts), seed=5))
    return key, value, np.cumsum([0, *counts])


PAGED_CALLS = {
    "reserved": lambda cache: cache.allocate(tokens=9),
    "freed": lambda cache: cache.free(1),
    "forked": lambda cache: cache.fork(1),
    "forgotten": lambda cache: cache.truncate(1, 2),
    "a token": lambda cache: cache.append(0, *(x[0] for x in tokens(1, seed=5))),
    "a copy": lambda cache: cache.append(1, *(x[0] for x in tokens(1, seed=5))),
    "many": lambda cache: cache.append(1, *(x[0] for x in tokens(17, seed=5))),
    "one each": lambda cache: cache.append([2, 0, 1], *packed(1, 1, 1)[:2]),
    "some each": lambda cache: cache.append([2, 0, 1], *packed(3, 9, 5)),
}


@pytest.mark.parametrize("call", PAGED_CALLS.values(), ids=PAGED_CALLS)
def test_pages(call):
    check_boundaries(paged, call, all_pages)


# The layer.

WIDTH = 8
WEIGHTS = rng(0).standard_normal((2 * D + D + E, WIDTH)), rng(1).standard_normal((WIDTH, 2 * E))


def layer():
    """Two heads of queries on one."""
    return MultiHeadAttention(
        WIDTH, 2, kv_heads=G, head_dim=D, value_dim=E, in_proj_weight=WEIGHTS[0].astype(float32),
        out_proj_weight=WEIGHTS[1].astype(float32), rotary=True,
    )  # fmt: skip


def x(*shape):
    return rng(3).standard_normal((*shape, WIDTH)).astype(float32)


@pytest.mark.parametrize("count", [1, 3, 70])
@pytest.mark.parametrize("options", [dict(), dict(window=5, keep=1), dict(dtype=np.int8, window=5)], ids=str)
def test_a_layer(options, count):
    """A call that is refused takes back what it appended: that may be interrupted, too."""
    layer_of_two = layer()

    def make():
        cache = layer_of_two.new_cache(**options)
        cache.append(*tokens(9))
        return cache

    def right(cache):
        layer_of_two(x(1, count), cache=cache)

    def refused(cache):
        layer_of_two(x(1, count), cache=cache, mask=np.ones((2, 2)))

    check_boundaries(make, right, shown)
    check_boundaries(make, refused, shown, right)


def test_a_layer_with_pages():
    layer_of_two = layer()

    def call(cache, **wrong):
        layer_of_two(x(8), cache=cache, sequences=[2, 0, 1], cu_seqlens=[0, 1, 3, 8], **wrong)

    check_boundaries(paged, call, all_pages)
    check_boundaries(paged, lambda cache: call(cache, mask=np.ones((2, 2))), all_pages, call)


# Signals, at any time.


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such signals")
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("options", [dict(window=256), dict(), dict(window=256, dtype=np.int8)], ids=str)
def test_signals(options, count):
    """However long the call takes, some come while it runs: the alarm is later each time, until it comes too late."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    start = KVCache(1, 8, 128, **options)
    start.append(*rng(0).standard_normal((2, 1, 8, 600, 128)).astype(float32))
    key, value = rng(1).standard_normal((2, 1, 8, count, 128)).astype(float32)
    query = np.ones((1, 8, 1, 128), float32)

    def ask(cache):
        return len(cache), cache.keys.tobytes(), cache.values.tobytes(), cache.attend(query).tobytes()

    running = False

    def alarm(*_):
        if running:
            raise Interrupt

    def begin():
        cache = start.fork()
        cache.append(key, value)  # now its memory is its own
        return cache

    cache = begin()
    states = [ask(cache)]
    cache.append(key, value)
    states.append(ask(cache))
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        for delay in np.geomspace(5e-6, 2e-3, 25):
            cache = begin()
            try:
                running = True
                signal.setitimer(signal.ITIMER_REAL, float(delay))
                cache.append(key, value)
                running = False
            except Interrupt:
                running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert ask(cache) in states
    finally:
        signal.signal(signal.SIGALRM, before)
