# Mirrors csrc/sdpa.h: the same names in the same order.
from libc.stdint cimport int64_t

cdef extern from "sdpa.h" nogil:
    int SDPA_BOOL, SDPA_FLOAT16, SDPA_BFLOAT16, SDPA_FLOAT32, SDPA_FLOAT64
    int SDPA_MAX_BUNDLE
    int SDPA_FOR_FLOAT, SDPA_FOR_DOUBLE, SDPA_FOR_BFLOAT16, SDPA_PURPOSES

    ctypedef struct sdpa_array:
        char *data
        ptrdiff_t batch, head, row, column
        int dtype, itemsize

    ctypedef struct sdpa_problem:
        int64_t batches, heads, kv_heads, q_len, kv_len, dim, value_dim
        sdpa_array query, key, value, out, weights, lse, mask, bias
        const int64_t *begin_shift
        const int64_t *end_shift
        ptrdiff_t shift_step
        const int64_t *q_offset
        const int64_t *kv_lengths
        double scale, softcap
        const double *sinks
        const double *alibi_slopes
        int64_t tasks_per_head, bundles_per_head, block_keys

    ctypedef struct sdpa_span:
        int64_t begin, end

    ctypedef struct sdpa_copied:
        pass

    ctypedef struct sdpa_task:
        sdpa_span keys
        sdpa_copied *copied
        int hidden

    ctypedef void (*sdpa_step)(const sdpa_problem *, sdpa_task *) noexcept nogil

    ctypedef struct sdpa_kernel:
        int real_bytes, lanes, rows, block_keys
        int (*copies)(const sdpa_problem *) noexcept nogil
        sdpa_step begin, scores, softmax_step, accumulate, accumulate_seen
        int (*finite)(const sdpa_problem *, const sdpa_task *) noexcept nogil
        sdpa_step close_sums, write_out, write_weights

    ctypedef struct sdpa_isa:
        const char *name
        const sdpa_kernel *kernel[3][2]

    int64_t sdpa_group(const sdpa_problem *)
    const sdpa_isa sdpa_isas[]
    int sdpa_cpu_runs(const char *isa)

    int64_t sdpa_tasks_per_head(const sdpa_problem *, const sdpa_kernel *, int threads)
    void sdpa_enter_task(const sdpa_problem *, const sdpa_kernel *, int64_t index, sdpa_task *)
    int sdpa_enter_block(const sdpa_problem *, const sdpa_kernel *, int64_t key, sdpa_task *)
    int64_t sdpa_bundles_per_head(const sdpa_problem *, const sdpa_kernel *, int threads)
    int sdpa_largest_bundle(const sdpa_problem *)
    size_t sdpa_lay_out_scratch(const sdpa_problem *, const sdpa_kernel *, char *scratch, sdpa_task *, int tasks)
