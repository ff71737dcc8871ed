"""Calls that mean nothing: the exception, and what its message names.  Arrays are those of `draw`:
query (2, 4, 37, 20), key (2, 2, 133, 20), value (2, 2, 133, 12)."""

import functools

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.lib.stride_tricks import as_strided
from support.accuracy import assert_same_bits
from support.draw import draw, float16, rng
from support.errors import ERRORS, ones, raises, table

import sdpa

EACH_ERROR = pytest.mark.parametrize("error, changes, parts", ERRORS)


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
