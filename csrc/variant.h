/* What differs between the compilations of kernel.c: the compute type, the instruction set and the engine, by the macros
 * that setup.py defines for each. */
#ifndef SDPA_VARIANT_H
#define SDPA_VARIANT_H

#include "sdpa.h"
#include "compiler.h"
#include "simd/real.h"
#include "simd/half.h"

/* Whether a `real` of Q, K and V is a pair of bfloat16 (pairs.h) or a number (singles.h). */
#if defined(SDPA_ISA_amx) || defined(SDPA_ISA_avx512_bf16)
#define PAIRS 1
#else
#define PAIRS 0
#endif

/* Whether pairs are multiplied by matrices (tiles.h) or by vectors (product.h). */
#if defined(SDPA_ISA_amx)
#define TILES 1
#else
#define TILES 0
#endif

#if defined(SDPA_ISA_amx)
#define SDPA_ISA amx
#include "simd/amx.h"
#elif defined(SDPA_ISA_avx512_bf16)
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

#ifndef LOADED_ONCE
#define LOADED_ONCE(vector) (void)(vector)
#endif

#if SDPA_FEW_ROWS
enum { ROWS = VL };
#else
enum { ROWS = VECTORS * VL, TALLEST = TILE > 16 ? TILE : 16 };
#endif
/* Measured with AVX-512 on 2048 x 2048, D = 64: 64 to 128 keys are alike, 192 and 256 take 1.5 % longer, as scores and
 * weights no longer fit into the first-level cache (48 KB) beside the queries.  Those of few rows do, and what a block
 * costs beside its products weighs more: one row of bfloat16 takes 12.9 cycles for a key of 64 features with blocks of
 * 128, 10.2 with 512. */
enum { BLOCK_KEYS = SDPA_FEW_ROWS ? 512 : 128 };

/* Rows of a tile that share an address: that of its first, and multiples of their distance which instructions add for
 * nothing.  Of 12 or 16 rows, addresses would not all fit in registers. */
enum { GROUP_ROWS = 4 };

/* Expands `call(n)` for n = `vectors`, so that the compiler sees a constant and unrolls each number on its own. */
#define WITH_VECTORS(vectors, call)                                                                                    \
    do {                                                                                                               \
        if ((vectors) == 1) call(1);                                                                                   \
        if ((vectors) == 2) call(2);                                                                                   \
        if (VECTORS > 2 && (vectors) == 3) call(3);                                                                    \
        if (VECTORS > 2 && (vectors) == 4) call(4);                                                                    \
    } while (0)

#if !TILES
static inline void release_tiles(void) {} /* there are none */
#endif

/* Whether results can be written as they are summed (vectors.h). */
#define STORES_ROWS (!TILES && !SDPA_FEW_ROWS)

/* Whether additive scores are computed, too. */
#define ADDITIVE (!PAIRS && !SDPA_FEW_ROWS)

enum { STEP = PAIRS ? 2 : 1 }; /* so many features, or keys, in one multiply-add of a lane */

#endif
