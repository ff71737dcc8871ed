"""sdpa.torch and sdpa.huggingface: what arrays give, and what torch and transformers give themselves."""

import importlib.util

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draw import draw, float32, float64, rng
from support.packed import draw_packed
from support.problems import ANY_DTYPE, LENGTHS, PROPERTY, examples, problems

import sdpa.torch
from sdpa.torch import _tensors as memory

F = torch.nn.functional
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def tensor(array):
    """A tensor of its own: torch has no negative strides, and no arrays that must not be written."""
    return memory.tensor_of(np.array(array, order="C"))


def arrays(*tensors):
    return [memory.array_of("x", x.detach()) for x in tensors]


def same(found, expected):
    for one, array in zip(arrays(*found), expected, strict=True):
        assert one.dtype == array.dtype
        np.testing.assert_array_equal(one.view(np.uint8), np.ascontiguousarray(array).view(np.uint8))


def tensors_in(options):
    return {name: tensor(given) if isinstance(given, np.ndarray) else given for name, given in options.items()}


@settings(PROPERTY, max_examples=examples(200))
@given(st.data(), problems())
def attention(data, problem):
    """Bits of the call on arrays, and its gradients, for some options as tensors."""
    *given, options = problem
    given = [tensor(x).requires_grad_() for x in given]
    options = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    as_arrays = arrays(*given)
    expected = sdpa.attention(*as_arrays, return_lse=True, **options)
    more = tensors_in(options) if data.draw(st.booleans()) else options
    found = sdpa.torch.attention(*given, return_lse=True, **more)
    same(found, expected)
    grad = rng(0).standard_normal(expected[0].shape).astype(expected[0].dtype)
    if grad.itemsize == 2:  # of which torch keeps the result as it was before it was rounded
        wide = np.empty(grad.shape, float32)
        expected = sdpa.attention(*as_arrays, return_lse=True, out=wide, **options)
    gradients = sdpa.attention_backward(grad, *as_arrays, *expected, **options)
    same(torch.autograd.grad(found[0], given, tensor(grad)), gradients[:3])


@settings(PROPERTY, max_examples=examples(200))
@given(st.data(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=5), ANY_DTYPE)
def packed(data, counts, dtype):
    given, starts = draw_packed(*zip(*counts), dtype=dtype, seed=data.draw(st.integers(0, 99)))
    options = data.draw(st.fixed_dictionaries({}, optional=dict(causal=st.booleans(), softcap=st.floats(0.5, 20))))
    expected = sdpa.attention_varlen(*given, return_lse=True, **starts, **options)
    found = sdpa.torch.attention_varlen(*map(tensor, given), return_lse=True, **tensors_in(starts), **options)
    same(found, expected)


@settings(PROPERTY, max_examples=examples(200))
@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), ANY_DTYPE)
def beside(data, M, pairs, parts, dtype):
    """merge and rotary."""
    normal = rng(data.draw(st.integers(0, 99))).standard_normal
    lse_dtype = float64 if dtype == float64 else float32
    outs = [normal((2, M, 2 * pairs)).astype(dtype) for _ in range(parts)]
    lses = [normal((2, M)).astype(lse_dtype) for _ in range(parts)]
    same(sdpa.torch.merge([*map(tensor, outs)], [*map(tensor, lses)]), sdpa.merge(outs, lses))
    at = data.draw(st.integers(0, 10**6) | st.just(rng(1).integers(0, 1000, M)))
    options = dict(interleaved=data.draw(st.booleans()), base=data.draw(st.sampled_from([10.0, 10000.0])))
    found = sdpa.torch.rotary(tensor(outs[0]), tensor(at) if isinstance(at, np.ndarray) else at, **options)
    same([found], [sdpa.rotary(outs[0], at, **options)])


@settings(PROPERTY, max_examples=examples(200))
@given(st.data(), LENGTHS, LENGTHS, ANY_DTYPE, st.booleans())
def enabled(data, M, N, dtype, grouped):
    """torch's function, while the library computes it, by any of the ways to say so, and ours that is like it."""
    given = [tensor(x) for x in draw(G=2 if grouped else 4, M=M, N=N, dtype=dtype, seed=data.draw(st.integers(0, 99)))]
    options = dict(scale=data.draw(st.none() | st.floats(-1, 1)), enable_gqa=grouped)
    if data.draw(st.booleans()):
        options["is_causal"] = True
    elif data.draw(st.booleans()):
        mask = rng(1).random(data.draw(st.sampled_from([(M, N), (1, N), (2, 1, M, N)]))) < 0.6
        options["attn_mask"] = tensor(mask)
    expected = F.scaled_dot_product_attention(*given, **options)
    assert isinstance(sdpa.torch.explain(*given, **options), sdpa.Explanation)
    found = [sdpa.torch.scaled_dot_product_attention(*given, **options)]
    with sdpa.torch.enabled():
        found.append(F.scaled_dot_product_attention(*given, **options))
    sdpa.torch.enable()
    try:
        found.append(F.scaled_dot_product_attention(*given, **options))
    finally:
        sdpa.torch.disable()
    for one in found:
        torch.testing.assert_close(one, expected, atol=CLOSE[one.dtype], rtol=CLOSE[one.dtype])
    if not (N and M):
        return
    sdpa.torch.register_flash_attention_impl("fuzzed")
    torch.nn.attention.activate_flash_attention_impl("fuzzed")
    try:
        one = F.scaled_dot_product_attention(*given, **options)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(one, expected, atol=CLOSE[one.dtype], rtol=CLOSE[one.dtype])


WIDTHS = st.integers(1, 5).map(lambda n: 8 * n)
LAYERS = {
    "linear": lambda n: torch.nn.Linear(n, n),
    "activation": lambda n: torch.nn.GELU(),
    "norm": lambda n: torch.nn.LayerNorm(n),
    "encoder": lambda n: torch.nn.TransformerEncoderLayer(n, 2, 3 * n, batch_first=True),
}


@settings(PROPERTY, max_examples=examples(60))
@given(WIDTHS, st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 20))
def modules(width, kinds, batch, tokens):
    """Accelerated, models give the same; restored, the same bits."""
    torch.manual_seed(width)
    model = torch.nn.Sequential(*(LAYERS[kind](width) for kind in kinds)).eval()
    x = torch.randn(batch, tokens, width)
    with torch.no_grad():
        expected = model(x)
        sdpa.torch.accelerate(model)
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
        sdpa.torch.restore(model)
        assert torch.equal(model(x), expected)


@settings(PROPERTY, max_examples=examples(60))
@given(st.data(), st.integers(1, 3), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def families(data, batch, chunks):
    """Models of all families that decode: with our attention and our cache, in chunks, as eagerly and at once."""
    from support import families

    import sdpa.huggingface

    sdpa.huggingface.register()
    name = data.draw(st.sampled_from(families.those_with_the_interface(families.DECODERS)))
    model = families.made(name)
    ids = families.tokens(batch, sum(chunks), seed=data.draw(st.integers(0, 99)))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("cpu_attention")
        cache = sdpa.huggingface.Cache(model.config)
        found = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)]
    assert cache.get_seq_length() == sum(chunks)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=2e-4, rtol=2e-5)


PROPERTIES = {
    "torch attention": attention,
    "torch packed": packed,
    "torch beside": beside,
    "torch enabled": enabled,
    "torch modules": modules,
}
if importlib.util.find_spec("transformers"):
    PROPERTIES["transformers"] = families
