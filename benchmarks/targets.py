"""What this library aims at, and why it misses where it does: the only place of both.  The numbers come from a run."""

import fnmatch
from typing import NamedTuple

DIGITS = 2  # ratios are judged as they are shown


class Target(NamedTuple):
    """Of the workloads whose names match: the least share of the bound, and the least speed-up over the best peer."""

    workloads: str  # a pattern of names
    share: float | None = None  # None: the bound says little here
    lead: float = 1.0


class Verdict(NamedTuple):
    """What a target says of one row of a report."""

    row: object
    target: Target

    @property
    def share_missed(self):
        return self.target.share is not None and not round(self.row.share, DIGITS) >= self.target.share

    @property
    def lead_missed(self):
        return self.row.best is not None and not round(self.row.lead, DIGITS) >= self.target.lead

    @property
    def hit(self):
        return not (self.share_missed or self.lead_missed)


# The first that matches counts.
TARGETS = [
    # Calls of microseconds are bound neither by arithmetic nor by memory.
    Target("tiny-*"),
    Target("small-32-*"),
    # Keys and values come from memory, next to a loop that only reads them; those of the others fit in a cache.
    Target("decode-32k-fp32", 0.80),
    Target("decode-b4-8k-fp32", 0.80),
    Target("decode-32k-*", 0.75),
    Target("decode-b4-8k-*", 0.75),
    Target("decode-4k-mha-fp32", lead=1.1),
    Target("decode-4k-mha-bf16", lead=2.0),
    Target("decode-*"),
    Target("chunk-16-fp32", 0.80),
    Target("chunk-*"),
    # Few keys for each query.
    Target("clip-77-fp32", 0.65),
    Target("clip-77-bf16", 0.45),
    Target("cross-77-*"),
    # A step of training and a layer have other products too.
    Target("bwd-*"),
    Target("layer-*"),
    # What the first draft of the kernel reached on 512 and 2048 queries; bfloat16: as the short sequences.
    Target("*-causal-fp32", 0.84),
    Target("long-16384-fp32", 0.84),
    Target("*-fp32", 0.88),
    Target("*-bf16", 0.75),
    Target("*"),
]

UNEXPLAINED = "Not explained."
# Found with a profiler, and by trials that no script here repeats.  The first that matches is shown.
REASONS = [
    ("decode-4k-mha-*", "ncnn reads float32 at the rate of memory, and bfloat16 as fast as this library."),
    ("decode-*-fp32", UNEXPLAINED),
    (
        "decode-*",
        "A part of keys and values stays in the third-level cache, so the loop that is the bound reads faster than "
        "memory gives; the kernel does not.",
    ),
    ("chunk-16-*", "The 64 rows of a head are one task, which waits for keys and values from memory."),
    (
        "clip-77-*",
        "77 causal queries are five vectors of 16 rows: the triangle that vectors cover is 1.27 times the one that "
        "counts, which leaves 0.79 at best. Transposing queries and results does not hide behind so short a product "
        "and takes a quarter of the time. Where malloc puts the result 16 bytes past a cache line, each store of a "
        "vector is two.",
    ),
    (
        "vit-197-bf16",
        "Next to products twice as fast as in float32, moving queries and results weighs twice as much. Prefetching "
        "the next head's rows made it slower, results on whole cache lines changed nothing.",
    ),
    (
        "vit-197-*",
        "197 rows are 13 vectors of 16, of which 5.6 % are padding, and two threads share the third-level cache: one "
        "thread alone comes nearer to its bound.",
    ),
    ("bert-*", f"{UNEXPLAINED} It differs from process to process; the alignment of the arrays makes 1 %."),
    (
        "mask-add-*",
        "The bias comes from memory, and its time does not overlap with the product; one shared by the heads, which "
        "stays in a cache, costs less. Prefetching it a block ahead, at the start of a block, or between tiles brought "
        "nothing.",
    ),
    ("window-512-*", "Two edges of triangles for each block of queries, covered in steps of 16 keys."),
]


def target_of(name):
    return next(target for target in TARGETS if fnmatch.fnmatch(name, target.workloads))


def reason_of(name):
    return next((reason for pattern, reason in REASONS if fnmatch.fnmatch(name, pattern)), UNEXPLAINED)


def verdicts(rows):
    """Of the rows that this library was measured on."""
    return [Verdict(row, target_of(row.name)) for row in rows if row.ours]
