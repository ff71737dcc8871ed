"""Gradients of the compiled engine: the oracle, differences and torch; bits, edges, memory, errors; on every kernel."""

import functools
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from support import packed as varlen
from support.accuracy import arithmetic, assert_same_bits, eps
from support.differences import BROADCASTS, by_differences, upstream
from support.draw import DTYPES, HALF, WIDE, draw, float16, float32, float64, inf, nan, rng
from support.edges import BLIND, HIDDEN
from support.errors import ERRORS, INPUTS, NOT_OURS, ones, raises, table
from support.gradients import FIELDS, judge, sizes_of
from support.kernels import KERNELS, PAIRS_OF_BFLOAT16, on_kernels
from support.layouts import LAYOUTS, LEADING
from support.options import OPTIONS, SCORES, options_for
from support.problems import EVERY_KERNEL, PROPERTY, examples, problems
from support.processes import run_python

import sdpa
from sdpa import reference
from sdpa._runtime import kernels
from sdpa.reference._attention import reduced, split

EACH_DTYPE = on_kernels(WIDE, HALF, half="best")
EACH_ARITHMETIC = on_kernels({"float32": float32, "bfloat16": bfloat16}, half="best")
EACH_WIDTH = on_kernels({"float32": float32}, HALF, half="best")
EACH_OPTION = pytest.mark.parametrize("name", OPTIONS)
ARRAYS = ("grad_out", "query", "key", "value", "out", "lse", "grad_lse")


def problem(query, key, value, *, forward=None, **options):
    """The arguments of a call: the arrays, what the forward gives for them, and what flows in."""
    out, lse = (forward or sdpa.attention)(query, key, value, return_lse=True, **options)
    grad_out, grad_lse = (np.asarray(x).astype(like.dtype) for x, like in zip(upstream(out, lse), (out, lse)))
    return dict(grad_out=grad_out, query=query, key=key, value=value, out=out, lse=lse, grad_lse=grad_lse) | options


def named(name, **sizes):
    """A problem with the named options."""
    arrays = draw(**sizes)
    return problem(*arrays, **options_for(*arrays[:2], *([name] if isinstance(name, str) else name)))


def run(call, **more):
    return sdpa.attention_backward(**call | more)


def present(grads):
    return {name: grad for name, grad in grads._asdict().items() if grad is not None}


def assert_all_same(actual, expected):
    assert present(actual).keys() == present(expected).keys()
    for name, grad in present(actual).items():
        assert_same_bits(grad, getattr(expected, name))


# Accuracy.


def check(*arrays, **options):
    call = problem(*arrays, **options)
    judge(run(call), call)


TAILS = [1, 2, 3, 7, 16, 17, 33, 64, 65, 129, 200]
SIZES = [1, 3, 20, 64, 100, 130, 257]
SHAPES = (
    {f"{M} queries": dict(B=1, H=1, G=1, M=M, N=20, D=8, E=8) for M in TAILS}
    | {f"{N} keys": dict(B=1, H=1, G=1, M=5, N=N, D=8, E=8) for N in TAILS}
    | {f"{n} queries, {n} keys": dict(B=1, H=1, G=1, M=n, N=n, D=4, E=3) for n in (1, 17, 65, 130)}
    | {f"keys of size {D}": dict(B=1, H=1, G=1, M=19, N=37, D=D, E=9) for D in SIZES}
    | {f"values of size {E}": dict(B=1, H=1, G=1, M=19, N=37, D=9, E=E) for E in SIZES}
    | {f"sizes of {D}": dict(B=1, H=2, G=2, M=70, N=135, D=D, E=D) for D in (64, 100)}
    | {f"groups of {n}": dict(B=2, H=2 * n, G=2, M=11, N=33, D=8, E=5) for n in (2, 5, 8)}
    | {f"one key head for {n}": dict(B=1, H=n, G=1, M=n + 7, N=130, D=16, E=16) for n in (2, 5, 8)}
    | {"more queries than keys": dict(B=1, H=2, G=1, M=90, N=40, D=8, E=8)}
)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@EACH_DTYPE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(kernel, shape, dtype, causal):
    check(*draw(**shape, dtype=dtype), causal=causal)


@EACH_DTYPE
@pytest.mark.parametrize("sizes", [(37, 133), (3, 150), (70, 40)], ids=str)
@EACH_OPTION
def test_each_option(kernel, name, sizes, dtype):
    call = named(name, M=sizes[0], N=sizes[1], dtype=dtype)
    judge(run(call), call)


def pairs():
    sample = draw(M=4, N=5)[:2]
    for first, second in itertools.combinations(OPTIONS, 2):
        if not options_for(*sample, first).keys() & options_for(*sample, second).keys():
            yield first, second


@EACH_ARITHMETIC
@pytest.mark.parametrize("first, second", list(pairs()))
def test_options_compose(kernel, first, second, dtype):
    call = named([first, second], M=21, N=139, D=8, E=5, dtype=dtype)
    judge(run(call), call)


EVERYTHING = ["mask of keys", "bias", "window", "lengths", "scale", "softcap", "sinks", "alibi", "offset per batch"]


@on_kernels(DTYPES)
def test_everything_at_once(kernel, dtype):
    call = named(["causal", *EVERYTHING], M=65, N=257, dtype=dtype, seed=1)
    judge(run(call), call)


@pytest.mark.cover(1)
@EACH_DTYPE
@pytest.mark.parametrize("name", ["nothing", "causal", "window", "mask of whole blocks", "bias of heads", "sinks"])
def test_many_rows_and_keys(kernel, dtype, name):
    """Several blocks of keys and several of rows."""
    sizes = dict(B=1, H=4, G=2, M=150, N=400) if dtype == float64 else dict(B=1, H=4, G=2, M=310, N=1100)
    call = named("nothing", **sizes, D=12, E=8, dtype=dtype)
    call |= options_for(np.empty((2, 4, *call["query"].shape[2:])), call["key"], name)
    judge(run(call), call)


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", ["nothing", "causal", "bias", "softcap", "wide softcap", "sinks", "alibi"])
def test_large_scores(kernel, dtype, name):
    query, key, value = draw(D=64, dtype=dtype)
    check(query * 30, key, value, **options_for(query, key, name))


@pytest.mark.parametrize("softcap", [1e-2, 0.5, 30.0, 1e8])
def test_softcap(kernel, softcap):
    check(*draw(), softcap=softcap)


def test_a_large_bias_in_common_changes_nothing(kernel):
    arrays = draw(dtype=float64)
    plain, more = (run(problem(*arrays, bias=np.full((1, 1), size))) for size in (0.0, 1e4))
    for name in FIELDS[:3]:
        np.testing.assert_allclose(getattr(more, name), getattr(plain, name), atol=1e-9)


@on_kernels(DTYPES)
def test_each_of_what_flows_in(kernel, dtype):
    """grad_out alone, grad_lse alone, neither."""
    call = named(["causal", "bias of heads", "sinks"], dtype=dtype)
    zero = np.zeros_like(call["grad_out"])
    for change in dict(grad_lse=None), dict(grad_out=zero), dict(grad_lse=call["grad_lse"] * 0):
        grads = run(call | change)
        judge(grads, call | change)
        assert (grads.value == 0).all() == ("grad_out" in change)
    assert all((x == 0).all() for x in run(call | dict(grad_out=zero, grad_lse=None)))
    del call["grad_lse"]
    assert_all_same(run(call), run(call, grad_lse=None))


@EVERY_KERNEL
@settings(PROPERTY, max_examples=examples(250))
@given(problems(), st.booleans(), st.integers(1, 3), st.data())
def test_any_problem(kernel, arrays_and_options, with_lse, threads, data):
    *arrays, options = arrays_and_options
    call = problem(*arrays, **options)
    call["grad_lse"] = call["grad_lse"] if with_lse else None
    if call["lse"].size:
        call["grad_out"] = data.draw(st.sampled_from(list(LAYOUTS.values())))(call["grad_out"])
        # Not one that repeats rows: a row that sees no key would have the result of another.
        call["out"] = data.draw(st.sampled_from([x for name, x in LAYOUTS.items() if "one " not in name]))(call["out"])
    before = {name: np.copy(x) for name, x in call.items() if isinstance(x, np.ndarray)}
    grads = run(call, threads=threads)
    assert all(np.array_equal(call[name], x, equal_nan=True) for name, x in before.items())
    judge(grads, call, factor=4, floor=20)


# Differences of the engine's own results, in float64.


@pytest.mark.cover(1)
@EACH_OPTION
def test_as_differences(kernel, name):
    inputs = dict(zip(FIELDS, draw(M=6, N=19, D=3, E=2, dtype=float64)))
    inputs |= options_for(inputs["query"], inputs["key"], name)
    check_differences(inputs)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("names", [["causal", "bias of heads", "sinks"], ["softcap", "mask", "alibi"]], ids=", ".join)
def test_as_differences_with_groups(kernel, heads, names):
    H, G = heads
    inputs = dict(zip(FIELDS, draw(H=H, G=G, M=5, N=7, D=2, E=3, dtype=float64)))
    check_differences(inputs | options_for(inputs["query"], inputs["key"], *names))


def check_differences(inputs):
    for name, grad in present(run(problem(**inputs))).items():
        expected = by_differences(name, inputs, sdpa.attention)
        np.testing.assert_allclose(grad, expected, rtol=1e-7, atol=1e-8 * np.abs(expected).max(initial=0) + 1e-10)


# torch.

TORCH = {  # torch's options, ours
    "plain": (dict(), dict()),
    "causal": (dict(is_causal=True), dict(causal=True, q_offset=0)),
    "scale": (dict(scale=0.3), dict(scale=0.3)),
    "mask": (dict(attn_mask="mask"), dict(mask=rng(1).random((2, 1, 37, 133)) < 0.7)),
    "bias": (dict(attn_mask="bias"), dict(bias=rng(2).standard_normal((1, 4, 37, 133)))),
    "bias of rows": (dict(attn_mask="bias"), dict(bias=rng(2).standard_normal((37, 1)))),
}


@pytest.mark.parametrize("G", [2, 4], ids=["grouped", "plain"])
@pytest.mark.parametrize("theirs, ours", TORCH.values(), ids=TORCH)
def test_as_torch(kernel, theirs, ours, G):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    call = problem(*draw(G=G, dtype=float64), **ours)
    inputs = {name: torch.from_numpy(call[name]) for name in FIELDS if call.get(name) is not None}
    for x in inputs.values():
        x.requires_grad_()
    if "attn_mask" in theirs:
        theirs = dict(attn_mask=inputs["bias"] if "bias" in inputs else torch.from_numpy(ours["mask"]))
    arrays = [inputs[name] for name in FIELDS[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*arrays, **theirs, enable_gqa=G != 4)
    out.backward(torch.from_numpy(call["grad_out"]))
    for name, grad in present(run(call | dict(grad_lse=None))).items():
        np.testing.assert_allclose(grad, inputs[name].grad.numpy(), rtol=1e-10, atol=1e-11)


def test_as_torch_with_all_that_it_lacks(kernel):
    """Softcap, sinks, ALiBi, a window, and a gradient of the lse: written out, and differentiated by torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    slopes, distance = np.linspace(0.1, 0.4, 4), np.arange(37)[:, None] + 96 - np.arange(133)
    options = dict(bias=rng(1).standard_normal((4, 1, 133)), sinks=np.linspace(-1, 2, 4), softcap=2.0, window=(30, 5))
    call = problem(*draw(dtype=float64), **options, alibi_slopes=slopes)
    inputs = {name: torch.from_numpy(call[name]).requires_grad_() for name in FIELDS}
    key, value = (inputs[name].repeat_interleave(2, 1) for name in ("key", "value"))
    score = 2 * torch.tanh(inputs["query"] @ key.mT * 20**-0.5 / 2) + inputs["bias"]
    score = score - torch.from_numpy(slopes[:, None, None] * abs(distance))
    score = score.masked_fill(torch.from_numpy((distance > 30) | (distance < -5)), -inf)
    lse = torch.logsumexp(torch.cat([score, inputs["sinks"][:, None, None].expand(2, 4, 37, 1)], -1), -1)
    out = torch.exp(score - lse[..., None]) @ value
    total = (out * torch.from_numpy(call["grad_out"])).sum() + (lse * torch.from_numpy(call["grad_lse"])).sum()
    total.backward()
    for name, grad in present(run(call)).items():
        np.testing.assert_allclose(grad, inputs[name].grad.numpy(), rtol=1e-10, atol=1e-11)


# Bias and sinks.

BIASES = {
    "of keys": (133,),
    "of rows": (37, 1),
    "one number": (1, 1),
    "no axes": (),
    "of heads": (4, 1, 1),
    "of keys, four axes": (1, 1, 1, 133),
    "of heads and keys": (4, 1, 133),
    "of batches": (2, 1, 1, 1),
    "of batches and pairs": (2, 1, 37, 133),
    "of heads and pairs": (1, 4, 37, 133),
    "of all": (2, 4, 37, 133),
}


@EACH_ARITHMETIC
@pytest.mark.parametrize("bias_dtype", [*WIDE.values(), *HALF.values()], ids=[*WIDE, *HALF])
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_bias(kernel, dtype, shape, bias_dtype):
    arrays = draw(dtype=dtype)
    bias = np.asarray(rng(1).standard_normal(shape)).astype(bias_dtype)
    for name in "causal", "softcap", "mask":
        check(*arrays, bias=bias, **options_for(*arrays[:2], name))


@on_kernels({"float64": float64}, HALF, half="best")
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_bias_of_other_dtypes(kernel, dtype, shape):
    check(*draw(dtype=dtype), bias=np.asarray(rng(1).standard_normal(shape)).astype(dtype), window=(60, 5))


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_bias(kernel, layout, dtype):
    """One that repeats its elements in memory is as good as a copy: only axes of length 1 are summed over."""
    bias = LAYOUTS[layout](rng(1).standard_normal((2, 4, 37, 133)).astype(dtype))
    call = problem(*draw(dtype=dtype), bias=bias)
    assert_all_same(run(call), run(call | dict(bias=np.array(bias, order="C"))))


@EACH_DTYPE
def test_a_bias_that_hides_has_no_gradient_there(kernel, dtype):
    call = named(["bias that hides", "sinks"], dtype=dtype)
    grads = run(call)
    assert (grads.bias[np.isneginf(call["bias"])] == 0).all()
    assert (grads.bias[~np.isneginf(call["bias"])] != 0).all()


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("sinks_dtype", [float32, float64, float16, bfloat16, int], ids=str)
def test_sinks(kernel, dtype, shape, sinks_dtype):
    arrays = draw(dtype=dtype)
    check(*arrays, sinks=np.asarray(rng(1).standard_normal(shape) * 3).astype(sinks_dtype), causal=True)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_sums_for_sinks_that_overflow(packed):
    """They are inf, without a warning."""
    query, sinks = np.ones((4, 4, 1)), np.full(4, 50.0)  # which have nearly all of the weight
    forward, backward = sdpa.attention, sdpa.attention_backward
    if packed:
        forward, backward = (
            functools.partial(call, cu_seqlens_q=[0, 4])
            for call in (sdpa.attention_varlen, sdpa.attention_varlen_backward)
        )
    out, lse = forward(query, query, query, sinks=sinks, return_lse=True)
    for grad_lse in 1e308, -1e308:
        grads = backward(0 * out, query, query, query, out, lse, grad_lse=np.full(lse.shape, grad_lse), sinks=sinks)
        assert (grads.sinks == np.copysign(inf, grad_lse)).all()


def test_sinks_of_minus_inf_are_none(kernel):
    arrays = draw()
    call = problem(*arrays)
    grads = run(call, sinks=np.full(4, -inf))
    assert (grads.sinks == 0).all()
    assert_all_same(grads._replace(sinks=None), run(call))


# Bits.


@EACH_DTYPE
@EACH_OPTION
def test_two_calls(kernel, name, dtype):
    call = named(name, dtype=dtype)
    copies = {what: x.copy() if isinstance(x, np.ndarray) else x for what, x in call.items()}
    assert_all_same(run(call), run(copies))


@EACH_ARITHMETIC
@EACH_OPTION
def test_threads(kernel, name, dtype):
    call = named(name, M=150, N=300, dtype=dtype)
    expected = run(call, threads=1)
    for threads in (2, 3, 5):
        assert_all_same(run(call, threads=threads), expected)


@EACH_ARITHMETIC
@pytest.mark.parametrize("sizes", [(1, 1, 200, 300), (1, 1, 65, 1000), (4, 1, 5, 700), (2, 2, 1, 1000)], ids=str)
@pytest.mark.parametrize("names", [["nothing"], ["causal", "bias of keys", "sinks"]], ids=", ".join)
def test_threads_with_few_heads(kernel, names, sizes, dtype):
    """What one head holds is shared among the threads."""
    H, G, M, N = sizes
    options = dict(causal=True, bias=rng(1).standard_normal(N), sinks=np.ones(H)) if "causal" in names else {}
    call = problem(*draw(1, H, G, M, N, dtype=dtype), **options)
    expected = run(call, threads=1)
    for threads in (2, 3, 5, 16):
        assert_all_same(run(call, threads=threads), expected)


@EACH_DTYPE
@EACH_OPTION
def test_each_batch_and_group_alone(kernel, name, dtype):
    """A key head and the query heads that share it."""
    call = named(name, dtype=dtype)
    whole = run(call)
    for b, g in itertools.product(range(2), range(2)):
        heads = slice(2 * g, 2 * g + 2)
        part = {}
        for what, x in call.items():
            if what in ("mask", "bias"):
                x = np.broadcast_to(x, (2, 4, 37, 133))[b, heads]
            elif what in ("kv_lengths", "q_offset") and np.ndim(x):
                x = x[b]
            elif what in ("sinks", "alibi_slopes"):
                x = np.broadcast_to(x, (2, 4))[b, heads]
            elif what in ARRAYS:
                x = x[b, [g] if what in ("key", "value") else heads]
            part[what] = x
        alone = run(part)
        assert_same_bits(alone.query, whole.query[b, heads])
        assert_same_bits(alone.key, whole.key[b, [g]])
        assert_same_bits(alone.value, whole.value[b, [g]])
        if name == "bias":
            assert_same_bits(alone.bias, whole.bias[b, heads])


@EACH_DTYPE
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_and_repeated_keys(kernel, causal, dtype):
    """dQ is the same; dK and dV are sums."""
    call = problem(*draw(H=8, G=2, dtype=dtype), causal=causal)
    repeated = run(call | {name: call[name].repeat(4, axis=1) for name in ("key", "value")})
    grads = run(call)
    assert_same_bits(grads.query, repeated.query)
    tolerance = 8 * eps(dtype)
    for name in "key", "value":
        summed = getattr(repeated, name).astype(float64).reshape(2, 2, 4, *call[name].shape[2:]).sum(axis=2)
        np.testing.assert_allclose(getattr(grads, name).astype(float64), summed, rtol=tolerance, atol=10 * tolerance)


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, layout, dtype):
    """Of one array after the other, and of all."""
    base = problem(*draw(M=19, N=70, D=36, E=40, dtype=dtype), causal=True)
    for which in [*([name] for name in ARRAYS), ARRAYS]:
        call = base | {name: LAYOUTS[layout](base[name]) for name in which}
        copies = {name: np.array(x, order="C") if name in ARRAYS else x for name, x in call.items()}
        assert_all_same(run(call), run(copies))


@EACH_DTYPE
def test_inputs_are_not_written(kernel, dtype):
    call = named(["bias", "sinks", "mask", "alibi", "lengths"], dtype=dtype)
    call = {name: LAYOUTS["read-only"](x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    before = {name: x.copy() for name, x in call.items() if isinstance(x, np.ndarray)}
    run(call)
    for name, x in before.items():
        assert_same_bits(call[name], x)


@EACH_ARITHMETIC
def test_inputs_that_overlap(kernel, dtype):
    query, _, _ = draw(G=4, M=60, N=60, D=16, E=16, dtype=dtype)
    call = problem(query, query, query, causal=True)
    call["grad_out"] = call["out"]
    copies = {name: np.copy(x) if name in ARRAYS else x for name, x in call.items()}
    assert_all_same(run(call), run(copies))


@EACH_ARITHMETIC
def test_gradients_are_new_arrays(kernel, dtype):
    call = named(["bias", "sinks"], dtype=dtype)
    grads = present(run(call)).values()
    assert all(x.flags.writeable for x in grads)
    inputs = [x for x in call.values() if isinstance(x, np.ndarray)]
    for grad in grads:
        assert not any(np.shares_memory(grad, x) for x in [*inputs, *(y for y in grads if y is not grad)])


# An `out` that was not rounded.


@on_kernels({"bfloat16": bfloat16})
@pytest.mark.parametrize("keys", [512, 2048])
def test_keys_whose_mean_is_not_0_need_an_unrounded_out(kernel, keys, dtype):
    """The gradients of scores sum to 0 but for the error of delta, which thus meets the mean of the keys."""
    query, grad_out = rng(0).standard_normal((2, 1, 64, 64)).astype(dtype)
    key, value = rng(1).random((2, 1, keys, 64)).astype(dtype)
    exact_out, exact_lse = reference.attention(query, key, value, return_lse=True)
    exact = reference.attention_backward(grad_out, query, key, value, exact_out, exact_lse).query
    errors = []
    for of in dtype, float32, float64:
        out, lse = sdpa.attention(query, key, value, return_lse=True, out=np.empty(query.shape, of))
        grad = sdpa.attention_backward(grad_out, query, key, value, out, lse).query
        assert grad.dtype == dtype
        errors.append(np.sqrt(((grad - exact) ** 2).mean() / (exact**2).mean()))
    assert 0.05 < errors[0] < 0.5 and max(errors[1:]) < 0.006


@EACH_WIDTH
def test_a_wider_out(kernel, dtype):
    """Dense and packed, as the oracle with that `out`; a narrower or another one is refused."""
    for packed in False, True:
        forward = sdpa.attention_varlen if packed else sdpa.attention
        arrays, where = varlen.draw_packed((20, 3), (30, 40), dtype=dtype) if packed else (draw(dtype=dtype), {})
        oracle = reference.attention_varlen_backward if packed else reference.attention_backward
        call = problem(*arrays, forward=forward, **where)
        call["out"] = np.empty(call["out"].shape, float64)
        forward(*arrays, out=call["out"], **where)
        backward = sdpa.attention_varlen_backward if packed else sdpa.attention_backward
        grads, expected = backward(**call), oracle(**call)
        for name in FIELDS[:3]:
            tolerance = 8 * eps(dtype)
            np.testing.assert_allclose(
                getattr(grads, name).astype(float64), getattr(expected, name), rtol=tolerance, atol=20 * tolerance
            )
        for other in np.int64, float16 if dtype != float16 else bfloat16:
            with raises(TypeError, ["out", str(np.dtype(other)), "or wider"]):
                backward(**call | dict(out=call["out"].astype(other)))


# Axes.


@EACH_ARITHMETIC
@pytest.mark.parametrize("rank", [2, 3])
def test_two_and_three_axes(kernel, rank, dtype):
    call = problem(*draw(B=1, H=1 if rank == 2 else 4, G=1 if rank == 2 else 2, dtype=dtype), causal=True)
    part = {name: x[(0,) * (4 - rank)] if name in ARRAYS else x for name, x in call.items()}
    for whole, grad in zip(run(call), run(part)):
        assert whole is None or assert_same_bits(grad, whole[(0,) * (4 - rank)]) is None


@EACH_ARITHMETIC
def test_more_leading_axes(kernel, dtype):
    call = named(["causal", "sinks"], B=6, dtype=dtype)
    expected = run(call)
    split = {name: x.reshape(2, 3, *x.shape[1:]) if name in ARRAYS else x for name, x in call.items()}
    for layout in np.ascontiguousarray, lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1):
        grads = run({name: layout(x) if name in ARRAYS else x for name, x in split.items()})
        for name in FIELDS[:3]:
            assert_same_bits(getattr(grads, name).reshape(call[name].shape), getattr(expected, name))
        np.testing.assert_allclose(grads.sinks, expected.sinks, rtol=1e-5)


@pytest.mark.parametrize("bias", [(2, 3, 4, 21, 40), (2, 1, 1, 21, 40), (1, 3, 1, 1, 40), (2, 1, 4, 21, 1)], ids=str)
@pytest.mark.parametrize("layout", LEADING)
def test_leading_axes_are_one_call(kernel, layout, bias):
    """Whatever their strides; a bias that some of them share gets the sum, in the same order."""
    arrays = [x.reshape(2, 3, *x.shape[1:]) for x in draw(B=6, M=21, N=40)]
    views = [LEADING[layout](x) for x in arrays]
    bias = rng(1).standard_normal(bias).astype(float32)
    options = dict(
        bias=LEADING[layout](bias) if bias.shape[:2] == (2, 3) else bias[:, None] if views[0].ndim > 5 else bias,
        kv_lengths=LEADING[layout](np.arange(35, 41).reshape(2, 3)), sinks=rng(2).standard_normal(4), causal=True,
    )  # fmt: skip
    call = problem(*views, **options)
    grads = run(call)
    assert_all_same(grads, run({name: np.array(x, order="C") if name in ARRAYS else x for name, x in call.items()}))
    judge(grads, call)


def test_a_bias_that_all_keys_share(kernel):
    """Its gradient sums as many equal numbers as there are keys, which must not drift."""
    arrays = draw(B=1, H=1, G=1, M=15, N=127, D=2, E=3)
    bias = rng(1).standard_normal((15, 1)).astype(float32)
    call = problem(*arrays, bias=bias, sinks=[-1.7], scale=0)
    judge(run(call), call, factor=1, floor=8)


@EACH_DTYPE
@pytest.mark.parametrize("q, k, v", BROADCASTS.values(), ids=BROADCASTS)
def test_leading_axes_that_broadcast(kernel, dtype, q, k, v):
    """What was shared gets the sum, in its own shape."""
    normal = rng(0).standard_normal
    arrays = (normal(shape).astype(dtype) for shape in ((*q, 21, 7), (*k, 40, 7), (*v, 40, 5)))
    check(*arrays, causal=True, bias=normal((21, 1)), sinks=normal((1, *q)[-1]))


# Edges.


def assert_zero(grads, call):
    """But for the sinks: each is the lse of its rows."""
    for name, grad in present(grads).items():
        assert grad.shape == np.shape(call[name])
        rows = 0 if "cu_seqlens_q" in call else (*range(call["lse"].ndim - 2), -1)
        expected = call["grad_lse"].sum(axis=rows, dtype=float64) if name == "sinks" else 0
        np.testing.assert_allclose(
            grad, np.broadcast_to(expected, grad.shape), rtol=1e-5, atol=1e-5 * (name == "sinks")
        )


def what_a_blind_row_ignores(more):
    return ("grad_out",) if more == "sinks" else ("grad_out", "out", "grad_lse")


@EACH_WIDTH
@pytest.mark.parametrize("more", ["nothing", *SCORES])
@pytest.mark.parametrize("options", BLIND.values(), ids=BLIND)
def test_rows_that_see_no_key(kernel, options, more, dtype):
    query, key, value = draw(dtype=dtype)
    query[0, 0] = key[0, 0] = value[1, 0] = nan
    key[1, 1] = value[0, 0] = inf
    call = problem(query, key, value, **options, **options_for(query, key, more))
    assert_zero(run(call), call)
    call |= {name: np.full_like(call[name], nan) for name in what_a_blind_row_ignores(more)}
    assert_zero(run(call), call)


@EACH_WIDTH
@pytest.mark.parametrize("more", ["nothing", "sinks", "softcap", "bias"])
def test_some_rows_see_no_key(kernel, more, dtype):
    """More queries than keys, causal: the first stand before all keys, and nothing of theirs matters."""
    arrays = draw(M=90, N=35, dtype=dtype)
    call = problem(*arrays, causal=True, **options_for(*arrays[:2], more))
    clean = run(call)
    names = ("query", *what_a_blind_row_ignores(more))
    call |= {name: call[name].copy() for name in names}
    for name in names:
        call[name][:, :, :55] = nan
    grads = run(call)
    assert_all_same(grads, clean)
    assert (grads.query[:, :, :55] == 0).all() and (grads.query[:, :, 55:] != 0).all()


@EACH_WIDTH
def test_an_lse_of_minus_inf_is_a_row_that_saw_nothing(kernel, dtype):
    call = named(["sinks", "bias"], dtype=dtype)
    call["lse"][:, 1, 7:20] = -inf
    judge(run(call), call)
    assert (run(call).query[:, 1, 7:20] == 0).all() and (run(call).bias[:, 1, 7:20] == 0).all()


@EACH_WIDTH
@pytest.mark.parametrize("garbage", [nan, inf, -inf])
@pytest.mark.parametrize("more", ["nothing", "softcap", "alibi", "sinks"])
@pytest.mark.parametrize("options, hidden", HIDDEN.values(), ids=HIDDEN)
def test_garbage_in_keys_that_nobody_sees_changes_no_bit(kernel, options, hidden, more, garbage, dtype):
    query, key, value = draw(D=36, E=40, dtype=dtype)
    call = problem(query, key, value, **options, **options_for(query, key, more))
    nobody = hidden.all(axis=0)
    call["key"][:, :, nobody] = call["value"][:, :, nobody] = 0
    clean = run(call)
    call["key"][:, :, nobody] = call["value"][:, :, nobody] = garbage
    grads = run(call)
    assert_all_same(grads, clean)
    assert all(np.isfinite(x).all() for x in present(grads).values())
    assert (grads.key[:, :, nobody] == 0).all() and (grads.value[:, :, nobody] == 0).all()


def assert_struck_alike(grads, call):
    """What is not finite in the gradients is so in the oracle's, and the rest is near."""
    exact = reference.attention_backward(**call)
    size = 1e-3 if arithmetic(call["query"].dtype) == call["query"].dtype else 4 * eps(call["query"].dtype)
    for name, grad in present(grads).items():
        expected, grad = getattr(exact, name), grad.astype(float64)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(grad), finite, err_msg=name)
        np.testing.assert_allclose(grad[finite], expected[finite], rtol=size, atol=10 * size, err_msg=name)


@EACH_WIDTH
@pytest.mark.parametrize("place", ["query", "key", "value", "grad_out", "out", "grad_lse"])
@pytest.mark.parametrize("garbage", [nan, inf])
@pytest.mark.parametrize("options, hidden", HIDDEN.values(), ids=HIDDEN)
def test_garbage_reaches_those_that_see_it_and_no_other(kernel, options, hidden, garbage, place, dtype):
    """It strikes the pairs that see it, and through a row that sees it all that this row sees."""
    arrays = dict(zip(FIELDS, draw(D=36, E=40, dtype=dtype)))
    planted = [3, 41, 77, 110, 129] if place in ("key", "value") else [2, 20, 36]
    if place in arrays:
        arrays[place][0, 1, planted] = garbage
    call = problem(**arrays, bias=np.zeros((37, 133)) if "bias" not in options else options["bias"],
                   **{name: x for name, x in options.items() if name != "bias"})  # fmt: skip
    if place not in arrays:
        call[place][0, 1, planted] = garbage
    with np.errstate(invalid="ignore"):
        assert_struck_alike(run(call), call)


@EACH_WIDTH
@EACH_OPTION
@pytest.mark.parametrize("place", ["query", "value", "grad_out"])
def test_one_nan_as_in_the_oracle(kernel, place, name, dtype):
    """One element: of dV one feature is struck by that of grad_out, none by that of value."""
    arrays = dict(zip(FIELDS, draw(dtype=dtype)))
    if place in arrays:
        arrays[place][1, 0, 30, 5] = nan
    call = problem(**arrays, **options_for(arrays["query"], arrays["key"], name))
    if place not in arrays:
        call[place][1, 0, 30, 5] = nan
    assert_struck_alike(run(call), call)


@EACH_WIDTH
@pytest.mark.parametrize("hide", ["mask", "lengths"])
def test_nan_in_the_bias_of_hidden_keys(kernel, hide, dtype):
    arrays = draw(M=19, N=40, dtype=dtype)
    bias = np.where(np.arange(40) < 25, 0.5, nan)
    call = problem(*arrays, bias=bias, **(dict(mask=np.arange(40) < 25) if hide == "mask" else dict(kv_lengths=25)))
    grads = run(call)
    assert_all_same(grads, run(call, bias=np.nan_to_num(bias)))
    assert (grads.bias[25:] == 0).all() and np.isfinite(grads.bias).all()


@EACH_WIDTH
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_a_score_of_minus_inf_is_not_seen(kernel, rows, dtype):
    key, value = (np.array(x, float32).astype(dtype)[:, None] for x in ([-inf, 0, 1], [1, 2, 3]))
    call = problem(np.ones((rows, 1), dtype), key, value, bias=np.zeros((rows, 3)), sinks=np.zeros(1))
    grads = run(call)
    assert_struck_alike(grads, call)
    assert grads.key[0] == grads.value[0] == 0 and (grads.bias[:, 0] == 0).all()
    call = problem(np.ones((rows, 1), dtype), key[:1], value[:1], bias=np.zeros((rows, 1)), sinks=np.zeros(1))
    assert_zero(run(call), call)


@EACH_WIDTH
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("empty", ["", "H", "HG", "M", "N", "D", "E", "DE", "MD", "NE", "HGMNDE"])
def test_empty_axes(kernel, empty, lead, causal, dtype):
    size = dict(H=4, G=2, M=3, N=5, D=3, E=2) | dict.fromkeys(empty, 0)
    H, G, M, N, D, E = size.values()
    arrays = [np.ones((*lead, *x), dtype) for x in [(H, M, D), (G, N, D), (G, N, E)]]
    call = problem(*arrays, causal=causal, sinks=np.ones(H), bias=np.zeros((M, 1)))
    grads = run(call)
    if set(empty) & set("HMND"):
        assert_zero(grads, call)
    assert_struck_alike(grads, call)


# Memory: beyond inputs and results one number per row, and blocks of each thread.


def extra_memory(call, threads):
    run(call, threads=threads)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        grads = run(call, threads=threads)
        return tracemalloc.get_traced_memory()[1] - before - sum(x.nbytes for x in present(grads).values())
    finally:
        tracemalloc.stop()


@on_kernels({"float32": float32}, HALF, half="best")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows, keys", [(33, 20_000), (20_000, 33)], ids=["many keys", "many rows"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias and sinks"])
def test_memory_of_a_call(kernel, rows, keys, threads, with_bias, dtype):
    options = dict(bias=np.zeros((keys,), float32), sinks=np.zeros(2)) if with_bias else {}
    call = problem(*draw(1, 2, 1, rows, keys, 16, 16, dtype=dtype), window=(500, 500), **options)
    sums = 4 * 2 * (rows + keys) * (16 + 16 + 4)  # one set of all sums, in float32
    assert extra_memory(call, threads) < 3e6 * threads + sums * (1 if dtype == float32 else 2)


def test_memory_of_long_sequences():
    """M * N numbers of float32 would take 1.6 GB."""
    pytest.importorskip("resource", reason="this system does not tell how much memory a process has taken")
    code = """
import resource, sys, numpy as np, sdpa
rows = 20_000
query, key, value, grad_out = np.random.default_rng(0).standard_normal((4, rows, 16), np.float32)
bias, sinks = np.zeros(rows, np.float32), np.zeros(1)
options = dict(window=(2000, 0), bias=bias, sinks=sinks)
out, lse = sdpa.attention(query, key, value, return_lse=True, **options)
sdpa.attention_backward(*[x[:200] for x in (grad_out, query, key, value, out, lse)], threads=2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, threads=2, **options)
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(taken * (1 if sys.platform == "darwin" else 1024) - sum(x.nbytes for x in grads))
"""
    assert int(run_python(code)) < 25e6


# Sequences.


def named_packed(name, q_counts=varlen.Q_COUNTS, k_counts=varlen.K_COUNTS, **sizes):
    arrays, where = varlen.draw_packed(q_counts, k_counts, **sizes)
    names = [name] if isinstance(name, str) else name
    options = varlen.options_for(arrays[0], k_counts, *names)
    return problem(*arrays, forward=sdpa.attention_varlen, **where, **options)


def run_packed(call, **more):
    return sdpa.attention_varlen_backward(**call | more)


def one_by_one(
    function, grad_out, query, key, value, out, lse, *, cu_seqlens_q, cu_seqlens_k, grad_lse=None,
    mask=None, bias=None, q_offset=None, kv_lengths=None, sinks=None, alibi_slopes=None, **options,
):  # fmt: skip
    """The gradients of each sequence alone, packed again; those of bias (H, T, L) and sinks (S, H) in full."""
    sequences = split(
        query, key, cu_seqlens_q, cu_seqlens_k, mask=mask, bias=bias, q_offset=q_offset, kv_lengths=kv_lengths,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    longest = max((k.stop - k.start for _, k, _ in sequences), default=0)
    pairs, heads = (query.shape[1], len(query), longest), (len(sequences), query.shape[1])
    grads = [None] * 3 + [None if bias is None else np.zeros(pairs), None if sinks is None else np.zeros(heads)]
    parts = [[], [], []]
    for b, (q, k, own) in enumerate(sequences):
        of = function(
            *(x.swapaxes(0, 1) for x in (grad_out[q], query[q], key[k], value[k], out[q])), lse[q].T,
            grad_lse=None if grad_lse is None else grad_lse[q].T, **own, **options,
        )  # fmt: skip
        for part, grad in zip(parts, of):
            part.append(grad.swapaxes(0, 1))
        if bias is not None:
            grads[3][:, q, : k.stop - k.start] = of.bias
        if sinks is not None:
            grads[4][b] = of.sinks
    empty = (x[:0] for x in (query, key, value))
    return sdpa.Gradients(*(np.concatenate([none, *part]) for none, part in zip(empty, parts)), *grads[3:])


def sizes_of_packed(**call):
    whole = one_by_one(sizes_of, **call)
    others = [x if x is None else reduced(x, np.shape(call[n])) for n, x in zip(FIELDS[3:], whole[3:])]
    return sdpa.Gradients(*whole[:3], *others)


def judge_packed(grads, call, **factors):
    judge(grads, call, oracle=reference.attention_varlen_backward, sizes=sizes_of_packed, **factors)


@EACH_DTYPE
@pytest.mark.parametrize("name", varlen.OPTIONS)
def test_sequences(kernel, dtype, name):
    call = named_packed(name, dtype=dtype)
    judge_packed(run_packed(call), call)


@on_kernels(DTYPES)
def test_sequences_with_everything_at_once(kernel, dtype):
    call = named_packed(varlen.EVERYTHING, dtype=dtype)
    judge_packed(run_packed(call), call)
    call["grad_lse"] = None
    judge_packed(run_packed(call), call)


@EACH_ARITHMETIC
@pytest.mark.parametrize("shape", [(), (140,), (68, 1), (4, 1, 1), (1, 68, 140), (4, 1, 140), (4, 68, 140)], ids=str)
def test_bias_of_sequences(kernel, dtype, shape):
    arrays, where = varlen.draw_packed(dtype=dtype)
    bias, sinks = rng(1).standard_normal(shape), rng(2).standard_normal((len(varlen.Q_COUNTS), 1))
    call = problem(*arrays, forward=sdpa.attention_varlen, **where, bias=bias, sinks=sinks, causal=True)
    judge_packed(run_packed(call), call)


@EACH_DTYPE
@pytest.mark.parametrize("q_counts, k_counts", varlen.ALIKE.values(), ids=varlen.ALIKE)
def test_bits_of_each_sequence_alone(kernel, dtype, q_counts, k_counts):
    names = ["bias", "causal", "sinks", "alibi per sequence", "lengths"]
    call = named_packed(names, q_counts, k_counts, dtype=dtype)
    together = run_packed(call)
    alone = one_by_one(sdpa.attention_backward, **call)
    for name in FIELDS[:3]:
        assert_same_bits(getattr(together, name), getattr(alone, name))
    np.testing.assert_array_equal(together.bias, alone.bias)
    np.testing.assert_allclose(together.sinks, alone.sinks.sum(axis=0), rtol=1e-5)


@EACH_ARITHMETIC
@pytest.mark.parametrize("name", ["nothing", "causal", "bias of heads", "sinks", "lengths"])
def test_threads_and_sequences(kernel, dtype, name):
    call = named_packed(name, (70, 3, 0, 150), (70, 200, 9, 300), dtype=dtype)
    expected = run_packed(call, threads=1)
    for threads in (2, 3, 5, None):
        assert_all_same(run_packed(call, threads=threads), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_sequences(kernel, layout):
    call = named_packed(["causal", "bias"])
    call |= {name: LAYOUTS[layout](call[name]) for name in (*ARRAYS, "bias")}
    copies = {name: np.array(x, order="C") if name in (*ARRAYS, "bias") else x for name, x in call.items()}
    assert_all_same(run_packed(call), run_packed(copies))


def test_keys_lie_as_queries_by_default(kernel):
    call = named_packed("causal", (4, 0, 30), (4, 0, 30))
    assert_all_same(run_packed(call | dict(cu_seqlens_k=None)), run_packed(call))


@EACH_ARITHMETIC
def test_what_is_past_the_length_does_not_matter(kernel, dtype):
    call = named_packed("sinks", (20, 40, 17), (40, 150, 33), dtype=dtype)
    call["kv_lengths"] = np.array([13, 0, 33])
    call |= dict(zip(("out", "lse"), sdpa.attention_varlen(
        *(call[name] for name in FIELDS[:3]), sinks=call["sinks"], kv_lengths=call["kv_lengths"], return_lse=True,
        cu_seqlens_q=call["cu_seqlens_q"], cu_seqlens_k=call["cu_seqlens_k"],
    )))  # fmt: skip
    clean = run_packed(call)
    call["key"][13:190] = call["value"][13:190] = nan
    call["grad_out"][20:60] = nan  # the second sequence has no keys
    grads = run_packed(call)
    assert_all_same(grads, clean)
    assert (grads.key[13:190] == 0).all() and (grads.query[20:60] == 0).all()


def test_no_sequences(kernel):
    arrays, _ = varlen.draw_packed((), ())
    call = problem(*arrays, forward=sdpa.attention_varlen, cu_seqlens_q=[0], sinks=np.ones(4), bias=np.ones((1, 1)))
    grads = run_packed(call)
    assert_zero(grads, call)
    assert grads.bias.shape == (1, 1) and grads.sinks.shape == (4,)


@pytest.mark.parametrize("empty", [dict(H=0, G=0), dict(H=0), dict(D=0), dict(E=0)], ids=str)
def test_empty_axes_of_sequences(kernel, empty):
    arrays, where = varlen.draw_packed((2, 1), (3, 0), **empty)
    call = problem(*arrays, forward=sdpa.attention_varlen, **where)
    grads = run_packed(call)
    for name in FIELDS[:3]:
        assert getattr(grads, name).shape == call[name].shape and np.isfinite(getattr(grads, name)).all()
    assert "D" not in empty or (grads.value == 0).all()


@EVERY_KERNEL
@settings(PROPERTY, max_examples=examples(80))
@given(varlen.packed_problems())
def test_any_sequences(kernel, drawn):
    arrays, where, options = drawn
    call = problem(*arrays, forward=sdpa.attention_varlen, **where, **options)
    judge_packed(run_packed(call), call, factor=4, floor=20)


# Found by review.


@pytest.mark.parametrize("sizes", [dict(B=1, H=128, G=1, M=2, N=1200), dict(B=2, H=6, G=2, M=50, N=300)], ids=str)
@pytest.mark.parametrize("columns", ["N", "one"])
def test_a_bias_that_the_heads_of_a_group_share_is_summed_by_one_thread(kernel, sizes, columns):
    arrays = draw(**sizes, D=4, E=4)
    bias = rng(1).standard_normal((sizes["M"], sizes["N"] if columns == "N" else 1)).astype(float32)
    call = problem(*arrays, bias=bias)
    expected = run(call, threads=1)
    judge(expected, call)
    for _ in range(5):
        assert_all_same(run(call, threads=2), expected)


@EACH_ARITHMETIC
def test_nan_flows_into_values_whose_weight_is_nothing(kernel, dtype):
    query, key, value = (np.array(x, dtype)[:, None] for x in ([1], [0, -200], [1, 2]))
    call = problem(query, key, value, scale=1.0)
    call["grad_out"] = np.full_like(call["grad_out"], nan)
    assert np.isnan(run(call).value).all()


@EACH_ARITHMETIC
def test_no_weight_is_above_1(kernel, dtype):
    arrays = [x * 10_000 for x in draw(B=1, H=1, G=1, M=40, N=200, D=8, dtype=dtype)[:2]]
    call = problem(*arrays, np.ones((1, 1, 200, 1), dtype), scale=0.3)
    grads = run(call, grad_out=np.ones_like(call["out"]))
    assert (grads.value >= 0).all() and (grads.value <= 40).all()


def test_a_scale_under_which_the_query_overflows(kernel):
    query, key, value = (np.array(x, float32)[:, None] for x in ([1e20], [1e-38, 0], [1, 2]))
    call = problem(query, key, value, scale=1e20)
    assert not (run(call, grad_out=np.ones_like(call["out"]), grad_lse=None).key == 0).any()


# Names and errors.  Arrays are those of `draw`: the result is (2, 4, 37, 12), the lse (2, 4, 37).


def test_gradients_are_a_named_tuple():
    assert issubclass(sdpa.Gradients, tuple) and sdpa.Gradients._fields == FIELDS
    assert sdpa.Gradients is reference.Gradients
    query, key, value, bias, sinks = run(named(["bias", "sinks"]))
    assert query.shape[-1] == key.shape[-1] == 20 and value.shape[-1] == 12 and bias.ndim == 4 and sinks.shape == (4,)
    assert run(named("nothing"))[3:] == (None, None)


@pytest.fixture(scope="module")
def valid():
    return problem(*draw())


@pytest.mark.parametrize("error, changes, parts", ERRORS)
def test_errors_of_options(valid, error, changes, parts):
    with raises(error, parts):
        run(valid | changes)


SHAPES_OF_RESULTS = dict(grad_out=(2, 4, 37, 12), out=(2, 4, 37, 12), lse=(2, 4, 37), grad_lse=(2, 4, 37))
TYPES = [
    pytest.param(TypeError, {name: ones(*shape).astype(dtype)}, [name, str(np.dtype(dtype))], id=f"{name} {dtype}")
    for name, shape in SHAPES_OF_RESULTS.items()
    for dtype in [*NOT_OURS, bool, float16, bfloat16, float64]
    if (name, dtype) != ("out", float64)
]
MASKED = [
    pytest.param(TypeError, {name: np.ma.ones(shape, "f4")}, [name, "masked array"], id=f"masked {name}")
    for name, shape in (SHAPES_OF_RESULTS | INPUTS).items()
]
RESULTS = table(
    ValueError,
    grad_out_of_queries=(dict(grad_out=ones(2, 4, 36, 12)), ["grad_out", "(2, 4, 36, 12)", "(2, 4, 37, 12)"]),
    grad_out_of_another_size=(dict(grad_out=ones(2, 4, 37, 20)), ["grad_out", "(2, 4, 37, 20)", "(2, 4, 37, 12)"]),
    grad_out_of_key_heads=(dict(grad_out=ones(2, 2, 37, 12)), ["grad_out", "(2, 2, 37, 12)", "(2, 4, 37, 12)"]),
    grad_out_of_three_axes=(dict(grad_out=ones(4, 37, 12)), ["grad_out", "(4, 37, 12)", "(2, 4, 37, 12)"]),
    grad_out_that_would_broadcast=(dict(grad_out=ones(1, 1, 1, 1)), ["grad_out", "(1, 1, 1, 1)", "(2, 4, 37, 12)"]),
    a_number_for_grad_out=(dict(grad_out=np.float32(1)), ["grad_out", "()", "(2, 4, 37, 12)"]),
    out_of_queries=(dict(out=ones(2, 4, 36, 12)), ["out", "(2, 4, 36, 12)", "(2, 4, 37, 12)"]),
    out_of_five_axes=(dict(out=ones(1, 2, 4, 37, 12)), ["out", "(1, 2, 4, 37, 12)", "(2, 4, 37, 12)"]),
    lse_of_out=(dict(lse=ones(2, 4, 37, 12)), ["lse", "(2, 4, 37, 12)", "(2, 4, 37)"]),
    lse_with_one_axis_more=(dict(lse=ones(2, 4, 37, 1)), ["lse", "(2, 4, 37, 1)", "(2, 4, 37)"]),
    lse_of_key_heads=(dict(lse=ones(2, 2, 37)), ["lse", "(2, 2, 37)", "(2, 4, 37)"]),
    lse_that_would_broadcast=(dict(lse=ones(37)), ["lse", "(37,)", "(2, 4, 37)"]),
    grad_lse_of_out=(dict(grad_lse=ones(2, 4, 37, 12)), ["grad_lse", "(2, 4, 37, 12)", "(2, 4, 37)"]),
    a_number_for_grad_lse=(dict(grad_lse=np.float32(1)), ["grad_lse", "()", "(2, 4, 37)"]),
)


@pytest.mark.parametrize("error, changes, parts", [*TYPES, *MASKED, *RESULTS])
def test_errors_of_what_the_forward_gave(valid, error, changes, parts):
    with raises(error, parts):
        run(valid | changes)


@pytest.mark.parametrize("dtype", [*WIDE.values(), *HALF.values()], ids=[*WIDE, *HALF])
@pytest.mark.parametrize("name", SHAPES_OF_RESULTS)
def test_dtypes_are_those_that_the_forward_gives(name, dtype):
    call = problem(*draw(dtype=dtype))
    for other in float16, bfloat16, float32, float64:
        unrounded = name == "out" and np.dtype(other).itemsize > call[name].itemsize
        if other != call[name].dtype and not unrounded:
            with raises(TypeError, [name, str(np.dtype(other)), str(call[name].dtype)]):
                run(call | {name: call[name].astype(other)})


def test_a_result_of_broadcast_leading_axes_has_them_all():
    query, key, value = draw()
    call = problem(query[0], key, value)
    assert run(call).query.shape == (4, 37, 20)
    with raises(ValueError, ["out", "(4, 37, 12)", "(2, 4, 37, 12)"]):
        run(call | dict(out=call["out"][0]))


def test_positional_and_unknown_names(valid):
    arrays = [valid[name] for name in ("grad_out", *FIELDS[:3], "out", "lse")]
    assert_all_same(sdpa.attention_backward(*arrays), run(valid, grad_lse=None))
    for call in (lambda: sdpa.attention_backward(*arrays, valid["lse"]), lambda: run(valid, return_lse=True)):
        with pytest.raises(TypeError, match=r"positional|return_lse"):
            call()


def test_what_is_allowed_though_unusual():
    """Lists, which are float64."""
    x = [[1.0, 2.0], [3.0, 4.0]]
    out, lse = sdpa.attention(x, x, x, bias=[0.5, 1.0], sinks=[1], return_lse=True)
    grads = sdpa.attention_backward(x, x, x, x, out.tolist(), lse.tolist(), bias=[0.5, 1.0], sinks=[1])
    expected = reference.attention_backward(x, x, x, x, out, lse, bias=[0.5, 1.0], sinks=[1])
    for grad, right in zip(grads, expected):
        assert grad.dtype == float64
        np.testing.assert_allclose(grad, right, atol=1e-13)


PACKED = (np.ones((6, 4, 8), float32), np.ones((9, 2, 8), float32), np.ones((9, 2, 5), float32))
OTHER_ERRORS = {  # that have nothing to do with `out` of the forward
    name: case for name, case in varlen.ERRORS.items() if not name.startswith("out of")
}
PACKED_RESULTS = {
    "grad_out": (ValueError, r"grad_out.*\(6, 4, 8\).*\(6, 4, 5\)", dict(grad_out=ones(6, 4, 8))),
    "grad_out of heads first": (ValueError, r"grad_out.*\(4, 6, 5\).*\(6, 4, 5\)", dict(grad_out=ones(4, 6, 5))),
    "out": (ValueError, r"out.*\(5, 4, 5\).*\(6, 4, 5\)", dict(out=ones(5, 4, 5))),
    "lse": (ValueError, r"lse.*\(4, 6\).*\(6, 4\)", dict(lse=ones(4, 6))),
    "grad_lse": (ValueError, r"grad_lse.*\(6, 4, 1\).*\(6, 4\)", dict(grad_lse=ones(6, 4, 1))),
    "dtype of out": (TypeError, "out.*float16.*float32 or wider", dict(out=np.ones((6, 4, 5), float16))),
    "dtype of grad_out": (TypeError, "grad_out.*float16.*float32", dict(grad_out=np.ones((6, 4, 5), float16))),
    "dtype of lse": (TypeError, "lse.*float64.*float32", dict(lse=np.ones((6, 4)))),
    "dtype of grad_lse": (TypeError, "grad_lse.*int64", dict(grad_lse=np.ones((6, 4), int))),
    "masked lse": (TypeError, "lse.*masked array", dict(lse=np.ma.ones((6, 4), "f4"))),
}


@pytest.mark.parametrize(
    "error, message, changed", (OTHER_ERRORS | PACKED_RESULTS).values(), ids=OTHER_ERRORS | PACKED_RESULTS
)
def test_errors_of_sequences(error, message, changed):
    call = problem(*PACKED, forward=sdpa.attention_varlen, cu_seqlens_q=varlen.QS, cu_seqlens_k=varlen.KS)
    with pytest.raises(error, match=message):
        run_packed(call | changed)


@pytest.mark.skipif(not PAIRS_OF_BFLOAT16, reason="this CPU does not multiply pairs of bfloat16")
@pytest.mark.parametrize("dtype", [*WIDE.values(), float16, (float32, bfloat16)], ids=str)
def test_pairs_of_bfloat16_are_for_bfloat16_alone(monkeypatch, dtype):
    """All else is computed as by the next kernel, so that the other tests need not be run for both."""
    call = named(["causal", "bias of heads", "sinks"], M=100, N=300, dtype=dtype)
    results = []
    for name in *PAIRS_OF_BFLOAT16, "avx512":
        monkeypatch.setattr(kernels, "default", KERNELS[name])
        results.append(run(call))
    for other in results[1:]:
        assert_all_same(results[0], other)
