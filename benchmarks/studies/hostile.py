"""What numbers that are rare cost: the same call with ordinary and with hostile numbers, timed in turns in one process.

python -m benchmarks.studies.hostile                        # some minutes; a table, the worst first
python -m benchmarks.studies.hostile --only 'bf16, many; V' # cases whose names hold one of these, with * for anything

Speed must not depend much on what arrays hold, else whoever sends them decides how long a call takes: a ratio above
LIMIT is marked.  Times are those of the CPU, on one thread, so that other load does not count.

Some CPUs take a hundred times as long for a multiply-add of float32 or float64 with a denormal: such cases say what
the CPU does, and are marked as well.
"""

import argparse
import fnmatch
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ml_dtypes
import numpy as np

import sdpa
from sdpa._runtime import kernels

LIMIT = 4
DTYPES = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
SIZES = {"many rows": (2, 512, 512, 64), "few rows": (4, 1, 4096, 64)}  # heads, queries, keys, features
HIDE = {
    "": lambda M, N: {},
    "causal": lambda M, N: {"causal": True},
    "a hidden key": lambda M, N: {"mask": np.arange(N) % 128 != 5},
    "a hiding bias": lambda M, N: {"bias": np.where(np.arange(N) % 128 == 5, -np.inf, 0).astype(np.float32)},
}


def denormal(x):
    info = ml_dtypes.finfo(x.dtype)
    return (np.clip(x.astype(float), -2, 2) / 2 * float(info.smallest_normal)).astype(x.dtype)


def filled(number):
    return lambda x: np.full_like(x, number)


def sparse(number):
    """One number of each row of the array."""

    def fill(x):
        x = x.copy()
        x[..., 3] = number
        return x

    return fill


def largest(x):
    return np.full_like(x, ml_dtypes.finfo(x.dtype).max)


FILLS = {
    "NaN": filled(np.nan),
    "inf": filled(np.inf),
    "a NaN per row": sparse(np.nan),
    "denormal": denormal,
    "largest": largest,
    "large": lambda x: (np.sign(x.astype(float)) * 2.0**66).astype(x.dtype),
}


def changes():
    """What of the arrays is filled with what, by name."""
    for fill in ("NaN", "inf", "a NaN per row", "denormal", "largest"):
        yield f"{fill} in V", {"value": fill}
    for place, name in ("query", "Q"), ("key", "K"):
        for fill in ("NaN", "a NaN per row", "denormal", "large"):
            yield f"{fill} in {name}", {place: fill}
    yield "denormal in Q, large in K", {"query": "denormal", "key": "large"}
    yield "large in Q, denormal in K", {"query": "large", "key": "denormal"}
    yield "denormal in Q, K and V", {"query": "denormal", "key": "denormal", "value": "denormal"}
    for fill in ("NaN", "inf", "a NaN per row", "denormal"):
        yield f"{fill} in grad_out", {"grad_out": fill}


def cases():
    """(name, the call with ordinary numbers, the same with hostile ones), neither yet prepared."""
    for sizes, (H, M, N, D) in SIZES.items():
        for dtype_name, dtype in DTYPES.items():
            for hide, options in HIDE.items():
                for gradients in (False, True) if M > 1 and hide in ("", "causal") else (False,):
                    for change, fills in changes():
                        if ("grad_out" in fills and not gradients) or (M == 1 and hide == "causal"):
                            continue
                        words = [dtype_name, sizes, "gradients" if gradients else "", hide, change]
                        name = ", ".join(filter(None, words))
                        yield (
                            name,
                            lambda key=(H, M, N, D), dtype=dtype, options=options, fills=fills, of=gradients: prepare(
                                key, dtype, options(key[1], key[2]), fills, of
                            ),
                        )


def prepare(sizes, dtype, options, fills, gradients):
    H, M, N, D = sizes
    draw = np.random.default_rng(0).standard_normal
    arrays = {"query": draw((H, M, D)), "key": draw((H, N, D)), "value": draw((H, N, D))}
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    hostile = {name: FILLS[fills[name]](x) if name in fills else x for name, x in arrays.items()}
    if not gradients:
        return [lambda x=x: sdpa.attention(**x, **options, threads=1) for x in (arrays, hostile)]
    out, lse = sdpa.attention(**arrays, return_lse=True, **options)
    grad = draw(out.shape).astype(dtype)
    struck = FILLS[fills["grad_out"]](grad) if "grad_out" in fills else grad
    return [
        lambda x=x, g=g: sdpa.attention_backward(g, **x, out=out, lse=lse, **options, threads=1)
        for x, g in ((arrays, grad), (hostile, struck))
    ]


def milliseconds(calls, seconds):
    """The best time of each, called in turns."""
    best, end, rounds = [np.inf] * len(calls), time.thread_time() + seconds, 0
    while rounds < 2 or time.thread_time() < end:
        for i, call in enumerate(calls):
            begin = time.thread_time()
            call()
            best[i] = min(best[i], (time.thread_time() - begin) * 1e3)
        rounds += 1
    return best


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="*", help="patterns of names, with semicolons between them: 'grad*V; few rows'"
    )
    parser.add_argument("--kernel", help="instead of the best")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each case")
    parser.add_argument("--least", type=float, default=1.5, help="smaller ratios are counted, not shown")
    given = parser.parse_args(arguments)
    if given.kernel:
        kernels.default = next(kernel for kernel in sdpa.kernels() if kernel.name == given.kernel)
    rows = []
    with np.errstate(all="ignore"):
        for name, make in cases():
            if any(fnmatch.fnmatch(name, f"*{pattern.strip()}*") for pattern in given.only.split(";")):
                rows.append((name, *milliseconds(make(), given.seconds)))
    rows.sort(key=lambda row: row[1] / row[2])  # the worst first
    shown = [row for row in rows if row[2] / row[1] >= given.least]
    print("| call | ordinary ms | hostile ms | ratio |\n|---|---:|---:|---:|")
    for name, ordinary, hostile in shown:
        ratio = hostile / ordinary
        print(f"| {name} | {ordinary:.2f} | {hostile:.2f} | {ratio:.2f}{' (!)' if ratio > LIMIT else ''} |")
    print(f"\n{len(rows)} calls; {len(rows) - len(shown)} below {given.least}")


if __name__ == "__main__":
    main()
