/* The 16-bit types, one number at a time: what the vector instructions of its neighbours do.  Both come as bits, as C has no
 * type for them everywhere.
 *
 *     float16    1 sign, 5 exponent (bias 15), 10 mantissa: largest 65504, smallest 2**-24
 *     bfloat16   1 sign, 8 exponent (bias 127), 7 mantissa: the upper half of a float */
#ifndef SDPA_SIMD_HALF_H
#define SDPA_SIMD_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

/* To nearest, ties to even: half a unit of what remains is added, a little less where that is even. */
static inline uint16_t bfloat16_of_float(float x)
{
    const uint32_t bits = bits_of_float(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40); /* quiet; rounding could make inf of it */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float float_of_float16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
    if (size >= 0x7c00) return float_of_bits(sign | 0x7f800000 | size << 13 | (size > 0x7c00) << 22); /* inf, NaN */
    const float x = float_of_bits(size << 13) * 0x1p112f; /* from one bias to the other; exact for denormals, too */
    return float_of_bits(sign | bits_of_float(x));
}

static inline uint16_t float16_of_float(float x)
{
    const uint32_t bits = bits_of_float(x), size = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (x != x) return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= bits_of_float(65520)) return sign | 0x7c00; /* half a unit past the largest number */
    if (size < bits_of_float(0x1p-14f))                     /* denormal: a float from 1/2 on has units of 2**-24, too */
        return sign | (uint16_t)(bits_of_float(float_of_bits(size) + 0.5f) - bits_of_float(0.5f));
    const uint32_t rebiased = size - ((127 - 15) << 23);
    return sign | (uint16_t)((rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
}

static inline uint16_t read_bits(const char *at)
{
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return half;
}
static inline void write_bits(char *at, uint16_t half) { memcpy(at, &half, sizeof half); }

#endif
