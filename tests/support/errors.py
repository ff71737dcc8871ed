"""Wrong arguments, and what is said about them."""

import re

import ml_dtypes
import numpy as np
import pytest

from support.draw import inf, nan


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


def raises(error, parts):
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))
