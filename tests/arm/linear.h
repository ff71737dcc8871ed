/* sdpa/_core_linear.pxi in C, for driver.c.  The query is x (rows, ins), the key W (outs, ins), and the value, if it
 * has a column, the bias (outs). */

enum { LINEAR_TILES = 3 };

/* The bias filled up to whole panels, as the kernels take it. */
static void *filled_bias(const sdpa_array *bias, int64_t outs, int64_t filled, int real_bytes)
{
    void *to = new_memory(filled * real_bytes);
    memset(to, 0, filled * real_bytes);
    if (bias->itemsize != real_bytes) fail("the bias is not of the compute type");
    memcpy(to, bias->data, outs * real_bytes);
    return to;
}

static void project(const header *h, sdpa_problem *p, const sdpa_kernel *kernel)
{
    const int64_t panels = divide_up(h->kv_len, kernel->rows), features = divide_up(h->dim, kernel->step);
    const int64_t padded = divide_up(features, kernel->lanes) * kernel->lanes;
    void *weights = new_memory(panels * kernel->rows * features * kernel->real_bytes);
    sdpa_linear l = {
        .x = p->query,
        .out = new_array(1, 0xff, h->dtype, 1, 1, h->q_len, h->kv_len),
        .rows = h->q_len,
        .ins = h->dim,
        .outs = h->kv_len,
        .block_rows = LINEAR_TILES * kernel->linear_tile,
        .weights = weights,
        .bias = h->value_dim ? filled_bias(&p->value, h->kv_len, panels * kernel->rows, kernel->real_bytes) : NULL,
    };
    kernel->pack_weights(&p->key, l.outs, l.ins, weights);
    for (int64_t row = 0; row < l.rows; row += l.block_rows) {
        const int rows = (int)(l.rows - row < l.block_rows ? l.rows - row : l.block_rows);
        void *scratch = new_memory(l.block_rows * (kernel->rows + padded) * kernel->real_bytes);
        int64_t copied = -1;
        for (int64_t panel = 0; panel < panels; ++panel) kernel->linear(&l, row, rows, panel, scratch, &copied);
        free(scratch);
    }
    put(&l.out, 1);
}
