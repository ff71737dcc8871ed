"""Small random models of transformers, one of each family: what differs from the sizes that all have."""

import numpy as np
import torch
import transformers

SIZES = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2, head_dim=8)
EXPERTS = GROUPED | dict(num_experts_per_tok=2)
BART = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
IMAGES = dict(image_size=24, patch_size=8, num_channels=3)
TEXT = SIZES | dict(projection_dim=16)
VISION = IMAGES | dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)

DECODERS = {
    "cohere": GROUPED,
    "cohere2": GROUPED | dict(sliding_window=4, sliding_window_pattern=2),
    "deepseek_v3": dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "exaone4": GROUPED | dict(sliding_window=4, sliding_window_pattern=2),
    "gemma": GROUPED,
    "gemma2": GROUPED | dict(sliding_window=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "gemma3_text": GROUPED | dict(
        sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "glm": GROUPED,
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48),
    "gpt2 scaled by its layers": dict(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48, scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
    ),
    "gpt_bigcode": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48),
    "gpt_neox": {},
    "gpt_oss": EXPERTS | dict(sliding_window=4, num_local_experts=4),
    "granite": GROUPED | dict(attention_multiplier=0.2),
    "llama": GROUPED,
    "llama4_text": EXPERTS | dict(
        attention_chunk_size=4, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    ),
    "mistral": GROUPED | dict(sliding_window=4),
    "mixtral": EXPERTS | dict(num_local_experts=4, sliding_window=None),
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "phi": dict(num_key_value_heads=2),
    "phi3": GROUPED | dict(sliding_window=4),
    "qwen2": GROUPED | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": GROUPED,
    "qwen3_moe": EXPERTS | dict(num_experts=4, moe_intermediate_size=16),
    "smollm3": GROUPED,
    "stablelm": dict(num_key_value_heads=2),
    "starcoder2": GROUPED | dict(sliding_window=4),
}  # fmt: skip
ENCODERS = {
    "albert": dict(embedding_size=16),
    "bert": {},
    "camembert": dict(pad_token_id=1),
    "distilbert": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "electra": dict(embedding_size=16),
    "ernie": {},
    "modernbert": dict(local_attention=4, global_attn_every_n_layers=2),
    "roberta": dict(pad_token_id=1),
    "xlm-roberta": dict(pad_token_id=1),
}
ENCODER_DECODERS = {
    "bart": BART,
    "marian": BART | dict(pad_token_id=0),
    "mbart": BART,
    "pegasus": BART,
    "t5": dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "whisper": BART | dict(
        num_mel_bins=8, max_source_positions=20, max_target_positions=64, suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
}  # fmt: skip
WITH_IMAGES = {
    "clip": dict(text_config=TEXT, vision_config=VISION, projection_dim=16),
    "deit": VISION,
    "dinov2": VISION,
    "siglip": dict(text_config=TEXT, vision_config=VISION),
    "vit": VISION,
    "dinov2_with_registers": VISION,
}


OLD = int(transformers.__version__.split(".")[0]) < 5
# In transformers 4.57 these choose their attention in another way.
ALONE = {*ENCODERS, "nemotron", "stablelm", "t5"} if OLD else set()


def those_with_the_interface(*tables):
    return [name for table in tables for name in table if name not in ALONE]


def made(name, more=None, seed=0):
    """A model of the family, with eager attention, in which attention matters."""
    family = name.split()[0]
    options = next(table[name] for table in (DECODERS, ENCODERS, ENCODER_DECODERS, WITH_IMAGES) if name in table)
    sizes = {} if name in WITH_IMAGES else {key: size for key, size in SIZES.items() if not overrides(options, key)}
    config = transformers.AutoConfig.for_model(family, **sizes | options | (more or {}))
    kind = (
        transformers.AutoModelForCausalLM if name in DECODERS
        else transformers.AutoModelForSpeechSeq2Seq if name == "whisper"
        else transformers.AutoModelForSeq2SeqLM if name in ENCODER_DECODERS
        else transformers.AutoModel
    )  # fmt: skip
    torch.manual_seed(seed)
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key.lower() and "weight" in key else 0.0, 0.25)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def overrides(options, name):
    """Whether the family calls that size otherwise, or has none."""
    if "n_embd" in options or "d_model" in options or "dim" in options:
        return name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return False


def tokens(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 97, shape))


def padded(lengths, side):
    """A mask of the tokens that are not padding."""
    at = torch.arange(max(lengths))
    lengths = torch.tensor(lengths)[:, None]
    return (at < lengths if side == "right" else at >= max(lengths) - lengths).long()


def inputs_of(model, side="right"):
    """What the model takes, and which rows of its result count."""
    mask = padded([11, 6, 1], side)
    ids = tokens(3, 11)
    if hasattr(model.config, "vision_config"):
        pixels = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))
        return dict(input_ids=ids, attention_mask=mask, pixel_values=pixels), None
    if model.main_input_name == "pixel_values":
        return dict(pixel_values=torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))), None
    if model.main_input_name == "input_features":
        features = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))
        return dict(input_features=features, decoder_input_ids=ids[:, :7]), None
    if model.config.is_encoder_decoder:
        return dict(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(3, 7, seed=1)), None
    return dict(input_ids=ids, attention_mask=mask), mask.bool()


def result_of(model, inputs):
    """What of the result shows everything that came before."""
    result = model(**inputs)
    if hasattr(result, "logits_per_text"):
        return torch.cat([result.text_embeds, result.image_embeds])
    return result.logits if hasattr(result, "logits") else result.last_hidden_state
