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

/* One element, in the array's own dtype. */
static inline void write_one(char *at, int dtype, double x)
{
    const float narrow = (float)x; /* exact for a half: those come from float */
    if (dtype == SDPA_FLOAT16) write_bits(at, float16_of_float(narrow));
    if (dtype == SDPA_BFLOAT16) write_bits(at, bfloat16_of_float(narrow));
    if (dtype == SDPA_FLOAT32) memcpy(at, &narrow, sizeof narrow);
    if (dtype == SDPA_FLOAT64) memcpy(at, &x, sizeof x);
}

enum { LINE = 64 }; /* bytes of a cache line */

/* Asks for `bytes` from `at` on, into all caches or, where `near` is 0, the second level only. */
static inline ALWAYS_INLINE void fetch(const char *at, ptrdiff_t bytes, const int near)
{
    const char *line = at - (uintptr_t)at % LINE;
    for (; line < at + bytes; line += LINE)
        if (near)
            PREFETCH(line, 3);
        else
            PREFETCH(line, 2);
}

/* Asks for `width` elements of each row of a vector of rows, before they are read column by column of vectors: each of
 * these would wait for its own lines. */
static inline void fetch_rows(const sdpa_array *array, char *const *row_at, int64_t width)
{
    if (array->column != array->itemsize) return;
    for (int row = 0; row < VL; ++row) fetch(row_at[row], width * array->itemsize, 1);
}

/* Like read_adjacent and read_chunk, the other way round. */
static inline ALWAYS_INLINE void write_adjacent(char *at, int dtype, vf x)
{
#if SDPA_REAL_BYTES == 4
    if (dtype == SDPA_FLOAT16) vf_to_float16(at, x);
    if (dtype == SDPA_BFLOAT16) vf_to_bfloat16(at, x);
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

/* Scores lie as s[key][rows]; of few rows without gaps between those of one key and the next. */
static inline ptrdiff_t score_index(const sdpa_task *t, int key, int v)
{
    return (ptrdiff_t)key * (SDPA_FEW_ROWS ? t->places : ROWS) + v * VL;
}
static inline real *scores_at(const sdpa_task *t, int key, int v) { return (real *)t->s + score_index(t, key, v); }

static inline int64_t padded(int64_t width) { return (width + VL - 1) / VL * VL; }

/* `width` elements from `at`, `column` bytes apart, to whole vectors: the last one is filled up with 0. */
static inline void read_row(const char *at, const sdpa_array *array, int64_t width, real *to)
{
    for (int64_t i = 0; i < width; i += VL) {
        const int count = width - i < VL ? (int)(width - i) : VL;
        vf_store(to + i, read_chunk(at + i * array->column, array->column, count, array));
    }
}

/* Rows of K or V as a product reads them: elements of `dtype` side by side, rows `stride` bytes apart.  Where `at` is
 * NULL rows lie in pages, and are asked for one by one. */
typedef struct {
    const char *at;
    ptrdiff_t stride;
    int dtype;
} operand;

/* What is unusual about the values of a block (sdpa_task.odd_values). */
enum { SMALL = 1, NOT_FINITE = 2 };

/* Where row `key` of the block lies; `rows_at` is row 0 of all (or of page 0).  *end is lowered to the last row
 * (counted from the block's first) that follows it in memory: in its page, or in pages that lie behind each other. */
static inline const char *row_address(const sdpa_problem *p, const sdpa_array *array, const char *rows_at,
                                      const sdpa_task *t, int key, int *end)
{
    if (!p->pages) return rows_at + (t->key + key) * array->row;
    const int64_t number = (t->key + key) / p->page_size, row = (t->key + key) % p->page_size;
    const int64_t *page = p->pages + t->batch * p->page_columns + number, first = *page;
    int64_t rows = p->page_size - row;
    while (*end - key > rows && page[1] == page[0] + 1 && array->batch == p->page_size * array->row)
        rows += p->page_size, ++page;
    if (*end - key > rows) *end = key + (int)rows;
    return rows_at + first * array->batch + row * array->row;
}
static inline const char *key_address(const sdpa_problem *p, const sdpa_task *t, int key, int *end)
{
    return row_address(p, &p->key, t->keys_at, t, key, end);
}
static inline const char *value_address(const sdpa_problem *p, const sdpa_task *t, int key, int *end)
{
    return row_address(p, &p->value, t->values_at, t, key, end);
}

/* Whether a copy lacks rows of the block; it is said to hold them from now on. */
static inline int must_copy(const sdpa_task *t, sdpa_copied *copied)
{
    const int same = copied->batch == t->batch && copied->kv_head == t->kv_head && copied->key == t->key;
    /* With an odd number the second half of the last pair is 0, and not a row (pairs.h). */
    if (same && copied->rows >= t->block && (copied->rows == t->block || t->block % STEP == 0)) return 0;
    *copied = (sdpa_copied){t->batch, t->kv_head, t->key, t->block, 0};
    return 1;
}

/* Whether rows can be read where they lie. */
static inline int is_adjacent(const sdpa_array *array, const char *at)
{
    return array->column == array->itemsize && array->row % array->itemsize == 0 &&
           (uintptr_t)at % (uintptr_t)array->itemsize == 0;
}

/* Whether all lanes are 0; NaN is not. */
static inline int is_zero(vf x)
{
    real lane[VL], any = 0;
    vf_store(lane, x);
    for (int i = 0; i < VL; ++i) any += lane[i] == 0 ? 0 : 1;
    return any == 0;
}

static inline ALWAYS_INLINE void read_lanes(vf *tile, char *const *row_at, ptrdiff_t offset, const int dtype)
{
    UNROLL_FOR (int lane = 0; lane < VL; ++lane) tile[lane] = read_adjacent(row_at[lane] + offset, dtype);
}

/* tile[column] lane row = row_at[row][column], for VL rows and `count` <= VL columns from `offset` (in bytes). */
static inline ALWAYS_INLINE void read_transposed(vf *tile, char *const *row_at, ptrdiff_t offset, int count,
                                                 const sdpa_array *array)
{
    const int whole = count == VL && array->column == array->itemsize;
    if (whole && array->dtype == REAL_DTYPE)
        read_lanes(tile, row_at, offset, REAL_DTYPE);
    else if (whole && array->dtype == SDPA_FLOAT16)
        read_lanes(tile, row_at, offset, SDPA_FLOAT16);
    else if (whole && array->dtype == SDPA_BFLOAT16)
        read_lanes(tile, row_at, offset, SDPA_BFLOAT16);
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
static void store_transposed(const sdpa_array *array, const sdpa_task *t, char *const *rows_at, const real *columns,
                             int64_t first_column, int64_t width, const real *factor)
{
    const int adjacent = writes_adjacent(array, array->column);
    for (int v = 0; v < t->vectors; ++v) {
        const int rows = t->rows - v * VL < VL ? t->rows - v * VL : VL;
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
