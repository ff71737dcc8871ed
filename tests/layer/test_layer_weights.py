"""from_torch, from_keras and from_flax: the same result as those layers, or as their documented equations."""

import re
from collections import OrderedDict

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.draw import float16, float32, float64, rng

from sdpa import MultiHeadAttention

B, M, N = 2, 5, 7


def normal(*shape, dtype=float64, seed=0):
    return rng(seed).standard_normal(shape).astype(dtype)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def raises(error, parts):
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


# PyTorch.


def torch_weights(width=12, dtype=float64, **more):
    """A state dict of a torch.nn.MultiheadAttention, in NumPy."""
    return {
        "in_proj_weight": normal(3 * width, width, dtype=dtype, seed=1),
        "in_proj_bias": normal(3 * width, dtype=dtype, seed=2),
        "out_proj.weight": normal(width, width, dtype=dtype, seed=3),
        "out_proj.bias": normal(width, dtype=dtype, seed=4),
    } | more


def torch_equation(state, heads, query, key, value):
    """Attention(Q W_i^Q, K W_i^K, V W_i^V) for each head, concatenated, times W^O, as in its documentation."""
    inputs = zip((query, key, value), np.split(state["in_proj_weight"], 3), np.split(state["in_proj_bias"], 3))
    q, k, v = (np.split(x @ weight.T + bias, heads, axis=-1) for x, weight, bias in inputs)
    found = [softmax(qi @ ki.swapaxes(-1, -2) / np.sqrt(qi.shape[-1])) @ vi for qi, ki, vi in zip(q, k, v)]
    return np.concatenate(found, axis=-1) @ state["out_proj.weight"].T + state["out_proj.bias"]


def test_a_state_dict_of_arrays():
    state = torch_weights()
    x, context = normal(B, M, 12), normal(B, N, 12, seed=5)
    layer = MultiHeadAttention.from_torch(state, num_heads=3)
    assert (layer.embed_dim, layer.num_heads, layer.head_dim, layer.batch_first) == (12, 3, 4, True)
    assert np.shares_memory(layer.in_proj_weight, state["in_proj_weight"])
    np.testing.assert_allclose(layer(x), torch_equation(state, 3, x, x, x), atol=1e-12)
    np.testing.assert_allclose(layer(x, context), torch_equation(state, 3, x, context, context), atol=1e-12)
    again = MultiHeadAttention.from_torch(OrderedDict(state), num_heads=3, rotary=True, threads=1, add_zero_attn=True)
    assert again.rotary is True and again.threads == 1 and again.add_zero_attn


def test_a_state_dict_for_contexts_of_other_sizes():
    widths = dict(q_proj_weight=12, k_proj_weight=10, v_proj_weight=7)
    separate = {name: normal(12, width, seed=i) for i, (name, width) in enumerate(widths.items())}
    state = without(torch_weights(**separate), "in_proj_weight")
    layer = MultiHeadAttention.from_torch(state, num_heads=3)
    assert (layer.kdim, layer.vdim, layer.in_proj_weight) == (10, 7, None)
    x, key, value = normal(B, M, 12), normal(B, N, 10, seed=5), normal(B, N, 7, seed=6)
    inputs = zip((x, key, value), separate.values())
    packed = torch_weights(in_proj_weight=np.concatenate([np.eye(12)] * 3))  # the products are taken beforehand
    expected = torch_equation(packed, 3, *(rows @ weight.T for rows, weight in inputs))
    np.testing.assert_allclose(layer(x, key, value_context=value), expected, atol=1e-12)


def test_a_prefix():
    state = torch_weights()
    whole = {f"encoder.0.self_attn.{name}": array for name, array in state.items()} | {"encoder.0.norm": np.ones(3)}
    x = normal(B, M, 12)
    layer = MultiHeadAttention.from_torch(whole, num_heads=3, prefix="encoder.0.self_attn.")
    np.testing.assert_array_equal(layer(x), MultiHeadAttention.from_torch(state, num_heads=3)(x))


def without(state, *names):
    return {name: array for name, array in state.items() if name not in names}


@pytest.mark.parametrize(
    "error, state, options, parts",
    [
        (ValueError, torch_weights(), {}, ["num_heads is None", "state dict"]),
        (ValueError, without(torch_weights(), "out_proj.weight"), dict(num_heads=3), ["no out_proj.weight"]),
        (ValueError, without(torch_weights(), "in_proj_weight"), dict(num_heads=3), ["no in_proj_weight", "out_proj"]),
        (ValueError, {}, dict(num_heads=3), ["no out_proj.weight, in_proj_weight", "none"]),
        (ValueError, torch_weights(rope=np.ones(3)), dict(num_heads=3), ["has rope", "none but", "in_proj_weight"]),
        (ValueError, torch_weights(), dict(num_heads=3, prefix="a."), ["no out_proj.weight", "after 'a.'"]),
        (ValueError, torch_weights(), dict(num_heads=5), ["embed_dim is 12", "num_heads 5"]),
        (
            ValueError,
            without(torch_weights(q_proj_weight=np.ones((12, 12))), "in_proj_weight"),
            dict(num_heads=3),
            ["no k_proj_weight, v_proj_weight"],
        ),
        (ValueError, torch_weights(in_proj_weight=np.ones((24, 12))), dict(num_heads=3), ["(24, 12)", "(36, 12)"]),
        (ValueError, torch_weights(bias_k=np.ones((1, 1, 12))), dict(num_heads=3), ["bias_k", "bias_v"]),
        (TypeError, torch_weights(in_proj_bias=np.ones(36, int)), dict(num_heads=3), ["in_proj_bias", "int64"]),
        (TypeError, [], dict(num_heads=3), ["module is of type list", "state dict"]),
        (ValueError, {1: np.ones(3)}, dict(num_heads=3), ["no out_proj.weight", "there are 1"]),
        (TypeError, torch_weights(), dict(num_heads=3, prefix=None), ["prefix is None", "text"]),
        (
            ValueError,
            torch_weights(**{"out_proj.weight": np.ones(12)}),
            dict(num_heads=3),
            ["out_proj.weight", "(12,)", "2 axes"],
        ),
    ],
)
def test_what_is_no_torch_layer(error, state, options, parts):
    with raises(error, parts):
        MultiHeadAttention.from_torch(state, **options)


class Tensor:
    """What a tensor can do, as far as it is used; NumPy's bfloat16 stands for torch's, which NumPy does not get."""

    def __init__(self, array, steps=()):
        self.array, self.steps = array, steps
        self.dtype = "torch.bfloat16" if array.dtype == bfloat16 else f"torch.{array.dtype}"

    def detach(self):
        return Tensor(self.array, (*self.steps, "detach"))

    def cpu(self):
        return Tensor(self.array, (*self.steps, "cpu"))

    def float(self):
        return Tensor(self.array.astype(float32), self.steps)

    def numpy(self):
        assert self.steps == ("detach", "cpu") and self.array.dtype != bfloat16
        return self.array


class Module:
    num_heads, batch_first, add_zero_attn = 3, False, True

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64])
def test_modules_and_tensors_by_what_they_can_do(dtype):
    state = torch_weights(dtype=dtype)
    tensors = {name: Tensor(array) for name, array in state.items()}
    layer = MultiHeadAttention.from_torch(Module(tensors))
    assert layer.in_proj_weight.dtype == dtype and (layer.num_heads, layer.batch_first) == (3, False)
    assert layer.add_zero_attn
    np.testing.assert_array_equal(layer.in_proj_weight, state["in_proj_weight"])
    other = MultiHeadAttention.from_torch(Module(tensors), num_heads=3, batch_first=True, add_zero_attn=False)
    assert other.batch_first and not other.add_zero_attn
    with raises(ValueError, ["num_heads is 4", "module 3"]):
        MultiHeadAttention.from_torch(Module(tensors), num_heads=4)
    whole = Module({f"layer.{name}": tensor for name, tensor in tensors.items()})
    with raises(ValueError, ["num_heads is None"]):  # those of a model are not those of its layer
        MultiHeadAttention.from_torch(whole, prefix="layer.")
    assert MultiHeadAttention.from_torch(whole, prefix="layer.", num_heads=2).num_heads == 2


def test_without_ml_dtypes_bfloat16_becomes_float32(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    state = torch_weights(dtype=bfloat16)
    layer = MultiHeadAttention.from_torch(Module({name: Tensor(array) for name, array in state.items()}))
    assert layer.in_proj_weight.dtype == float32
    np.testing.assert_array_equal(layer.in_proj_weight, state["in_proj_weight"].astype(float32))


@pytest.mark.parametrize("more", [{}, dict(kdim=10, vdim=7), dict(kdim=10, vdim=10)], ids=str)
@pytest.mark.parametrize("biases", [{}, dict(bias=False), dict(add_bias_kv=True), dict(add_zero_attn=True)], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_as_torch_itself(biases, more, batch_first):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(
        12, 3, dropout=0.5, batch_first=batch_first, dtype=torch.float64, **biases, **more
    ).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)  # not the zeros that biases begin as
    layer = MultiHeadAttention.from_torch(module)
    shape = (B, M) if batch_first else (M, B)
    context = (B, N) if batch_first else (N, B)
    x = normal(*shape, 12)
    key, value = normal(*context, module.kdim, seed=1), normal(*context, module.vdim, seed=2)
    mask, padding = rng(3).random((M, N)) < 0.7, np.arange(N) < np.array([[N], [4]])
    mask[:, 0] = True
    expected, weights = module(
        *map(torch.from_numpy, (x, key, value)), attn_mask=torch.from_numpy(~mask),
        key_padding_mask=torch.from_numpy(~padding), average_attn_weights=False,
    )  # fmt: skip
    out, own_weights = layer(x, key, value_context=value, mask=mask & padding[:, None, None], return_weights=True)
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(own_weights, weights.detach().numpy(), atol=1e-12)
    if not more:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(M, dtype=torch.float64)
        expected, _ = module(*[torch.from_numpy(x)] * 3, attn_mask=causal)
        np.testing.assert_allclose(layer(x, causal=True), expected.detach().numpy(), atol=1e-12)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_dtypes_of_torch_itself(name):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(getattr(torch, name))
    layer = MultiHeadAttention.from_torch(module.state_dict(), num_heads=4)
    assert layer.in_proj_weight.dtype.name == name
    for own, theirs in ((layer.in_proj_weight, module.in_proj_weight), (layer.out_proj_bias, module.out_proj.bias)):
        np.testing.assert_array_equal(own.astype(float64), theirs.detach().double().numpy())
    x = normal(B, M, 32).astype(layer.in_proj_weight.dtype)
    theirs = torch.from_numpy(x.astype(float64)).to(getattr(torch, name))
    with torch.no_grad():
        expected, _ = module(theirs, theirs, theirs, need_weights=False)
    size = {"float32": 1e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}[name]
    np.testing.assert_allclose(layer(x).astype(float64), expected.double().numpy(), atol=size)


def test_a_layer_within_a_model_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    block = torch.nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, dtype=torch.float64)
    model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    x = normal(B, M, 12)
    module = model.layers[1].self_attn
    expected, _ = module(*[torch.from_numpy(x)] * 3)
    for source in model, model.state_dict():
        layer = MultiHeadAttention.from_torch(source, num_heads=3, prefix="layers.1.self_attn.")
        np.testing.assert_allclose(layer(x), expected.detach().numpy(), atol=1e-12)


# Keras and Flax: kernels with the input first and heads apart.


def kernels(width=10, H=4, G=2, D=3, E=5, out=9, kdim=8, vdim=6, biases=True, last="attention_output"):
    shapes = {"query": (width, H, D), "key": (kdim, G, D), "value": (vdim, G, E), last: (H, E, out)}
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        found[f"{name}/kernel"] = normal(*shape, seed=i)
        if biases:
            found[f"{name}/bias"] = normal(*(shape[2:] if name == last else shape[1:]), seed=i + 4)
    return found


def equations(arrays, query, key, value, last="attention_output", norm=None):
    """The equations of keras.layers.MultiHeadAttention, which are those of Flax: dense layers "abc,cde->abde", scores
    "aecd,abcd->acbe" of queries over the root of their size, "acbe,aecd->abcd", and "abcd,cde->abe"."""

    def dense(name, x):
        return np.einsum("abc,cde->abde", x, arrays[f"{name}/kernel"]) + arrays.get(f"{name}/bias", 0)

    q, k, v = dense("query", query), dense("key", key), dense("value", value)
    if norm is not None:
        q, k = norm("query_ln", q), norm("key_ln", k)
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))  # as GroupQueryAttention does
    weights = softmax(np.einsum("aecd,abcd->acbe", k, q / np.sqrt(q.shape[-1])))
    heads = np.einsum("acbe,aecd->abcd", weights, v)
    return np.einsum("abcd,cde->abe", heads, arrays[f"{last}/kernel"]) + arrays.get(f"{last}/bias", 0), weights


def assert_equations_hold(layer, arrays, **options):
    width, kdim, vdim = (arrays[f"{name}/kernel"].shape[0] for name in ("query", "key", "value"))
    x, key, value = normal(B, M, width, seed=20), normal(B, N, kdim, seed=21), normal(B, N, vdim, seed=22)
    out, weights = layer(x, key, value_context=value, return_weights=True)
    expected, expected_weights = equations(arrays, x, key, value, **options)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-12)
    if width == kdim == vdim:
        np.testing.assert_allclose(layer(x), equations(arrays, x, x, x, **options)[0], atol=1e-12)


SIZES = {
    "grouped": {},
    "alike": dict(kdim=10, vdim=10, E=3, out=10),
    "as many heads": dict(G=4),
    "one head": dict(H=1, G=1),
    "no biases": dict(biases=False),
}
of_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def nested(arrays):
    tree = {}
    for name, array in arrays.items():
        part, what = name.split("/")
        tree.setdefault(part, {})[what] = array
    return tree


@of_sizes
def test_keras(sizes):
    arrays = kernels(**sizes)

    class Layer:
        def get_weights(self):
            return list(arrays.values())

    named = {f"attention/{name}:0": array for name, array in arrays.items()}
    for layer in (
        MultiHeadAttention.from_keras(Layer()),
        MultiHeadAttention.from_keras(list(arrays.values())),
        MultiHeadAttention.from_keras(arrays),
        MultiHeadAttention.from_keras(nested(arrays)),
        MultiHeadAttention.from_keras(named | {"dense/kernel:0": np.ones((2, 2))}, prefix="attention/"),
    ):
        assert_equations_hold(layer, arrays)
    assert MultiHeadAttention.from_keras(kernels(D=4), rotary=True, qk_norm=True, threads=2).threads == 2


class Boxed:
    def __init__(self, array):
        self.value = array


class Method:
    def __init__(self, array):
        self.array = array

    def get_value(self):
        return self.array


class Called:
    def __init__(self, array):
        self.array = array

    def value(self):
        return Tensor(self.array)


class State:
    """A mapping that is no dict."""

    def __init__(self, tree):
        self.tree = tree

    def items(self):
        return self.tree.items()

    def __iter__(self):
        return iter(self.tree)

    def __getitem__(self, name):
        return self.tree[name]


@of_sizes
@pytest.mark.parametrize("box", [np.asarray, Boxed, Method, Called, np.ndarray.tolist], ids=lambda box: box.__name__)
def test_flax(sizes, box):
    arrays = kernels(**sizes, last="out")
    boxed = nested({name: box(array) for name, array in arrays.items()})
    state = State({name: State(part) for name, part in boxed.items()} | {"query_ln": None, "key_ln": None})
    for params in boxed, {"params": boxed}, state:
        assert_equations_hold(MultiHeadAttention.from_flax(params), arrays, last="out")


def test_flax_with_normed_queries_and_keys():
    """LayerNorm over each head with a scale, no bias, and an epsilon of 1e-6."""
    arrays = kernels(last="out") | {"query_ln/scale": normal(3, seed=30), "key_ln/scale": normal(3, seed=31)}

    def norm(name, x):
        mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-6) * arrays[f"{name}/scale"]

    layer = MultiHeadAttention.from_flax(nested(arrays))
    assert_equations_hold(layer, arrays, last="out", norm=norm)
    with raises(ValueError, ["qk_norm is True", "query_ln", "None"]):
        MultiHeadAttention.from_flax(nested(arrays), qk_norm=True)
    assert MultiHeadAttention.from_flax(nested(kernels(last="out")), qk_norm=True).qk_norm is True


@pytest.mark.parametrize("name", ["query", "key", "value", "attention_output"])
def test_some_biases_only(name):
    """As in Whisper, whose keys have none."""
    arrays = without(kernels(), f"{name}/bias")
    layer = MultiHeadAttention.from_keras(arrays)
    assert (layer.out_proj_bias is None) == (name == "attention_output")
    assert_equations_hold(layer, arrays)


GOOD, BARE = kernels(), kernels(biases=False)
LAST = "attention_output/kernel"
SPOILED = {
    "missing": (without(GOOD, "key/kernel"), ValueError, ["no key/kernel", "query/kernel"]),
    "unknown": (GOOD | {"gate/kernel": np.ones(3)}, ValueError, ["has gate/kernel", "none but"]),
    "axes": (GOOD | {"value/kernel": np.ones((6, 10))}, ValueError, ["value/kernel", "(6, 10)", "3 axes"]),
    "axes of the result": (GOOD | {LAST: np.ones((4, 5, 3, 3))}, ValueError, ["(4, 5, 3, 3)", "3 axes"]),
    "key size": (GOOD | {"key/kernel": np.ones((8, 2, 4))}, ValueError, ["key/kernel", "(8, 2, 4)", "(8, 2, 3)"]),
    "value heads": (GOOD | {"value/kernel": np.ones((6, 4, 5))}, ValueError, ["(6, 4, 5)", "(6, 2, 5)"]),
    "value size": (GOOD | {LAST: np.ones((4, 3, 9))}, ValueError, [LAST, "(4, 3, 9)", "(4, 5, 9)"]),
    "heads": (
        BARE | {"key/kernel": np.ones((8, 3, 3)), "value/kernel": np.ones((6, 3, 5))},
        ValueError,
        ["num_heads is 4", "kv_heads 3", "multiple"],
    ),
    "bias": (GOOD | {"key/bias": np.ones((2, 4))}, ValueError, ["key/bias", "(2, 4)", "(2, 3)"]),
    "dtype": (GOOD | {"query/kernel": np.ones((10, 4, 3), int)}, TypeError, ["query/kernel", "int64"]),
    "five arrays": (list(GOOD.values())[:5], ValueError, ["5 weights", "4 kernels", "8"]),
    "a number": (3, TypeError, ["layer is of type int"]),
}


@pytest.mark.parametrize("given, error, parts", SPOILED.values(), ids=SPOILED)
def test_what_is_no_keras_layer(given, error, parts):
    with raises(error, parts):
        MultiHeadAttention.from_keras(given)


@pytest.mark.parametrize("name", ["sliding_window", "_sliding_window"])
def test_a_keras_layer_with_a_window(name):
    """Which is no weight: without it results would be others."""

    class Layer:
        def get_weights(self):
            return list(GOOD.values())

    layer = Layer()
    setattr(layer, name, 4)
    with raises(ValueError, ["sliding_window of 4", "None", "window=(3, 3)"]):
        MultiHeadAttention.from_keras(layer)
    setattr(layer, name, None)
    assert MultiHeadAttention.from_keras(layer).num_heads == 4
    with raises(TypeError, ["prefix is None", "text"]):
        MultiHeadAttention.from_keras(GOOD, prefix=None)


def test_what_are_no_flax_parameters():
    good = kernels(last="out")
    with raises(ValueError, ["params has no query/kernel", "there are attn/query/kernel"]):
        MultiHeadAttention.from_flax({"attn": nested(good)})
    with raises(ValueError, ["no query_ln/scale"]):
        MultiHeadAttention.from_flax(nested(good | {"key_ln/scale": np.ones(3)}))
    with raises(ValueError, ["has rngs/count"]):
        MultiHeadAttention.from_flax(nested(good | {"rngs/count": np.ones(3)}))
    for wrong in [], {"params": []}:
        with raises(TypeError, ["params are of type list", "dict"]):
            MultiHeadAttention.from_flax(wrong)
