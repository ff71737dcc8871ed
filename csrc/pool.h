/* The interface of threads.h by a pool of threads of the library's own, for builds that shall need no OpenMP runtime
 * (SDPA_THREADS=pool), as wheels are.  Needs GCC or clang, and POSIX threads or those of Windows.
 *
 * There are never more workers than the largest call asked for: calls from several threads at once share them, and one
 * that finds none idle computes alone.  A caller never waits for a worker that has not begun: it takes the part back
 * and does it.  So what a call may lose to another process is what its workers have begun, and not the time until the
 * system lets them begin.  A forked child has none of these threads, and starts its own.
 *
 * Where torch has loaded an OpenMP runtime, its threads are borrowed instead (lender.h); not in a forked child, where it
 * would wait for threads that are not there. */
#ifndef SDPA_POOL_H
#define SDPA_POOL_H

#include "compiler.h"
#include "lender.h"
#include "threads.h"

#include <fenv.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#undef far /* words of 16-bit Windows */
#undef near
typedef SRWLOCK sdpa_lock;
typedef CONDITION_VARIABLE sdpa_bell;
#define SDPA_LOCK_INIT SRWLOCK_INIT
#define sdpa_acquire AcquireSRWLockExclusive
#define sdpa_release ReleaseSRWLockExclusive
#define sdpa_await(bell, lock) SleepConditionVariableSRW(bell, lock, INFINITE, 0)
#define sdpa_ring WakeConditionVariable
#define sdpa_new_bell InitializeConditionVariable
#define sdpa_new_lock InitializeSRWLock
#else
#include <pthread.h>
#include <signal.h>
#include <time.h>
typedef pthread_mutex_t sdpa_lock;
typedef pthread_cond_t sdpa_bell;
#define SDPA_LOCK_INIT PTHREAD_MUTEX_INITIALIZER
#define sdpa_acquire pthread_mutex_lock
#define sdpa_release pthread_mutex_unlock
#define sdpa_await pthread_cond_wait
#define sdpa_ring pthread_cond_signal
#define sdpa_new_bell(bell) pthread_cond_init(bell, NULL)
#define sdpa_new_lock(lock) pthread_mutex_init(lock, NULL)
#endif

/* Who waits sleeps after so many ns, about what it takes to wake a thread; not tuned further.  The next call may come
 * within that time, and another process does not lose more by it. */
#ifndef SDPA_SPIN
#define SDPA_SPIN 50000
#endif
#define SDPA_STACK ((size_t)2 << 20) /* of a worker; some systems give less than kernels may want */

/* Of a worker.  Its own wait is for POSTED, the caller's for the end of RUNNING; the last two say that who waits for
 * that sleeps. */
enum sdpa_state { SDPA_IDLE, SDPA_POSTED, SDPA_RUNNING, SDPA_ASLEEP, SDPA_AWAITED };

typedef struct sdpa_worker {
    struct sdpa_worker *next; /* of those that are idle, or of a team */
    int state, number;        /* number: in its team, from 1 */
    sdpa_duty part;
    void *of;
    fenv_t *rounding; /* of the caller: all threads of a call round alike */
    sdpa_lock lock;
    sdpa_bell bell;
    char apart[64]; /* what others wait for lies on another cache line */
} sdpa_worker;

typedef struct {
    sdpa_worker *first, *last;
    const sdpa_lender *lender; /* of all threads but the caller's, or NULL: they are the workers from `first` on */
    int members;               /* with the caller */
    int size;                  /* of the lender's team */
} sdpa_team;

static struct {
    sdpa_lock lock;
    sdpa_worker *idle; /* those that worked last come first: what they need is in their caches */
    int workers, watches_forks, is_child;
} sdpa_pool = {SDPA_LOCK_INIT, NULL, 0, 0, 0};

static inline int sdpa_this_member(void) { return sdpa_member; }

static inline void sdpa_after_fork(void) { sdpa_pool.is_child = 1; }

static inline int64_t sdpa_awake_ns(void) { return SDPA_SPIN; }

/* Nothing pins its threads. */
static inline int sdpa_pinned_cpus(void) { return 0; }

static inline int64_t sdpa_now(void)
{
#ifdef _WIN32
    LARGE_INTEGER ticks, each_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&each_second);
    return (int64_t)((double)ticks.QuadPart * 1e9 / (double)each_second.QuadPart);
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
#endif
}

static inline int sdpa_state_of(const sdpa_worker *w) { return __atomic_load_n(&w->state, __ATOMIC_ACQUIRE); }

static inline int sdpa_change(sdpa_worker *w, int from, int to)
{
    return __atomic_compare_exchange_n(&w->state, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Whoever sleeps until then wakes.  It holds the lock between its last look at the state and its sleep. */
static void sdpa_set(sdpa_worker *w, int state)
{
    int before = __atomic_exchange_n(&w->state, state, __ATOMIC_ACQ_REL);
    if (before != SDPA_ASLEEP && before != SDPA_AWAITED) return;
    sdpa_acquire(&w->lock);
    sdpa_release(&w->lock);
    sdpa_ring(&w->bell);
}

/* Until the state is another one: for a while at the CPU's cost, then asleep, which the state `sleeping` tells. */
static void sdpa_wait_while(sdpa_worker *w, int state, int sleeping)
{
    int64_t end = sdpa_now() + SDPA_SPIN;
    while (sdpa_state_of(w) == state) {
        if (sdpa_now() < end) {
            for (int i = 0; i < 16 && sdpa_state_of(w) == state; ++i) PAUSE();
        } else if (sdpa_change(w, state, sleeping)) {
            sdpa_acquire(&w->lock);
            while (sdpa_state_of(w) == sleeping) sdpa_await(&w->bell, &w->lock);
            sdpa_release(&w->lock);
        }
    }
}

/* What is denormal, and how numbers are rounded, is the caller's choice, and a thread's own. */
static void sdpa_work(sdpa_worker *w)
{
    sdpa_member = w->number;
    fesetenv(w->rounding);
    w->part(w->of, w->number);
    sdpa_set(w, SDPA_IDLE);
}

#ifdef _WIN32
static DWORD WINAPI sdpa_live(void *of)
#else
static void *sdpa_live(void *of)
#endif
{
    sdpa_worker *w = (sdpa_worker *)of;
    for (;;) {
        sdpa_wait_while(w, SDPA_IDLE, SDPA_ASLEEP);
        if (sdpa_change(w, SDPA_POSTED, SDPA_RUNNING)) sdpa_work(w);
    }
    return 0;
}

#ifdef _WIN32
static int sdpa_start(sdpa_worker *w)
{
    HANDLE thread = CreateThread(NULL, SDPA_STACK, sdpa_live, w, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return thread && CloseHandle(thread);
}
#else
/* Signals are for the threads of the program, but for those that the worker itself causes. */
static int sdpa_start(sdpa_worker *w)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t blocked, before;
    pthread_attr_t attributes;
    pthread_t thread;
    int failed;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof *own; ++i) sigdelset(&blocked, own[i]);
    if (pthread_attr_init(&attributes) != 0) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, SDPA_STACK);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    failed = pthread_create(&thread, &attributes, sdpa_live, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !failed;
}

static void sdpa_before_fork(void) { sdpa_acquire(&sdpa_pool.lock); }
static void sdpa_in_parent(void) { sdpa_release(&sdpa_pool.lock); }

/* What the workers of the parent were is lost, and small. */
static void sdpa_in_child(void)
{
    sdpa_new_lock(&sdpa_pool.lock);
    sdpa_pool.idle = NULL;
    sdpa_pool.workers = 0;
    sdpa_after_fork();
}
#endif

/* NULL where the system refuses; with the lock of the pool. */
static sdpa_worker *sdpa_new_worker(void)
{
    sdpa_worker *w;
#ifndef _WIN32
    if (!sdpa_pool.watches_forks && pthread_atfork(sdpa_before_fork, sdpa_in_parent, sdpa_in_child) != 0) return NULL;
#endif
    sdpa_pool.watches_forks = 1;
    w = (sdpa_worker *)calloc(1, sizeof *w);
    if (!w) return NULL;
    sdpa_new_lock(&w->lock);
    sdpa_new_bell(&w->bell);
    if (!sdpa_start(w)) {
        free(w);
        return NULL;
    }
    ++sdpa_pool.workers;
    return w;
}

/* Returns the members, the caller included, which may be fewer than `threads`. */
static int sdpa_hire(sdpa_team *team, int threads, int least, int most)
{
    team->first = team->last = NULL;
    team->lender = NULL;
    team->members = team->size = 1;
    if (threads == 1) return 1;
    sdpa_acquire(&sdpa_pool.lock);
    team->lender = sdpa_pool.is_child ? NULL : sdpa_find_lender();
    while (!team->lender && team->members < threads) {
        sdpa_worker *w = sdpa_pool.idle;
        if (w)
            sdpa_pool.idle = w->next;
        else if (sdpa_pool.workers >= threads - 1 || !(w = sdpa_new_worker()))
            break;
        if (team->last)
            team->last->next = w;
        else
            team->first = w;
        team->last = w;
        w->number = team->members++;
    }
    if (team->last) team->last->next = NULL;
    sdpa_release(&sdpa_pool.lock);
    if (team->lender) {
        team->size = sdpa_team_size(threads, least, most);
        team->members = threads < team->size ? threads : team->size;
    }
    return team->members;
}

static void sdpa_dismiss(sdpa_team *team)
{
    if (!team->first) return;
    sdpa_acquire(&sdpa_pool.lock);
    team->last->next = sdpa_pool.idle; /* in their order, so that the next call of as many gives each the same part */
    sdpa_pool.idle = team->first;
    sdpa_release(&sdpa_pool.lock);
}

static void sdpa_run(sdpa_team *team, sdpa_duty part, void *of)
{
    sdpa_worker *w;
    fenv_t rounding;
    if (team->lender) {
        sdpa_run_on_loan(team->lender, team->size, team->members, part, of);
        return;
    }
    fegetenv(&rounding);
    for (w = team->first; w; w = w->next) {
        w->part = part;
        w->of = of;
        w->rounding = &rounding;
        sdpa_set(w, SDPA_POSTED);
    }
    part(of, 0);
    for (w = team->first; w; w = w->next) {
        if (sdpa_change(w, SDPA_POSTED, SDPA_IDLE))
            part(of, w->number);
        else
            sdpa_wait_while(w, SDPA_RUNNING, SDPA_AWAITED);
    }
}

#endif
