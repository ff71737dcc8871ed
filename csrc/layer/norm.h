/* Layer norm and root-mean-square norm: out = (y - mean) / sqrt(variance + eps) * weight + bias of each row y = x +
 * residual, which is written, too.  Without the mean that is the norm by the root of the mean square.
 *
 * A row is read once and waits in scratch, from where it is summed: the mean first, and then the squares of what is left
 * without it, as the difference of large sums would lose what matters. */
#ifndef SDPA_NORM_H
#define SDPA_NORM_H

#include "memory/read.h"
#include "memory/write.h"
#include "simd/vmath.h"

enum { NORM_CHAINS = 4 }; /* sums side by side: one would wait for each addition */

static inline real sum_of_lanes(const vf *sums)
{
    real lane[VL], total = 0;
    vf_store(lane, vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
    for (int i = 0; i < VL; ++i) total += lane[i];
    return total;
}

/* y = x + residual, filled up with 0 to whole vectors; its rounded numbers go to `sum`.  Returns what they sum to. */
static real read_norm_row(const sdpa_norm *n, int64_t row, real *y)
{
    const char *x = n->x.data + row * n->x.row;
    const char *more = n->residual.data ? n->residual.data + row * n->residual.row : NULL;
    vf total[NORM_CHAINS];
    UNROLL_FOR (int i = 0; i < NORM_CHAINS; ++i) total[i] = vf_set1(0);
    for (int64_t i = 0; i < n->size; i += VL) {
        const int count = n->size - i < VL ? (int)(n->size - i) : VL;
        vf of_row = read_chunk(x + i * n->x.column, n->x.column, count, &n->x);
        if (more) {
            const sdpa_array *residual = &n->residual, *sum = &n->sum;
            of_row = vf_add(of_row, read_chunk(more + i * residual->column, residual->column, count, residual));
            write_chunk(sum->data + row * sum->row + i * sum->column, sum->column, count, sum, of_row);
        }
        vf_store(y + i, of_row);
        total[i / VL % NORM_CHAINS] = vf_add(total[i / VL % NORM_CHAINS], of_row);
    }
    return sum_of_lanes(total);
}

/* The sum of (y - mean)^2; the lanes past the end count as the mean. */
static real sum_of_squares(const real *y, int64_t size, real mean)
{
    vf total[NORM_CHAINS];
    int64_t i = 0;
    UNROLL_FOR (int chain = 0; chain < NORM_CHAINS; ++chain) total[chain] = vf_set1(0);
    for (; i + NORM_CHAINS * VL <= size; i += NORM_CHAINS * VL)
        UNROLL_FOR (int chain = 0; chain < NORM_CHAINS; ++chain) {
            const vf off = vf_sub(vf_load(y + i + chain * VL), vf_set1(mean));
            total[chain] = vf_fma(off, off, total[chain]);
        }
    real rest = 0;
    for (; i < size; ++i) rest += (y[i] - mean) * (y[i] - mean);
    return sum_of_lanes(total) + rest;
}

static void norm(const sdpa_norm *n, int64_t row, int64_t rows, void *scratch)
{
    real *y = scratch;
    const vf zero = vf_set1(0);
    for (const int64_t end = row + rows; row < end; ++row) {
        const real sum = read_norm_row(n, row, y), mean = n->centred ? sum / (real)n->size : 0;
        const double variance = (double)sum_of_squares(y, n->size, mean) / (double)n->size;
        const vf factor = vf_set1((real)(1 / sqrt(variance + n->eps))), shift = vf_set1(mean);
        char *out = n->out.data + row * n->out.row;
        for (int64_t i = 0; i < n->size; i += VL) {
            const int count = n->size - i < VL ? (int)(n->size - i) : VL;
            vf z = vf_mul(vf_sub(vf_load(y + i), shift), factor);
            if (n->weight)
                z = vf_fma(z, vf_load((const real *)n->weight + i),
                           n->bias ? vf_load((const real *)n->bias + i) : zero);
            else if (n->bias)
                z = vf_add(z, vf_load((const real *)n->bias + i));
            write_chunk(out + i * n->out.column, n->out.column, count, &n->out, z);
        }
    }
}

#endif
