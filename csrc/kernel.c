/* The arithmetic of attention for one instruction set, one compute type and one engine.  setup.py compiles this file
 * once for each triple, with SDPA_ISA_avx512 (or avx2, neon, baseline), SDPA_REAL_BYTES (4: float, 8: double) and
 * SDPA_FEW_ROWS (0: rows in lanes, 1: features in lanes) defined; the result is one constant table of functions.  What
 * is called when is decided in sdpa/_core/kernels.pxi. */
#include "variant.h"
#include "forward/scores.h"
#include "forward/softmax.h"
#include "forward/output.h"
#include "forward/care.h"
#if !SDPA_FEW_ROWS
#include "backward/backward.h"
#include "layer/linear.h"
#include "layer/norm.h"
#endif

#define PASTE_(a, b, c, d) a##b##_##c##_##d
#define PASTE(a, b, c, d) PASTE_(a, b, c, d)

const sdpa_kernel PASTE(sdpa_kernel_, SDPA_ISA, SDPA_REAL_BYTES, SDPA_FEW_ROWS) = {
    .real_bytes = SDPA_REAL_BYTES,
    .lanes = VL,
    .rows = ROWS,
    .block_keys = BLOCK_KEYS,
    .few_rows = SDPA_FEW_ROWS,
    .copies = copies,
    .begin_forward = begin_forward,
    .scores = scores,
    .softmax_block = softmax_block,
    .accumulate = accumulate,
    .finite = settled, /* "finite" is a function of macOS */
    .accumulate_seen = accumulate_seen,
    .lift = lift,
    .add_poison = add_poison,
    .close_sums = close_sums,
    .join = join,
    .start = start,
    .write_out = write_out,
#if STORES_ROWS
    .stores_rows = stores_rows,
    .write_at_once = write_at_once,
#endif
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
    .linear_tile = HIGHEST,
    .whole_sum = TILES ? 2 * VL : STEP,
    .pack_panel = pack_panel,
    .linear = linear,
    .norm = norm,
#endif
};
