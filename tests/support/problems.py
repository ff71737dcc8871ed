"""Problems that hypothesis draws."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from support.draw import float16, float32, float64, inf, rng
from support.kernels import KERNELS
from support.layouts import LAYOUTS


def examples(count):
    """How many a property gets that has `count` of them without --hypothesis-profile."""
    return max(1, count * settings().max_examples // 100)


LENGTHS = st.integers(0, 6) | st.sampled_from([15, 16, 17, 33, 64, 65, 127, 128, 129, 140, 257])
SIZES = st.integers(0, 5) | st.sampled_from([7, 8, 16, 17, 33, 64])
ANY_DTYPE = st.sampled_from([float32, float64, float16, bfloat16])
LAYOUT = st.sampled_from(list(LAYOUTS.values()))
SIDE = st.none() | st.integers(-3, 8) | st.sampled_from([-140, -60, 40, 100, 130, 300, 2**40])
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS, indirect=True)
PROPERTY = settings(
    max_examples=examples(400), deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@st.composite
def problems(choose, lengths=LENGTHS, sizes=SIZES, dtypes=ANY_DTYPE):
    """query, key, value, and any combination of options, of ranks 2 to 5 with leading axes that broadcast."""
    rank = choose(st.integers(2, 5))
    lead = tuple(choose(st.integers(0, 3)) for _ in range(rank - 3))
    G = choose(st.integers(1, 3)) if rank > 2 else 1
    H = G * choose(st.integers(1, 4)) if rank > 2 else 1
    M, N, D, E = choose(lengths), choose(lengths), choose(sizes), choose(sizes)
    heads = (H,) if rank > 2 else ()
    normal = rng(choose(st.integers(0, 9999)))
    dtype = choose(dtypes)
    narrower = {float64: [float64, float32, float16, bfloat16], float32: [float32, float16, bfloat16]}
    kv_dtypes = st.sampled_from(narrower.get(dtype, [dtype]))
    key_dtype = choose(kv_dtypes)
    value_dtype = choose(kv_dtypes)
    if {key_dtype, value_dtype} == {float16, bfloat16}:
        value_dtype = key_dtype

    def broadcast(shape):
        """One that broadcasts to `shape`."""
        kept = [n if choose(st.integers(0, 2)) else 1 for n in shape]
        return tuple(kept[choose(st.integers(0, len(shape))) if choose(st.booleans()) else 0 :])

    def array(shape, of):
        return choose(LAYOUT)(np.asarray(normal.standard_normal(shape)).astype(of))

    query = array((*lead, *heads, M, D), dtype)  # the result has all axes
    key = array((*broadcast(lead), *((G,) if rank > 2 else ()), N, D), key_dtype)
    value = array((*broadcast(lead), *((G,) if rank > 2 else ()), N, E), value_dtype)
    pairs, per_head = (*lead, *(heads or (1,)), M, N), (*lead, *(heads or (1,)))
    mask = choose(LAYOUT)(np.asarray(normal.random(broadcast(pairs)) < choose(st.sampled_from([0.02, 0.5, 0.9]))))
    bias = array(broadcast(pairs), choose(st.sampled_from([float32, float64, float16, bfloat16])))
    if choose(st.booleans()):
        bias = np.where(normal.random(bias.shape) < 0.4, bias.dtype.type(-inf), bias)
    optional = dict(
        mask=st.just(mask),
        bias=st.just(bias),
        causal=st.booleans(),
        window=st.none() | st.tuples(SIDE, SIDE),
        q_offset=st.integers(-150, 150) | st.just(normal.integers(-150, 150, broadcast(lead))),
        kv_lengths=st.integers(0, N) | st.just(normal.integers(0, N + 1, broadcast(lead))),
        scale=st.none() | st.floats(-2, 2),
        softcap=st.none() | st.floats(0.1, 50),
        sinks=st.just(normal.standard_normal(broadcast(per_head)) * 3),
        alibi_slopes=st.just(normal.random(broadcast(per_head)) / 4),
    )
    return query, key, value, choose(st.fixed_dictionaries({}, optional=optional))
