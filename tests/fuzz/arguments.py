"""Any objects as arguments of all public functions: a result or an error that names what is wrong, never a crash."""

import functools
import itertools
import tempfile
import warnings
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16, float8_e5m2
from support.draw import draw, float32, float64, rng
from support.layouts import LAYOUTS
from support.models import write_model
from support.packed import draw_packed
from support.problems import PROPERTY, examples

import sdpa

ERRORS = (ValueError, TypeError, FileNotFoundError)  # the last: text, without a tokenizer


def normal(*shape):
    return rng(0).standard_normal(shape).astype(float32)


ARRAYS = dict(zip(("query", "key", "value"), draw(M=5, N=7, D=4, E=3)))
OUT, LSE = sdpa.attention(**ARRAYS, return_lse=True)
(_Q, _K, _V), WHERE = draw_packed((2, 0, 3), (4, 1, 3), D=4, E=3)
PACKED = dict(query=_Q, key=_K, value=_V, **WHERE)
PACKED_OUT, PACKED_LSE = sdpa.attention_varlen(**PACKED, return_lse=True)
OPTIONS = dict(
    mask=None, bias=None, causal=False, window=None, q_offset=None, kv_lengths=None, scale=None, softcap=None,
    sinks=None, alibi_slopes=None, threads=None,
)  # fmt: skip
RESULTS = dict(return_lse=False, out=None)
CACHE = dict(batch=2, kv_heads=2, head_dim=4, value_dim=3, dtype=float32, capacity=None, keep=0)
CACHE_OPTIONS = {name: value for name, value in OPTIONS.items() if name != "kv_lengths"}  # it knows its lengths
PAGES = dict(pages=9, page_size=3, kv_heads=2, head_dim=4, value_dim=3, dtype=float32)
LAYER = dict(embed_dim=8, num_heads=2, in_proj_weight=normal(24, 8), out_proj_weight=normal(8, 8))


def taken(given, names):
    """Those that make the object; what is left are the options of its call, each of them an argument here."""
    return {name: given.pop(name) for name in names if name in given}


def of_layer(x, context=None, **given):
    made = taken(given, (*LAYER, "kv_heads", "rotary", "qk_norm", "pre_norm", "bias_k"))
    return sdpa.MultiHeadAttention(**made)(x, context, **given)


def of_linear(weight, bias, activation, x, residual, out, threads):
    return sdpa.Linear(weight, bias, activation=activation)(x, residual=residual, out=out, threads=threads)


def of_feed_forward(x, residual, up_weight, down_weight, **given):
    return sdpa.FeedForward(up_weight, down_weight, **given)(x, residual=residual)


def of_cache(key, value, query, lengths, n, **given):
    cache = sdpa.KVCache(**taken(given, ("window", "group", *CACHE)))
    cache.append(key, value, lengths)
    cache.fork().truncate(n)
    return cache.attend(query, **given)


def of_pages(key, value, query, tokens, n, cu_seqlens, sequences=None, **given):
    cache = sdpa.PagedKVCache(**taken(given, PAGES))
    first = [cache.allocate(tokens), cache.allocate()]
    cache.append(first if sequences is None else sequences, key, value, cu_seqlens)
    cache.truncate(cache.fork(first[0]), n)
    return cache.attend(query, first if sequences is None else sequences, **given)


@functools.cache
def model(kind):
    with tempfile.TemporaryDirectory() as place:
        return sdpa.models.load(write_model(Path(place) / kind, kind))


def of_encoder(ids, lengths, mask, token_types):
    model("bert")(ids, lengths=lengths, mask=mask, token_types=token_types)
    return model("bert").embed(ids, lengths=lengths, mask=mask, token_types=token_types)


def of_decoder(ids, lengths, prompt, max_new_tokens, options, cache_options, **how):
    caches = model("llama").new_caches(**cache_options)
    model("llama")(ids, lengths=lengths, caches=caches)
    tokens = model("llama").generate(prompt, max_new_tokens, **how, **options)
    return list(itertools.islice(tokens, 3))


def of_torch(num_heads, prefix, batch_first, add_zero_attn, **state):
    names = {name.replace("__", "."): given for name, given in state.items()}
    return sdpa.MultiHeadAttention.from_torch(
        names, num_heads=num_heads, prefix=prefix, batch_first=batch_first, add_zero_attn=add_zero_attn
    )


def of_keras(prefix, **weights):
    return sdpa.MultiHeadAttention.from_keras(list(weights.values()), prefix=prefix)


def of_flax(**kernels):
    return sdpa.MultiHeadAttention.from_flax({name: {"kernel": kernel} for name, kernel in kernels.items()})


KERNELS = dict(query=normal(8, 2, 4), key=normal(8, 2, 4), value=normal(8, 2, 4))
CALLS = {
    sdpa.attention: ARRAYS | OPTIONS | RESULTS,
    sdpa.explain: ARRAYS | OPTIONS | RESULTS,
    sdpa.attention_weights: dict(query=ARRAYS["query"], key=ARRAYS["key"]) | OPTIONS,
    sdpa.attention_varlen: PACKED | OPTIONS | RESULTS,
    sdpa.attention_backward: ARRAYS | OPTIONS | dict(grad_out=OUT, out=OUT, lse=LSE, grad_lse=None),
    sdpa.attention_varlen_backward: PACKED | OPTIONS | dict(
        grad_out=PACKED_OUT, out=PACKED_OUT, lse=PACKED_LSE, grad_lse=None
    ),
    sdpa.additive_attention: ARRAYS | OPTIONS | RESULTS | dict(w_query=normal(6, 4), w_key=normal(6, 4), v=normal(6)),
    sdpa.scaled_dot_product_attention: ARRAYS | dict(
        attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True
    ),
    sdpa.merge: dict(outs=[OUT, OUT], lses=[LSE, LSE], out=None),
    sdpa.rotary: dict(
        x=ARRAYS["query"], positions=3, base=10000.0, frequencies=None, interleaved=False, dim=None, cos=None, sin=None,
        out=None, threads=None,
    ),
    sdpa.layer_norm: dict(x=normal(3, 8), weight=None, bias=None, eps=1e-5, residual=None, out=None, threads=None),
    sdpa.rms_norm: dict(x=normal(3, 8), weight=None, eps=1e-5, residual=None, out=None, threads=None),
    of_linear: dict(
        weight=normal(5, 8), bias=None, activation=None, x=normal(3, 8), residual=None, out=None, threads=None
    ),
    of_feed_forward: dict(
        x=normal(3, 8), residual=None, up_weight=normal(5, 8), down_weight=normal(8, 5), gate_weight=None, up_bias=None,
        gate_bias=None, down_bias=None, activation="gelu", threads=None,
    ),
    of_layer: LAYER | OPTIONS | dict(
        x=normal(2, 5, 8), context=None, kv_heads=2, rotary=None, qk_norm=None, pre_norm=None, bias_k=None,
        positions=None, residual=None, return_weights=False, cache=None, sequences=None, cu_seqlens=None,
    ),
    of_cache: CACHE | CACHE_OPTIONS | RESULTS | dict(
        group=32, key=normal(2, 2, 5, 4), value=normal(2, 2, 5, 3), query=ARRAYS["query"], lengths=None, n=3,
    ),
    of_pages: PAGES | OPTIONS | RESULTS | dict(
        key=normal(2, 2, 4), value=normal(2, 2, 3), query=normal(2, 4, 4), tokens=2, n=1, cu_seqlens=None,
        sequences=None,
    ),
    of_encoder: dict(ids=[[2, 3, 4], [5, 6, 7]], lengths=None, mask=None, token_types=None),
    of_decoder: dict(
        ids=[[2, 3, 4]], lengths=None, prompt=[2, 3], max_new_tokens=3, options={}, cache_options={}, temperature=0,
        top_k=None, top_p=None, seed=0, stop=None,
    ),
    of_torch: dict(
        in_proj_weight=normal(24, 8), out_proj__weight=normal(8, 8), in_proj_bias=normal(24), bias_k=normal(1, 1, 8),
        bias_v=normal(1, 1, 8), num_heads=2, prefix="", batch_first=None, add_zero_attn=None,
    ),
    of_keras: KERNELS | dict(attention_output=normal(2, 4, 8), prefix=""),
    of_flax: KERNELS | dict(out=normal(2, 4, 8)),
}  # fmt: skip


class Odd:
    """What NumPy makes of it fails."""

    def __array__(self, *_, **__):
        raise RuntimeError("no array")

    def __index__(self):
        return 2**80


NUMBERS = [None, True, False, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**62, 2**63, -(2**63), 2**64, 2**80]
NUMBERS += [0.0, 0.5, -2.5, 1e308, np.inf, np.nan, np.float32(2), np.int8(3), np.uint64(2**63), np.bool_(True), 1j]
OTHERS = ["", "x", "gelu", b"ab", [], [1, 2], [1, [2]], (None, 1), (-1, None), (2**62, -(2**62)), {}, {"base": 2}]
OTHERS += [
    {"eps": -1},
    {"weight": [1]},
    float32,
    "bfloat16",
    "int8",
    "O",
    object(),
    range(3),
    Ellipsis,
    slice(1),
    "gelu_tanh",
]
DTYPES = [
    float32,
    float64,
    np.float16,
    bfloat16,
    float8_e5m2,
    np.int8,
    np.int64,
    np.uint64,
    bool,
    complex,
    object,
    ">f4",
    "U3",
]
DTYPES += ["f4,i8", "M8[s]", np.longdouble]
SIZES = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 24])


@st.composite
def arrays(choose):
    shape = choose(st.lists(SIZES, max_size=5))
    dtype = choose(st.sampled_from(DTYPES[:4]) | st.sampled_from(DTYPES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = np.zeros(shape, dtype)
    if np.dtype(dtype) in (float32, float64) and choose(st.booleans()):
        array[...] = choose(st.sampled_from([1, -1, np.nan, np.inf, 1e30]))
    kind = choose(st.sampled_from(["plain", "plain", "masked", "list"]))
    if array.dtype in (float32, float64):
        kind = choose(st.sampled_from([kind, "layout", "large and empty", "one element"]))
    if kind == "layout":
        return choose(st.sampled_from(list(LAYOUTS.values())))(array)
    if kind == "masked":
        return np.ma.masked_array(array)
    if kind == "large and empty":
        return np.lib.stride_tricks.as_strided(array, (choose(st.sampled_from([2**31, 2**40])), 0, *shape), None)
    if kind == "one element" and array.size:
        return np.lib.stride_tricks.as_strided(array, shape, [0] * len(shape))
    return array.tolist() if kind == "list" and array.dtype.kind in "fi" else array


ANY = st.sampled_from(NUMBERS) | st.sampled_from(OTHERS) | arrays() | arrays() | st.builds(Odd)


@functools.cache
def has_a_result(call):
    """Else all that follows would be refused, and nothing tested."""
    call(**CALLS[call])
    return True


@settings(PROPERTY, max_examples=examples(2000))
@given(st.data())
def arguments(data):
    call = data.draw(st.sampled_from(list(CALLS)))
    usual = CALLS[call]
    assert has_a_result(call)
    names = data.draw(st.lists(st.sampled_from(sorted(usual)), min_size=1, max_size=3, unique=True))
    any_of_it = ANY
    if call in (sdpa.merge, of_encoder, of_decoder):  # parts, and sequences, may be as many as there are
        any_of_it = ANY.filter(lambda given: not isinstance(given, np.ndarray) or given.shape[:1] < (2**31,))
    given = usual | {name: data.draw(any_of_it) for name in names}
    kept = {name: array.copy() for name, array in usual.items() if isinstance(array, np.ndarray)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are not finite, or of NumPy about its own conversions
        try:
            call(**given)
        except ERRORS as error:
            assert str(error)
        except MemoryError:  # what was asked for is too much
            pass
        except RuntimeError as error:
            assert str(error) == "no array"  # of Odd
    for name, array in kept.items():
        np.testing.assert_array_equal(usual[name], array)


PROPERTIES = {"arguments": arguments}
