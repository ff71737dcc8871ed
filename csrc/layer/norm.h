/* Layer norm and root-mean-square norm: out = (y - mean) / sqrt(variance + eps) * weight + bias of each row y = x +
 * residual, which is written, too.  Without the mean that is the norm by the root of the mean square.
 *
 * A row is read once and waits in scratch, or where it is, to be summed: the mean first, and then the squares of what is
 * left without it, as the difference of large sums would lose what matters.  Each sum ends with a chain of dependent
 * operations, as long as ten vectors take: some rows go through each step together, and fill the time of each other. */
#ifndef SDPA_NORM_H
#define SDPA_NORM_H

#include "memory/read.h"
#include "memory/write.h"
#include "simd/vmath.h"

enum { NORM_CHAINS = 4 }; /* sums side by side: one would wait for each addition */
enum { NORM_ROWS = 4 };   /* that go through each step together, where they fit into the first-level cache */
enum { ANY_LAYOUT = -1 }; /* in place of the dtype of arrays whose rows are adjacent numbers of this one dtype */

/* Expands step(chain, i, count) for `count` columns from i on: whole vectors, in turns of NORM_CHAINS and then one by
 * one, and the rest. */
#define FOR_VECTORS(size, step)                                                                                        \
    do {                                                                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + NORM_CHAINS * VL <= (size); i += NORM_CHAINS * VL)                                                  \
            UNROLL_FOR (int chain = 0; chain < NORM_CHAINS; ++chain) step(chain, i + chain * VL, VL);                  \
        for (; i + VL <= (size); i += VL) step(0, i, VL);                                                              \
        if (i < (size)) step(0, i, (int)((size) - i));                                                                 \
    } while (0)

/* Bytes from number i of a row to the next. */
static inline ALWAYS_INLINE ptrdiff_t norm_column(const sdpa_array *array, const int dtype)
{
    return dtype == ANY_LAYOUT ? array->column : size_of(dtype);
}

static inline ALWAYS_INLINE vf read_norm(const sdpa_array *array, const char *row, int64_t i, int count,
                                         const int dtype)
{
    const char *at = row + i * norm_column(array, dtype);
    return dtype != ANY_LAYOUT && count == VL ? read_adjacent(at, dtype) : read_chunk(at, array->column, count, array);
}

static inline ALWAYS_INLINE void write_norm(const sdpa_array *array, char *row, int64_t i, int count, const int dtype,
                                            vf x)
{
    char *at = row + i * norm_column(array, dtype);
    if (dtype != ANY_LAYOUT && count == VL)
        write_adjacent(at, dtype, x);
    else
        write_chunk(at, array->column, count, array, x);
}

static inline real sum_of_lanes(const vf *sums)
{
    real lane[VL];
    vf_store(lane, vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
    UNROLL_FOR (int count = VL / 2; count > 0; count /= 2)
        UNROLL_FOR (int i = 0; i < count; ++i) lane[i] += lane[i + count];
    return lane[0];
}

/* What a row becomes: y = x + residual, in *y.  That is scratch, filled up with 0 to whole vectors, or the row itself
 * where it has such already.  The rounded numbers go to `sum`.  Returns what they sum to. */
static inline ALWAYS_INLINE real read_norm_row(const sdpa_norm *n, int64_t row, real **y, const int dtype,
                                               const int with_residual)
{
    const char *x = n->x.data + row * n->x.row;
    const char *more = with_residual ? n->residual.data + row * n->residual.row : NULL;
    char *both = with_residual ? n->sum.data + row * n->sum.row : NULL;
    const int in_place = dtype == REAL_DTYPE && n->size % VL == 0;
    real *const to = *y;
    vf total[NORM_CHAINS];
    UNROLL_FOR (int i = 0; i < NORM_CHAINS; ++i) total[i] = vf_set1(0);
#define READ(chain, i, count)                                                                                          \
    do {                                                                                                               \
        vf of_row = read_norm(&n->x, x, i, count, dtype);                                                              \
        if (with_residual) {                                                                                           \
            of_row = vf_add(of_row, read_norm(&n->residual, more, i, count, dtype));                                   \
            write_norm(&n->sum, both, i, count, dtype, of_row);                                                        \
        }                                                                                                              \
        if (!in_place) vf_store(to + (i), of_row);                                                                     \
        total[chain] = vf_add(total[chain], of_row);                                                                   \
    } while (0)
    FOR_VECTORS(n->size, READ);
#undef READ
    if (in_place) *y = (real *)(with_residual ? both : (char *)x);
    return sum_of_lanes(total);
}

/* The sum of (y - mean)^2.  What fills up the last vector becomes the mean. */
static inline real sum_of_squares(real *y, int64_t size, real mean)
{
    vf total[NORM_CHAINS];
    UNROLL_FOR (int chain = 0; chain < NORM_CHAINS; ++chain) total[chain] = vf_set1(0);
    for (int64_t i = size; i % VL; ++i) y[i] = mean;
#define SQUARE(chain, i, count)                                                                                        \
    do {                                                                                                               \
        const vf off = vf_sub(vf_load(y + (i)), vf_set1(mean));                                                        \
        total[chain] = vf_fma(off, off, total[chain]);                                                                 \
    } while (0)
    FOR_VECTORS(size, SQUARE);
#undef SQUARE
    return sum_of_lanes(total);
}

static inline ALWAYS_INLINE void write_norm_row(const sdpa_norm *n, int64_t row, const real *y, real mean,
                                                double variance, const int dtype)
{
    const real *weight = n->weight, *bias = n->bias;
    const vf factor = vf_set1((real)(1 / sqrt(variance + n->eps))), shift = vf_set1(mean), zero = vf_set1(0);
    char *out = n->out.data + row * n->out.row;
#define WRITE(chain, i, count)                                                                                         \
    do {                                                                                                               \
        vf z = vf_mul(vf_sub(vf_load(y + (i)), shift), factor);                                                        \
        if (weight)                                                                                                    \
            z = vf_fma(z, vf_load(weight + (i)), bias ? vf_load(bias + (i)) : zero);                                   \
        else if (bias)                                                                                                 \
            z = vf_add(z, vf_load(bias + (i)));                                                                        \
        write_norm(&n->out, out, i, count, dtype, z);                                                                  \
    } while (0)
    FOR_VECTORS(n->size, WRITE);
#undef WRITE
}

static inline ALWAYS_INLINE void norm_rows(const sdpa_norm *n, int64_t row, int64_t end, real *scratch, const int dtype,
                                           const int with_residual)
{
    const int64_t room = (n->size + VL - 1) / VL * VL;
    for (int64_t next; row < end; row = next) {
        real *y[NORM_ROWS], mean[NORM_ROWS];
        double variance[NORM_ROWS];
        next = room * NORM_ROWS > SDPA_NORM_TOGETHER ? row + 1 : row + NORM_ROWS;
        if (next > end) next = end;
        for (int64_t i = 0; i < next - row; ++i) {
            y[i] = scratch + i * room;
            mean[i] = read_norm_row(n, row + i, &y[i], dtype, with_residual) / (real)n->size;
            if (!n->centred) mean[i] = 0;
        }
        for (int64_t i = 0; i < next - row; ++i)
            variance[i] = (double)sum_of_squares(y[i], n->size, mean[i]) / (double)n->size;
        for (int64_t i = 0; i < next - row; ++i) write_norm_row(n, row + i, y[i], mean[i], variance[i], dtype);
    }
}

/* Whether it holds rows of adjacent numbers of the dtype of x; or is none. */
static int norm_adjacent(const sdpa_norm *n, const sdpa_array *array)
{
    return !array->data || (array->dtype == n->x.dtype && writes_adjacent(array, array->column));
}

static void norm(const sdpa_norm *n, int64_t row, int64_t rows, void *scratch)
{
    const int adjacent = norm_adjacent(n, &n->x) && norm_adjacent(n, &n->out) && norm_adjacent(n, &n->residual) &&
                         (!n->residual.data || norm_adjacent(n, &n->sum));
    const int dtype = adjacent ? n->x.dtype : ANY_LAYOUT;
#define ROWS_OF(of)                                                                                                    \
    do {                                                                                                               \
        if (dtype == (of) && n->residual.data) norm_rows(n, row, row + rows, scratch, of, 1);                          \
        if (dtype == (of) && !n->residual.data) norm_rows(n, row, row + rows, scratch, of, 0);                         \
    } while (0)
    ROWS_OF(REAL_DTYPE);
    ROWS_OF(SDPA_FLOAT16);
    ROWS_OF(SDPA_BFLOAT16);
    ROWS_OF(ANY_LAYOUT);
#undef ROWS_OF
}

#endif
