/* In place of csrc/kernel.c, which is kernel_itself.h then: the same tables of functions, which are timed.  What a thread
 * has spent in each stage is in a row of its own of sdpa_stage_ticks; benchmarks/studies/stages.py reads them. */
#define sdpa_kernel_ itself_ /* the table has another name */
#include "kernel_itself.h"
#undef sdpa_kernel_

#include <stdint.h>
#include <time.h>

enum { STAGES = 16, MOST_THREADS = 256 };

#define SHARED __attribute__((weak, visibility("default"))) /* one of all kernels */

SHARED int sdpa_stage_threads;
SHARED uint64_t sdpa_stage_ticks[MOST_THREADS][STAGES];
SHARED _Thread_local int sdpa_stage_thread; /* its row and one: 0 before it has any */

SHARED uint64_t sdpa_stage_now(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc(); /* 20 cycles; asking the system takes 25 ns */
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

static void spend(int stage, uint64_t begin)
{
    if (!sdpa_stage_thread) sdpa_stage_thread = 1 + __atomic_fetch_add(&sdpa_stage_threads, 1, __ATOMIC_RELAXED);
    if (sdpa_stage_thread <= MOST_THREADS) sdpa_stage_ticks[sdpa_stage_thread - 1][stage] += sdpa_stage_now() - begin;
}

#define ITSELF PASTE(itself_, SDPA_ISA, SDPA_REAL_BYTES, SDPA_FEW_ROWS)
#define TABLE PASTE(sdpa_kernel_, SDPA_ISA, SDPA_REAL_BYTES, SDPA_FEW_ROWS)

/* The numbers are the places of NAMES in stages.py. */
#define FOR_STAGES(timed)                                                                                              \
    timed(begin_forward, 0);                                                                                           \
    timed(scores, 1);                                                                                                  \
    timed(softmax_block, 2);                                                                                           \
    timed(accumulate, 3);                                                                                              \
    timed(accumulate_seen, 3);                                                                                         \
    timed(add_poison, 4);                                                                                              \
    timed(close_sums, 4);                                                                                              \
    timed(start, 4);                                                                                                   \
    timed(write_out, 4)
#define FOR_BACKWARD_STAGES(timed)                                                                                     \
    timed(begin_backward, 0);                                                                                          \
    timed(score_gradients, 5);                                                                                         \
    timed(query_gradient, 6);                                                                                          \
    timed(key_gradients, 7);                                                                                           \
    timed(write_query_gradient, 4);                                                                                    \
    timed(write_key_gradients, 4)

#define TIMED_STAGE(name, stage, input, task)                                                                          \
    static void timed_##name(const input *in, task *t)                                                                 \
    {                                                                                                                  \
        const uint64_t begin = sdpa_stage_now();                                                                       \
        ITSELF.name(in, t);                                                                                            \
        spend(stage, begin);                                                                                           \
    }                                                                                                                  \
    _Static_assert(stage < STAGES, #name)
#define TIMED(name, stage) TIMED_STAGE(name, stage, sdpa_input, sdpa_task)
#define TIMED_BACKWARD(name, stage) TIMED_STAGE(name, stage, sdpa_backward_input, sdpa_backward_task)
FOR_STAGES(TIMED);
FOR_BACKWARD_STAGES(TIMED_BACKWARD);

static int timed_write_at_once(const sdpa_input *in, sdpa_task *t)
{
    const uint64_t begin = sdpa_stage_now();
    const int written = ITSELF.write_at_once(in, t);
    spend(3, begin);
    return written;
}

static void timed_join(const sdpa_input *in, const sdpa_task *t, const sdpa_task *part)
{
    const uint64_t begin = sdpa_stage_now();
    ITSELF.join(in, t, part);
    spend(4, begin);
}

static void timed_linear(const sdpa_linear *l, int64_t row, int rows, int64_t vector, void *scratch, int64_t *copied)
{
    const uint64_t begin = sdpa_stage_now();
    ITSELF.linear(l, row, rows, vector, scratch, copied);
    spend(8, begin);
}

static void timed_norm(const sdpa_norm *n, int64_t row, int64_t rows, void *scratch)
{
    const uint64_t begin = sdpa_stage_now();
    ITSELF.norm(n, row, rows, scratch);
    spend(9, begin);
}

sdpa_kernel TABLE; /* constant for all others, once the library is loaded */

__attribute__((constructor)) static void time_stages(void)
{
    TABLE = ITSELF;
#define TIME(name, stage)                                                                                              \
    if (ITSELF.name) TABLE.name = timed_##name
    FOR_STAGES(TIME);
    FOR_BACKWARD_STAGES(TIME);
    TIME(write_at_once, );
    TIME(join, );
    TIME(linear, );
    TIME(norm, );
#undef TIME
}
