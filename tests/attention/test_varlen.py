"""Packed sequences: the oracle, `attention` on each sequence alone, edges and errors."""

import inspect
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.accuracy import assert_same_bits
from support.draw import DTYPES, HALF, WIDE, float32, float64, nan, rng
from support.kernels import KERNELS, on_kernels
from support.layouts import LAYOUTS
from support.packed import (
    ALIKE,
    ERRORS,
    EVERYTHING,
    K_COUNTS,
    KS,
    OPTIONS,
    Q_COUNTS,
    QS,
    A,
    K,
    V,
    cumulative,
    draw_packed,
    judge_packed,
    options_for,
    packed_problems,
)
from support.problems import examples

import sdpa
from sdpa import reference


def check(arrays, **options):
    out, lse = sdpa.attention_varlen(*arrays, return_lse=True, **options)
    judge_packed(out, lse, *arrays, **options)


@on_kernels(WIDE, HALF, half="best")
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(kernel, dtype, name):
    arrays, where = draw_packed(dtype=dtype)
    check(arrays, **where, **options_for(arrays[0], K_COUNTS, name))


@on_kernels(DTYPES)
def test_everything_at_once(kernel, dtype):
    arrays, where = draw_packed(dtype=dtype)
    check(arrays, **where, **options_for(arrays[0], K_COUNTS, *EVERYTHING))


@pytest.mark.parametrize("name", ["nothing", "causal", "window", "lengths", "bias of keys"])
def test_few_queries_and_many_keys(kernel, name):
    counts = (1, 300, 1000, 0, 129)
    arrays, where = draw_packed((1, 1, 2, 1, 1), counts, H=8, D=64, E=64)
    check(arrays, **where, **options_for(arrays[0], counts, name))


def one_by_one(function, query, key, value, q_counts, k_counts, **per_sequence):
    """`function` on each sequence alone, packed again."""
    queries, keys = ([slice(*ends) for ends in itertools.pairwise(cumulative(x))] for x in (q_counts, k_counts))
    results = [
        function(
            *(x[part].swapaxes(0, 1) for x, part in ((query, q), (key, k), (value, k))),
            return_lse=True, **{name: option(b, q, k) for name, option in per_sequence.items()},
        )
        for b, (q, k) in enumerate(zip(queries, keys))
    ]  # fmt: skip
    return np.concatenate([x.swapaxes(0, 1) for x, _ in results]), np.concatenate([x.T for _, x in results])


@on_kernels(WIDE, HALF)
@pytest.mark.parametrize("q_counts, k_counts", ALIKE.values(), ids=ALIKE)
def test_bits_of_each_sequence_alone(kernel, dtype, q_counts, k_counts):
    arrays, where = draw_packed(q_counts, k_counts, dtype=dtype)
    T, L, S = sum(q_counts), max(k_counts), len(q_counts)
    mask, bias = rng(1).random((4, T, L)) < 0.7, rng(2).standard_normal((T, L)).astype(dtype)
    slopes, offsets, lengths = rng(3).random((S, 4)), np.arange(S) * 7 - 2, np.array(k_counts) * 2 // 3
    together = sdpa.attention_varlen(
        *arrays, **where, causal=True, mask=mask, bias=bias, alibi_slopes=slopes, q_offset=offsets, kv_lengths=lengths,
        sinks=np.ones(4), return_lse=True,
    )  # fmt: skip
    alone = one_by_one(
        sdpa.attention, *arrays, q_counts, k_counts, causal=lambda b, q, k: True, sinks=lambda b, q, k: np.ones(4),
        mask=lambda b, q, k: mask[:, q, : k.stop - k.start], bias=lambda b, q, k: bias[q, : k.stop - k.start],
        alibi_slopes=lambda b, q, k: slopes[b], q_offset=lambda b, q, k: offsets[b],
        kv_lengths=lambda b, q, k: lengths[b],
    )  # fmt: skip
    for actual, expected in zip(together, alone):
        assert_same_bits(actual, expected)


def test_default_offset_lets_the_last_query_see_the_last_key(kernel):
    arrays, where = draw_packed((3, 20), (9, 11))
    alone = one_by_one(sdpa.attention, *arrays, (3, 20), (9, 11), causal=lambda *_: True)
    for actual, expected in zip(sdpa.attention_varlen(*arrays, **where, causal=True, return_lse=True), alone):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_keys_lie_as_queries_by_default(kernel):
    (query, key, value), where = draw_packed((4, 0, 30), (4, 0, 30))
    for actual, expected in zip(
        sdpa.attention_varlen(query, key, value, cu_seqlens_q=where["cu_seqlens_q"], causal=True, return_lse=True),
        sdpa.attention_varlen(query, key, value, **where, causal=True, return_lse=True),
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS, indirect=True)
@settings(
    max_examples=examples(120), deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(packed_problems())
def test_any_lengths(kernel, problem):
    arrays, where, options = problem
    out, lse = sdpa.attention_varlen(*arrays, **where, return_lse=True, **options)
    judge_packed(out, lse, *arrays, factor=4, floor=20, **where, **options)


# Edges.


def test_no_sequences():
    arrays, _ = draw_packed((), ())
    out, lse = sdpa.attention_varlen(*arrays, cu_seqlens_q=[0], return_lse=True)
    assert out.shape == (0, 4, 12) and lse.shape == (0, 4)


@pytest.mark.parametrize("empty", [dict(H=0, G=0), dict(H=0), dict(D=0), dict(E=0)], ids=str)
def test_empty_axes(empty):
    arrays, where = draw_packed((2, 1), (3, 0), **empty)
    out, lse = sdpa.attention_varlen(*arrays, **where, return_lse=True)
    assert out.shape == (3, arrays[0].shape[1], arrays[2].shape[2]) and (out == 0).all()
    if "D" in empty:
        assert np.isneginf(lse).all()


def test_queries_without_keys_get_zeros(kernel):
    arrays, where = draw_packed((3, 30, 2), (0, 0, 0))
    assert np.isneginf(sdpa.attention_varlen(*arrays, **where, return_lse=True)[1]).all()
    for sinks in np.arange(4.0), np.arange(12.0).reshape(3, 4):
        out, lse = sdpa.attention_varlen(*arrays, **where, return_lse=True, sinks=sinks)
        assert (out == 0).all() and (lse == np.broadcast_to(sinks, (3, 4)).repeat((3, 30, 2), axis=0)).all()


@pytest.mark.parametrize("q_counts", [(1, 1, 2), (20, 40, 17)], ids=["few", "many"])
def test_what_is_past_the_length_and_in_other_sequences_does_not_matter(kernel, q_counts):
    k_counts, lengths = (40, 150, 33), np.array([13, 0, 33])
    (query, key, value), where = draw_packed(q_counts, k_counts)
    clean = sdpa.attention_varlen(query, key, value, **where, kv_lengths=lengths, return_lse=True)
    key[13:190] = value[13:190] = nan
    for actual, expected in zip(
        sdpa.attention_varlen(query, key, value, **where, kv_lengths=lengths, return_lse=True), clean
    ):
        assert_same_bits(actual, expected)
    spoilt = sdpa.attention_varlen(query, key, value, **where, kv_lengths=[14, 0, 33])
    assert np.isnan(spoilt[: q_counts[0]]).all() and np.isfinite(spoilt[q_counts[0] :]).all()


@pytest.mark.parametrize("q_counts, k_counts", ALIKE.values(), ids=ALIKE)
def test_threads_do_not_change_bits(q_counts, k_counts):
    arrays, where = draw_packed(q_counts, k_counts, D=64, E=64)
    one, *more = (
        sdpa.attention_varlen(*arrays, **where, causal=True, return_lse=True, threads=n) for n in (1, 2, 3, None)
    )
    for result in more:
        for actual, expected in zip(result, one):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    arrays, where = draw_packed()
    arrays = [layout(x) for x in arrays]
    copies = [np.ascontiguousarray(x) for x in arrays]
    assert_same_bits(
        sdpa.attention_varlen(*arrays, **where, causal=True),
        sdpa.attention_varlen(*copies, **where, causal=True),
    )


@pytest.mark.parametrize(
    "layout", ["every third column", "columns backwards", "read-only", "in records", "off by a byte"]
)
def test_layouts_of_starts(layout):
    arrays, where = draw_packed()
    there = {name: LAYOUTS[layout](np.array(starts, np.int64)) for name, starts in where.items()}
    assert_same_bits(sdpa.attention_varlen(*arrays, **there), sdpa.attention_varlen(*arrays, **where))


def test_heads_outside_cost_no_copy_and_stay_outside():
    arrays, where = draw_packed()
    views = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in arrays]
    out = sdpa.attention_varlen(*views, **where)
    assert out.swapaxes(0, 1).flags.c_contiguous
    assert_same_bits(out, sdpa.attention_varlen(*arrays, **where))


def test_out_is_filled_and_returned(kernel):
    arrays, where = draw_packed()
    wide = np.full((sum(Q_COUNTS), 4, 24), 77, float32)
    out = wide[:, :, ::2]
    assert sdpa.attention_varlen(*arrays, **where, out=out) is out
    assert_same_bits(out, sdpa.attention_varlen(*arrays, **where))
    assert (wide[:, :, 1::2] == 77).all()


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint8, np.uint64], ids=lambda kind: kind.__name__)
def test_cumulative_lengths_of_any_integer_kind(kind):
    arrays, where = draw_packed()
    given = {name: kind(x.tolist()) if kind in (list, tuple) else x.astype(kind) for name, x in where.items()}
    assert_same_bits(sdpa.attention_varlen(*arrays, **given), sdpa.attention_varlen(*arrays, **where))


def test_inputs_are_not_written():
    arrays, where = draw_packed()
    for x in (*arrays, *where.values()):
        x.flags.writeable = False
    before = [x.copy() for x in arrays]
    sdpa.attention_varlen(*arrays, **where, causal=True)
    assert all((x == y).all() for x, y in zip(arrays, before))


# Errors: the name, the values and the rule.


@pytest.mark.parametrize("error, message, changed", ERRORS.values(), ids=ERRORS)
def test_errors(error, message, changed):
    out = np.full((6, 4, 5), 77, float32)
    arguments = dict(query=A, key=K, value=V, cu_seqlens_q=QS, cu_seqlens_k=KS, out=out) | changed
    with pytest.raises(error, match=message):
        sdpa.attention_varlen(**arguments)
    assert (out == 77).all()


@pytest.mark.parametrize("name", ["query", "cu_seqlens_q", "bias", "sinks"])
def test_out_must_not_overlap(name):
    memory = np.zeros(6 * 4 * 8 + 10, float64)
    out = memory[: 6 * 4 * 5].reshape(6, 4, 5)
    wide = [x.astype(float64) for x in (A, K, V)]
    overlapping = {
        "query": memory[: 6 * 4 * 8].reshape(6, 4, 8),
        "cu_seqlens_q": memory.view(np.int64)[:3],
        "bias": memory[:9],
        "sinks": memory[:4],
    }[name]
    if name == "cu_seqlens_q":
        overlapping[:] = QS
    arguments = dict(query=wide[0], key=wide[1], value=wide[2], cu_seqlens_q=QS, cu_seqlens_k=KS, out=out)
    with pytest.raises(ValueError, match=f"out overlaps {name}"):
        sdpa.attention_varlen(**arguments | {name: overlapping})


def test_signature():
    own = inspect.signature(sdpa.attention_varlen).parameters
    attention = inspect.signature(sdpa.attention).parameters
    assert own.keys() - attention.keys() == {"cu_seqlens_q", "cu_seqlens_k"}
    assert attention.items() <= own.items()
    oracle = dict(inspect.signature(reference.attention_varlen).parameters)
    assert oracle.pop("dtype").default is None
    assert oracle == dict(own)


# The oracle itself.


def test_the_oracle_is_a_loop_over_sequences():
    arrays, where = draw_packed((2, 0, 3), (4, 1, 0))
    actual = reference.attention_varlen(*arrays, **where, causal=True, return_lse=True)
    alone = one_by_one(reference.attention, *arrays, (2, 0, 3), (4, 1, 0), causal=lambda *_: True)
    for x, y in zip(actual, alone):
        np.testing.assert_array_equal(x, y)
