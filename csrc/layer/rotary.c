/* The arithmetic of rotary embedding, in plain C that compilers vectorise.  setup.py compiles this file for
 * SDPA_REAL_BYTES 4 (float, and the half types) and 8 (double).  Angles are double in both. */
#include "layer/rotary.h"
#include "compiler.h"
#include "simd/half.h"
#include "simd/real.h"

#include <math.h>
#include <string.h>

#if SDPA_REAL_BYTES == 4
#define SDPA_ROTATE sdpa_rotate_4
#else
#define SDPA_ROTATE sdpa_rotate_8
#endif

static inline uint64_t bits_of_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline double double_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* pi/2 in three parts.  Multiples of the first two up to 2**20 are exact: they have 33 bits. */
static const double QUARTER[] = {0x1.921fb544p+0, 0x1.0b4611a6p-34, 0x1.3198a2e037073p-69};
static const double QUARTERS_IN_ONE = 0x1.45f306dc9c883p-1; /* 2 / pi */
static const double LARGEST_ANGLE = 1.6e6;                  /* below 2**20 quarters */

/* Cosine and sine of an angle up to LARGEST_ANGLE, to 1.5 units of the last place of 1.  What remains after whole
 * quarters is at most pi/4, where these terms of the Taylor series leave 2e-18 and 1e-19.  No branches, so that the
 * compiler computes several at once. */
static inline ALWAYS_INLINE void turn(double angle, double *cosine, double *sine)
{
    const double rounder = 0x1.8p52; /* added, it leaves a whole number in the low bits */
    const double shifted = angle * QUARTERS_IN_ONE + rounder, quarters = shifted - rounder;
    const double x = angle - quarters * QUARTER[0] - quarters * QUARTER[1] - quarters * QUARTER[2];
    const double y = x * x;

    double s = 1 / 355687428096000.0; /* 1 / 17! */
    s = s * y - 1 / 1307674368000.0;
    s = s * y + 1 / 6227020800.0;
    s = s * y - 1 / 39916800.0;
    s = s * y + 1 / 362880.0;
    s = s * y - 1 / 5040.0;
    s = s * y + 1 / 120.0;
    s = s * y - 1 / 6.0;
    s = x + x * y * s;

    double c = 1 / 20922789888000.0; /* 1 / 16! */
    c = c * y - 1 / 87178291200.0;
    c = c * y + 1 / 479001600.0;
    c = c * y - 1 / 3628800.0;
    c = c * y + 1 / 40320.0;
    c = c * y - 1 / 720.0;
    c = c * y + 1 / 24.0;
    c = 1 - (y * 0.5 - y * y * c);

    /* Each quarter takes (c, s) to (-s, c). */
    const uint64_t quadrant = bits_of_double(shifted), odd = 0 - (quadrant & 1);
    const uint64_t c_bits = bits_of_double(c), s_bits = bits_of_double(s);
    *cosine = double_of_bits(((c_bits & ~odd) | (s_bits & odd)) ^ ((quadrant + 1) & 2) << 62);
    *sine = double_of_bits(((s_bits & ~odd) | (c_bits & odd)) ^ (quadrant & 2) << 62);
}

/* `step` is 1 if each pair has its own position, else 0. */
static inline ALWAYS_INLINE void fill_row(const sdpa_rotary *r, const double *restrict position, const int step,
                                          double farthest, real *restrict cosine, real *restrict sine)
{
    const double *restrict frequency = r->frequency;
    if (farthest * r->largest_frequency <= LARGEST_ANGLE) {
        for (int64_t i = 0; i < r->pairs; ++i) {
            double c, s;
            turn(position[i * step] * frequency[i], &c, &s);
            cosine[i] = (real)c;
            sine[i] = (real)s;
        }
    } else {
        for (int64_t i = 0; i < r->pairs; ++i) {
            cosine[i] = (real)cos(position[i * step] * frequency[i]);
            sine[i] = (real)sin(position[i * step] * frequency[i]);
        }
    }
}

/* Cosines and sines of some rows, the first of which is `row` of the positions at `offset`. */
static void fill_table(const sdpa_rotary *r, ptrdiff_t offset, int64_t row, int64_t rows, real *cosine, real *sine)
{
    const int64_t pairs = r->pairs;
    for (const int64_t end = row + rows; row < end; ++row, cosine += pairs, sine += pairs) {
        if (r->each_pair) {
            const double *position = r->positions + offset + row * pairs;
            double farthest = 0;
            for (int64_t i = 0; i < pairs; ++i) farthest = fmax(farthest, fabs(position[i]));
            fill_row(r, position, 1, farthest, cosine, sine);
        } else {
            const double position = r->positions ? r->positions[offset + row] : r->first_position + (double)row;
            fill_row(r, &position, 0, fabs(position), cosine, sine);
        }
    }
}

/* A condition as bits: all or none. */
static inline ALWAYS_INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    const uint32_t mask = 0 - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* As in half.h but without branches, for which compilers do not vectorise: all cases are computed, one is chosen.
 * (A NaN becomes quiet when it is rotated.) */
static inline ALWAYS_INLINE float widened(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t number = bits_of_float(float_of_bits(size) * 0x1p112f);
    return float_of_bits(sign | choose(size < 0x7c00 << 13, number, size | 0x7f800000));
}
static inline ALWAYS_INLINE uint16_t narrowed(float x)
{
    const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    const uint32_t rebiased = size - ((127 - 15) << 23), number = (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13;
    const uint32_t denormal = bits_of_float(float_of_bits(size) + 0.5f) - 0x3f000000; /* 0.5f has units of 2**-24 */
    const uint32_t nan = 0x7e00 | (size >> 13 & 0x3ff);
    const uint32_t finite = choose(size < 0x38800000, denormal, number); /* 2**-14 */
    const uint32_t large = choose(size > 0x7f800000, nan, 0x7c00);
    return (uint16_t)(sign | choose(size < 0x477ff000, finite, large)); /* 65520 */
}

/* Elements need not be aligned, hence memcpy. */
static inline ALWAYS_INLINE real get(const char *at, const int dtype)
{
    real x;
    if (dtype == SDPA_FLOAT16) return (real)widened(read_bits(at));
    if (dtype == SDPA_BFLOAT16) return (real)float_of_bfloat16(read_bits(at));
    memcpy(&x, at, sizeof x);
    return x;
}
static inline ALWAYS_INLINE void put(char *at, const int dtype, real x)
{
    if (dtype == SDPA_FLOAT16)
        write_bits(at, narrowed((float)x));
    else if (dtype == SDPA_BFLOAT16)
        write_bits(at, bfloat16_of_float((float)x));
    else
        memcpy(at, &x, sizeof x);
}

/* Where the pairs of a row are: `stride` from one to the next, `second` from its first feature to its second. */
typedef struct {
    ptrdiff_t stride, second;
} layout;

static inline ALWAYS_INLINE void rotate_pair(const char *x, ptrdiff_t x_second, char *out, ptrdiff_t out_second,
                                             real cosine, real sine, const int dtype)
{
    const real a = get(x, dtype), b = get(x + x_second, dtype);
    put(out, dtype, a * cosine - b * sine);
    put(out + out_second, dtype, b * cosine + a * sine);
}

/* Features that lie side by side, in x and in out: this the compiler vectorises. */
static inline ALWAYS_INLINE void rotate_adjacent(const char *x, char *out, layout of, int64_t pairs,
                                                 const real *restrict cosine, const real *restrict sine,
                                                 const int dtype)
{
    INDEPENDENT for (int64_t i = 0; i < pairs; ++i)
        rotate_pair(x + i * of.stride, of.second, out + i * of.stride, of.second, cosine[i], sine[i], dtype);
}

static inline ALWAYS_INLINE void rotate_row(const sdpa_rotary *r, const char *x, char *out, const real *cosine,
                                            const real *sine, const int dtype, const int size)
{
    const int64_t pairs = r->pairs;
    if (r->x_column == size && r->out_column == size) {
        if (r->interleaved)
            rotate_adjacent(x, out, (layout){2 * size, size}, pairs, cosine, sine, dtype);
        else
            rotate_adjacent(x, out, (layout){size, pairs * size}, pairs, cosine, sine, dtype);
        return;
    }
    const layout in_units = {r->interleaved ? 2 : 1, r->interleaved ? 1 : pairs};
    const layout from = {in_units.stride * r->x_column, in_units.second * r->x_column};
    const layout to = {in_units.stride * r->out_column, in_units.second * r->out_column};
    for (int64_t i = 0; i < pairs; ++i)
        rotate_pair(x + i * from.stride, from.second, out + i * to.stride, to.second, cosine[i], sine[i], dtype);
}

/* The features that are not rotated. */
static void copy_rest(const sdpa_rotary *r, const char *x, char *out)
{
    const size_t size = (size_t)r->itemsize;
    int64_t i = 2 * r->pairs;
    if (r->x_column == r->itemsize && r->out_column == r->itemsize)
        memcpy(out + i * r->out_column, x + i * r->x_column, (size_t)(r->dim - i) * size);
    else
        for (; i < r->dim; ++i) memcpy(out + i * r->out_column, x + i * r->x_column, size);
}

typedef struct {
    ptrdiff_t x, out, positions;
} offsets;

static offsets moved(offsets at, const sdpa_axes *axes, int64_t index)
{
    for (int axis = axes->count - 1; axis >= 0; --axis) {
        const int64_t i = axis ? index % axes->size[axis] : index; /* most often there is one axis: no division */
        if (axis) index /= axes->size[axis];
        at.x += i * axes->x[axis];
        at.out += i * axes->out[axis];
        at.positions += i * axes->positions[axis];
    }
    return at;
}

static void rotate_at(const sdpa_rotary *r, offsets at, int64_t row, const real *cosine, const real *sine)
{
    const char *x = r->x + at.x + row * r->x_row;
    char *out = r->out + at.out + row * r->out_row;
#if SDPA_REAL_BYTES == 8
    rotate_row(r, x, out, cosine, sine, SDPA_FLOAT64, 8);
#else
    if (r->dtype == SDPA_FLOAT32) rotate_row(r, x, out, cosine, sine, SDPA_FLOAT32, 4);
    if (r->dtype == SDPA_FLOAT16) rotate_row(r, x, out, cosine, sine, SDPA_FLOAT16, 2);
    if (r->dtype == SDPA_BFLOAT16) rotate_row(r, x, out, cosine, sine, SDPA_BFLOAT16, 2);
#endif
    if (!r->in_place) copy_rest(r, x, out);
}

void SDPA_ROTATE(const sdpa_rotary *r, int64_t task, void *scratch)
{
    const int64_t part = task % r->parts, block = task / r->parts % r->blocks, own = task / r->parts / r->blocks;
    const int64_t begin = block * r->task_rows;
    const int64_t rows = r->rows - begin < r->task_rows ? r->rows - begin : r->task_rows;
    const int64_t head = part * r->shared.total / r->parts, end = (part + 1) * r->shared.total / r->parts;
    const offsets start = moved((offsets){0, 0, 0}, &r->own, own);
    const real *cosine = scratch, *sine = cosine + r->task_rows * r->pairs; /* [rows][pairs] */
    if (r->cosine) {
        cosine = (const real *)r->cosine + start.positions + begin * r->pairs;
        sine = (const real *)r->sine + start.positions + begin * r->pairs;
    } else {
        fill_table(r, start.positions, begin, rows, scratch, (real *)scratch + r->task_rows * r->pairs);
    }
    /* In the order of the memory: (B, S, H, D), seen as (B, H, S, D), is 3 times slower the other way. */
    if (r->heads_inside) {
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t h = head; h < end; ++h)
                rotate_at(r, moved(start, &r->shared, h), begin + row, cosine + row * r->pairs, sine + row * r->pairs);
    } else {
        for (int64_t h = head; h < end; ++h) {
            const offsets at = moved(start, &r->shared, h);
            for (int64_t row = 0; row < rows; ++row)
                rotate_at(r, at, begin + row, cosine + row * r->pairs, sine + row * r->pairs);
        }
    }
}
