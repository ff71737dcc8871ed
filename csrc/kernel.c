/* The arithmetic of attention for one instruction set and one compute type.  setup.py compiles this file once for
 * each pair, with SDPA_ISA (avx512, avx2, neon, baseline) and SDPA_REAL_BYTES (4: float, 8: double) defined; the
 * result is one constant table of functions.  What is called when is decided in sdpa/_core.pyx. */
#include "sdpa.h"

#include <float.h>
#include <math.h>
#include <string.h>

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

#if defined(__clang__)
#define UNROLL_FOR _Pragma("clang loop unroll(full)") for
#define ALWAYS_INLINE __attribute__((always_inline))
#elif defined(__GNUC__)
#define UNROLL_FOR _Pragma("GCC unroll 24") for
#define ALWAYS_INLINE __attribute__((always_inline))
#else
#define UNROLL_FOR for
#define ALWAYS_INLINE
#endif

#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)
#define PASTE_(a, b, c) a##b##_##c
#define PASTE(a, b, c) PASTE_(a, b, c)

#if defined(SDPA_ISA_avx512)
#define SDPA_ISA avx512
#include "simd_avx512.h"
#elif defined(SDPA_ISA_avx2)
#define SDPA_ISA avx2
#include "simd_avx2.h"
#elif defined(SDPA_ISA_neon)
#define SDPA_ISA neon
#include "simd_neon.h"
#else
#define SDPA_ISA baseline
#if defined(__GNUC__) && !defined(__clang__)
/* GCC 12 joins the scalars of two keys into one load in `multiply`, and then reads past the last key. */
#pragma GCC optimize("no-tree-loop-vectorize")
#endif
#include "simd_baseline.h"
#endif

enum { ROWS = VECTORS * VL, TALLEST = TILE > 16 ? TILE : 16 };
#ifndef BLOCK_KEYS
#define BLOCK_KEYS 128
#endif

#include "vmath.h"
#include "load.h"
#include "product.h"
#include "scores.h"
#include "softmax.h"
#include "output.h"

const sdpa_kernel PASTE(sdpa_kernel_, SDPA_ISA, SDPA_REAL_BYTES) = {
    .isa = QUOTE(SDPA_ISA),
    .real_bytes = SDPA_REAL_BYTES,
    .lanes = VL,
    .rows = ROWS,
    .block_keys = BLOCK_KEYS,
    .begin = begin,
    .scores = scores,
    .softmax_step = softmax_step,
    .accumulate = accumulate,
    .accumulate_seen = accumulate_seen,
    .finite = finite,
    .close_sums = close_sums,
    .write_out = write_out,
    .write_weights = write_weights,
};
