"""What this library aims at, and why it misses where it does: the only place of both.  The numbers come from a run."""

import fnmatch
import math
from typing import NamedTuple

DIGITS = 2  # ratios are judged as they are shown


class Target(NamedTuple):
    """Of the workloads whose names match: the least share of the bound, and the least speed-up over the best peer;
    the longest time; and the longest as a multiple of this library's own time for the same in float32."""

    workloads: str  # a pattern of names
    share: float | None = None  # None: the bound says little here
    lead: float = 1.0
    microseconds: float | None = None
    of_float32: float | None = None


class Verdict(NamedTuple):
    """What a target says of one row of a report."""

    row: object
    target: Target
    float32: object = None  # the row of the same workload in float32

    @property
    def of_float32(self):
        known = self.float32 is not None and self.float32.ours
        return self.row.ours["minimum"] / self.float32.ours["minimum"] if known else math.nan

    @property
    def share_missed(self):
        return self.target.share is not None and not round(self.row.share, DIGITS) >= self.target.share

    @property
    def lead_missed(self):
        return self.row.best is not None and not round(self.row.lead, DIGITS) >= self.target.lead

    @property
    def time_missed(self):
        return self.target.microseconds is not None and self.row.ours["minimum"] * 1e6 > self.target.microseconds

    @property
    def of_float32_missed(self):
        return self.target.of_float32 is not None and round(self.of_float32, DIGITS) > self.target.of_float32

    @property
    def hit(self):
        return not (self.share_missed or self.lead_missed or self.time_missed or self.of_float32_missed)


# The first that matches counts.
TARGETS = [
    # Calls of microseconds are bound neither by arithmetic nor by memory.
    Target("tiny-fp32", microseconds=2),
    Target("tiny-*"),
    Target("small-32-fp32", microseconds=9),
    # Keys and values come from memory, next to a loop that only reads them; those of the others fit in a cache.
    Target("decode-32k-fp32", 0.80),
    Target("decode-b4-8k-fp32", 0.80),
    Target("decode-32k-*", 0.75),
    Target("decode-b4-8k-*", 0.75),
    Target("decode-4k-fp32", 0.75, lead=1.8),
    Target("decode-4k-bf16", 0.60, lead=2.0),
    Target("decode-4k-fp16", 0.75, lead=1.3),
    Target("decode-4k-mha-fp32", lead=1.1),
    Target("decode-4k-mha-*", lead=2.0),
    Target("decode-short-*", lead=1.8),
    Target("decode-cross-*", lead=1.2),
    Target("decode-*-bf16", 0.60),
    Target("decode-*", 0.75),
    # Several queries behind a cache, keys and values of which come from the third-level cache.
    Target("speculate-*", 0.75),
    Target("chunk-16-fp32", 0.80),
    Target("chunk-64-fp32", 0.88),
    Target("chunk-16-bf16", 0.70),
    Target("chunk-64-bf16", 0.75),
    # A step of training.  The peers are those of the same arithmetic.
    Target("bwd-1024-full-fp32", 0.85, lead=1.3),
    Target("bwd-1024-causal-fp32", 0.80, lead=1.8),
    Target("bwd-bert-fp32", 0.75, lead=1.3),
    Target("bwd-gqa-1024-causal-fp32", 0.80, lead=1.8),
    Target("bwd-1024-causal-bf16", 0.60, lead=1.8),
    Target("bwd-64-d32-fp32", 0.75, lead=1.3),
    Target("bwd-50-fp32", 0.75, lead=1.3),
    Target("bwd-*-causal-*", lead=1.8),
    Target("bwd-*", lead=1.3),
    Target("layer-b8-128-*", lead=1.1),
    Target("layer-*"),
    # Whole models; a token takes as long as reading the weights, the keys and the values.
    Target("model-bert-base-8x128-bf16", 0.80),
    Target("model-bert-*-fp32", 0.92),
    Target("model-bert-*"),
    Target("model-minilm-1x16-fp32", microseconds=1100),
    Target("model-minilm-*", 0.90),
    Target("model-llama-prefill-512-fp32", 0.90),
    Target("model-llama-*", 0.80),
    # The peer is the same model of transformers without this library.
    Target("hf-bert-base-8x128-fp32", lead=2.2),
    Target("hf-llama-token-2048-fp32", lead=2.0),
    Target("hf-llama-token-4096-bf16", lead=4.0),
    Target("hf-*"),
    # Parts of models.  Few rows take as long as reading the weights, from memory or from the third-level cache.
    Target("linear-1024-gelu-*", 0.95),
    Target("linear-*-4096-*", 0.85),
    Target("linear-*", 0.75),
    Target("ffn-*"),
    Target("norm-*-1x4096-*"),
    Target("norm-*", 0.85),
    # Many short sequences, or few keys for each query.
    Target("bert-fp32", 0.88, lead=1.12),
    Target("vit-197-fp32", 0.88, lead=1.12),
    Target("clip-77-fp32", 0.65, lead=1.12),
    Target("many-*-fp32", 0.70, lead=1.5),
    Target("many-*", lead=1.5),
    Target("swin-49-*-fp32", 0.60, lead=1.4),
    Target("swin-49-*", lead=1.4),
    Target("cross-77-fp32", 0.80),
    Target("bert-bf16", 0.75),
    Target("vit-197-bf16", 0.75),
    Target("clip-77-bf16", 0.45),
    Target("cross-77-bf16"),
    # Masks.
    Target("mask-pad-fp32", 0.90),
    Target("mask-*-fp32", 0.88),
    Target("window-512-fp32", 0.88),
    Target("window-*-fp32", 0.78),
    Target("mask-*-bf16", 0.75),
    Target("window-512-bf16", 0.75),
    Target("window-*-bf16", 0.70),
    # Long sequences.
    Target("prefill-512-causal-fp32", 0.85),
    Target("*-causal-fp32", 0.90),
    Target("long-16384-fp32", 0.90),
    Target("*-fp32", 0.93),
    Target("prefill-512-causal-bf16", 0.70),
    Target("*-causal-bf16", 0.80),
    Target("*-bf16", 0.85),
    Target("*-fp64", 0.85),
    Target("*-fp16", of_float32=1.05),  # which is multiplied as float32
]

# Shares of the time are those of `studies/stages.py`; the rest was found by trials that no script here repeats, and the
# tables of csrc/README.md have them.  The first that matches is shown.
REASONS = [
    (
        "decode-short-*",
        "A call of 6 to 15 µs, of which checking arguments and starting and ending threads take two to three. The rest "
        "is arithmetic, which does not hide behind reading from caches this near.",
    ),
    (
        "decode-4k-mha-fp32",
        "Keys and values come from memory, at its rate, and ncnn reads them at the same.",
    ),
    (
        "decode-4k-bf16",
        "A key of 128 features takes four rows 24 cycles from the second-level cache, of which products of pairs are "
        "16, and 29 from the third-level cache, from which it could be read in 18: sums over lanes, softmax and "
        "what is fetched ahead take as many instructions as the products.",
    ),
    (
        "decode-4k-*",
        "Keys and values come from the third-level cache, a part of them from memory: 40 cycles of arithmetic for each "
        "key, 32 of which are multiply-adds, hide only in part behind reading it, and the loop that is the bound has "
        "none.",
    ),
    (
        "decode-cross-*",
        "One row of 64 features, at two thirds to three quarters of the rate of a loop that only reads. NumPy's arrays "
        "do not begin with cache lines, so that vectors are read in two parts, and peers copy keys and values into "
        "memory of their own. Prefetching nearer, farther or both, and the first rows of a task at once, brought "
        "nothing more.",
    ),
    (
        "decode-*-fp32",
        "The kernel's arithmetic hides only in part behind reading: memory is idle for some of it. Other distances of "
        "the prefetch, other orders, hints and numbers of streams brought nothing.",
    ),
    (
        "decode-*",
        "A part of keys and values stays in the third-level cache, so the loop that is the bound reads faster than "
        "memory gives; the kernel does not, whether it prefetches into all caches or past them.",
    ),
    (
        "speculate-*",
        "The bound is a loop that reads keys and values once; several rows of a head multiply each of them as often, "
        "at two thirds of the rate of multiply-adds, beside sums over lanes and softmax.",
    ),
    (
        "clip-77-*",
        "77 causal queries are five vectors of 16 rows: in the scores the triangle that vectors cover is 1.27 times "
        "the one that counts. Transposing queries, geometry, and starting and ending threads do not hide behind so "
        "short a product.",
    ),
    (
        "vit-197-bf16",
        "Next to products twice as fast as in float32, moving queries and results weighs twice as much. Prefetching "
        "the next head's rows made it slower, results on whole cache lines changed nothing.",
    ),
    (
        "vit-197-*",
        "197 rows are 13 vectors of 16, of which 5.6 % are padding. The products of what is left run at the rate of "
        "multiply-adds; moving queries and results, from the third-level cache, takes a tenth of the time.",
    ),
    (
        "bert-*",
        "The products, 86 % of the time, run at the rate of multiply-adds. Softmax takes 7 %, laying out queries 4 %, "
        "what is no stage 2 %; it differs from process to process by 5 %.",
    ),
    (
        "mask-add-*",
        "The bias is read once from memory, and transposed: a sixth of the time, half of which is waiting. It is "
        "prefetched with the product before it; more at once, or into the first-level cache, brought less.",
    ),
    ("mask-bool-*", "The mask is read, transposed and applied in a pass of its own, which takes 7 % of the time."),
    ("window-512-*", "Two edges of triangles for each block of queries, covered in steps of 16 keys."),
    (
        "window-*",
        "A vector of 16 rows computes 144 keys where each row sees 128. Q, K, V and the result come from memory: where "
        "they are in the second-level cache a row takes one thread 184 ns, from memory 246, of which products are 150.",
    ),
    (
        "bwd-*-d32-*",
        "The five products take two thirds of the time. Rows of queries and of the gradient of the result are "
        "transposed, and copied, for tasks of 64 rows: a fifth; the sums of result times gradient take a tenth.",
    ),
    (
        "bwd-50-*",
        "As with 64 rows of 32 features; and 50 rows are 64 in the products.",
    ),
    (
        "many-*",
        "In float32 queries, keys, values and results are 25 to 34 MB, more than stays in the third-level cache: at "
        "the rate of memory 0.4 to 0.6 ms, of which the bound, which is that of arithmetic, knows nothing. Geometry "
        "and scratch of a head take 330 cycles, in all dtypes.",
    ),
    (
        "swin-49-*",
        "A bias for each head, read and transposed; 49 rows are 64 in the scores, and 49 keys are more than three "
        "vectors of the bias.",
    ),
    (
        "layer-[3b]2-*",
        "Calls of 100 µs: three loops of threads, and sums over so few rows that each weight is used 20 to 40 times.",
    ),
    ("hdim-32-*", "Beside sums over 32 features, writing scores and results weighs twice as much as with 64."),
    (
        "layer-b8-128-fp32",
        "Ahead in other runs. Its attention reads rows of heads that lie 9 KB apart from a third-level cache that is "
        "shared with others: the layer takes 10.1 to 10.7 ms, from hour to hour.",
    ),
    (
        "norm-*-bf16",
        "Rows of 1024 come from a cache. Widening, rounding to even with NaN and denormals included, "
        "and the sums take as long as moving four times as many bytes.",
    ),
    (
        "norm-*",
        "Between three passes over a row that waits in the first-level cache, reading and writing four arrays from the "
        "third-level cache is idle in part; a copy has one of each. Large arrays, from memory, are at 0.86 to 0.88.",
    ),
    (
        "linear-1024-gelu-*",
        "The products run at 0.945 of the rate of multiply-adds by themselves. Writing the result takes 2 % of it, "
        "and GELU, with 21 instructions for each vector, 3 % in float32 and 5 % in bfloat16.",
    ),
    (
        "model-bert-*",
        "The projections take 0.94 of the time, and run at 0.89 to 0.92 of the rate of multiply-adds, with GELU and "
        "what they read and write outside the caches. Attention takes 4 %, norms 1 %, all else 1 %.",
    ),
    (
        "model-minilm-1x16-fp32",
        "Forty calls of 5 to 50 µs, each with the start and the end of its threads, and 42 MB of weights that are read "
        "from memory once for each call of the model.",
    ),
    (
        "model-minilm-*",
        "Beside sums over 384 features writing and GELU weigh twice as much as with 768. Attention with heads of 32 "
        "features takes an eighth of the time, at 0.8 of its bound.",
    ),
    (
        "model-llama-prefill-*",
        "The projections run at 0.88 to 0.93 of the rate of multiply-adds; attention of 16 heads on 4, the rotary "
        "embedding, and new caches for each prompt take 5 %.",
    ),
    (
        "linear-*",
        "Calls of 15 to 100 µs, of which starting and ending threads take 2 to 3, and the first part of the weights of "
        "each thread is waited for.",
    ),
    (
        "*",
        "Near the target, and on it in other runs: the machine is shared, and the same build differs by 3 % from hour "
        "to hour.",
    ),
]


def target_of(name):
    return next(target for target in TARGETS if fnmatch.fnmatch(name, target.workloads))


def reason_of(name):
    return next(reason for pattern, reason in REASONS if fnmatch.fnmatch(name, pattern))


def verdicts(rows):
    """Of the rows that this library was measured on."""
    by_name = {row.name: row for row in rows}

    def in_float32(row):
        return by_name.get(f"{row.name.rpartition('-')[0]}-fp32")

    return [Verdict(row, target_of(row.name), in_float32(row)) for row in rows if row.ours]
