"""Models of transformers with this library's attention against their own eager attention: one of each family."""

import pytest
from support.warned import WARNINGS_OF_OTHERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import families  # noqa: E402
from support.families import DECODERS, ENCODER_DECODERS, ENCODERS, WITH_IMAGES, those_with_the_interface  # noqa: E402

import sdpa.huggingface  # noqa: E402
from sdpa.huggingface import _attention, _masks  # noqa: E402

pytestmark = WARNINGS_OF_OTHERS
CLOSE = dict(atol=2e-4, rtol=2e-5)  # of logits up to 15, from sums in float32 in another order
TRAINED = ["bert", "gemma2", "gpt_oss", "llama", "mistral", "t5", "whisper", "modernbert"]


@pytest.fixture
def calls():
    """The masks of all calls of this library's attention by a model with "cpu_attention"."""
    masks = []

    def watched(module, query, key, value, attention_mask, *args, **kwargs):
        masks.append(attention_mask)
        return _attention.attention(module, query, key, value, attention_mask, *args, **kwargs)

    transformers.AttentionInterface.register("cpu_attention", watched)
    transformers.AttentionMaskInterface.register("cpu_attention", _masks.mask)
    yield masks
    sdpa.huggingface.register()


def with_both(model, compute):
    """What `compute` returns with eager attention, and with this library's."""
    results = []
    for name in ("eager", "cpu_attention"):
        model.set_attn_implementation(name)
        results.append(compute())
    return results


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", those_with_the_interface(DECODERS, ENCODERS, ENCODER_DECODERS))
def test_results(name, side, calls):
    model = families.made(name)
    inputs, real = families.inputs_of(model, side)
    with torch.no_grad():
        theirs, ours = with_both(model, lambda: families.result_of(model, inputs))
    assert len(calls) >= 2
    if real is not None:
        theirs, ours = theirs[real], ours[real]
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert theirs.std() > 0.05


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images(name, calls):
    model = families.made(name)
    inputs, _ = families.inputs_of(model)
    with torch.no_grad():
        theirs, ours = with_both(model, lambda: families.result_of(model, inputs))
    assert len(calls) >= 2
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", those_with_the_interface(TRAINED))
def test_gradients(name, calls):
    model = families.made(name).train()
    for module in model.modules():
        for dropout in ("p", "dropout", "attention_dropout", "layerdrop"):
            if isinstance(getattr(module, dropout, None), float):
                setattr(module, dropout, 0.0)
    inputs, real = families.inputs_of(model)

    def step():
        model.zero_grad()
        result = families.result_of(model, inputs | {"use_cache": False})
        (result if real is None else result[real]).float().logsumexp(-1).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs, ours = with_both(model, step)
    assert calls and theirs.keys() == ours.keys()
    for key, gradient in theirs.items():
        atol = 1e-3 * (1e-3 + gradient.abs().max().item())
        torch.testing.assert_close(
            ours[key], gradient, atol=atol, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}"
        )


def caches(model):
    return {
        "dynamic": {},
        "static": dict(cache_implementation="static"),
        "ours": dict(past_key_values=sdpa.huggingface.Cache(model.config)),
    }


@pytest.mark.parametrize("kind", ["dynamic", "static", "ours"])
@pytest.mark.parametrize("name", those_with_the_interface(DECODERS))
def test_greedy_tokens(name, kind, calls):
    """With padding on the left, beyond all windows."""
    if families.OLD and (name, kind) == ("deepseek_v3", "static"):
        pytest.skip("static caches of transformers 4 take values as large as keys only")
    model = families.made(name)
    prompt = dict(input_ids=families.tokens(3, 6), attention_mask=families.padded([6, 3, 1], "left"))
    how = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(**prompt, **how)
    model.set_attn_implementation("cpu_attention")
    found = model.generate(**prompt, **how, **caches(model)[kind])
    assert len(calls) >= 24
    for step, (ours, theirs) in enumerate(zip(found.logits, expected.logits)):
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text, step=step: f"token {step}: {text}")
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_translations(name, calls):
    model = families.made(name)
    inputs, _ = families.inputs_of(model, "left")
    inputs.pop("decoder_input_ids")
    how = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
    expected = model.generate(**inputs, **how)
    model.set_attn_implementation("cpu_attention")
    assert model.generate(**inputs, **how).tolist() == expected.tolist()
    assert model.generate(**inputs, **how, past_key_values=our_caches(model)).tolist() == expected.tolist()
    found = model.generate(**inputs, **how, num_beams=3, past_key_values=our_caches(model)).tolist()
    assert found == model.generate(**inputs, **how, num_beams=3).tolist()
    model.set_attn_implementation("eager")
    assert found == model.generate(**inputs, **how, num_beams=3).tolist()


def our_caches(model):
    return transformers.EncoderDecoderCache(*(sdpa.huggingface.Cache(model.config) for _ in range(2)))
