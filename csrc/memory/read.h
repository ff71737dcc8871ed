/* Reading arrays of any dtype and any stride; write.h is the other way round, and both are the only places that know how
 * the caller's memory looks.  Addresses need not be aligned (a view into packed records is legal in NumPy), hence
 * memcpy. */
#ifndef SDPA_MEMORY_READ_H
#define SDPA_MEMORY_READ_H

#include "variant.h"

#include <math.h>
#include <string.h>

/* A number too large for `real` becomes the largest one: only inf is inf (a bias of -DBL_MAX must not hide a key). */
static inline real narrowed(double x)
{
    if (isfinite(x) && x > REAL_MAX) return REAL_MAX;
    if (isfinite(x) && x < -REAL_MAX) return -REAL_MAX;
    return (real)x;
}

static inline real read_one(const char *at, int dtype)
{
    float narrow;
    double wide;
    switch (dtype) {
    case SDPA_INT8: return *(const signed char *)at;
    case SDPA_FLOAT16: return (real)float_of_float16(read_bits(at));
    case SDPA_BFLOAT16: return (real)float_of_bfloat16(read_bits(at));
    case SDPA_FLOAT32: memcpy(&narrow, at, sizeof narrow); return (real)narrow;
    case SDPA_FLOAT64: memcpy(&wide, at, sizeof wide); return narrowed(wide);
    default: return 0;
    }
}

static inline ALWAYS_INLINE int size_of(int dtype)
{
    return dtype == SDPA_FLOAT64 ? 8 : dtype == SDPA_FLOAT32 ? 4 : dtype == SDPA_INT8 ? 1 : 2;
}

/* VL elements that lie side by side, of any dtype but one wider than `real`. */
static inline ALWAYS_INLINE vf read_adjacent(const char *at, int dtype)
{
    switch (dtype) {
    case SDPA_INT8: return vf_from_int8(at);
    case SDPA_FLOAT16: return vf_from_float16(at);
    case SDPA_BFLOAT16: return vf_from_bfloat16(at);
    case SDPA_FLOAT32: return vf_from_float((const float *)at);
    default: return vf_load((const real *)at);
    }
}

/* `count` <= VL elements, `stride` bytes apart; the lanes past them are 0. */
static inline vf read_chunk(const char *at, ptrdiff_t stride, int count, const sdpa_array *array)
{
    if (stride == array->itemsize && stride <= (ptrdiff_t)sizeof(real)) {
        char part[VL * sizeof(real)] = {0};
        if (count == VL) return read_adjacent(at, array->dtype);
        memcpy(part, at, (size_t)(count * stride));
        return read_adjacent(part, array->dtype);
    }
    real lane[VL] = {0};
    for (int i = 0; i < count; ++i) lane[i] = read_one(at + i * stride, array->dtype);
    return vf_load(lane);
}

/* `width` elements from `at`, `column` bytes apart, to whole vectors: the last one is filled up with 0. */
static inline void read_row(const char *at, const sdpa_array *array, int64_t width, real *to)
{
    for (int64_t i = 0; i < width; i += VL) {
        const int count = width - i < VL ? (int)(width - i) : VL;
        vf_store(to + i, read_chunk(at + i * array->column, array->column, count, array));
    }
}

/* Whether rows can be read where they lie. */
static inline int is_adjacent(const sdpa_array *array, const char *at)
{
    return array->column == array->itemsize && array->row % array->itemsize == 0 &&
           (uintptr_t)at % (uintptr_t)array->itemsize == 0;
}

static inline ALWAYS_INLINE void read_lanes(vf *tile, char *const *row_at, ptrdiff_t offset, const int dtype)
{
    UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = read_adjacent(row_at[lane] + offset, dtype);
}

/* The same for `count` <= VL columns of any layout. */
static NOINLINE void read_any_lanes(vf *tile, char *const *row_at, ptrdiff_t offset, int count, const sdpa_array *array)
{
    for (int lane = 0; lane < VL; ++lane) tile[lane] = read_chunk(row_at[lane] + offset, array->column, count, array);
}

/* tile[column] lane row = row_at[row][column], for VL rows and `count` <= VL columns from `offset` (in bytes). */
static inline ALWAYS_INLINE void read_transposed(vf *tile, char *const *row_at, ptrdiff_t offset, int count,
                                                 const sdpa_array *array)
{
    const int whole = count == VL && array->column == array->itemsize;
    vf any[VL]; /* in memory, where `tile` can stay in registers */
    if (whole && array->dtype == REAL_DTYPE)
        read_lanes(tile, row_at, offset, REAL_DTYPE);
    else if (whole && array->dtype == SDPA_FLOAT16)
        read_lanes(tile, row_at, offset, SDPA_FLOAT16);
    else if (whole && array->dtype == SDPA_BFLOAT16)
        read_lanes(tile, row_at, offset, SDPA_BFLOAT16);
    else {
        read_any_lanes(any, row_at, offset, count, array);
        UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = any[lane];
    }
    vf_transpose(tile);
}

/* The same for the last columns of wider rows: a whole tile that ends with them is read, as one by one takes longer.
 * What comes after them repeats the last. */
static inline void read_last_transposed(vf *tile, char *const *row_at, ptrdiff_t offset, int count,
                                        const sdpa_array *array)
{
    const int before = VL - count;
    real columns[VL][VL];
    read_transposed(tile, row_at, offset - before * array->column, VL, array);
    UNROLL_FOR (int i = 0; i < VL; ++i) vf_store(columns[i], tile[i]);
    UNROLL_FOR (int i = 0; i < VL; ++i) tile[i] = vf_load(columns[i < count ? before + i : VL - 1]);
}

/* seen[column] lane row = mask_row[row][column]; false in the columns past `count`. */
static inline void read_mask(vm *seen, char *const *mask_row, ptrdiff_t offset, int count, const sdpa_array *mask)
{
    if (count == VL && mask->column == 1) {
        vm_transpose_bools(seen, mask_row, offset);
        return;
    }
    char part[VL][VL] = {{0}}, *part_row[VL];
    for (int lane = 0; lane < VL; ++lane) {
        for (int i = 0; i < count; ++i) part[lane][i] = mask_row[lane][offset + i * mask->column];
        part_row[lane] = part[lane];
    }
    vm_transpose_bools(seen, part_row, 0);
}

/* Chunks of VL columns: the last one of a wide row begins earlier, to be whole, and repeats some columns. */
static inline int64_t chunk_begin(int64_t column, int64_t width)
{
    return column + VL > width && width >= VL ? width - VL : column;
}

#endif
