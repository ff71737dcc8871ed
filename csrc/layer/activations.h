/* What a layer applies to its sums, while these are in the first-level cache. */
#ifndef SDPA_ACTIVATIONS_H
#define SDPA_ACTIVATIONS_H

#include "simd/vmath.h"

/* x = act(x) for `count` <= 4 vectors.  Each is x times a factor from 0 to 1 (relu but for NaN, which stays). */
static inline ALWAYS_INLINE void activate(vf *x, const int count, const int activation)
{
    vf factor[4];
    UNROLL_FOR (int i = 0; i < count; ++i) {
        if (activation == SDPA_RELU) x[i] = vf_select(vf_lt(x[i], vf_set1(0)), vf_set1(0), x[i]);
        /* tanh(y) + 1 is twice the sigmoid of 2 y: here y = sqrt(2 / pi) (x + 0.044715 x^3). */
        if (activation == SDPA_GELU_TANH) {
            const vf square = vf_mul(x[i], x[i]);
            factor[i] =
                vf_fma(square, vf_set1((real)(1.5957691216057307117 * 0.044715)), vf_set1((real)1.5957691216057307117));
            factor[i] = vf_mul(factor[i], x[i]);
        }
        if (activation == SDPA_GELU || activation == SDPA_SILU) factor[i] = x[i];
    }
    if (activation == SDPA_GELU) normal_all(factor, count);
    if (activation == SDPA_GELU_TANH || activation == SDPA_SILU) sigmoid_all(factor, count);
    if (activation >= SDPA_GELU)
        UNROLL_FOR (int i = 0; i < count; ++i) x[i] = vf_mul(x[i], factor[i]);
}

#endif
