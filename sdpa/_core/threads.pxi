# Units of work shared among threads, with scratch for each of these, and stopped by signals.  Part of _core.pyx.
#
# Every loop over units goes through here:    hire(&crew, ...)    with nogil: share(&crew, ...)    return dismiss(&crew)
#
# Python runs handlers of signals in its main thread alone.  Where that has called, it lets them run every 50 ms; where
# one raises (KeyboardInterrupt), all threads leave off between two units, or two blocks of one, and `dismiss` passes
# the exception on.
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.time cimport monotonic_ns
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memset
from typing import NamedTuple
import numpy as np

cdef extern from "Python.h":
    int PyErr_CheckSignals()  # without `except`: what it raises stays set until `dismiss`
    unsigned long PyThread_get_thread_ident() nogil


ctypedef void (*unit_work)(const void *call, int64_t unit, char *scratch) noexcept nogil
ctypedef double (*unit_weight)(const void *call, int64_t unit) noexcept nogil

cdef struct crew:
    # Who shares the units of a call.
    sdpa_team team
    int threads
    char *memory
    char *scratch  # of the first thread, on a cache line; those of the others follow
    char *beside  # what all share
    size_t bytes_each
    int64_t hired, own  # when, and how long the caller's own parts took, in ns
    unit_weight weigh  # multiply-adds of a unit, where units differ; for `rehearse` alone
    sdpa_watch watch


cdef enum sharing:
    EQUALLY  # each thread a stretch of units, the same in the next call
    BY_CHUNKS  # whoever comes first
    NEIGHBOURS  # the same, with long stretches first


# The scratch of a thread begins with what it says of copies in it; with all bits set that is: nothing was copied.
cdef size_t HEAD = SDPA_COPIES * sizeof(sdpa_copied)

# The clock is looked at (25 ns) after so many multiply-adds, which take 30 µs on a fast thread and 1 ms in plain C; and
# signals are looked for after so many ns.  For that the GIL is taken: where others keep one waiting (5 ms, if they run
# Python), signals are looked for less often.
cdef int64_t LOOK_AT_CLOCK = 1 << 22, LOOK_FOR_SIGNALS = 50_000_000, SELDOM = 3, NEVER = 1 << 62

# Threads wait for the next call at the CPU's cost for some time, and then sleep.  Waking one takes 10 to 25 us: work of
# less than twice that is done alone (measured: 19 us of one thread took two that slept 28, 96 us 75).
cdef double WAKING_US = 50
cdef int64_t awake_ns = 0, awake_until = 0  # for so long after a call; until then, by monotonic_ns
# Where others have work for the same CPUs, the system takes one from a thread for some ms, and its team waits.  After a
# call that has waited for longer than it takes to wake or start its threads, calls of less work are done alone for a
# while.  What that gives is in the last table of csrc/README.md.
cdef double CROWDED_US = 4_000, LONG = 1e9
cdef int64_t WAITS_NS = 500_000, STARTS_NS = 30_000, CROWDED_NS = 50_000_000, crowded_until = 0

cdef unsigned long main_thread = 0
cdef bint in_child = False  # of a fork

# Threads of a team, some of which may have no work: as many as another library has, or 1; and what the last call was
# allowed.  Calls that come at once may read what another has written: then threads are started again.
cdef int least_in_team = 1, most_in_team = 1


def know_threads(unsigned long main, bint forked=False):
    """`main` is Python's main thread: signals are handled there; `forked`: this is a child that begins.  Returns the
    CPUs among which OpenMP pins threads, 0 where it does not."""
    global main_thread, in_child, awake_ns, usual_until
    main_thread, in_child, awake_ns = main, forked, sdpa_awake_ns()
    if forked:
        usual_until = 0  # the number of the parent's threads is not that of the child's
        sdpa_after_fork()
    return sdpa_pinned_cpus()


cdef bint are_awaited(double us, int64_t now) noexcept:
    """Whether work that takes one thread so many us would wait for others for longer than they save: until they are
    woken, or have a CPU.  A call that comes soon after another wakes them all the same: then there are many."""
    global awake_until
    if us < WAKING_US and now >= awake_until:
        awake_until = now + <int64_t>(1000 * us) + awake_ns
        return True
    return us < CROWDED_US and now < crowded_until


cdef int hire(crew *c, int threads, double us, size_t bytes_each, size_t beside) except -1:
    """Up to `threads` threads for work that takes one of them so many us, roughly, each with so much scratch; and
    memory beside that."""
    cdef size_t needed
    if threads > 1 and not is_rehearsed():
        c.hired, c.own = monotonic_ns(), 0
        if are_awaited(us, c.hired):
            threads = 1
    c.threads = sdpa_hire(&c.team, 1 if is_rehearsed() else threads, least_in_team, most_in_team)
    if is_rehearsed():
        c.threads = threads
    c.bytes_each = (max(bytes_each, HEAD) + 63) // 64 * 64
    needed = c.threads * c.bytes_each + beside
    c.memory = <char *>PyMem_RawMalloc(needed + 64)  # not touched here: a page lies where the thread runs that is first
    if c.memory == NULL:
        sdpa_dismiss(&c.team)
        raise MemoryError(f"{needed} bytes of scratch for {c.threads} threads")
    c.scratch = c.memory + (-<int64_t><uintptr_t>c.memory & 63)
    c.beside = c.scratch + c.threads * c.bytes_each
    c.weigh = NULL
    c.watch.left, c.watch.next = LOOK_AT_CLOCK, 0
    sdpa_stop(&c.watch, 0)
    return 0


cdef int dismiss(crew *c) except -1:
    global awake_until, crowded_until
    cdef int64_t now
    if c.threads > 1 and not is_rehearsed():
        now = monotonic_ns()
        awake_until = now + awake_ns
        if now - c.hired > 2 * c.own + WAITS_NS + c.threads * STARTS_NS:
            crowded_until = now + CROWDED_NS
    sdpa_dismiss(&c.team)
    PyMem_RawFree(c.memory)
    return -1 if sdpa_stops(&c.watch) else 0


cdef struct sharing_units:
    # What the threads of a crew do.
    crew *crew
    unit_work work
    const void *call
    int64_t units, products, chunk
    sharing how
    char apart[64]
    int64_t next  # unit, where whoever comes first takes it; on a cache line of its own
    char apart_too[64]


cdef void share(
    crew *c, unit_work work, const void *call, int64_t units, sharing how, int chunk, int64_t products
) noexcept nogil:
    """work(call, unit, scratch) for all units.  `products`: multiply-adds of one, but for those that it tells the watch
    of; roughly."""
    cdef sharing_units s
    s.crew, s.work, s.call, s.units, s.products, s.how, s.next = c, work, call, units, products, how, 0
    s.chunk = chunk if how == BY_CHUNKS else 0
    if is_rehearsed():
        write_down(&s)
    elif c.threads == 1:
        do_part(&s, 0)
    else:
        sdpa_run(&c.team, do_part, &s)


cdef void do_part(void *of, int part) noexcept nogil:
    cdef sharing_units *s = <sharing_units *>of
    cdef crew *c = s.crew
    cdef char *scratch = c.scratch + (0 if c.threads == 1 else sdpa_this_member()) * c.bytes_each
    cdef int64_t unit, count = 1, begun = monotonic_ns() if part == 0 else 0
    memset(scratch, 0xFF, HEAD)
    if s.how == EQUALLY or c.threads == 1:
        do_units(s, part * s.units // c.threads, (part + 1) * s.units // c.threads, scratch)
        count = 0
    while count > 0:
        unit = sdpa_claim(&s.next, s.units, s.chunk, c.threads, &count)
        do_units(s, unit, unit + count, scratch)
    if part == 0:
        c.own += monotonic_ns() - begun


cdef inline void do_units(sharing_units *s, int64_t begin, int64_t end, char *scratch) noexcept nogil:
    cdef int64_t unit
    for unit in range(begin, end):
        if not stopped(&s.crew.watch, s.products):
            s.work(s.call, unit, scratch)


class Region(NamedTuple):
    """A loop over units that threads share."""

    threads: int
    sharing: str
    chunk: int  # units that a thread takes at once
    work: np.ndarray  # multiply-adds of each unit, with those that a softmax is worth; roughly


cdef list regions = None
cdef unsigned long rehearsing = 0  # the thread that does


def rehearse(function):
    """What threads would share in function(): a list of Regions.  It is called, but nothing is computed: what arrays
    hold then means nothing.  Calls of other threads are computed."""
    global regions, rehearsing
    if rehearsing:
        raise RuntimeError("another rehearsal goes on")
    regions, rehearsing = [], PyThread_get_thread_ident()
    try:
        function()
    finally:
        rehearsing = 0
    return regions


cdef inline bint is_rehearsed() noexcept nogil:
    return rehearsing != 0 and rehearsing == PyThread_get_thread_ident()


cdef void write_down(const sharing_units *s) noexcept with gil:
    cdef int64_t unit
    work = np.full(s.units, float(max(s.products, 1)))
    cdef double[::1] each = work
    for unit in range(s.units if s.crew.weigh != NULL else 0):
        each[unit] = s.crew.weigh(s.call, unit)
    regions.append(Region(s.crew.threads, ("equally", "by chunks", "neighbours")[s.how], s.chunk, work))


cdef inline bint stopped(sdpa_watch *watch, int64_t products) noexcept nogil:
    """Whether to leave off; before so many multiply-adds."""
    if sdpa_this_member() == 0:
        watch.left -= products
        if watch.left < 0:
            look_up(watch)
    return sdpa_stops(watch)


cdef void look_up(sdpa_watch *watch) noexcept nogil:
    cdef int64_t now = monotonic_ns(), wait = LOOK_FOR_SIGNALS
    watch.left = LOOK_AT_CLOCK
    if watch.next and now < watch.next:
        return
    if watch.next:
        handle_signals(watch)
        wait = max(wait, min(SELDOM * wait, 32 * (monotonic_ns() - now)))
    watch.next = now + wait


cdef void handle_signals(sdpa_watch *watch) noexcept with gil:
    sdpa_stop(watch, PyErr_CheckSignals() != 0)
    if sdpa_stops(watch) or PyThread_get_thread_ident() != main_thread:
        watch.left = NEVER


# ---- Memory that all threads will read

cdef size_t PAGE = 4096, HUGE_PAGE = 2 << 20


cdef struct touch_call:
    char *begin
    int64_t bytes
    int threads


cdef void touch_pages(const void *of, int64_t thread, char *scratch) noexcept nogil:
    """Every so many huge pages one.  Neighbours of these are of threads far from each other: where threads are pinned
    in their order, those of the first half are on another socket than those of the second."""
    cdef const touch_call *call = <const touch_call *>of
    cdef int64_t half = (call.threads + 1) // 2, at, end
    cdef int64_t number = 2 * thread if thread < half else 2 * (thread - half) + 1
    cdef int64_t before = <int64_t>(<uintptr_t>call.begin & (HUGE_PAGE - 1))  # of the first huge page
    while number * <int64_t>HUGE_PAGE - before < call.bytes:
        at = max(<int64_t>0, number * <int64_t>HUGE_PAGE - before)
        end = min(call.bytes, (number + 1) * <int64_t>HUGE_PAGE - before)
        while at < end:
            call.begin[at] = 0
            at += PAGE
        number += call.threads


def touch(cnp.ndarray array not None, int threads):
    """The pages of an array without gaps, that nobody has touched, are touched by so many threads in turns."""
    cdef crew c
    cdef touch_call call
    hire(&c, threads, LONG, 0, 0)
    call.begin, call.bytes, call.threads = cnp.PyArray_BYTES(array), cnp.PyArray_NBYTES(array), c.threads
    with nogil:
        share(&c, touch_pages, &call, c.threads, EQUALLY, 1, 0)
    dismiss(&c)
