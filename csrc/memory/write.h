/* Writing arrays of any dtype and any stride: see read.h. */
#ifndef SDPA_MEMORY_WRITE_H
#define SDPA_MEMORY_WRITE_H

#include "memory/read.h"

/* One element, in the array's own dtype. */
static inline void write_one(char *at, int dtype, double x)
{
    const float narrow = (float)x; /* exact for a half: those come from float */
    if (dtype == SDPA_FLOAT16) write_bits(at, float16_of_float(narrow));
    if (dtype == SDPA_BFLOAT16) write_bits(at, bfloat16_of_float(narrow));
    if (dtype == SDPA_FLOAT32) memcpy(at, &narrow, sizeof narrow);
    if (dtype == SDPA_FLOAT64) memcpy(at, &x, sizeof x);
}

/* Like read_adjacent and read_chunk, the other way round. */
static inline ALWAYS_INLINE void write_adjacent(char *at, int dtype, vf x)
{
#if SDPA_REAL_BYTES == 4
    if (dtype == SDPA_FLOAT16) vf_to_float16(at, x);
#if PAIRS
    if (dtype == SDPA_BFLOAT16) vf_store_bfloat16(at, x);
#else
    if (dtype == SDPA_BFLOAT16) vf_to_bfloat16(at, x);
#endif
#endif
    if (dtype == REAL_DTYPE) vf_store((real *)at, x);
}

/* Whether it takes elements `stride` bytes apart.  What double becomes that is narrower (gradients of keys may be), and
 * float that is wider (`out` may be), is rare, and written one by one. */
static inline int writes_adjacent(const sdpa_array *array, ptrdiff_t stride)
{
    const int half = sizeof(real) == sizeof(float) && array->itemsize == 2;
    return stride == array->itemsize && (array->dtype == REAL_DTYPE || half);
}

static inline void write_chunk(char *at, ptrdiff_t stride, int count, const sdpa_array *array, vf x)
{
    if (count == VL && writes_adjacent(array, stride)) {
        write_adjacent(at, array->dtype, x);
        return;
    }
    real lane[VL];
    vf_store(lane, x);
    for (int i = 0; i < count; ++i) write_one(at + i * stride, array->dtype, lane[i]);
}

/* row_at[row][column] = columns[column][row] * factor[row] for `rows` <= VL rows and `count` <= VL columns. */
static inline ALWAYS_INLINE void store_tile(const sdpa_array *array, char *const *row_at, ptrdiff_t offset, int rows,
                                            int count, const real *columns, vf factor)
{
    vf tile[VL];
    for (int i = 0; i < VL; ++i) tile[i] = i < count ? vf_mul(vf_load(columns + i * ROWS), factor) : vf_set1(0);
    vf_transpose(tile);
    for (int lane = 0; lane < rows; ++lane) write_chunk(row_at[lane] + offset, array->column, count, array, tile[lane]);
}

/* The same for VL columns that lie side by side, all in registers. */
static inline ALWAYS_INLINE void store_whole_tile(const int dtype, char *const *row_at, ptrdiff_t offset, int rows,
                                                  const real *columns, vf factor)
{
    vf tile[VL];
    UNROLL_FOR (int i = 0; i < VL; ++i) tile[i] = vf_mul(vf_load(columns + i * ROWS), factor);
    vf_transpose(tile);
    UNROLL_FOR (int lane = 0; lane < VL; ++lane)
        if (lane < rows) write_adjacent(row_at[lane] + offset, dtype, tile[lane]);
}

/* rows_at[row][first_column + column] = columns[column][rows] * factor[rows], for the rows of the task; NULL is 1. */
static void store_transposed(const sdpa_array *array, const sdpa_rows *of, char *const *rows_at, const real *columns,
                             int64_t first_column, int64_t width, const real *factor)
{
    const int adjacent = writes_adjacent(array, array->column);
    for (int v = 0; v < of->vectors; ++v) {
        const int rows = of->count - v * VL < VL ? of->count - v * VL : VL;
        char *const *row_at = rows_at + v * VL;
        const vf scale = factor ? vf_load(factor + v * VL) : vf_set1(1);
        for (int64_t column = 0; column < width; column += VL) {
            const int64_t c = chunk_begin(column, width);
            const real *from = columns + c * ROWS + v * VL;
            const ptrdiff_t offset = (first_column + c) * array->column;
            if (width < VL || !adjacent)
                store_tile(array, row_at, offset, rows, width < VL ? (int)width : VL, from, scale);
            else if (array->dtype == REAL_DTYPE)
                store_whole_tile(REAL_DTYPE, row_at, offset, rows, from, scale);
            else if (array->dtype == SDPA_FLOAT16)
                store_whole_tile(SDPA_FLOAT16, row_at, offset, rows, from, scale);
            else
                store_whole_tile(SDPA_BFLOAT16, row_at, offset, rows, from, scale);
        }
    }
}

#endif
