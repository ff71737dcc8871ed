/* The compute type, of SDPA_REAL_BYTES (4: float, 8: double). */
#ifndef SDPA_SIMD_REAL_H
#define SDPA_SIMD_REAL_H

#include "sdpa.h"

#include <float.h>

#if SDPA_REAL_BYTES == 4
typedef float real;
typedef uint32_t real_bits;
#define REAL_MAX FLT_MAX
#define REAL_MIN FLT_MIN
enum { REAL_MANTISSA_BITS = 23, REAL_BIAS = 127, REAL_DTYPE = SDPA_FLOAT32 };
#else
typedef double real;
typedef uint64_t real_bits;
#define REAL_MAX DBL_MAX
#define REAL_MIN DBL_MIN
enum { REAL_MANTISSA_BITS = 52, REAL_BIAS = 1023, REAL_DTYPE = SDPA_FLOAT64 };
#endif

#endif
