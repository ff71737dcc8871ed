/* Reading and writing arrays of any dtype and any stride: the only place that knows how the caller's memory looks.
 * Addresses need not be aligned (a view into packed records is legal in NumPy), hence memcpy. */

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
    case SDPA_FLOAT32: memcpy(&narrow, at, sizeof narrow); return (real)narrow;
    case SDPA_FLOAT64: memcpy(&wide, at, sizeof wide); return narrowed(wide);
    default: return 0;
    }
}

/* `count` <= VL elements, `stride` bytes apart; the lanes past them are 0. */
static inline vf read_chunk(const char *at, ptrdiff_t stride, int count, const sdpa_array *array)
{
    if (count == VL && stride == array->itemsize) {
        if (array->dtype == REAL_DTYPE) return vf_load((const real *)at);
        if (array->dtype == SDPA_FLOAT32) return vf_from_float((const float *)at);
    }
    real lane[VL] = {0};
    for (int i = 0; i < count; ++i) lane[i] = read_one(at + i * stride, array->dtype);
    return vf_load(lane);
}

/* One element, in the array's own dtype. */
static inline void write_one(char *at, int dtype, double x)
{
    float narrow = (float)x;
    if (dtype == SDPA_FLOAT32) memcpy(at, &narrow, sizeof narrow);
    if (dtype == SDPA_FLOAT64) memcpy(at, &x, sizeof x);
}

/* Like read_chunk, the other way round. */
static inline void write_chunk(char *at, ptrdiff_t stride, int count, const sdpa_array *array, vf x)
{
    if (count == VL && stride == sizeof(real) && array->itemsize == sizeof(real)) {
        vf_store((real *)at, x);
        return;
    }
    real lane[VL];
    vf_store(lane, x);
    for (int i = 0; i < count; ++i) write_one(at + i * stride, array->dtype, lane[i]);
}

/* Whether whole vectors can be moved between the array and registers as they are. */
static inline int is_plain(const sdpa_array *array)
{
    return array->itemsize == sizeof(real) && array->column == (ptrdiff_t)sizeof(real);
}

/* Scores lie as s[key][rows]. */
static inline real *scores_at(const sdpa_task *t, int key, int v)
{
    return (real *)t->s + (ptrdiff_t)key * ROWS + v * VL;
}

static inline int64_t padded(int64_t width) { return (width + VL - 1) / VL * VL; }

/* `width` elements from `at`, `column` bytes apart, to whole vectors: the last one is filled up with 0. */
static inline void read_row(const char *at, const sdpa_array *array, int64_t width, real *to)
{
    for (int64_t i = 0; i < width; i += VL) {
        const int count = width - i < VL ? (int)(width - i) : VL;
        vf_store(to + i, read_chunk(at + i * array->column, array->column, count, array));
    }
}

/* Rows of K or V as `real` rows of `width` with stride *stride: in place where they lie so, else copied to `copy`,
 * where they are padded with 0 to whole vectors (`whole`: the caller needs them so). */
static const real *read_block(const sdpa_array *array, const char *at, int64_t rows, int64_t width, int whole,
                              real *copy, ptrdiff_t *stride)
{
    const int aligned = array->row % (ptrdiff_t)sizeof(real) == 0 && (uintptr_t)at % sizeof(real) == 0;
    if (is_plain(array) && aligned && !(whole && width % VL)) {
        *stride = array->row / (ptrdiff_t)sizeof(real);
        return (const real *)at;
    }
    *stride = padded(width);
    for (int64_t row = 0; row < rows; ++row) read_row(at + row * array->row, array, width, copy + row * *stride);
    return copy;
}

/* Whether all lanes are 0; NaN is not. */
static inline int is_zero(vf x)
{
    real lane[VL], any = 0;
    vf_store(lane, x);
    for (int i = 0; i < VL; ++i) any += lane[i] == 0 ? 0 : 1;
    return any == 0;
}

static inline const char *block_address(const sdpa_array *array, const sdpa_task *t)
{
    return array->data + t->batch * array->batch + t->kv_head * array->head + t->key * array->row;
}

/* tile[column] lane row = row_at[row][column], for VL rows and `count` <= VL columns from `offset` (in bytes). */
static inline ALWAYS_INLINE void read_transposed(vf *tile, char *const *row_at, ptrdiff_t offset, int count,
                                                 const sdpa_array *array)
{
    if (count == VL && is_plain(array))
        UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = vf_load((const real *)(row_at[lane] + offset));
    else
        for (int lane = 0; lane < VL; ++lane)
            tile[lane] = read_chunk(row_at[lane] + offset, array->column, count, array);
    vf_transpose(tile);
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

/* row_at[row][first_column + column] = columns[column][rows] * factor[rows], for the rows of the task; NULL is 1. */
static void store_transposed(const sdpa_array *array, const sdpa_task *t, const real *columns, int64_t first_column,
                             int64_t width, const real *factor)
{
    for (int v = 0; v < t->vectors; ++v) {
        const int rows = t->rows - v * VL < VL ? t->rows - v * VL : VL;
        char *const *row_at = t->out_row + v * VL;
        const vf scale = factor ? vf_load(factor + v * VL) : vf_set1(1);
        for (int64_t column = 0; column < width; column += VL) {
            const int64_t c = chunk_begin(column, width);
            const int count = width < VL ? (int)width : VL;
            const real *from = columns + c * ROWS + v * VL;
            const ptrdiff_t offset = (first_column + c) * array->column;
            vf tile[VL];
            if (count == VL && is_plain(array)) {
                UNROLL_FOR (int i = 0; i < VL; ++i) tile[i] = vf_mul(vf_load(from + i * ROWS), scale);
                vf_transpose(tile);
                UNROLL_FOR (int lane = 0; lane < VL; ++lane)
                    if (lane < rows) vf_store((real *)(row_at[lane] + offset), tile[lane]);
                continue;
            }
            for (int i = 0; i < VL; ++i) tile[i] = i < count ? vf_mul(vf_load(from + i * ROWS), scale) : vf_set1(0);
            vf_transpose(tile);
            for (int lane = 0; lane < rows; ++lane)
                write_chunk(row_at[lane] + offset, array->column, count, array, tile[lane]);
        }
    }
}
