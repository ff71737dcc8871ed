"""The table of all cases, and the dtypes in which they are run."""

from dataclasses import replace

from benchmarks.workloads.attention import Attention, Backward, Layer
from benchmarks.workloads.layers import FeedForward, Linear, Norm
from benchmarks.workloads.models import AcceleratedDecoder, AcceleratedEncoder, Decoder, Encoder

BERT_BASE = dict(layers=12, width=768, heads=12, inner=3072)
MINILM = dict(layers=6, width=384, heads=12, inner=1536)
LLAMA = dict(layers=12, width=1024, heads=16, inner=2816)

CASES = [
    # case                        B   H   G      M      N    D
    Attention("prefill-512-full", 1, 8, 8, 512, 512, 64),
    Attention("prefill-512-causal", 1, 8, 8, 512, 512, 64, causal=True),
    Attention("prefill-2048-full", 1, 8, 8, 2048, 2048, 64),
    Attention("prefill-2048-causal", 1, 8, 8, 2048, 2048, 64, causal=True),
    Attention("prefill-4096-d128-full", 1, 8, 8, 4096, 4096, 128),
    Attention("prefill-4096-d128-causal", 1, 8, 8, 4096, 4096, 128, causal=True),
    Attention("gqa-1024-d128-full", 1, 32, 8, 1024, 1024, 128),
    Attention("gqa-1024-d128-causal", 1, 32, 8, 1024, 1024, 128, causal=True),
    Attention("bert", 8, 12, 12, 128, 128, 64),
    Attention("vit-197", 8, 12, 12, 197, 197, 64),
    Attention("clip-77", 8, 12, 12, 77, 77, 64, causal=True),
    Attention("odd-1000-full", 1, 8, 8, 1000, 1000, 64),
    Attention("odd-1000-causal", 1, 8, 8, 1000, 1000, 64, causal=True),
    *(Attention(f"hdim-{dim}", 1, 8, 8, 1024, 1024, dim) for dim in (32, 64, 80, 96, 128, 192, 256)),
    Attention("decode-4k", 1, 32, 8, 1, 4096, 128),
    Attention("decode-4k-mha", 1, 32, 32, 1, 4096, 128),
    Attention("decode-32k", 1, 32, 8, 1, 32768, 128),
    Attention("decode-b4-8k", 4, 32, 8, 1, 8192, 128),
    Attention("decode-3000-g5", 1, 40, 8, 1, 3000, 128),
    Attention("decode-b4-2k-d64", 4, 16, 4, 1, 2048, 64),
    Attention("decode-short", 1, 32, 8, 1, 256, 128),
    Attention("decode-short-b4-d64", 4, 16, 4, 1, 200, 64),
    Attention("decode-short-mha", 1, 12, 12, 1, 256, 64),
    Attention("decode-cross-1500", 1, 12, 12, 1, 1500, 64),  # one token of a decoder that listens to an encoder
    Attention("decode-cross-b4-1024", 4, 8, 8, 1, 1024, 64),
    Attention("decode-cross-2000", 1, 20, 20, 1, 2000, 64),
    # Tokens that were guessed, looked at together.
    *(Attention(f"speculate-{n}", 1, 32, 8, n, 2048 + n, 128, causal=True) for n in (2, 4, 8)),
    Attention("speculate-5-mha", 2, 12, 12, 5, 2053, 64, causal=True),
    Attention("chunk-16", 1, 32, 8, 16, 8192, 128, causal=True),
    Attention("chunk-64", 1, 32, 8, 64, 8192, 128, causal=True),
    Attention("tiny", 1, 1, 1, 3, 3, 64),
    Attention("small-32", 1, 4, 4, 32, 32, 64),
    Attention("cross-77", 2, 8, 8, 4096, 77, 40),
    Attention("cross-512x1500", 4, 8, 8, 448, 1500, 64),
    Attention("mask-pad", 4, 12, 12, 384, 384, 64, hiding="pad"),
    Attention("mask-bool", 1, 8, 8, 1024, 1024, 64, hiding="random"),
    Attention("mask-add", 1, 8, 8, 1024, 1024, 64, hiding="bias"),
    Attention("window-512", 1, 8, 8, 4096, 4096, 64, window=512),
    Attention("window-128-8192", 1, 8, 8, 8192, 8192, 64, window=128),
    Attention("window-200-3000", 2, 4, 4, 3000, 3000, 128, window=200),
    # Many short sequences, and the windows of an image that look at themselves, with a bias for each head.
    Attention("many-16", 256, 8, 8, 16, 16, 64),
    Attention("many-32", 128, 12, 12, 32, 32, 32),
    Attention("many-64", 64, 8, 8, 64, 64, 64),
    Attention("swin-49", 64, 4, 4, 49, 49, 32, hiding="bias"),
    Attention("swin-49-b256", 256, 3, 3, 49, 49, 32, hiding="bias"),
    Attention("long-8192-full", 1, 4, 4, 8192, 8192, 64),
    Attention("long-8192-causal", 1, 4, 4, 8192, 8192, 64, causal=True),
    Attention("long-16384", 1, 2, 2, 16384, 16384, 64, causal=True),
    Backward("bwd-1024-full", 1, 8, 8, 1024, 1024, 64),
    Backward("bwd-1024-causal", 1, 8, 8, 1024, 1024, 64, causal=True),
    Backward("bwd-bert", 8, 12, 12, 128, 128, 64),
    Backward("bwd-gqa-1024-causal", 1, 16, 4, 1024, 1024, 128, causal=True),
    Backward("bwd-64-d32", 32, 8, 8, 64, 64, 32),
    Backward("bwd-50", 16, 12, 12, 50, 50, 64),
    Layer("layer-32", 1, 12, 12, 32, 32, 32),
    Layer("layer-b2-20", 2, 6, 6, 20, 20, 64),
    Layer("layer-b8-128", 8, 12, 12, 128, 128, 64),
    Layer("layer-1024", 1, 12, 12, 1024, 1024, 64),
    # case                             rows width outs
    *(Linear(f"linear-{rows}-4096", rows, 4096, 4096, count=4) for rows in (1, 4, 16)),  # read from memory
    *(Linear(f"linear-{rows}-768x3072", rows, 768, 3072) for rows in (1, 4, 16)),  # from the third-level cache
    *(Linear(f"linear-{rows}-1024", rows, 1024, 1024) for rows in (1, 4, 16)),
    Linear("linear-7-1000x2600", 7, 1000, 2600),
    Linear("linear-1024-gelu", 1024, 768, 3072, "gelu"),
    *(FeedForward(f"ffn-bert-{rows}", rows, 768, 3072) for rows in (1, 16, 128, 1024)),
    *(FeedForward(f"ffn-llama-{rows}", rows, 1024, 2816, gated=True) for rows in (1, 16, 128, 1024)),
    *(Norm(f"norm-layer-{rows}x{width}", rows, width) for rows, width in ((1024, 768), (8192, 1024), (1, 4096))),
    *(
        Norm(f"norm-rms-{rows}x{width}", rows, width, centred=False)
        for rows, width in ((1024, 768), (8192, 1024), (1, 4096))
    ),
    # case                               B   S
    Encoder("model-bert-base-8x128", 8, 128, **BERT_BASE),
    Encoder("model-bert-base-1x128", 1, 128, **BERT_BASE),
    Encoder("model-bert-base-3x77", 3, 77, **BERT_BASE),
    Encoder("model-minilm-32x64-lengths", 32, 64, **MINILM, padded=True),
    Encoder("model-minilm-8x256", 8, 256, **MINILM),
    Encoder("model-minilm-1x16", 1, 16, **MINILM),
    Decoder("model-llama-prefill-512", 1, 512, **LLAMA),
    Decoder("model-llama-token-512", 1, 1, **LLAMA, cached=512),
    Decoder("model-llama-token-4096", 1, 1, **LLAMA, cached=4096),
    Decoder("model-llama-5-tokens-999", 5, 1, **LLAMA, cached=999),
    AcceleratedEncoder("hf-bert-base-8x128", 8, 128, **BERT_BASE),
    AcceleratedDecoder("hf-llama-token-2048", 1, 1, **LLAMA | dict(layers=8), cached=2048),
    AcceleratedDecoder("hf-llama-token-4096", 1, 1, **LLAMA | dict(layers=8), cached=4096),
]

DOUBLE = ["prefill-2048-full", "prefill-2048-causal"]
FLOAT16 = [
    "prefill-512-full", "prefill-512-causal", "prefill-2048-full", "prefill-2048-causal",
    "prefill-4096-d128-full", "prefill-4096-d128-causal", "gqa-1024-d128-full", "gqa-1024-d128-causal",
    "bert", "vit-197", "clip-77", "odd-1000-full", "odd-1000-causal",
    *(case.case for case in CASES if case.case.startswith(("decode-", "speculate-"))), "chunk-16", "chunk-64",
    "cross-77", "mask-pad", "mask-bool", "mask-add", "window-512", "window-128-8192", "many-16", "many-32", "many-64",
    "swin-49",
]  # fmt: skip
PARTS = ("hdim-", "bwd-", "layer-", "linear-", "ffn-", "norm-", "model-bert-", "model-llama-", "hf-llama-")  # of models
BFLOAT16 = [*FLOAT16, "tiny", *(case.case for case in CASES if case.case.startswith(PARTS))]

OTHERS = {"fp64": DOUBLE, "bf16": BFLOAT16, "fp16": FLOAT16}  # the cases that are run in other dtypes too
WORKLOADS = {workload.name: workload for workload in CASES}
for dtype_name, names in OTHERS.items():
    WORKLOADS |= {w.name: w for w in (replace(case, dtype_name=dtype_name) for case in CASES if case.case in names)}

# Families in which one size grows: {family: {size: workload}}.  All that are prepared at once fit in a worker.
SWEEPS = {
    "length": {n: Attention(f"length-{n}", 1, 2, 2, n, n, 64, causal=True) for n in (2**i for i in range(16))},
    "head-size": {
        dim: Attention(f"head-size-{dim}", 1, 8, 8, 1024, 1024, dim)
        for dim in (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
    },
    "context": {n: Attention(f"context-{n}", 1, 16, 2, 1, n, 128) for n in (128 * 4**i for i in range(6))},
}
