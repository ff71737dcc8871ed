"""Calls that mean nothing: the exception, and what its message names.  Arrays are those of `draw`:
query (2, 4, 37, 20), key (2, 2, 133, 20), value (2, 2, 133, 12)."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
from conftest import assert_same_bits, bfloat16, draw, float16, inf, nan, rng
from numpy.lib.stride_tricks import as_strided

import sdpa


def ones(*shape):
    return np.ones(shape, np.float32)


def table(error, **rows):
    return [pytest.param(error, changes, parts, id=name.replace("_", " ")) for name, (changes, parts) in rows.items()]


INPUTS = dict(query=(2, 4, 37, 20), key=(2, 2, 133, 20), value=(2, 2, 133, 12), bias=(133,))
NOT_OURS = [np.int64, np.uint8, np.complex64, object, ">f2", ">f4", ">f8", "U1", ml_dtypes.float8_e5m2]
NOT_OURS += [np.longdouble] if np.dtype(np.longdouble).itemsize > 8 else []
TYPES = [
    pytest.param(TypeError, {name: ones(*shape).astype(dtype)}, [name, str(np.dtype(dtype))], id=f"{name} {dtype}")
    for name, shape in INPUTS.items()
    for dtype in [*NOT_OURS, bool]
    if (name, dtype) != ("bias", bool)
]

SHAPES = table(
    ValueError,
    query_of_one_axis=(dict(query=ones(20)), ["query", "(20,)", "two axes"]),
    query_of_no_axis=(dict(query=np.float32(1)), ["query", "()", "two axes"]),
    key_of_one_axis=(dict(key=ones(20)), ["key", "(20,)", "two axes"]),
    value_of_one_axis=(dict(value=ones(12)), ["value", "(12,)", "two axes"]),
    key_size=(dict(key=ones(2, 2, 133, 19)), ["query", "(2, 4, 37, 20)", "key", "(2, 2, 133, 19)", "last axes"]),
    values_and_keys=(dict(value=ones(2, 2, 132, 12)), ["key", "(2, 2, 133, 20)", "value", "(2, 2, 132, 12)", "same"]),
    one_value_for_all_keys=(dict(value=ones(2, 2, 1, 12)), ["key", "value", "(2, 2, 1, 12)"]),
    heads_of_value=(dict(value=ones(2, 1, 133, 12)), ["key", "value", "(2, 1, 133, 12)", "heads"]),
    heads=(dict(key=ones(2, 3, 133, 20), value=ones(2, 3, 133, 12)), ["query", "4 heads", "key", "3", "multiple"]),
    fewer_query_heads=(dict(query=ones(2, 1, 37, 20)), ["1 heads", "2", "multiple"]),
    lists_of_unlike_lengths=(dict(query=[[1.0], [1.0, 2.0]]), ["query", "must be an array"]),
    no_key_heads=(dict(key=ones(2, 0, 133, 20), value=ones(2, 0, 133, 12)), ["4 heads", "0", "multiple"]),
    batches=(dict(query=ones(3, 4, 37, 20)), ["query (3, 4, 37, 20)", "key (2, 2, 133, 20)", "broadcast"]),
    batches_of_value=(dict(value=ones(3, 2, 133, 12)), ["value (3, 2, 133, 12)", "broadcast"]),
)

if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # NumPy 1 has no more than 32 axes itself
    SHAPES += table(
        ValueError,
        query_of_33_axes=(dict(query=ones(*[1] * 29, 2, 4, 37, 20)), ["query", "33 axes", "at most 32"]),
        key_of_36_axes=(dict(key=ones(*[1] * 32, 2, 2, 133, 20)), ["key", "36 axes", "at most 32"]),
        value_of_64_axes=(dict(value=ones(*[1] * 64)), ["value", "64 axes", "at most 32"]),
        bias_of_64_axes=(dict(bias=ones(*[1] * 64)), ["bias", "64 axes", "at most 32"]),
    )

MASKS = table(
    TypeError,
    integer_mask=(dict(mask=np.ones((37, 133), int)), ["mask", "int64", "boolean", "bias"]),
    float_mask=(dict(mask=np.zeros((37, 133))), ["mask", "float64", "boolean", "bias"]),
    object_mask=(dict(mask=np.array(None)), ["mask", "object", "boolean"]),
    value_None=(dict(value=None), ["value", "object"]),
    boolean_bias=(dict(bias=np.ones((37, 133), bool)), ["bias", "bool", "mask"]),
    causal_1=(dict(causal=1), ["causal", "1", "True or False"]),
    causal_None=(dict(causal=None), ["causal", "None"]),
    causal_text=(dict(causal="yes"), ["causal", "yes"]),
) + table(
    ValueError,
    mask_shape=(dict(mask=np.ones((36, 133), bool)), ["mask", "(36, 133)", "broadcast", "(2, 4, 37, 133)"]),
    mask_of_key_heads=(dict(mask=np.ones((2, 2, 37, 133), bool)), ["mask", "(2, 2, 37, 133)", "(2, 4, 37, 133)"]),
    mask_of_five_axes=(dict(mask=np.ones((2, 2, 4, 37, 133), bool)), ["mask", "(2, 2, 4, 37, 133)"]),
    bias_shape=(dict(bias=ones(37, 132)), ["bias", "(37, 132)", "broadcast", "(2, 4, 37, 133)"]),
    bias_of_five_axes=(dict(bias=ones(3, 1, 1, 1, 1)), ["bias", "(3, 1, 1, 1, 1)"]),
)

POSITIONS = table(
    TypeError,
    window_of_float=(dict(window=(1.5, 0)), ["window", "(1.5, 0)", "whole number"]),
    window_of_text=(dict(window=("1", 0)), ["window", "('1', 0)"]),
    window_of_one_number=(dict(window=5), ["window", "5", "(left, right)"]),
    q_offset_of_float=(dict(q_offset=0.5), ["q_offset", "float64", "whole number"]),
    q_offset_of_text=(dict(q_offset="3"), ["q_offset"]),
    q_offset_of_bool=(dict(q_offset=True), ["q_offset", "bool"]),
    kv_lengths_of_float=(dict(kv_lengths=[1.0, 2.0]), ["kv_lengths", "float64", "whole number"]),
    kv_lengths_masked=(dict(kv_lengths=np.ma.array([1, 2], mask=[True, False])), ["kv_lengths", "masked array"]),
    q_offset_masked=(dict(q_offset=np.ma.array([1, 2])), ["q_offset", "masked array"]),
) + table(
    ValueError,
    window_of_one=(dict(window=(1,)), ["window", "(1,)", "(left, right)"]),
    window_of_three=(dict(window=(1, 2, 3)), ["window", "(1, 2, 3)", "(left, right)"]),
    q_offset_for_three=(dict(q_offset=[1, 2, 3]), ["q_offset", "(3,)", "(2,)"]),
    q_offset_of_two_axes=(dict(q_offset=[[1], [2]]), ["q_offset", "(2, 1)", "(2,)"]),
    q_offset_beyond_64_bits=(dict(q_offset=2**63), ["q_offset", str(2**63), "64 bits"]),
    kv_lengths_below_0=(dict(kv_lengths=[-1, 5]), ["kv_lengths", "-1", "133"]),
    kv_lengths_above_N=(dict(kv_lengths=[1, 134]), ["kv_lengths", "134", "133"]),
    kv_lengths_far_above_N=(dict(kv_lengths=2**62), ["kv_lengths", str(2**62), "133"]),
    kv_lengths_for_three=(dict(kv_lengths=[1, 2, 3]), ["kv_lengths", "(3,)", "(2,)"]),
)

NUMBERS = table(
    TypeError,
    scale_of_text=(dict(scale="big"), ["scale", "big", "number"]),
    scale_of_complex=(dict(scale=1j), ["scale", "1j", "number"]),
    scale_per_head=(dict(scale=np.ones(4)), ["scale", "number"]),
    softcap_of_text=(dict(softcap="x"), ["softcap", "'x'", "number"]),
    sinks_of_complex=(dict(sinks=np.ones(4, complex)), ["sinks", "complex128", "each head"]),
    sinks_of_text=(dict(sinks="abcd"), ["sinks"]),
    sinks_masked=(dict(sinks=np.ma.array(np.ones(4), mask=[0, 1, 0, 0])), ["sinks", "masked array"]),
    alibi_slopes_masked=(dict(alibi_slopes=np.ma.array(np.ones(4))), ["alibi_slopes", "masked array"]),
    sinks_of_bool=(dict(sinks=np.ones(4, bool)), ["sinks", "bool"]),
    alibi_slopes_of_object=(dict(alibi_slopes=[None] * 4), ["alibi_slopes", "object"]),
    threads_of_float=(dict(threads=1.5), ["threads", "1.5", "whole number"]),
    threads_of_bool=(dict(threads=True), ["threads", "True"]),
    threads_of_text=(dict(threads="2"), ["threads", "'2'"]),
) + table(
    ValueError,
    scale_NaN=(dict(scale=nan), ["scale", "nan", "finite"]),
    scale_inf=(dict(scale=-inf), ["scale", "-inf", "finite"]),
    softcap_0=(dict(softcap=0), ["softcap", "0", "above 0"]),
    softcap_below_0=(dict(softcap=-2.5), ["softcap", "-2.5", "above 0"]),
    softcap_NaN=(dict(softcap=nan), ["softcap", "nan"]),
    softcap_inf=(dict(softcap=inf), ["softcap", "inf"]),
    sinks_for_three=(dict(sinks=np.ones(3)), ["sinks", "(3,)", "(2, 4)"]),
    alibi_slopes_for_three=(dict(alibi_slopes=np.ones(3)), ["alibi_slopes", "(3,)", "(2, 4)"]),
    alibi_slopes_for_three_batches=(dict(alibi_slopes=np.ones((3, 4))), ["alibi_slopes", "(3, 4)", "(2, 4)"]),
    threads_0=(dict(threads=0), ["threads", "0", "1 or more"]),
    threads_below_0=(dict(threads=-3), ["threads", "-3", "1 or more"]),
)

ERRORS = [*TYPES, *SHAPES, *MASKS, *POSITIONS, *NUMBERS]
EACH_ERROR = pytest.mark.parametrize("error, changes, parts", ERRORS)


def raises(error, parts):
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


def arguments(changes):
    return dict(zip(["query", "key", "value"], draw())) | changes


@EACH_ERROR
def test_attention(error, changes, parts):
    with raises(error, parts):
        sdpa.attention(**arguments(changes))


@EACH_ERROR
def test_nothing_is_written(error, changes, parts):
    out = np.full((2, 4, 37, 12), 77, np.float32)
    with raises(error, parts):
        sdpa.attention(**arguments(changes), out=out)
    assert (out == 77).all()


@EACH_ERROR
def test_explain(error, changes, parts):
    with raises(error, parts):
        sdpa.explain(**arguments(changes))


@EACH_ERROR
def test_attention_weights(error, changes, parts):
    if "value" in changes and "key" not in changes:
        return
    given = arguments(changes)
    del given["value"]
    with raises(error, parts):
        sdpa.attention_weights(**given)


WRONG_OUT = table(
    ValueError,
    shape=(dict(out=ones(2, 4, 37, 20)), ["out", "(2, 4, 37, 20)", "(2, 4, 37, 12)"]),
    fewer_axes=(dict(out=ones(8, 37, 12)), ["out", "(8, 37, 12)", "(2, 4, 37, 12)"]),
    integers=(dict(out=np.ones((2, 4, 37, 12), np.int64)), ["out", "int64", "float32, or a wider one"]),
    complex=(dict(out=np.ones((2, 4, 37, 12), complex)), ["out", "complex128", "float32"]),
    wide_byte_order=(dict(out=np.ones((2, 4, 37, 12), ">f8")), ["out", ">f8", "float32"]),
    half_dtype=(dict(out=np.ones((2, 4, 37, 12), float16)), ["out", "float16", "float32"]),
    bfloat16=(dict(out=np.ones((2, 4, 37, 12), bfloat16)), ["out", "bfloat16", "float32"]),
    byte_order=(dict(out=np.ones((2, 4, 37, 12), ">f4")), ["out", ">f4", "float32"]),
    repeated_elements=(dict(out=as_strided(ones(37, 12), (2, 4, 37, 12), (0, 0, 48, 4))), ["out", "overlap"]),
) + table(
    TypeError,
    a_list=(dict(out=[0.0]), ["out", "list"]),
    a_number=(dict(out=1.0), ["out", "float"]),
)


@pytest.mark.parametrize("error, changes, parts", WRONG_OUT)
def test_out(error, changes, parts):
    before = np.array(changes["out"])
    with raises(error, parts):
        sdpa.attention(**arguments(changes))
    np.testing.assert_array_equal(np.array(changes["out"]), before)


def test_read_only_out():
    out = ones(2, 4, 37, 12)
    out.flags.writeable = False
    with raises(ValueError, ["out", "read-only"]):
        sdpa.attention(*draw(), out=out)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_masked_arrays_are_refused(name):
    changes = {name: np.ma.masked_array(arguments({})[name])}
    with raises(TypeError, [name, "masked"]):
        sdpa.attention(**arguments(changes))


def test_names_that_do_not_exist():
    for call in sdpa.attention, sdpa.explain:
        with pytest.raises(TypeError, match="is_causal"):
            call(*draw(), is_causal=True)
    with pytest.raises(TypeError, match="positional"):
        sdpa.attention(*draw(), None)


def test_what_is_allowed_though_unusual():
    """Lists, NumPy scalars, and whole numbers of any kind."""
    query, key, value = draw()
    expected = sdpa.attention(query, key, value, causal=True, q_offset=3, window=(50, 2), kv_lengths=[100, 7], scale=1)
    assert_same_bits(
        sdpa.attention(
            query, key, value, causal=np.True_, q_offset=np.uint8(3), window=[np.int16(50), np.uint64(2)],
            kv_lengths=np.array([100, 7], np.uint64), scale=np.float16(1), threads=np.int8(2),
        ),
        expected,
    )  # fmt: skip
    x = [[1.0, 2.0], [3.0, 4.0]]
    assert sdpa.attention(x, x, x, mask=[True, False], bias=[0.5, 1.0], sinks=[1], alibi_slopes=0.5).dtype == np.float64


@pytest.mark.parametrize(
    "error, call, parts",
    [
        (TypeError, lambda a: sdpa.attention(*a, mask=np.ma.ones((37, 133), bool)), ["mask", "masked array"]),
        (TypeError, lambda a: sdpa.attention(*a, bias=np.ma.ones((37, 133))), ["bias", "masked array"]),
        (TypeError, lambda a: sdpa.attention(*a, out=np.ma.ones((2, 4, 37, 12), "f4")), ["out", "MaskedArray"]),
        (TypeError, lambda a: sdpa.merge([np.ma.ones((3, 4))], [np.ones(3)]), ["outs", "masked array"]),
        (TypeError, lambda a: sdpa.attention(a[0], a[1].astype("f8"), a[2]), ["key", "float64", "query", "float32"]),
        (TypeError, lambda a: sdpa.attention(a[0], a[1], a[2].astype("f8")), ["value", "float64", "wider"]),
        (TypeError, lambda a: sdpa.attention(a[0].astype(bfloat16), *a[1:]), ["key", "float32", "query", "bfloat16"]),
        (TypeError, lambda a: sdpa.attention(*a[:2], a[2].astype(ml_dtypes.float8_e4m3fn)), ["value", "float8_e4m3fn"]),
        (TypeError, lambda a: sdpa.attention(*a, bias=np.ones(133, ml_dtypes.float8_e5m2)), ["bias", "float8_e5m2"]),
        (TypeError, lambda a: sdpa.attention(*a, sinks=np.ones(4, ml_dtypes.int4)), ["sinks", "int4"]),
        (TypeError, lambda a: sdpa.merge([np.ones((3, 4), ml_dtypes.float8_e5m2)], [np.ones(3)]), ["outs", "float8"]),
        (TypeError, lambda a: sdpa.attention(*a, scale="0.5"), ["scale", "'0.5'", "number"]),
        (TypeError, lambda a: sdpa.attention(*a, scale=True), ["scale", "True", "number"]),
        (ValueError, lambda a: sdpa.attention(*a, softcap=10**400), ["softcap", "1000", "finite"]),
        (TypeError, lambda a: sdpa.attention(*a, window=(True, None)), ["window", "True", "whole number"]),
        (TypeError, lambda a: sdpa.attention(*a, threads=np.array([1, 2])), ["threads", "[1, 2]", "whole number"]),
        (ValueError, lambda a: sdpa.merge([np.float32(1)], [np.float32(1)]), ["outs", "lses"]),
        (TypeError, lambda a: sdpa.explain(*a, causl=True), ["explain", "causl"]),
    ],
)
def test_what_would_be_taken_for_something_else(error, call, parts):
    with pytest.raises(error) as caught:
        call(draw())
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "error, options, parts",
    [
        (TypeError, dict(attn_mask=np.ones((37, 133), int)), ["attn_mask", "int64", "boolean"]),
        (TypeError, dict(attn_mask=np.ma.ones((37, 133), bool)), ["attn_mask", "masked array"]),
        (ValueError, dict(attn_mask=np.ones((36, 133), bool)), ["attn_mask", "(36, 133)", "(2, 2, 37, 133)"]),
        (ValueError, dict(attn_mask=np.ones((37, 132))), ["attn_mask", "(37, 132)", "(2, 2, 37, 133)"]),
        (ValueError, dict(attn_mask=[[True], [True, False]]), ["attn_mask", "must be an array"]),
        (TypeError, dict(is_causal="no"), ["is_causal", "'no'", "True or False"]),
        (TypeError, dict(enable_gqa="no"), ["enable_gqa", "'no'", "True or False"]),
        (ValueError, dict(dropout_p=np.zeros(2)), ["dropout_p", "must be 0"]),
        (ValueError, dict(query=[[1.0], [1.0, 2.0]]), ["query", "must be an array"]),
        (TypeError, dict(value=None), ["value", "object"]),
    ],
)
def test_errors_in_the_words_of_torch(error, options, parts):
    arrays = dict(zip(["query", "key", "value"], draw(H=2)))
    with pytest.raises(error) as caught:
        sdpa.scaled_dot_product_attention(**arrays | options)
    for part in parts:
        assert part in str(caught.value)
    for ours in "mask", "bias", "causal":
        assert ours not in str(caught.value).replace("attn_mask", "").replace("is_causal", "").replace("masked", "")


def caches(batch=1):
    """A KVCache for each way that it attends, and its query, which is the last of 5 tokens."""
    token = rng(0).standard_normal((batch, 1, 5, 32)).astype(np.float32)
    for options in (
        {},
        dict(dtype=np.int8),
        dict(window=3, keep=1),
        dict(window=3),
        dict(window=2, keep=1, dtype=np.int8),
    ):
        cache = sdpa.KVCache(batch, 1, 32, **options)
        cache.append(token[:, :, :2], token[:, :, :2], lengths=np.arange(batch) % 2 + 1)
        cache.append(token[:, :, 2:], token[:, :, 2:])
        yield cache, token[:, :, 4:]


def paged():
    cache = sdpa.PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=32)
    cache.append(cache.allocate(), ones(1, 5, 32), ones(1, 5, 32))
    return cache, ones(1, 1, 32)


PACKED = dict(query=ones(3, 1, 4), key=ones(3, 1, 4), value=ones(3, 1, 4), cu_seqlens_q=[0, 1, 3])
NETWORK = dict(w_query=ones(5, 20), w_key=ones(5, 20), v=ones(5))


@pytest.mark.parametrize("given", ["no", 1, 0, None, np.array([True])], ids=str)
def test_return_lse_is_true_or_false(given):
    calls = [
        lambda **more: sdpa.attention(*draw(), **more),
        lambda **more: sdpa.explain(*draw(), **more),
        lambda **more: sdpa.additive_attention(*draw(), **NETWORK, **more),
        lambda **more: sdpa.attention_varlen(**PACKED, **more),
        lambda **more: paged()[0].attend(paged()[1], 0, **more),
        *(functools.partial(cache.attend, query) for batch in (1, 2) for cache, query in caches(batch)),
    ]
    for call in calls:
        with raises(TypeError, ["return_lse", repr(given)[:5], "True or False"]):
            call(return_lse=given)
    for call in calls[:1] + calls[2:]:
        assert len(call(return_lse=np.True_)) == 2


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset", "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"])
def test_masked_numbers_are_refused_everywhere(name):
    one = np.ma.array([1], mask=[True])
    with raises(TypeError, [name, "masked array"]):
        sdpa.attention_varlen(**PACKED | {name: one})
    if name.startswith("cu"):
        return
    cache, query = paged()
    with raises(TypeError, [name, "masked array"]):
        cache.attend(query, 0, **{name: one})
    for cache, query in caches() if name != "kv_lengths" else []:
        with raises(TypeError, [name, "masked array"]):
            cache.attend(query, **{name: one})


def test_value_is_needed():
    query, key, value = draw()
    out, lse = sdpa.attention(query, key, value, return_lse=True)
    for call in (
        lambda: sdpa.attention(query, key, None),
        lambda: sdpa.explain(query, key, None),
        lambda: sdpa.attention_backward(out, query, key, None, out, lse),
        lambda: sdpa.additive_attention(query, key, None, **NETWORK),
        lambda: sdpa.attention_varlen(**PACKED | dict(value=None)),
    ):
        with raises(TypeError, ["value", "object"]):
            call()


def test_as_many_axes_as_there_may_be():
    """With leading axes that broadcast, all options, and gradients."""
    query, key, value = draw(B=2, M=3, N=5)
    many = query.reshape(*[1] * 28, *query.shape)
    options = dict(mask=np.ones((4, 3, 5), bool), bias=ones(1, 3, 5), sinks=np.ones(4), kv_lengths=4, causal=True)
    out, lse = sdpa.attention(many, key, value, return_lse=True, **options)
    assert out.ndim == 32 and lse.ndim == 31
    assert_same_bits(out.reshape(2, 4, 3, 12), sdpa.attention(query, key, value, **options))
    assert sdpa.attention_weights(many, key, **options).ndim == 32
    assert sdpa.attention_backward(out, many, key, value, out, lse, **options).query.shape == many.shape
    assert_same_bits(sdpa.merge([out], [lse])[0], out)
    assert sdpa.additive_attention(many, key, value, **NETWORK).ndim == 32
