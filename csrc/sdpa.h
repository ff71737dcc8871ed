/* What the three layers share: the input (filled by Cython from checked arguments), the schedule (how its work is cut),
 * the task (what one thread works on) and the kernel (the arithmetic, once per instruction set, compute type and
 * engine).  Gradients extend input and task.
 *
 * Axes: B batch, H query heads, G key/value heads, M queries, N keys, D size of a key, E size of a value.
 * A *row* is one query of one head.  The H/G query heads that share a key/value head form a group; the rows of a
 * key/value head are numbered  position * group + head of the group,  so that a task reads K and V once for all. */
#ifndef SDPA_H
#define SDPA_H

#include <stddef.h>
#include <stdint.h>

enum { SDPA_MAX_ROWS = 64, SDPA_MAX_VECTORS = 4, SDPA_MAX_BUNDLE = 8, SDPA_COPIES = 3 };

/* One row per storable type; memory/read.h is the only reader of it. */
typedef enum { SDPA_BOOL, SDPA_INT8, SDPA_FLOAT16, SDPA_BFLOAT16, SDPA_FLOAT32, SDPA_FLOAT64 } sdpa_dtype;

/* A 4-D array (batch, head, row, column) as it lies in memory.  Strides are in bytes, of any sign; 0 broadcasts.
 * `data` is NULL where an optional array is absent. */
typedef struct {
    char *data;
    ptrdiff_t batch, head, row, column;
    const ptrdiff_t *batches; /* where each batch begins, in bytes, if no one stride says so; else NULL */
    int dtype, itemsize;
} sdpa_array;

/* Where a batch begins. */
static inline char *sdpa_batch(const sdpa_array *array, int64_t batch)
{
    return array->data + (array->batches ? array->batches[batch] : batch * array->batch);
}

/* What the caller gave, as the kernels read it, and where the result goes.  Nothing below the call changes it. */
typedef struct {
    int64_t batches, heads, kv_heads, q_len, kv_len, dim, value_dim;
    sdpa_array query, key, value, out;
    sdpa_array weights;    /* (B, H, M, N), zeroed: where attention_weights puts its result */
    sdpa_array lse;        /* (B, H, M): rows in `row`, `column` unused */
    sdpa_array mask, bias; /* broadcast to (B, H, M, N) */
    /* Query i of batch b sees the keys i + begin_shift[b] <= j < i + end_shift[b]; NULL: no bound on that side.
     * Causal, window and q_offset are no more than that.  The shifts lie within +-(q_len + kv_len + 1), so that sums do
     * not overflow. */
    const int64_t *begin_shift, *end_shift; /* (B) */
    ptrdiff_t shift_stride;                 /* 1, or 0 where one shift serves all batches */
    const int64_t *q_offset;                /* (B): position of query 0, for ALiBi; NULL: kv_len - q_len */
    const int64_t *kv_lengths;              /* (B), or NULL: kv_len */
    double scale;
    double softcap;             /* 0: none */
    const double *sinks;        /* (B, H) or NULL */
    const double *alibi_slopes; /* (B, H) or NULL */
    /* Additive scores (additive.h): query and key are projections then, `dim` their features, with numbers of (-2, 2)
     * to weigh them; NULL: scores are products. */
    const double *v; /* (H, dim) */
    /* Where K and V are int8: number d of a row is its int8 * scale[d >> group_shift]; a row of scales for each key. */
    sdpa_array key_scale, value_scale;
    int group_shift;
    /* Sequences of lengths of their own, packed row after row: there is no batch axis then, q_len and kv_len are the
     * longest, and kv_lengths is given.  NULL: each batch is an element of the batch axis. */
    const int64_t *q_starts; /* (B + 1) */
    const int64_t *k_starts; /* (B), or NULL where keys lie in pages */
    /* Key j of batch b is row j % page_size of page pages[b * page_columns + j / page_size]: of the batch axis. */
    const int64_t *pages;
    int64_t page_columns, page_size;
} sdpa_input;

/* The same for gradients; `out` and `lse` are given then.  The gradients of query, key and value are written, that of
 * the bias, of the compute type and with the bias's own strides, is added to. */
typedef struct {
    sdpa_input forward;
    sdpa_array grad_out, grad_lse, grad_query, grad_key, grad_value, grad_bias;
    sdpa_array delta; /* (B, H, M), of the compute type: see backward.h; written where it is there */
} sdpa_backward_input;

/* Query heads that share a key/value head. */
static inline int64_t sdpa_group(const sdpa_input *in) { return in->heads / in->kv_heads; }

/* Half open: begin <= key < end. */
typedef struct {
    int64_t begin, end;
} sdpa_span;

/* How one key/value head is cut: rows into tasks, these into bundles; keys into parts. */
typedef struct {
    int64_t tasks, bundles, part_keys, last_part;
    sdpa_span parts; /* that rows see: the first, and the one behind the last */
} sdpa_cut;

/* How the work of a call is cut for one kernel; see plan/schedule.c. */
typedef struct {
    const sdpa_input *input;
    const struct sdpa_kernel *kernel;
    int threads;                    /* that will share the work */
    int64_t fewest_rows, most_rows; /* of a key/value head, for this kernel; other sequences are not its work */
    int shares_parts;               /* bundles are few, so that threads may share parts of their keys */
    int split;                      /* units are nodes of the trees of these parts: those of `level`, */
    int level;                      /* which is else that of the highest tree */
    int64_t most_units;             /* of a head */
    int largest_bundle;             /* tasks */
    int64_t most_parts;             /* of the keys of a head */
    sdpa_cut cut;                   /* of the first batch, and where nothing says otherwise of all */
    int far;                        /* where K and V are expected: see sdpa_distance */
    int ahead;                      /* what is read next, and results, are asked for: they come from memory */
    int at_once;                    /* results are written as they are summed: one block has all keys */
    int64_t *unit_starts;           /* (B + 1), where sequences are packed: units before each of them */
    struct sdpa_watch *watch;       /* of the threads of the call, between blocks: see threads.h */
} sdpa_schedule;

/* The second-level caches, the third-level cache, or memory. */
typedef enum { SDPA_NEAR, SDPA_THIRD_LEVEL, SDPA_MEMORY } sdpa_distance;

/* What a thread takes at once, of one key/value head: a bundle, or where the schedule is `split` a node of its tree. */
typedef struct {
    int64_t batch, kv_head, node;
    int64_t first;                /* the first unit of the bundle */
    int64_t first_task, end_task; /* none where other batches have more units */
    sdpa_cut cut;
} sdpa_unit;

/* The same within a block, counted from its start. */
typedef struct {
    int begin, end;
} sdpa_range;

/* Keys begin..end of the current block, counted from its start, and the vectors of rows that may see any of them. */
typedef struct {
    int begin, end, first_vector, end_vector;
} sdpa_segment;

/* Which rows a task holds, and where they lie: see plan/rows.c. */
typedef struct {
    /* `count` rows of one key/value head from `first` on, in `vectors` vectors.  The lanes past the last row repeat it,
     * and are not written. */
    int64_t batch, kv_head, first, q_len, kv_len;
    int count, vectors;
    int far, ahead;   /* as the schedule says */
    sdpa_span keys;   /* seen by at least one row: by geometry, as everywhere where the mask is not named */
    sdpa_span shared; /* seen by every row */
    const char *keys_at, *values_at, *key_scales_at, *value_scales_at; /* row 0; where K and V have pages: of page 0 */
    /* Row 0 of what the thread reads next, which is asked for while this is computed; or NULL. */
    const char *next_query, *next_keys, *next_values;
    int64_t next_queries; /* rows */
    /* Where each row lies; set only for arrays that are there. */
    char *query[SDPA_MAX_ROWS], *mask[SDPA_MAX_ROWS], *bias[SDPA_MAX_ROWS];
    char *out[SDPA_MAX_ROWS], *lse[SDPA_MAX_ROWS];
} sdpa_rows;

/* The current block of keys of a task, and who sees what of it: see plan/blocks.c. */
typedef struct {
    int64_t first; /* its first key */
    int count;     /* keys in it */
    int segments;
    sdpa_segment segment[2 * SDPA_MAX_VECTORS + 1];
    sdpa_segment of_vector[SDPA_MAX_VECTORS]; /* begin..end: the keys computed for one vector */
    sdpa_range sees[SDPA_MAX_ROWS];           /* where `cut`: the keys of the block that a row sees, */
    sdpa_range whole[SDPA_MAX_VECTORS];       /* and that all rows of a vector see */
    int cut;                                  /* some row does not see, by geometry, some key of the segments */
    int masked;                               /* the mask hides some key of the block from some row */
} sdpa_block;

/* Which rows a copy holds: the next task often needs the same. */
typedef struct {
    int64_t batch, kv_head, key; /* the first */
    int rows;
    int odd; /* see pairs.h */
} sdpa_copied;

/* Where a task keeps its numbers; `real` is the compute type, R the rows of the kernel.  See plan/scratch.c. */
typedef struct {
    sdpa_copied *copied;         /* [SDPA_COPIES]: what key_copy, value_copy and key_pairs hold */
    void *q;                     /* [D][R]; few rows: [R][D], or [R][D/2] pairs; pairs: [D/2][R] */
    void *s;                     /* [block_keys][R]: scores, then weights; pairs of weights: [block_keys/2][R]; few
                                    rows: [block_keys][places] */
    void *o;                     /* [E][R]; few rows: [R][E]: sums of weight * value */
    void *block_o;               /* as o; few rows: the sums over the block; pairs: those of small values */
    void *high;                  /* [R]: largest score of the block */
    void *max, *sum, *shrink;    /* [R] */
    void *kept;                  /* [R]; pairs: sum of the rounded weights */
    void *lift;                  /* [R]: powers of 2; o holds the sums divided by them */
    void *visible;               /* as s, for blocks with NaN or inf in V; pairs: or with odd rows */
    void *poison;                /* as o: which sums meet NaN or inf in V, see care.h */
    void *key_copy, *value_copy; /* [block_keys][D], [block_keys][E]; used where K, V cannot be read in place; few
                                    rows: the same place */
    void *feature_weights;       /* additive: [dim/4][5][R]: see additive.h */
    void *cap_slope;             /* [block_keys][R], for gradients with a softcap: its derivative; else NULL */
    int leads;                   /* the first of its bundle that sees the block: fetches from memory for all */

    /* What these hold. */
    int has_queries;   /* q holds those of the task */
    int places;        /* few rows: of a key in `s`, see few.h */
    int started;       /* o holds something */
    int lifted;        /* some of `lift` are above 1 */
    int poisonous;     /* poison holds something */
    int odd_values;    /* what is unusual about the values of the block: see forward/scratch.h */
    uint64_t odd_rows; /* bit per row whose scores are computed otherwise: see pairs.h, additive.h */
} sdpa_scratch;

/* What a thread works on. */
typedef struct {
    sdpa_rows rows;
    sdpa_block block;
    sdpa_scratch scratch;
} sdpa_task;

/* What gradients need beside `rows`: where those of their arrays lie. */
typedef struct {
    char *grad_out[SDPA_MAX_ROWS], *grad_query[SDPA_MAX_ROWS], *grad_bias[SDPA_MAX_ROWS];
    char *grad_lse[SDPA_MAX_ROWS], *delta[SDPA_MAX_ROWS];
} sdpa_backward_rows;

/* Gradients of rows of K or V while they are summed: in scratch, or in the result itself. */
typedef struct {
    void *at;         /* row keys.begin */
    ptrdiff_t stride; /* in `real` */
    int64_t width;
    sdpa_span keys;
    char *result; /* row 0 */
} sdpa_sums;

/* What they need beside `scratch`: see backward.h. */
typedef struct {
    void *g;                        /* [E][R]: grad_out, as q is query */
    void *query_rows, *grad_rows;   /* [R][D], [R][E]: query and grad_out; pairs: [R/2][..], rows interleaved by twos */
    void *lse, *delta;              /* [R] */
    void *slope;                    /* [block_keys][R]: gradients of the scores */
    void *key_slope;                /* the same; pairs: [block_keys/2][R], rounded */
    void *key_pairs;                /* pairs: [block_keys/2][D]: rows of K interleaved by twos */
    sdpa_sums key_sums, value_sums; /* of the gradients of K and V; `at` is NULL where only those of Q are wanted */
    char *summed;                   /* [blocks]: whether the sums of a block hold something */
    uint64_t poisoned;              /* bit per row of grad_out with NaN or inf: grad_rows has 0 for them */
    int careful;                    /* K may hold NaN or inf */
} sdpa_backward_scratch;

typedef struct {
    sdpa_task task; /* the scores and all that they need */
    sdpa_backward_rows rows;
    sdpa_backward_scratch scratch;
} sdpa_backward_task;

typedef enum { SDPA_IDENTITY, SDPA_RELU, SDPA_GELU, SDPA_GELU_TANH, SDPA_SILU } sdpa_activation;

/* A projection; see linear.h. */
typedef struct {
    sdpa_array x, out;   /* (rows, ins), (rows, outs) */
    sdpa_array residual; /* as out, of any float dtype: added in the end; or none */
    int64_t rows, ins, outs;
    int block_rows;      /* that are done together, panel after panel, */
    int vectors;         /* or with threads enough, so many vectors of a panel after the other */
    const void *weights; /* panels, made by pack_panel */
    const void *bias;    /* of the compute type, as the lanes of the panels; or NULL */
    int activation;
    int gated; /* every other vector of a panel has gates: out = act(gate) * sum */
} sdpa_linear;

static inline int sdpa_vectors_apart(const sdpa_linear *l) { return l->gated ? 2 : 1; } /* of features of the result */

enum { SDPA_NORM_TOGETHER = 4096 }; /* numbers of scratch, at least: of several rows */

/* The norm of rows; see norm.h.  Arrays are (rows, size). */
typedef struct {
    sdpa_array x, out;
    sdpa_array residual, sum; /* where there is one: it is added to x, and the sum is written */
    int64_t rows, size;
    const void *weight, *bias; /* of the compute type, filled up to 16 numbers; or NULL */
    double eps;
    int centred; /* whether the mean is taken off */
} sdpa_norm;

/* One stage of the algorithm on the current block (or at the start or end) of a task. */
typedef void (*sdpa_stage)(const sdpa_input *, sdpa_task *);
typedef void (*sdpa_backward_stage)(const sdpa_backward_input *, sdpa_backward_task *);

typedef struct sdpa_kernel {
    int real_bytes;  /* 4: float, 8: double */
    int lanes, rows; /* rows in a vector, and in the largest task */
    int block_keys;
    int few_rows;
    int (*copies)(const sdpa_input *); /* whether K or V is copied block by block, to be converted */
    sdpa_stage begin_forward;          /* queries to q, nothing summed yet */
    sdpa_stage scores;                 /* s = K q, with softcap, alibi, bias; -inf where hidden; high */
    sdpa_stage softmax_block;          /* s = exp(s - max); max, sum, shrink */
    sdpa_stage accumulate;             /* o = o * shrink + s V */
    /* Where NaN or inf came out, and not from the scores: again with care, as often as that asks for. */
    int (*finite)(const sdpa_input *, const sdpa_task *); /* nothing of that kind came out */
    sdpa_stage accumulate_seen;                           /* like accumulate; NaN and inf in V go to poison instead */
    int (*lift)(const sdpa_input *, sdpa_task *); /* whether sums overflowed; the next attempt divides by lift */
    sdpa_stage add_poison;                        /* o = o + poison */
    sdpa_stage close_sums;                        /* sinks; lse; shrink = what o is multiplied by */
    void (*join)(const sdpa_input *, const sdpa_task *, const sdpa_task *part); /* o, max, sum of both */
    sdpa_stage start;                                                           /* o = 0 where nothing was seen */
    sdpa_stage write_out;                                                       /* out = o * shrink */
    /* Where one block holds all keys: whether rows of the result can be written as they are summed, by this, after
     * close_sums, which then takes the place of accumulate and write_out; it returns 0 where it cannot.  Or NULL. */
    int (*stores_rows)(const sdpa_input *);
    int (*write_at_once)(const sdpa_input *, sdpa_task *);
    sdpa_stage write_weights; /* weights of this block = exp(s - max) * shrink */

    /* Gradients: NULL for few rows. */
    int step;                            /* numbers in one `real` of an operand: 1, or 2 for pairs */
    sdpa_backward_stage begin_backward;  /* queries to q, grad_out to g, ... */
    sdpa_backward_stage score_gradients; /* s = exp(s - lse), slope = s (V g - delta) */
    sdpa_backward_stage query_gradient;  /* o = o + slope K */
    sdpa_backward_stage key_gradients;   /* key_sums = key_sums + slope^T Q, value_sums = value_sums + s^T grad_out */
    sdpa_backward_stage add_slopes;      /* grad_bias = grad_bias + slope; NULL where slopes are rounded */
    sdpa_backward_stage bias_gradient;   /* that alone, instead of all others but `scores` */
    int (*needs_care)(const sdpa_input *, const sdpa_task *); /* o holds NaN or inf, maybe from a hidden key */
    sdpa_backward_stage write_query_gradient, write_key_gradients;

    /* Projections: NULL for few rows. */
    int linear_tile; /* rows of x in one */
    int whole_sum;   /* a row of weights in a panel is filled up to a multiple of so many numbers */
    void (*pack_panel)(const sdpa_array *weight, int64_t outs, int64_t ins, int vector, int apart, void *panel);
    void (*linear)(const sdpa_linear *, int64_t row, int rows, int64_t vector, void *scratch, int64_t *copied);
    void (*norm)(const sdpa_norm *, int64_t row, int64_t rows, void *scratch);
} sdpa_kernel;

/* What the arithmetic is made for: real numbers, or Q, K and V that all are bfloat16. */
enum { SDPA_FOR_FLOAT, SDPA_FOR_DOUBLE, SDPA_FOR_BFLOAT16, SDPA_PURPOSES };

/* The kernels of one instruction set, by purpose; of each [0] for many rows, [1] for few. */
typedef struct {
    const char *name; /* as in setup.py: "avx512" */
    const sdpa_kernel *kernel[SDPA_PURPOSES][2];
} sdpa_isa;

/* dispatch.c: best first; a name that is NULL ends the list. */
extern const sdpa_isa sdpa_isas[];
int sdpa_cpu_runs(const char *isa);

/* plan/schedule.c */
double sdpa_busy(int threads, double units, double largest, double all);
int64_t sdpa_cut_linear(sdpa_linear *, const sdpa_kernel *, int threads);
int64_t sdpa_linear_vectors(const sdpa_linear *, const sdpa_kernel *);
int64_t sdpa_cut_evenly(int threads, int64_t heads, double uneven, int64_t of_head, int64_t most);
int64_t sdpa_count_units(sdpa_schedule *);
sdpa_unit sdpa_find_unit(const sdpa_schedule *, int64_t unit);
int sdpa_has_node(const sdpa_cut *, int level, int64_t node);
int sdpa_height(const sdpa_cut *);
sdpa_span sdpa_parts_of(const sdpa_cut *cut, sdpa_span keys);
sdpa_span sdpa_node_keys(const sdpa_cut *, int level, int64_t node, sdpa_span seen);
sdpa_unit sdpa_backward_head(const sdpa_schedule *, int64_t head, int64_t finer);

/* plan/rows.c */
void sdpa_enter_task(const sdpa_schedule *, const sdpa_unit *, int64_t index, sdpa_rows *);
void sdpa_look_ahead(const sdpa_schedule *, const sdpa_unit *, int64_t index, sdpa_rows *);
void sdpa_enter_backward(const sdpa_schedule *, const sdpa_backward_input *, const sdpa_unit *, int64_t index,
                         sdpa_backward_task *);

/* plan/visibility.c */
sdpa_span sdpa_visible(const sdpa_input *, int64_t batch, int64_t kv_len, int64_t query);

/* plan/blocks.c */
int sdpa_enter_block(const sdpa_schedule *, const sdpa_rows *, int64_t key, sdpa_block *);

/* plan/scratch.c */
size_t sdpa_scratch_bytes(const sdpa_schedule *, int tasks);
void sdpa_lay_out_scratch(const sdpa_schedule *, char *memory, sdpa_task *, int tasks);
size_t sdpa_sums_bytes(const sdpa_schedule *);
void sdpa_lay_out_sums(const sdpa_schedule *, char *memory, sdpa_scratch *);
size_t sdpa_backward_bytes(const sdpa_kernel *, const sdpa_backward_input *, int tasks, int64_t keys);
void sdpa_lay_out_backward(const sdpa_kernel *, const sdpa_backward_input *, char *memory, sdpa_backward_task *,
                           int tasks, int64_t keys);
void sdpa_begin_sums(const sdpa_kernel *, const sdpa_backward_input *, const sdpa_unit *, sdpa_span keys,
                     sdpa_backward_task *, int tasks);

/* memory/quantise.c */
int sdpa_quantise_rows(const sdpa_array *source, int64_t batches, int64_t heads, int64_t rows, int64_t dim,
                       int64_t group, const sdpa_array *out, const sdpa_array *scales);

#endif
