/* The arithmetic of attention for one instruction set, one compute type and one engine.  setup.py compiles this file
 * once for each triple, with SDPA_ISA_avx512 (or avx2, neon, baseline), SDPA_REAL_BYTES (4: float, 8: double) and
 * SDPA_FEW_ROWS (0: rows in lanes, 1: features in lanes) defined; the result is one constant table of functions.  What
 * is called when is decided in sdpa/_core/kernels.pxi. */
#include "sdpa.h"
#include "compiler.h"

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

#define PASTE_(a, b, c, d) a##b##_##c##_##d
#define PASTE(a, b, c, d) PASTE_(a, b, c, d)

#include "simd/half.h"

/* Whether a `real` of Q, K and V is a pair of bfloat16 (pairs.h) or a number (singles.h). */
#if defined(SDPA_ISA_avx512_bf16)
#define PAIRS 1
#else
#define PAIRS 0
#endif

#if defined(SDPA_ISA_avx512_bf16)
#define SDPA_ISA avx512_bf16
#include "simd/avx512_bf16.h"
#elif defined(SDPA_ISA_avx512)
#define SDPA_ISA avx512
#include "simd/avx512.h"
#elif defined(SDPA_ISA_avx2)
#define SDPA_ISA avx2
#include "simd/avx2.h"
#elif defined(SDPA_ISA_neon)
#define SDPA_ISA neon
#include "simd/neon.h"
#else
#define SDPA_ISA baseline
/* GCC 12 joins the scalars of two keys into one load in `multiply`, and then reads past the last key. */
NO_LOOP_VECTORIZE
#include "simd/baseline.h"
#endif

#if SDPA_FEW_ROWS
enum { ROWS = VL };
#else
enum { ROWS = VECTORS * VL, TALLEST = TILE > 16 ? TILE : 16 };
#endif
/* Measured with AVX-512 on 2048 x 2048, D = 64: 64 to 128 keys are alike, 192 and 256 take 1.5 % longer, as scores and
 * weights no longer fit into the first-level cache (48 KB) beside the queries. */
enum { BLOCK_KEYS = 128 };

/* Whether additive scores are computed, too. */
#define ADDITIVE (!PAIRS && !SDPA_FEW_ROWS)

enum { STEP = PAIRS ? 2 : 1 }; /* so many features, or keys, in one multiply-add of a lane */

#include "simd/vmath.h"
#include "memory/read.h"
#include "memory/write.h"
#include "memory/prefetch.h"
#include "memory/pages.h"
#include "forward/scratch.h"
#if PAIRS
#include "forward/pairs.h"
#else
#include "forward/singles.h"
#endif
#if SDPA_FEW_ROWS
#include "forward/few.h"
#else
#include "forward/product.h"
#endif
#if ADDITIVE
#include "forward/additive.h"
#endif
#include "forward/scores.h"
#include "forward/softmax.h"
#include "forward/output.h"
#include "forward/care.h"
#if !SDPA_FEW_ROWS
#if PAIRS
#include "backward/pairs.h"
#else
#include "backward/singles.h"
#endif
#include "backward/backward.h"
#include "layer/linear.h"
#endif

const sdpa_kernel PASTE(sdpa_kernel_, SDPA_ISA, SDPA_REAL_BYTES, SDPA_FEW_ROWS) = {
    .real_bytes = SDPA_REAL_BYTES,
    .lanes = VL,
    .rows = ROWS,
    .block_keys = BLOCK_KEYS,
    .copies = copies,
    .begin_forward = begin_forward,
    .scores = scores,
    .softmax_block = softmax_block,
    .accumulate = accumulate,
    .finite = finite,
    .accumulate_seen = accumulate_seen,
    .lift = lift,
    .add_poison = add_poison,
    .close_sums = close_sums,
    .join = JOIN,
    .start = start,
    .write_out = write_out,
    .write_weights = write_weights,
    .step = STEP,
#if !SDPA_FEW_ROWS
    .begin_backward = begin_backward,
    .score_gradients = score_gradients,
    .query_gradient = query_gradient,
    .key_gradients = key_gradients,
    .bias_gradient = bias_gradient,
    .add_slopes = PAIRS ? NULL : add_slopes,
    .needs_care = needs_care,
    .write_query_gradient = write_query_gradient,
    .write_key_gradients = write_key_gradients,
    .linear_tile = TILE / VECTORS,
    .pack_weights = pack_weights,
    .linear = linear,
#endif
};
