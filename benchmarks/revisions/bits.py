"""Whether a change keeps the bits of all results: two revisions compute the same random calls.

python -m benchmarks.revisions.bits BASE [HEAD] --calls 300 --seed 0

Each kernel of both computes them in a process of its own.  HEAD: the working tree if left out.  What differs is printed
with the call that shows it, and the exit status says whether anything did.  The sink of a row that sees nothing is left
out of lse: it was -inf before 2026-11-19.
"""

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

import sdpa  # of the revision that PYTHONPATH leads to

FLOATS = [np.float32, np.float32, np.float64, np.float16, bfloat16]
LENGTHS = [1, 2, 3, 5, 9, 16, 17, 31, 64, 65, 100, 129, 200, 333]
SIZES = [1, 3, 8, 16, 24, 33, 64, 80, 128, 200]


# ------------------------------------------------------------------------------------ what one revision gives: digests


def digests(calls, seed):
    """A line for each call and part of its result: `name`, `call`, `digest`."""
    for index in range(calls):
        rng = np.random.default_rng([seed, index])
        make = MAKERS[index % len(MAKERS)]
        described, results = make(rng)
        for part, array in results.items():
            yield f"{make.__name__}.{part}", f"call {index}: {described}", digest(array)


def digest(array):
    if array is None:
        return "None"
    array = np.ascontiguousarray(array)
    array = np.where(array != array, array.dtype.type(0), array)  # NaN has many bit patterns, and they mean the same
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def problem(rng, lead=True):
    """query, key, value, options; of any dtypes, sizes and layouts."""
    B, G = (int(rng.integers(1, 4)), int(rng.integers(1, 3))) if lead else (1, int(rng.integers(1, 3)))
    H, M, N = G * int(rng.integers(1, 5)), int(rng.choice(LENGTHS)), int(rng.choice(LENGTHS))
    D, E = int(rng.choice(SIZES)), int(rng.choice(SIZES))
    dtype = FLOATS[rng.integers(len(FLOATS))]
    narrow = dtype if rng.random() < 0.7 or dtype in (np.float16, bfloat16) else FLOATS[rng.integers(3, 5)]
    query = laid_out(rng, rng.standard_normal((B, H, M, D)).astype(dtype))
    key, value = (laid_out(rng, rng.standard_normal((B, G, N, n)).astype(narrow)) for n in (D, E))
    return query, key, value, options(rng, B, H, M, N)


def laid_out(rng, array):
    kind = rng.integers(4)
    if kind == 1:
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    if kind == 2:
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    return array


def options(rng, B, H, M, N):
    """Each with a probability of its own, in any combination."""
    every = {
        "causal": lambda: True,
        "window": lambda: (int(rng.integers(0, N + 2)), [None, 0, 3][rng.integers(3)]),
        "q_offset": lambda: int(rng.integers(-3, N + 3)),
        "kv_lengths": lambda: rng.integers(0, N + 1, B),
        "mask": lambda: rng.random([(B, H, M, N), (B, 1, 1, N), (M, N)][rng.integers(3)]) < 0.7,
        "bias": lambda: rng.standard_normal([(B, H, M, N), (H, 1, N), (M, N)][rng.integers(3)]).astype(np.float32),
        "scale": lambda: float(rng.random()),
        "softcap": lambda: float(1 + 20 * rng.random()),
        "sinks": lambda: rng.standard_normal(H),
        "alibi_slopes": lambda: rng.random(H) / 8,
        "threads": lambda: int(rng.integers(1, 3)),
    }
    return {name: make() for name, make in every.items() if rng.random() < 0.25}


def described(query, value, options):
    sizes = f"{query.dtype}/{value.dtype} query {query.shape} value {value.shape}"
    return f"{sizes} {', '.join(sorted(options)) or 'no options'}"


def without_sinks_of_blind_rows(lse, blind):
    return np.where(blind, 0, lse)


def attention(rng):
    query, key, value, chosen = problem(rng)
    out, lse = sdpa.attention(query, key, value, return_lse=True, **chosen)
    blind = np.isneginf(sdpa.attention(query, key, value, return_lse=True, **chosen | {"sinks": None})[1])
    weights = sdpa.attention_weights(query, key, **chosen)
    return described(query, value, chosen), {
        "out": out, "lse": without_sinks_of_blind_rows(lse, blind), "weights": weights,
    }  # fmt: skip


def backward(rng):
    query, key, value, chosen = problem(rng)
    out, lse = sdpa.attention(query, key, value, return_lse=True, **chosen)
    grad_out = rng.standard_normal(out.shape).astype(out.dtype)
    grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, **chosen)
    return described(query, value, chosen), grads._asdict()


def packed(rng):
    dtype, D, E = FLOATS[rng.integers(len(FLOATS))], int(rng.choice(SIZES)), int(rng.choice(SIZES))
    G = int(rng.integers(1, 3))
    H, counts = G * int(rng.integers(1, 5)), rng.integers(0, 90, int(rng.integers(1, 6)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    query, key, value = (
        rng.standard_normal((starts[-1], heads, size)).astype(dtype) for heads, size in ((H, D), (G, D), (G, E))
    )
    chosen = {"causal": bool(rng.integers(2)), "cu_seqlens_q": starts}
    out, lse = sdpa.attention_varlen(query, key, value, return_lse=True, **chosen)
    grads = sdpa.attention_varlen_backward(query[..., :1] * np.ones(E, dtype), query, key, value, out, lse, **chosen)
    return f"{dtype.__name__} {counts.tolist()}", {"out": out, "lse": lse} | grads._asdict()


def cache(rng):
    B, G, D = int(rng.integers(1, 3)), int(rng.integers(1, 3)), 8 * int(rng.integers(1, 17))
    dtype = [np.float32, np.float16, bfloat16, np.float64, np.int8][rng.integers(5)]
    window = [None, int(rng.integers(1, 40))][rng.integers(2)]
    held = sdpa.KVCache(B, G, D, dtype=dtype, window=window)
    of = np.float32 if dtype is np.int8 else dtype
    results = {}
    for step, count in enumerate([int(rng.integers(1, 70)), 1, int(rng.integers(1, 5)), 1]):
        held.append(*(rng.standard_normal((B, G, count, D)).astype(of) for _ in range(2)))
        query = rng.standard_normal((B, G * 3, count, D)).astype(of)
        results[f"step {step}"] = held.attend(query, softcap=[None, 9.0][rng.integers(2)])
    return f"{np.dtype(dtype)} {(B, G, D)} window {window}", results


def pages(rng):
    G, D, dtype = int(rng.integers(1, 3)), int(rng.choice(SIZES)), FLOATS[rng.integers(len(FLOATS))]
    held = sdpa.PagedKVCache(40, 16, G, D, dtype=dtype)
    sequences = [held.allocate() for _ in range(3)]
    for sequence in sequences:
        count = int(rng.integers(1, 150))
        held.append(sequence, *(rng.standard_normal((G, count, D)).astype(dtype) for _ in range(2)))
    query = rng.standard_normal((3, G * 2, D)).astype(dtype)
    return f"{np.dtype(dtype)} {(G, D)}", {"out": held.attend(query, sequences)}


def layer(rng):
    heads, size, dtype = int(rng.integers(1, 5)), 8 * int(rng.integers(1, 9)), FLOATS[rng.integers(len(FLOATS))]
    width = heads * size
    weights = (rng.standard_normal((3 * width, width)) / width**0.5).astype(dtype)
    out_weight = (rng.standard_normal((width, width)) / width**0.5).astype(dtype)
    made = sdpa.MultiHeadAttention(
        width, heads, in_proj_weight=weights, out_proj_weight=out_weight, rotary={"base": 1e4}
    )
    x = rng.standard_normal((2, int(rng.choice(LENGTHS)), width)).astype(dtype)
    return f"{np.dtype(dtype)} {x.shape}, {heads} heads", {"out": made(x, causal=True)}


def others(rng):
    query, key, value, chosen = problem(rng, lead=False)
    size = 2 * int(rng.integers(1, 40))
    w_query, w_key = (rng.standard_normal((size, query.shape[-1])).astype(query.dtype) for _ in range(2))
    v = rng.standard_normal(size).astype(query.dtype)
    turned = sdpa.rotary(query[..., : query.shape[-1] // 2 * 2], np.arange(query.shape[-2]))
    parts = [sdpa.attention(query, key, value, return_lse=True, **chosen) for _ in range(2)]
    return described(query, value, chosen), {
        "additive": sdpa.additive_attention(query, key, value, w_query, w_key, v),
        "rotary": turned,
        "merge": sdpa.merge(*zip(*parts))[0],
    }


MAKERS = [attention, backward, packed, cache, attention, pages, layer, backward, others]


# --------------------------------------------------------------------------------------------- what two of them differ


def digests_of(folder, kernel, calls, seed):
    """name, call: digest; of a revision on one of its kernels."""
    command = [sys.executable, str(Path(__file__).resolve()), "digests", str(calls), str(seed)]
    environment = os.environ | {"PYTHONPATH": str(folder), "SDPA_KERNEL": kernel}
    with tempfile.TemporaryFile("w+") as lines:
        subprocess.run(command, cwd=folder, env=environment, stdout=lines, check=True)
        lines.seek(0)
        rows = map(json.loads, lines)
        assert next(rows) == str(folder)
        return {(name, call): found for name, call, found in rows}


def differences(base, head):
    """The keys whose digests are not the same."""
    return [key for key in base | head if base.get(key) != head.get(key)]


def compare(folders, kernels, calls, seed, tell):
    """Whether all digests agree; says which do not."""
    same = True
    for kernel in kernels:
        base, head = (digests_of(folder, kernel, calls, seed) for folder in folders)
        differ = differences(base, head)
        tell(f"{kernel}: {len(base)} results, {len(differ)} differ")
        counts = Counter(name for name, _ in differ)
        for name, count in counts.items():
            first = next(call for found, call in differ if found == name)
            tell(f"  {name} {count}: {first}")
        same = same and not differ
    return same


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, a branch or a tag")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="another (default: the working tree)")
    parser.add_argument("--calls", type=int, default=300, help="of each kernel")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    from benchmarks.revisions import building  # which is not there for the processes of a revision

    arguments = parse_arguments()
    folders = [building.revision(name, print).folder for name in (arguments.base, arguments.head)]
    tell = functools.partial(print, flush=True)
    sys.exit(not compare(folders, sdpa.kernels(), arguments.calls, arguments.seed, tell))


if __name__ == "__main__":
    if sys.argv[1:2] == ["digests"]:
        print(json.dumps(str(Path(sdpa.__file__).resolve().parents[1])))
        for line in digests(*map(int, sys.argv[2:])):
            print(json.dumps(line))
    else:
        main()
