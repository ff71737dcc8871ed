/* AMX: products of matrices of pairs of bfloat16.  A tile register holds 16 rows of 64 bytes; there are eight, and one
 * instruction multiplies two of them and adds to a third:
 *
 *     c[i][lane] += sum over pair of a[i][pair].low * b[pair][lane].low + a[i][pair].high * b[pair][lane].high
 *
 * for 16 i, 16 pairs and 16 lanes.  It takes 16 cycles, and a load from the first-level cache 8 of those meanwhile, so
 * with two tiles of a and two of b there is one load to a product and the products are the limit: 1024 operations a
 * cycle, where vectors have 128.  As with those, denormals count as 0.
 *
 * All tiles are whole here: operands are filled up with 0 along the sum, and with anything in rows and lanes that are
 * not wanted. */
#ifndef SDPA_SIMD_AMX_H
#define SDPA_SIMD_AMX_H

#include "compiler.h"
#include "simd/avx512_bf16.h"

#include <string.h>

enum { SIDE = 16, WHOLE_STEP = 2 * SIDE }; /* of a tile: rows, pairs and lanes; numbers along the sum of one */

/* The shapes of the tile registers belong to the state of a thread.  Asking for it takes 16 cycles, setting it 160. */
static inline void use_tiles(void)
{
    static const uint8_t whole[64] = {1,         [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64,
                                      [26] = 64, [28] = 64, [30] = 64, [48] = 16, 16,        16,
                                      16,        16,        16,        16,        16}; /* palette, bytes, rows */
    uint8_t now[64];
    _tile_storeconfig(now);
    if (memcmp(now, whole, sizeof now) != 0) _tile_loadconfig(whole);
}

/* For whoever comes next: a thread whose tiles are in use takes longer to be switched. */
static inline void release_tiles(void) { _tile_release(); }

/* Operands of a product: where they begin, and bytes from row to row and from one whole step of the sum to the next. */
typedef struct {
    const void *at;
    ptrdiff_t row, step;
} matrix;

/* What is asked for meanwhile: so many cache lines with each step. */
typedef struct {
    const char *at;
    int lines;
} lines_soon;

/* c (+)= a b, for 16 * high rows and 16 * wide lanes: 1 x 4 tiles at most, or 2 x 2. */
static inline ALWAYS_INLINE void multiply_tiles(const int high, const int wide, int64_t steps, matrix a, matrix b,
                                                real *c, ptrdiff_t c_row, int first, lines_soon soon)
{
    const char *a_at = a.at, *b_at = b.at;
    char *const c_at = (char *)c, *const c_below = c_at + SIDE * c_row;
    ALL_WRITTEN(); /* compilers do not know what the instructions read */
#define BESIDE(lanes) ((lanes) * SIDE * (ptrdiff_t)sizeof(real))
#define FOR_SUMS(do_with)                                                                                              \
    do_with(0, c_at);                                                                                                  \
    if (wide > 1) do_with(1, c_at + BESIDE(1));                                                                        \
    if (wide > 2) do_with(2, c_at + BESIDE(2));                                                                        \
    if (wide > 3) do_with(3, c_at + BESIDE(3));                                                                        \
    if (high > 1) do_with(2, c_below);                                                                                 \
    if (high > 1 && wide > 1) do_with(3, c_below + BESIDE(1))
#define ZERO(tile, at) _tile_zero(tile)
#define LOAD(tile, at) _tile_loadd(tile, at, c_row)
#define STORE(tile, at) _tile_stored(tile, at, c_row)
    if (first) {
        FOR_SUMS(ZERO);
    } else {
        FOR_SUMS(LOAD);
    }
    for (int64_t k = 0; k < steps; ++k, a_at += a.step, b_at += b.step) {
        for (int line = 0; line < soon.lines; ++line, soon.at += 64) PREFETCH(soon.at, 2);
        _tile_loadd(4, a_at, a.row);
        _tile_loadd(6, b_at, b.row);
        if (wide > 1) _tile_loadd(7, b_at + BESIDE(1), b.row);
        if (high > 1) _tile_loadd(5, a_at + SIDE * a.row, a.row);
        _tile_dpbf16ps(0, 4, 6);
        if (wide > 1) _tile_dpbf16ps(1, 4, 7);
        if (high > 1) _tile_dpbf16ps(2, 5, 6);
        if (high > 1 && wide > 1) _tile_dpbf16ps(3, 5, 7);
        if (wide > 2) {
            _tile_loadd(6, b_at + BESIDE(2), b.row);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (wide > 3) {
            _tile_loadd(7, b_at + BESIDE(3), b.row);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    FOR_SUMS(STORE);
#undef BESIDE
#undef FOR_SUMS
#undef ZERO
#undef LOAD
#undef STORE
}

#endif
