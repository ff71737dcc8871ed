"""What makes the attention known to transformers."""

from transformers import AttentionInterface, AttentionMaskInterface

from ._attention import attention
from ._masks import mask

# transformers takes names with these parts for its own implementations, and then asks what only those fulfil: models
# without support for torch's attention (Gemma 2, gpt-oss) refuse a name with "sdpa" in it.
RESERVED = ("sdpa", "flash", "flex_attention", "eager", "paged", "|", "/")


def register(name: str = "cpu_attention") -> None:
    """Make `attn_implementation=name` known to transformers: attention on the CPU by this library.

    Models are then loaded with this attention, or change to it::

        sdpa.huggingface.register()
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="cpu_attention")
        model.set_attn_implementation("cpu_attention")

    Most of what the models of transformers ask for follows from lengths, windows and offsets, without a mask: padding
    on the right, causal and bidirectional attention, sliding windows, chunks, packed sequences, static caches.  Padding
    on the left is a mask of the keys of each batch.  Other masks, such as prefixes, are those of transformers.  Soft
    caps, sinks, biases by position, grouped heads and cross-attention go to the kernels as they are.

    Gradients are those of `sdpa.torch.attention`.  With dropout, or if the weights are asked for
    (output_attentions=True), attention is computed by torch, in memory for all scores.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is of type {type(name).__name__}: it must be a str")
    for part in RESERVED:
        if part in name or not name:
            raise ValueError(
                f"name is {name!r}: it must not be empty, nor contain any of {', '.join(map(repr, RESERVED))}, which "
                "transformers gives a meaning of its own"
            )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
