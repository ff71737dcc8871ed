"""What a call costs beside its arithmetic: python -m benchmarks.studies.calls

Times calls on arrays so small that the kernels have next to nothing to do: (1, 1, 3, 64), one query in caches.  With
--base FOLDER, a checkout that has been built, the same calls of that revision are timed in turns, each revision in a
process of its own.
"""

import argparse
import json
import subprocess
import sys
import timeit
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cases():
    """name: call without arguments."""
    import numpy as np

    import sdpa

    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 1, 3, 64)).astype(np.float32)
    two = rng.standard_normal((1, 3, 2, 64)).astype(np.float32).swapaxes(1, 2)
    options = {
        "no option": {},
        "scale": {"scale": 0.5},
        "threads": {"threads": 2},
        "mask": {"mask": np.ones((3, 3), bool)},
        "bias": {"bias": np.zeros((3, 3), np.float32)},
        "causal": {"causal": True},
        "window": {"window": (1, 0)},
        "kv_lengths": {"kv_lengths": 2},
        "q_offset": {"q_offset": 0},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": np.zeros(1)},
        "alibi_slopes": {"alibi_slopes": np.zeros(1)},
        "return_lse": {"return_lse": True},
        "out": {"out": np.empty_like(query)},
    }
    six = {
        name: value
        for part in ("mask", "bias", "causal", "scale", "softcap", "return_lse")
        for name, value in options[part].items()
    }
    found = {
        f"attention, {name}": lambda given=given: sdpa.attention(query, key, value, **given)
        for name, given in options.items()
    }
    found["attention, six of these"] = lambda: sdpa.attention(query, key, value, **six)
    found["attention, a strided query"] = lambda: sdpa.attention(two, two, two)
    found["attention, 3 axes"] = lambda: sdpa.attention(query[0], key[0], value[0])
    found["attention, 5 axes"] = lambda: sdpa.attention(query[None], key[None], value[None])
    found["attention_weights"] = lambda: sdpa.attention_weights(query, key)
    found["scaled_dot_product_attention"] = lambda: sdpa.scaled_dot_product_attention(query, key, value, is_causal=True)
    rows, starts = np.ascontiguousarray(query[0].swapaxes(0, 1)), np.array([0, 3])
    network = rng.standard_normal((8, 64)).astype(np.float32)
    found["additive_attention"] = lambda: sdpa.additive_attention(query, key, value, network, network, network[:, 0])
    found["attention_varlen"] = lambda: sdpa.attention_varlen(rows, rows, rows, cu_seqlens_q=starts)
    out, lse = sdpa.attention(query, key, value, return_lse=True)
    found["attention_backward"] = lambda: sdpa.attention_backward(out, query, key, value, out, lse)
    found["merge of two parts"] = lambda: sdpa.merge([out, out], [lse, lse])
    found["rotary"] = lambda: sdpa.rotary(query, 0)
    token = np.ascontiguousarray(query[:, :, :1])
    cache, pages = sdpa.KVCache(1, 1, 64), sdpa.PagedKVCache(8, 4, 1, 64)
    cache.append(key, value)
    sequence = pages.allocate()
    pages.append(sequence, key[0], value[0])
    for name, given in ("no option", {}), ("scale", {"scale": 0.5}), ("scale, softcap", {"scale": 0.5, "softcap": 2.0}):
        found[f"KVCache.attend, {name}"] = lambda given=given: cache.attend(token, **given)
        found[f"PagedKVCache.attend, {name}"] = lambda given=given: pages.attend(token[0], sequence, **given)
    return found | appending(sdpa, rng)


def appending(sdpa, rng):
    """Calls that append a token, in caches with a window, so that they stay as small as they are."""
    import numpy as np

    token, tokens = (rng.standard_normal((batch, 1, 1, 64)).astype(np.float32) for batch in (1, 2))
    x, *weights = (rng.standard_normal(shape).astype(np.float32) for shape in [(1, 1, 64), (192, 64), (64, 64)])
    found = {}
    for name, options in {"": {}, ", int8": {"dtype": np.int8}, ", unlike lengths": {}}.items():
        new = tokens if "lengths" in name else token
        cache = sdpa.KVCache(len(new), 1, 64, window=16, **options)
        cache.append(new.repeat(3, axis=2), new.repeat(3, axis=2), lengths=[3, 2][: len(new)])
        found[f"KVCache.append{name}"] = lambda cache=cache, new=new: cache.append(new, new)
    pages = sdpa.PagedKVCache(2, 1 << 20, 1, 64)
    sequence = pages.allocate()
    found["PagedKVCache.append"] = lambda: pages.append(sequence, token[0], token[0])
    layer = sdpa.MultiHeadAttention(64, 1, rotary=True, in_proj_weight=weights[0], out_proj_weight=weights[1])
    found["MultiHeadAttention"] = lambda: layer(x)
    cache = layer.new_cache(window=16)
    found["MultiHeadAttention, a step with a KVCache"] = lambda: layer(x, cache=cache)
    return found


def measure(number, repeat):
    """Microseconds of the fastest batch of `number` calls of each case."""
    return {
        name: min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6 for name, call in cases().items()
    }


def in_folder(folder, number, repeat):
    """The same, by the library in that folder."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(folder)!r}); import sdpa; sys.path.insert(0, {str(ROOT)!r}); "
        f"from benchmarks.studies import calls; print(json.dumps(calls.measure({number}, {repeat})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, help="a built checkout of another revision")
    parser.add_argument("--number", type=int, default=3000, help="calls of a batch")
    parser.add_argument("--repeat", type=int, default=5, help="batches of a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each revision")
    args = parser.parse_args()
    folders = [ROOT] if args.base is None else [args.base.resolve(), ROOT]
    rounds = [[in_folder(folder, args.number, args.repeat) for folder in folders] for _ in range(args.rounds)]
    best = [{name: min(times[i][name] for times in rounds) for name in rounds[0][i]} for i in range(len(folders))]
    print("| call | " + " | ".join(["base µs", "µs"][-len(folders) :]) + " |")
    print("|---|" + "---:|" * len(folders))
    for name in best[-1]:
        print(f"| {name} | " + " | ".join(f"{times[name]:.2f}" for times in best) + " |")


if __name__ == "__main__":
    main()
