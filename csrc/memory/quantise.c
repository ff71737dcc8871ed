/* Numbers as int8, with one scale for each group of neighbours in a row: what a cache of keys and values may hold.
 *
 *     scale = largest |x| of the group / 127,    stored = x / scale, rounded to nearest, ties to even
 *
 * so that an error is at most half a scale, and zero stays zero.  Compiled once: the memory it reads is the limit. */
#include "sdpa.h"

#include <float.h>
#include <string.h>
#include "simd/half.h"

enum { CHUNK = 128 }; /* numbers widened at once: the most that a group usually has */

/* Below this, 127 / x overflows and the scale is no normal number: such a group becomes zeros. */
static const float SMALLEST = 127 * 0x1p-126f;

static void widen(const char *from, ptrdiff_t stride, int dtype, int count, float *to)
{
    switch (dtype) {
    case SDPA_FLOAT32:
        if (stride == sizeof(float))
            memcpy(to, from, (size_t)count * sizeof(float));
        else
            for (int i = 0; i < count; ++i) memcpy(&to[i], from + i * stride, sizeof(float));
        break;
    case SDPA_FLOAT64:
        for (int i = 0; i < count; ++i) {
            double x;
            memcpy(&x, from + i * stride, sizeof x);
            to[i] = (float)x;
        }
        break;
    case SDPA_BFLOAT16:
        for (int i = 0; i < count; ++i) to[i] = float_of_bfloat16(read_bits(from + i * stride));
        break;
    default:
        for (int i = 0; i < count; ++i) to[i] = float_of_float16(read_bits(from + i * stride));
    }
}

/* The bits of the largest |x|; NaN and inf are larger than all numbers. */
static uint32_t largest(const float *x, int count)
{
    int32_t most = 0; /* not unsigned: of that many vector units have no maximum */
    for (int i = 0; i < count; ++i) {
        const int32_t size = (int32_t)(bits_of_float(x[i]) & 0x7fffffff);
        most = size > most ? size : most;
    }
    return (uint32_t)most;
}

static void round_to_int8(const float *x, float inverse, int count, int8_t *to)
{
    for (int i = 0; i < count; ++i) { /* the sum has units of 1, so that its last bits are the whole number */
        const uint32_t bits = bits_of_float(x[i] * inverse + 0x1.8p23f);
        to[i] = (int8_t)(uint8_t)bits;
    }
}

/* One group; 0 if it holds NaN or inf. */
static int quantise_group(const char *from, ptrdiff_t stride, int dtype, int64_t count, int8_t *to, float *scale)
{
    float x[CHUNK];
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i += CHUNK) {
        const int part = (int)(count - i < CHUNK ? count - i : CHUNK);
        widen(from + i * stride, stride, dtype, part, x);
        const uint32_t of_part = largest(x, part);
        most = of_part > most ? of_part : most;
    }
    if (most >= 0x7f800000) return 0;
    const float size = float_of_bits(most);
    const float inverse = size < SMALLEST ? 0 : 127 / size;
    *scale = size < SMALLEST ? 0 : size / 127;
    if (*scale * 127 > FLT_MAX) *scale = float_of_bits(bits_of_float(*scale) - 1); /* else it comes out as inf */
    for (int64_t i = 0; i < count; i += CHUNK) {
        const int part = (int)(count - i < CHUNK ? count - i : CHUNK);
        if (count > CHUNK) widen(from + i * stride, stride, dtype, part, x);
        round_to_int8(x, inverse, part, to + i);
    }
    return 1;
}

/* `source` (batches, heads, rows, dim) of any float type; `out` of that shape and `scales` (batches, heads, rows,
 * groups), in both of which only the last axis has no gaps.  Returns 0 as soon as NaN or inf is met, which a number too
 * large for a float is, too. */
int sdpa_quantise_rows(const sdpa_array *source, int64_t batches, int64_t heads, int64_t rows, int64_t dim,
                       int64_t group, const sdpa_array *out, const sdpa_array *scales)
{
    for (int64_t batch = 0; batch < batches; ++batch)
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t row = 0; row < rows; ++row) {
                const char *from = source->data + batch * source->batch + head * source->head + row * source->row;
                int8_t *to = (int8_t *)(out->data + batch * out->batch + head * out->head + row * out->row);
                float *scale =
                    (float *)(scales->data + batch * scales->batch + head * scales->head + row * scales->row);
                for (int64_t i = 0; i < dim; i += group) {
                    const int64_t count = dim - i < group ? dim - i : group;
                    const char *first = from + i * source->column;
                    if (!quantise_group(first, source->column, source->dtype, count, to + i, scale++)) return 0;
                }
            }
    return 1;
}
