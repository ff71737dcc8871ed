"""accelerate and restore: models give the same, and get their modules back."""

import copy
import io
import json
import pickle

import pytest
from support.processes import run_python
from support.torch_tensors import tensors

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("sdpa.torch")
nn, F = torch.nn, torch.nn.functional
DTYPES = (torch.float32, torch.bfloat16)


def close(got, expected):
    scale = expected.float().abs().max()
    bound = scale * (6e-2 if expected.dtype is torch.bfloat16 else 2e-5)
    assert got.dtype is expected.dtype and got.shape == expected.shape
    assert (got.float() - expected.float()).abs().max() <= bound


def check(model, call, replaced):
    """The accelerated model gives the same and has the same state; restored, it is what it was, bit by bit."""
    with torch.no_grad():
        expected = call(model)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        kinds = {name: type(module) for name, module in model.named_modules()}
        parameters = dict(model.named_parameters())
        report = adapter.accelerate(model)
        assert set(report.replaced.values()) >= replaced, str(report)
        close(call(model), expected)
        now = model.state_dict()
        assert list(now) == list(state) and all(torch.equal(now[name], x) for name, x in state.items())
        assert not adapter.accelerate(model).replaced
        assert adapter.restore(model) is model
        assert {name: type(module) for name, module in model.named_modules()} == kinds
        assert all(parameters[name] is x for name, x in model.named_parameters())
        assert all(torch.equal(model.state_dict()[name], x) for name, x in state.items())
        assert torch.equal(call(model), expected)
    return report


ACTIVATIONS = {
    "relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU(), None: nn.Tanh(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, activation", ACTIVATIONS.items(), ids=map(str, ACTIVATIONS))
def test_projections_with_the_activation_that_follows(name, activation, dtype):
    model = nn.Sequential(nn.Linear(24, 40), activation, nn.Linear(40, 8, bias=False), nn.LayerNorm(8)).eval().to(dtype)
    (x,) = tensors((2, 3, 24), dtype=dtype)
    report = check(model, lambda model: model(x), {"Linear", "layer_norm"})
    assert report.replaced["0"] == ("Linear" if name is None else f"Linear with {name}")
    assert ("1" in report.replaced) == (name is not None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(eps, dtype):
    norm = nn.RMSNorm(16, eps=eps)
    nn.init.normal_(norm.weight)
    (x,) = tensors((3, 16), dtype=dtype)
    check(nn.Sequential(norm).eval().to(dtype), lambda model: model(x * 1e-2), {"rms_norm"})


MASKS = {
    "none": {},
    "padding": dict(key_padding_mask=torch.tensor([[False] * 6, [False] * 4 + [True] * 2])),
    "both": dict(
        key_padding_mask=torch.tensor([[False] * 6, [False] * 4 + [True] * 2]),
        attn_mask=torch.ones(5, 6).triu(1).bool(),
    ),
    "floats": dict(attn_mask=torch.linspace(-1, 1, 4 * 30).reshape(4, 5, 6)),
}


class Attention(nn.Module):
    """Whose attention is a child, and is given query, key and value."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, **options)

    def forward(self, *inputs, **options):
        return self.attention(*inputs, **options)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_multihead_attention(options, need_weights):
    model = Attention(batch_first=True).eval()
    query, key = tensors((2, 5, 16), (2, 6, 16))

    def call(model):
        out, weights = model(query, key, key, need_weights=need_weights, **options)
        assert (weights is not None) == need_weights
        return out if weights is None else torch.cat([out, weights], -1)

    check(model, call, {"MultiheadAttention"})


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", [(5, 16), (5, 3, 16)], ids=str)
def test_self_attention_in_all_layouts(shape, batch_first):
    (x,) = tensors(shape)
    model = Attention(batch_first=batch_first, bias=False).eval()
    check(model, lambda model: model(x, x, x, average_attn_weights=False)[0], {"MultiheadAttention"})


@pytest.mark.parametrize("activation", [F.relu, F.gelu, nn.SiLU(), torch.tanh], ids=["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.filterwarnings("ignore:.*nested")
def test_layers_of_torch(kind, activation):
    options = dict(d_model=16, nhead=2, dim_feedforward=32, batch_first=True, activation=activation)
    x, memory = tensors((2, 5, 16), (2, 4, 16))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    if kind == "encoder":
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 2).eval()
        # torch leaves zeros where there is padding
        call = lambda model: model(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)  # noqa: E731
    else:
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2).eval()
        call = lambda model: model(x, memory, tgt_key_padding_mask=padding)  # noqa: E731
    report = check(model, call, {"Linear", "layer_norm", "MultiheadAttention"})
    known = model.layers[0].activation is not torch.tanh
    assert report.replaced["layers.0.linear1"].startswith("Linear with" if known else "Linear")


# ------------------------------------------------------------------------------------------------------------- memory


def test_weights_are_not_kept_twice():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval()
    weight = model[0].weight
    report = adapter.accelerate(model)
    assert weight.untyped_storage().nbytes() == 0
    assert report.bytes_before == 2 * (512 * 512 + 512) * 4
    assert report.bytes_before <= report.bytes_after < 1.01 * report.bytes_before
    assert "2.1 MB before, 2.1 MB now" in str(report)


def test_weights_that_others_have_stay_theirs():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    report = check(Tied().eval(), lambda model: model(torch.arange(5)), {"Linear"})
    assert report.twice == ("head",) and "another module" in str(report)


def test_a_module_in_two_places_stays_one():
    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, nn.Tanh(), linear).eval()
    (x,) = tensors((2, 8))
    check(model, lambda model: model(x), {"Linear"})
    adapter.accelerate(model)
    assert model[0] is model[2]
    adapter.restore(model)
    assert model[0] is model[2] is linear


def test_copies_and_files():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    (x,) = tensors((2, 8))
    expected = model(x).detach()
    adapter.accelerate(model)
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    other.load_state_dict(torch.load(memory))
    assert torch.equal(other(x), expected)
    with pytest.raises(RuntimeError, match="restore"):
        model.load_state_dict(other.state_dict())


def saved(model):
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "torch.save": saved}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_models_of_their_own(copied):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    (x,) = tensors((2, 3, 8))
    with torch.no_grad():
        expected = model(x)
        state = {name: y.clone() for name, y in model.state_dict().items()}
        adapter.accelerate(model)
        other = copied(model)
        adapter.restore(model)
        for parameter in model.parameters():
            parameter.zero_()
        close(other(x), expected)
        now = other.state_dict()
        assert all(torch.equal(now[name], y) for name, y in state.items())
        assert torch.equal(adapter.restore(other)(x), expected)


def test_a_model_of_transformers_from_a_file(tmp_path):
    """In a process that knows nothing of this library until it reads the file."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gpt2", vocab_size=97, n_embd=48, n_layer=2, n_head=4)
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    adapter.accelerate(model)
    model.save_pretrained(tmp_path / "folder")
    torch.save(model, tmp_path / "model.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
with torch.no_grad():
    print(model(torch.arange(14).reshape(2, 7)).last_hidden_state.tolist())"""
    torch.testing.assert_close(torch.tensor(json.loads(run_python(code))), expected)
    with torch.no_grad():
        again = transformers.AutoModel.from_pretrained(tmp_path / "folder").eval()(ids).last_hidden_state
    assert torch.equal(again, expected)


def test_inference_mode_leaves_no_trace():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    (x,) = tensors((2, 8))
    expected = model(x).detach()
    with torch.inference_mode():
        adapter.accelerate(model)
        close(model(x), expected)
    close(model(x).detach(), expected)
    with torch.inference_mode():
        adapter.restore(model)
    model(x).sum().backward()
    assert model[0].weight.grad.any()


# -------------------------------------------------------------------------------------------------------------- limits


def test_gradients_are_refused_when_they_are_asked_for():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    adapter.accelerate(model)
    out = model(torch.arange(3))
    with pytest.raises(RuntimeError, match="gradient of an accelerated model"):
        out.sum().backward()
    adapter.restore(model)(torch.arange(3)).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "module", [nn.Linear(8, 8), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, batch_first=True)], ids=str
)
def test_gradients_of_the_weights_are_refused(module, dtype):
    """Of all modules; what they give may be changed in place as that of any other."""
    model = nn.Sequential(copy.deepcopy(module)).eval().to(dtype)
    adapter.accelerate(model)
    x = torch.ones(1, 2, 8, dtype=dtype)
    out = model(x)
    out += 1
    with pytest.raises(RuntimeError, match="gradient of an accelerated model"):
        out.sum().backward()
    adapter.restore(model)(x).sum().backward()
    with torch.no_grad():
        adapter.accelerate(model)
        assert not model(x).requires_grad
    adapter.restore(model).requires_grad_(False)
    adapter.accelerate(model)
    assert not model(x).requires_grad


def test_training_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="training mode"):
        adapter.accelerate(model)
    adapter.accelerate(model.eval())
    with pytest.raises(RuntimeError, match="training mode"):
        model.train()(torch.ones(2, 8))
    assert adapter.restore(model)[0].training


def test_what_is_not_known_stays():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, inputs, out: out + 1)
    model = nn.Sequential(
        nn.Conv1d(8, 8, 1), Doubled(8, 8), hooked, nn.Linear(8, 8).double(), nn.LayerNorm((2, 8)), nn.Linear(8, 8)
    )  # fmt: skip
    report = adapter.accelerate(model.eval())
    assert set(report.replaced) == {"5"}
    assert report.kept == {
        "2": "it has hooks", "3": "its dtype is torch.float64", "4": "its rows have 2 axes",
    }  # fmt: skip


def test_a_replaced_forward_stays():
    patched, double = nn.Linear(8, 8), nn.ReLU()
    patched.forward = lambda x: F.linear(x, patched.weight) * 2
    double.register_forward_hook(lambda module, inputs, out: out * 2)
    model = nn.Sequential(patched, nn.Linear(8, 8), double).eval()
    (x,) = tensors((2, 8))
    report = check(model, lambda model: model(x), {"Linear"})
    assert set(report.replaced) == {"1"} and "0" in report.kept


def test_no_activation_goes_along_where_others_see_what_is_before_it():
    class Each(nn.Sequential):
        """All that its modules give."""

        def forward(self, x):
            found = []
            for module in self:
                x = module(x)
                found.append(x)
            return torch.cat(found, -1)

    class Layer(nn.TransformerEncoderLayer):
        def forward(self, x):
            return self.linear2(self.linear1(x) + self.activation(x))

    (x,) = tensors((2, 8))
    check(Each(nn.Linear(8, 8), nn.ReLU()).eval(), lambda model: model(x), {"Linear"})
    check(nn.Sequential(Layer(8, 2, 8)).eval(), lambda model: model(x), {"Linear"})


def test_an_activation_that_is_clipped_far_out_is_none_that_is_known():
    class Clipped(nn.Module):
        def forward(self, x):
            return F.gelu(x).clip(-10, 10)

    (x,) = tensors((2, 8))
    report = check(nn.Sequential(nn.Linear(8, 8), Clipped()).eval(), lambda model: model(100 * x), {"Linear"})
    assert set(report.replaced) == {"0"}


def test_a_norm_that_takes_a_gate_stays():
    class RMSNormGated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(8)), 1e-6

        def forward(self, x, gate=None):
            x = F.rms_norm(x, (8,), self.weight, self.variance_epsilon)
            return x if gate is None else x * F.silu(gate)

    report = adapter.accelerate(nn.Sequential(RMSNormGated()).eval())
    assert not report.replaced and set(report.kept) == {"0"}


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(input=self.linear(input=x))

    model = Named().eval()
    (x,) = tensors((2, 8))
    check(model, lambda model: model(x), {"Linear", "layer_norm"})
    adapter.accelerate(model)
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        model.linear(x=x)


def test_a_block_that_only_looks_like_one_is_taken_by_its_parts():
    class Feeding(nn.Module):
        """The names of a feed-forward block, and something else."""

        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.fc1(self.act(self.fc2(x)))

    model = nn.Sequential(Feeding()).eval()
    (x,) = tensors((2, 8))
    report = check(model, lambda model: model(x), {"Linear"})
    assert "something else" in report.kept["0"] and set(report.replaced) == {"0.fc1", "0.fc2"}


def test_wrong_inputs():
    with pytest.raises(TypeError, match="model is of type int"):
        adapter.accelerate(3)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    adapter.accelerate(model)
    with pytest.raises(RuntimeError, match=r"dtype torch\.float64"):
        model(torch.ones(2, 8).double())
    with pytest.raises(ValueError, match="last axis must be 8"):
        model(torch.ones(2, 7))
    with pytest.raises(TypeError, match="input is of type NoneType"):
        model(None)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"is_causal": True}, "is_causal is True and attn_mask is None"),
        ({"key_padding_mask": torch.zeros(5, 2).bool()}, r"key_padding_mask has shape \(5, 2\): it must be \(2, 5\)"),
        ({"attn_mask": torch.zeros(2, 5, 5)}, r"attn_mask has shape \(2, 5, 5\): it must be \(5, 5\) or \(8, 5, 5\)"),
        ({"attn_mask": torch.zeros(1, 5)}, "attn_mask has shape"),
    ],
    ids=["causal", "padding", "heads", "broadcast"],
)  # fmt: skip
def test_wrong_masks_of_multihead_attention(options, text):
    model = nn.Sequential(nn.MultiheadAttention(8, 4, batch_first=True)).eval()
    adapter.accelerate(model)
    with pytest.raises(ValueError, match=text):
        model[0](*[torch.ones(2, 5, 8)] * 3, **options)


def test_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    (x,) = tensors((2, 8))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)
        adapter.accelerate(model)
        close(model(x), expected)


# -------------------------------------------------------------------------------------------------------- transformers

SIZES = dict(
    vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=32,
)  # fmt: skip
FAMILIES = {
    "bert": (SIZES, {"Linear, residual and layer_norm", "Linear with gelu"}),
    "roberta": (SIZES, {"Linear, residual and layer_norm", "Linear with gelu"}),
    "distilbert": (dict(vocab_size=97, dim=48, n_layers=2, n_heads=4, hidden_dim=96), {"FeedForward with gelu"}),
    "llama": (SIZES | dict(num_key_value_heads=2), {"FeedForward with silu and a gate", "rms_norm"}),
    "qwen3": (SIZES | dict(num_key_value_heads=2, head_dim=16), {"FeedForward with silu and a gate", "rms_norm"}),
    "gemma": (SIZES | dict(num_key_value_heads=2, head_dim=16), {"FeedForward with gelu_tanh and a gate", "rms_norm"}),
    "phi3": (SIZES | dict(pad_token_id=0), {"FeedForward with silu and a gate", "rms_norm"}),
    "gpt2": (dict(vocab_size=97, n_embd=48, n_layer=2, n_head=4), {"FeedForward with gelu_tanh", "Linear"}),
    "gpt_neox": (SIZES, {"FeedForward with gelu", "layer_norm"}),
    "vit": (
        {name: x for name, x in SIZES.items() if "vocab" not in name} | dict(image_size=16, patch_size=8),
        {"FeedForward with gelu", "layer_norm"},
    ),
    "t5": (dict(vocab_size=97, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4), {"rms_norm"}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family, dtype):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sdpa.huggingface")
    sizes, replaced = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.15)
    model = model.to(dtype)
    inputs = {"input_ids": torch.arange(14).reshape(2, 7)}
    if family == "vit":
        inputs = {"pixel_values": tensors((2, 3, 16, 16), dtype=dtype)[0]}
    if family == "t5":
        inputs["decoder_input_ids"] = torch.arange(6).reshape(2, 3)
    implementation = model.config._attn_implementation
    report = check(model, lambda model: model(**inputs).last_hidden_state, replaced)
    assert report.replaced["attn_implementation"] == "attention, by sdpa.huggingface"
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("kind, sizes", [("Linear", (4, 4)), ("LayerNorm", (4,)), ("MultiheadAttention", (4, 2))])
def test_a_model_that_would_itself_be_replaced(kind, sizes):
    model = getattr(nn, kind)(*sizes).eval()
    with pytest.raises(ValueError, match=r"model is a \w+: it must contain what is replaced"):
        adapter.accelerate(model)
    assert adapter.accelerate(nn.Sequential(model).eval()).replaced
