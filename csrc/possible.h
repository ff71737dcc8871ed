/* How many threads an OpenMP runtime is asked for.  Part of threads.h and lender.h; POSIX. */
#ifndef SDPA_POSSIBLE_H
#define SDPA_POSSIBLE_H

#include <stdlib.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

typedef struct {
    pthread_t thread;
    pthread_mutex_t *gate;
    volatile long id;
} sdpa_trial;

static void *sdpa_wait_at_gate(void *of)
{
    sdpa_trial *trial = (sdpa_trial *)of;
#ifdef __linux__
    trial->id = syscall(SYS_gettid);
#endif
    pthread_mutex_lock(trial->gate);
    pthread_mutex_unlock(trial->gate);
    return NULL;
}

/* Whoever joins a thread may come before the system has given back its place. */
static void sdpa_wait_for_end(const sdpa_trial *trial)
{
    enum { MOST_LOOKS = 100000 };
    pthread_join(trial->thread, NULL);
#ifdef __linux__
    for (int i = 0; i < MOST_LOOKS && syscall(SYS_tgkill, (long)getpid(), trial->id, 0) == 0; ++i) sched_yield();
#endif
}

/* How many of `wanted` threads there can be at once beside those that there are: by trying. */
static int sdpa_try_threads(int wanted)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    sdpa_trial *trial = (sdpa_trial *)malloc((size_t)wanted * sizeof *trial);
    int started = 0;
    if (!trial) return 0;
    pthread_mutex_lock(&gate);
    for (; started < wanted; ++started) {
        trial[started].gate = &gate;
        if (pthread_create(&trial[started].thread, NULL, sdpa_wait_at_gate, &trial[started]) != 0) break;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; ++i) sdpa_wait_for_end(&trial[i]);
    free(trial);
    return started;
}

/* A team for `threads` threads, or for as many as the system lets a call have: OpenMP ends the process where it cannot
 * start those it is asked for.  It keeps for each thread that calls it those of its last team, so only what a larger one
 * lacks is tried.  From a smaller team threads would end, and the next large one would start them again, 25 us each: so
 * it stays as it was, from `least` to `most`, and some of it have no work. */
static inline int sdpa_team_size(int threads, int least, int most)
{
    static __thread int last_team = 1;
    int size = last_team < most ? last_team : most;
    if (size < least) size = least;
    if (size < threads) size = threads;
    if (size > last_team) size = last_team + sdpa_try_threads(size - last_team);
    return last_team = size;
}

#endif
