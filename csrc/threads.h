/* The threads of a call, by OpenMP, by a pool of our own, or none: what sdpa/_core/threads.pxi needs of the system, and
 * Cython cannot say; part of _core.c alone.
 *
 *     sdpa_hire(&team, threads, least, most)
 *                                   up to so many, with the caller; says how many there are.  Where teams cannot change
 *                                   without starting threads, it may have others beside them, from `least` to `most`
 *     sdpa_run(&team, part, of)     part(of, 0) ... part(of, members - 1)
 *     sdpa_dismiss(&team)
 *     sdpa_this_member()            which one of the team runs this; the caller's thread is 0
 *     sdpa_after_fork()             in the child, by the thread that it began with */
#ifndef SDPA_THREADS_H
#define SDPA_THREADS_H

#include <stdint.h>
#include <stdlib.h>
#ifdef _MSC_VER
#include <intrin.h>
#endif

/* Of one call: whether its threads shall leave off.  All look at `stop`; what follows belongs to the caller's thread,
 * and lies on another cache line. */
struct sdpa_watch {
    int stop; /* by sdpa_stop and sdpa_stops */
    char apart[60];
    int64_t left; /* multiply-adds until it looks at the clock again */
    int64_t next; /* when it looks for signals again, in ns; 0: it did not look at the clock yet */
};

typedef void (*sdpa_duty)(void *of, int part);

#ifdef _MSC_VER
static inline int64_t sdpa_load(int64_t *of) { return *(volatile int64_t *)of; }
static inline int sdpa_replace(int64_t *of, int64_t old, int64_t new)
{
    return _InterlockedCompareExchange64(of, new, old) == old;
}
static inline void sdpa_stop(struct sdpa_watch *watch, int stop) { *(volatile int *)&watch->stop = stop; }
static inline int sdpa_stops(const struct sdpa_watch *watch) { return *(const volatile int *)&watch->stop; }
#else
static inline int64_t sdpa_load(int64_t *of) { return __atomic_load_n(of, __ATOMIC_RELAXED); }
static inline int sdpa_replace(int64_t *of, int64_t old, int64_t new)
{
    return __atomic_compare_exchange_n(of, &old, new, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
static inline void sdpa_stop(struct sdpa_watch *watch, int stop)
{
    __atomic_store_n(&watch->stop, stop, __ATOMIC_RELAXED);
}
static inline int sdpa_stops(const struct sdpa_watch *watch) { return __atomic_load_n(&watch->stop, __ATOMIC_RELAXED); }
#endif

/* Of two threads that come here, whether this is the second: it sees what the first one wrote before. */
static inline int sdpa_comes_second(int *gate)
{
#ifdef _MSC_VER
    return _InterlockedExchange((volatile long *)gate, 1) != 0;
#else
    return __atomic_exchange_n(gate, 1, __ATOMIC_ACQ_REL) != 0;
#endif
}

/* The first of the next units, of which `*count` are the caller's: `chunk` of them, or with 0 long stretches first; and
 * none where there are no more. */
static inline int64_t sdpa_claim(int64_t *next, int64_t end, int64_t chunk, int threads, int64_t *count)
{
    int64_t first, left;
    do {
        first = sdpa_load(next);
        left = end - first;
        *count = chunk ? chunk : (left + threads - 1) / threads;
        if (*count > left) *count = left;
    } while (left > 0 && !sdpa_replace(next, first, first + *count));
    return first;
}

#if defined(SDPA_POOL)
#include "pool.h"
#else
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    int members; /* with the caller */
    int size;    /* with those that have no work */
} sdpa_team;

/* CPUs that OpenMP was allowed to use, where it pins threads to them: the affinity of a thread is then one CPU, which
 * says nothing of the process.  0 where it pins none. */
static inline int sdpa_pinned_cpus(void)
{
#if defined(_OPENMP) && _OPENMP >= 201307
    if (omp_get_proc_bind() != omp_proc_bind_false) return omp_get_num_procs();
#endif
    return 0;
}

/* For so long after a call threads stay awake: with libgomp for 2 ms at least, if the program does not forbid it. */
static inline int64_t sdpa_awake_ns(void)
{
    const char *policy = getenv("OMP_WAIT_POLICY");
    return policy && (*policy == 'p' || *policy == 'P') ? 0 : 1000000; /* "passive" */
}

#if defined(_OPENMP) && !defined(_WIN32)
#include "possible.h"
#else
static inline int sdpa_team_size(int threads, int least, int most)
{
    (void)least, (void)most;
    return threads;
}
#endif

static inline int sdpa_hire(sdpa_team *team, int threads, int least, int most)
{
    team->size = threads > 1 ? sdpa_team_size(threads, least, most) : 1;
    return team->members = threads < team->size ? threads : team->size;
}

static inline void sdpa_dismiss(sdpa_team *team) { team->members = 0; }

static inline void sdpa_after_fork(void) {} /* sdpa/_runtime/threads.py asks for one thread there */

static inline int sdpa_this_member(void)
{
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* OpenMP may give fewer threads than it is asked for. */
static void sdpa_run(sdpa_team *team, sdpa_duty part, void *of)
{
#ifdef _OPENMP
#pragma omp parallel num_threads(team->size)
    for (int i = omp_get_thread_num(); i < team->members; i += omp_get_num_threads()) part(of, i);
#else
    for (int i = 0; i < team->members; ++i) part(of, i);
#endif
}
#endif

#endif
