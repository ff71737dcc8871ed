"""Models of transformers with the attention and the cache of this library, next to what transformers does without it.

python -m benchmarks.studies.huggingface --rounds 5
python -m benchmarks.studies.huggingface --only token-bfloat16 --seconds 40 --rounds 10
"""

import copy
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sdpa.huggingface
import sdpa.torch
from benchmarks.measure import variants
from benchmarks.measure.variants import Comparison, Variant

SIZES = dict(
    vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=8192, use_cache=True,
)  # fmt: skip


def models(kind, config, implementations, dtype=torch.float32, training=False):
    """The same model with each implementation of attention, or accelerated; the others share weights."""
    sdpa.huggingface.register()
    torch.manual_seed(0)
    config._attn_implementation = implementations[0]
    model = kind(config).to(dtype).train(training)
    for name in implementations:
        fast = name == "accelerated"  # which gives up the weights as they were
        twin = copy.deepcopy(model, {} if fast else {id(weight): weight for weight in model.parameters()})
        twin.set_attn_implementation("cpu_attention" if fast else name)
        if fast:
            sdpa.torch.accelerate(twin)
        yield name, twin


def filled(cache, config, dtype, length):
    """The cache, with random keys and values of so many tokens."""
    generator = torch.Generator().manual_seed(1)
    size = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        # Laid out as models make them: heads beside each other.
        rows = torch.randn(2, 1, length, config.num_key_value_heads, size, generator=generator).to(dtype)
        cache.update(*rows.transpose(2, 3), layer)
    return cache


def token_variants(dtype, length):
    """One token behind `length` others; the cache then forgets it."""
    config = transformers.LlamaConfig(**SIZES)
    (_, theirs), (_, ours), (_, fast) = models(
        transformers.LlamaForCausalLM, config, ["sdpa", "cpu_attention", "accelerated"], dtype=getattr(torch, dtype)
    )
    token = torch.tensor([[5]])
    for label, model, cache in (
        ("transformers' sdpa, DynamicCache", theirs, transformers.DynamicCache(config=config)),
        ("cpu_attention, DynamicCache", ours, transformers.DynamicCache(config=config)),
        ("cpu_attention, Cache", ours, sdpa.huggingface.Cache(config)),
        ("cpu_attention, Cache of int8", ours, sdpa.huggingface.Cache(config, dtype="int8")),
        ("accelerated, Cache", fast, sdpa.huggingface.Cache(config)),
    ):
        yield token_variant(label, model, filled(cache, config, model.dtype, length), token)


def token_variant(label, model, cache, token):
    @torch.inference_mode()
    def step():
        model(token, past_key_values=cache)
        cache.crop(-1)

    return Variant(label, step)


def prefill_variants(length=2048):
    """Softcap and windows: eager attention is the only one of transformers."""
    config = transformers.Gemma2Config(
        **SIZES | dict(head_dim=64, num_hidden_layers=4), sliding_window=1024, query_pre_attn_scalar=64
    )
    ids = torch.arange(length)[None] % 1000
    for name, model in models(transformers.Gemma2Model, config, ["eager", "cpu_attention", "accelerated"]):

        @torch.inference_mode()
        def prefill(model=model):
            model(ids, use_cache=False)

        yield Variant(name, prefill)


def training_variants(length=1024):
    """Forward and backward of 6 causal layers of 512."""
    config = transformers.LlamaConfig(
        **SIZES
        | dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8)
        | dict(num_key_value_heads=8)
    )
    ids = torch.arange(length)[None] % 1000
    for name, model in models(transformers.LlamaModel, config, ["sdpa", "cpu_attention"], training=True):

        def step(model=model):
            model.zero_grad()
            model(ids, use_cache=False).last_hidden_state.square().mean().backward()

        yield Variant(name, step)


def encoder_variants(batch=8, length=128):
    """BERT-base, a quarter of the tokens padding."""
    config = transformers.BertConfig(num_hidden_layers=4)
    ids = torch.arange(batch * length).reshape(batch, length) % 1000
    mask = (torch.arange(length) < torch.linspace(length // 2, length, batch)[:, None]).long()
    for name, model in models(transformers.BertModel, config, ["sdpa", "cpu_attention", "accelerated"]):

        @torch.inference_mode()
        def encode(model=model):
            model(ids, attention_mask=mask)

        yield Variant(name, encode)


COMPARISONS = [
    Comparison(
        "token-bfloat16", "Llama-like, 8 layers of 1024: one token at 4096, bfloat16 (aim: 2.5 by attention alone)",
        lambda: token_variants("bfloat16", 4096),
    ),
    Comparison(
        "token-float32", "Llama-like, 8 layers of 1024: one token at 2048, float32 (aim: 1.05 by attention alone)",
        lambda: token_variants("float32", 2048),
    ),
    Comparison(
        "prefill", "Gemma-2-like, 4 layers of 1024: a prompt of 2048, float32 (aim: 2 by attention alone)",
        prefill_variants,
    ),
    Comparison(
        "training", "Causal model, 6 layers of 512: a step of training at 1024 tokens, float32 (aim: 1.3)",
        training_variants,
    ),
    Comparison("encoder", "BERT-like, 4 layers of 768: 8 × 128 tokens, float32", encoder_variants),
]  # fmt: skip

if __name__ == "__main__":
    variants.main(COMPARISONS, "benchmarks.studies.huggingface", __doc__)
