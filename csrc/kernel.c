/* The arithmetic of attention for one instruction set and one compute type.  setup.py compiles this file once for
 * each pair, with SDPA_ISA (avx512, avx2, neon, baseline) and SDPA_REAL_BYTES (4: float, 8: double) defined; the
 * result is one constant table of functions.  What is called when is decided in sdpa/_core.pyx. */
#include "sdpa.h"

#include <math.h>
#include <string.h>

#if SDPA_REAL_BYTES == 4
typedef float real;
typedef uint32_t real_bits;
enum { REAL_MANTISSA_BITS = 23, REAL_BIAS = 127 };
#else
typedef double real;
typedef uint64_t real_bits;
enum { REAL_MANTISSA_BITS = 52, REAL_BIAS = 1023 };
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ALWAYS_INLINE __attribute__((always_inline))
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 24")
#define ALWAYS_INLINE __attribute__((always_inline))
#else
#define UNROLL
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
#include "simd_baseline.h"
#endif

enum { ROWS = VECTORS * VL };
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
