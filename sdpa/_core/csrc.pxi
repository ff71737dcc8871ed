# Mirrors csrc/threads.h and csrc/sdpa.h: the same names in the same order.
from libc.stdint cimport int64_t

cdef extern from "threads.h" nogil:
    ctypedef struct sdpa_watch "struct sdpa_watch":
        int64_t left, next
    void sdpa_stop(sdpa_watch *, int)
    bint sdpa_stops(const sdpa_watch *)
    ctypedef void (*sdpa_duty)(void *of, int part) noexcept nogil
    ctypedef struct sdpa_team:
        int members
    int64_t sdpa_claim(int64_t *, int64_t, int64_t, int, int64_t *)
    int sdpa_hire(sdpa_team *, int threads, int least, int most)
    void sdpa_run(sdpa_team *, sdpa_duty, void *)
    void sdpa_dismiss(sdpa_team *)
    int sdpa_this_member()
    int64_t sdpa_awake_ns()
    bint sdpa_comes_second(int *gate)
    int sdpa_pinned_cpus()
    void sdpa_after_fork()

cdef extern from "sdpa.h" nogil:
    int SDPA_NEAR, SDPA_THIRD_LEVEL, SDPA_MEMORY
    int SDPA_BOOL, SDPA_INT8, SDPA_FLOAT16, SDPA_BFLOAT16, SDPA_FLOAT32, SDPA_FLOAT64
    enum: SDPA_MAX_BUNDLE, SDPA_PURPOSES, SDPA_COPIES, SDPA_NORM_TOGETHER
    int SDPA_FOR_FLOAT, SDPA_FOR_DOUBLE, SDPA_FOR_BFLOAT16

    ctypedef struct sdpa_array:
        char *data
        ptrdiff_t batch, head, row, column
        const ptrdiff_t *batches
        int dtype, itemsize

    ctypedef struct sdpa_input:
        int64_t batches, heads, kv_heads, q_len, kv_len, dim, value_dim
        sdpa_array query, key, value, out, weights, lse, mask, bias
        const int64_t *begin_shift
        const int64_t *end_shift
        ptrdiff_t shift_stride
        const int64_t *q_offset
        const int64_t *kv_lengths
        double scale, softcap
        const double *sinks
        const double *alibi_slopes
        const double *v
        sdpa_array key_scale, value_scale
        int group_shift
        const int64_t *q_starts
        const int64_t *k_starts
        const int64_t *pages
        int64_t page_columns, page_size

    ctypedef struct sdpa_backward_input:
        sdpa_input forward
        sdpa_array grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias, delta

    int64_t sdpa_group(const sdpa_input *)

    ctypedef struct sdpa_kernel

    ctypedef struct sdpa_schedule:
        const sdpa_input *input
        const sdpa_kernel *kernel
        int threads
        int64_t fewest_rows, most_rows
        int split, level
        int64_t most_units
        int largest_bundle
        int64_t most_parts
        int far, ahead, at_once
        int64_t *unit_starts
        sdpa_watch *watch

    ctypedef struct sdpa_span:
        int64_t begin, end

    ctypedef struct sdpa_cut:
        int64_t tasks, bundles, part_keys, last_part
        sdpa_span parts

    ctypedef struct sdpa_unit:
        int64_t batch, kv_head, node, first, first_task, end_task
        sdpa_cut cut

    ctypedef struct sdpa_rows:
        int64_t batch, first, kv_len
        int count, ahead
        sdpa_span keys

    ctypedef struct sdpa_block:
        pass

    ctypedef struct sdpa_copied:
        pass

    ctypedef struct sdpa_scratch:
        void *cap_slope
        int started, lifted, leads

    ctypedef struct sdpa_task:
        sdpa_rows rows
        sdpa_block block
        sdpa_scratch scratch

    ctypedef struct sdpa_sums:
        void *at

    ctypedef struct sdpa_backward_scratch:
        sdpa_sums key_sums, value_sums
        int careful

    ctypedef struct sdpa_backward_task:
        sdpa_task task
        sdpa_backward_scratch scratch

    int SDPA_IDENTITY, SDPA_RELU, SDPA_GELU, SDPA_GELU_TANH, SDPA_SILU

    ctypedef struct sdpa_linear:
        sdpa_array x, out, residual
        int64_t rows, ins, outs
        int block_rows, vectors
        const void *weights
        const void *bias
        int activation, gated

    ctypedef struct sdpa_norm:
        sdpa_array x, out, residual, sum
        int64_t rows, size
        const void *weight
        const void *bias
        double eps
        int centred

    ctypedef void (*sdpa_stage)(const sdpa_input *, sdpa_task *) noexcept nogil
    ctypedef void (*sdpa_backward_stage)(const sdpa_backward_input *, sdpa_backward_task *) noexcept nogil

    ctypedef struct sdpa_kernel:
        int real_bytes, lanes, rows, block_keys, few_rows, step
        int (*copies)(const sdpa_input *) noexcept nogil
        sdpa_stage begin_forward, scores, softmax_block, accumulate
        int (*finite)(const sdpa_input *, const sdpa_task *) noexcept nogil
        sdpa_stage accumulate_seen
        int (*lift)(const sdpa_input *, sdpa_task *) noexcept nogil
        sdpa_stage add_poison, close_sums
        void (*join)(const sdpa_input *, const sdpa_task *, const sdpa_task *) noexcept nogil
        sdpa_stage start, write_out, write_weights
        int (*stores_rows)(const sdpa_input *) noexcept nogil
        int (*write_at_once)(const sdpa_input *, sdpa_task *) noexcept nogil
        sdpa_backward_stage begin_backward, score_gradients, query_gradient, key_gradients, add_slopes, bias_gradient
        int (*needs_care)(const sdpa_input *, const sdpa_task *) noexcept nogil
        sdpa_backward_stage write_query_gradient, write_key_gradients
        int linear_tile
        int whole_sum
        void (*pack_panel)(
            const sdpa_array *, int64_t outs, int64_t ins, int vector, int apart, void *panel) noexcept nogil
        void (*linear)(
            const sdpa_linear *, int64_t row, int rows, int64_t vector, void *scratch, int64_t *copied) noexcept nogil
        void (*norm)(const sdpa_norm *, int64_t row, int64_t rows, void *scratch) noexcept nogil

    ctypedef struct sdpa_isa:
        const char *name
        const sdpa_kernel *kernel[SDPA_PURPOSES][2]

    const sdpa_isa sdpa_isas[]
    int sdpa_cpu_runs(const char *isa)

    double sdpa_busy(int threads, double units, double largest, double all)
    int64_t sdpa_cut_evenly(int threads, int64_t heads, double uneven, int64_t of_head, int64_t most)
    int64_t sdpa_cut_linear(sdpa_linear *, const sdpa_kernel *, int threads)
    int64_t sdpa_linear_vectors(const sdpa_linear *, const sdpa_kernel *) nogil
    int64_t sdpa_count_units(sdpa_schedule *)
    sdpa_unit sdpa_find_unit(const sdpa_schedule *, int64_t unit)
    bint sdpa_has_node(const sdpa_cut *, int level, int64_t node)
    int sdpa_height(const sdpa_cut *)
    sdpa_span sdpa_parts_of(const sdpa_cut *, sdpa_span keys)
    sdpa_span sdpa_node_keys(const sdpa_cut *, int level, int64_t node, sdpa_span seen)
    sdpa_unit sdpa_backward_head(const sdpa_schedule *, int64_t head, int64_t finer)

    void sdpa_enter_task(const sdpa_schedule *, const sdpa_unit *, int64_t index, sdpa_rows *)
    void sdpa_look_ahead(const sdpa_schedule *, const sdpa_unit *, int64_t index, sdpa_rows *) nogil
    void sdpa_enter_backward(
        const sdpa_schedule *, const sdpa_backward_input *, const sdpa_unit *, int64_t index, sdpa_backward_task *)

    sdpa_span sdpa_visible(const sdpa_input *, int64_t batch, int64_t kv_len, int64_t query)

    int sdpa_enter_block(const sdpa_schedule *, const sdpa_rows *, int64_t key, sdpa_block *)

    size_t sdpa_scratch_bytes(const sdpa_schedule *, int tasks)
    void sdpa_lay_out_scratch(const sdpa_schedule *, char *memory, sdpa_task *, int tasks)
    size_t sdpa_sums_bytes(const sdpa_schedule *)
    void sdpa_lay_out_sums(const sdpa_schedule *, char *memory, sdpa_scratch *)
    size_t sdpa_backward_bytes(const sdpa_kernel *, const sdpa_backward_input *, int tasks, int64_t keys)
    void sdpa_lay_out_backward(
        const sdpa_kernel *, const sdpa_backward_input *, char *memory, sdpa_backward_task *, int tasks, int64_t keys)
    void sdpa_begin_sums(
        const sdpa_kernel *, const sdpa_backward_input *, const sdpa_unit *, sdpa_span keys, sdpa_backward_task *,
        int tasks)

    int sdpa_quantise_rows(
        const sdpa_array *source, int64_t batches, int64_t heads, int64_t rows, int64_t dim, int64_t group,
        const sdpa_array *out, const sdpa_array *scales)


cdef extern from "layer/rotary.h" nogil:
    ctypedef struct sdpa_axes:
        int count
        int64_t total
        int64_t size[64]
        ptrdiff_t x[64]
        ptrdiff_t out[64]
        ptrdiff_t positions[64]

    ctypedef struct sdpa_rotary:
        char *x
        char *out
        ptrdiff_t x_row, x_column, out_row, out_column
        int dtype, itemsize, interleaved, in_place, heads_inside
        int64_t rows, pairs, dim
        sdpa_axes own, shared
        const double *positions
        int each_pair
        double first_position
        const double *frequency
        double largest_frequency
        const void *cosine
        const void *sine
        int64_t task_rows, blocks, parts

    void sdpa_rotate_4(const sdpa_rotary *, int64_t task, void *scratch)
    void sdpa_rotate_8(const sdpa_rotary *, int64_t task, void *scratch)
