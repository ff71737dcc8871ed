/* Beside torch the pool (pool.h) borrows the threads of its OpenMP runtime, as builds with OpenMP do: after each loop of
 * torch they spin for some milliseconds, and threads of our own would wait for their CPUs (the table at the end of
 * README.md).  torch brings a libgomp under its plain name, which can be found where it is loaded; scikit-learn's has a
 * name of its own, and is left alone.  Linux alone. */
#ifndef SDPA_LENDER_H
#define SDPA_LENDER_H

#include <stddef.h>

typedef void (*sdpa_duty)(void *of, int part); /* as in threads.h, which needs this file */

static __thread int sdpa_member; /* which one of its team this thread is; the caller is 0 */

#ifdef __linux__
#include "possible.h"

#include <dlfcn.h>
#include <fenv.h>

/* What a libgomp offers: to call function(of) on up to so many threads; which of them this is, of how many. */
typedef struct {
    void (*run)(void (*function)(void *), void *of, unsigned threads, unsigned flags);
    int (*member)(void), (*members)(void);
} sdpa_lender;

/* Some calls go by until it is looked for again, which takes a microsecond. */
enum { SDPA_LOOK_FOR_LENDER = 32 };

/* That which is loaded, or NULL.  With the lock of the pool. */
static const sdpa_lender *sdpa_find_lender(void)
{
    static sdpa_lender found;
    static int left = 0;
    void *library;
    if (found.run) return &found;
    if (left-- > 0) return NULL;
    left = SDPA_LOOK_FOR_LENDER;
    library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD); /* never closed: it stays as long as it is used */
    if (!library) return NULL;
    *(void **)&found.member = dlsym(library, "omp_get_thread_num");
    *(void **)&found.members = dlsym(library, "omp_get_num_threads");
    if (found.member && found.members) *(void **)&found.run = dlsym(library, "GOMP_parallel");
    return found.run ? &found : NULL;
}

/* A call, on borrowed threads. */
typedef struct {
    const sdpa_lender *lender;
    sdpa_duty part;
    void *of;
    int members;
    fenv_t rounding;
} sdpa_loan;

/* There may be fewer threads than were asked for.  How they round is their owner's choice. */
static void sdpa_work_on_loan(void *of)
{
    sdpa_loan *loan = (sdpa_loan *)of;
    const int step = loan->lender->members();
    fenv_t own;
    fegetenv(&own);
    fesetenv(&loan->rounding);
    sdpa_member = loan->lender->member();
    for (int i = sdpa_member; i < loan->members; i += step) loan->part(loan->of, i);
    sdpa_member = 0;
    fesetenv(&own);
}

static void sdpa_run_on_loan(const sdpa_lender *lender, int size, int members, sdpa_duty part, void *of)
{
    sdpa_loan loan = {.lender = lender, .part = part, .of = of, .members = members};
    fegetenv(&loan.rounding);
    lender->run(sdpa_work_on_loan, &loan, (unsigned)size, 0);
}

#else
typedef void sdpa_lender;
static const sdpa_lender *sdpa_find_lender(void) { return NULL; }
static int sdpa_team_size(int threads, int least, int most)
{
    (void)least, (void)most;
    return threads;
}
static void sdpa_run_on_loan(const sdpa_lender *lender, int size, int members, sdpa_duty part, void *of)
{
    (void)lender, (void)size, (void)members, (void)part, (void)of;
}
#endif

#endif
