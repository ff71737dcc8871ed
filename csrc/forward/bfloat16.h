/* What engines for many rows and for few have in common where pairs of bfloat16 are multiplied.
 *
 * Such products take denormals for 0, in what is multiplied and in the sum.  Both engines find the numbers for which that
 * could be seen and compute them otherwise (pairs.h, few_pairs.h).  What remains: a product of weight and value below
 * 2**-126 counts as 0 where the sum of the row is not as small. */
#ifndef SDPA_FORWARD_BFLOAT16_H
#define SDPA_FORWARD_BFLOAT16_H

#include "memory/read.h"
#include "forward/scratch.h"

static inline int64_t steps(int64_t count) { return (count + 1) / 2; }

enum {
    SMALLEST_NORMAL = 0x0080,
    LARGE_QUERY = 0x5f80, /* 2**64: times a denormal less than 2**-62 */
    SMALL_VALUE = 0x1000, /* 2**-95: with weights down to 2**-31 no product is denormal */
    SMALL_VALUE_EXPONENT = 96,
    INFINITE = 0x7f80
};

/* Whether a row of Q holds numbers that pairs do not multiply as they should. */
static int is_odd_query(const sdpa_input *in, const char *at)
{
    int odd = 0;
    for (int64_t d = 0; d < in->dim; ++d) {
        const uint16_t size = read_bits(at + d * in->query.column) & 0x7fff;
        odd |= (size != 0) & ((size < SMALLEST_NORMAL) | (size >= LARGE_QUERY));
    }
    return odd;
}

/* Filled up to whole vectors. */
static void copy_pair_row(const char *at, const sdpa_array *array, int64_t width, char *copy)
{
    const int64_t bytes = whole_vectors(steps(width)) * 4;
    if (array->column == 2)
        memcpy(copy, at, (size_t)(2 * width));
    else
        for (int64_t d = 0; d < width; ++d) write_bits(copy + 2 * d, read_bits(at + d * array->column));
    memset(copy + 2 * width, 0, (size_t)(bytes - 2 * width));
}
static inline int is_small_value(uint16_t bits) { return (bits & 0x7fff) && (bits & 0x7fff) < SMALL_VALUE; }

#endif
