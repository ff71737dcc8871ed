"""Faults that are planted in the library, each where one target must find it: `python -m tests.fuzz.planted` says after
how many rounds it does.  They are small, and most show in some calls only, as those do that fuzzers are for."""

import contextlib
import importlib
import sys
import time
from unittest import mock

import numpy as np

import sdpa
from sdpa import models
from sdpa._cache import files as cache_files
from sdpa.models import _files as model_files

MOST_ROUNDS = 30


def off(result):
    """The same with its last number changed."""
    if isinstance(result, tuple):
        return type(result)(*map(off, result)) if hasattr(result, "_fields") else (off(result[0]), *result[1:])
    if result is None or not result.size or not np.isfinite(result.reshape(-1)[-1]):
        return result
    changed = result.copy()
    last = changed.reshape(-1)[-1:]
    last[...] = last * changed.dtype.type(1.25) + changed.dtype.type(0.25)
    return changed


def tensor_off(result):
    return (result[0] + 1, *result[1:]) if isinstance(result, tuple) else result + 1


def wrong(owner, name, when=lambda *arguments, **options: True, change=off):
    """The result of such calls is changed."""
    right = getattr(owner, name)

    def call(*arguments, **options):
        result = right(*arguments, **options)
        return change(result) if when(*arguments, **options) else result

    return mock.patch.object(owner, name, call)


def given(*names):
    return lambda *_, **options: all(options.get(name) is not None for name in names)


def other_error(owner, name):
    """What is refused is refused by an error that says nothing."""
    right = getattr(owner, name)

    def call(*arguments, **options):
        try:
            return right(*arguments, **options)
        except ValueError:
            raise IndexError from None

    return mock.patch.object(owner, name, call)


def leak(result):
    """A NaN that nobody should see."""
    out, lse = result
    return np.full_like(out, np.nan), lse


def last_bit(result):
    out, lse = result
    return (np.nextafter(out, out.dtype.type(9)) if out.dtype.kind == "f" else out), lse


def forgets_one(cache, sequence, n, truncate=sdpa.PagedKVCache.truncate):
    truncate(cache, sequence, max(0, n - (n > 3)))


def cache_forgets_one(cache, n, truncate=sdpa.KVCache.truncate):
    truncate(cache, np.maximum(np.asarray(n) - (np.asarray(n) > 3), 0))


def on_ranks(fault):
    """The fault, a call of one of the functions above, in the processes that mpiexec starts."""

    from . import ranks

    def run(number, *arguments, right=ranks.run_ranks, **more):
        start = f"import runpy\nimport sdpa.distributed\nfrom tests.fuzz.planted import *\n{fault}.start()\n"
        runner, (what, *rest) = "run_path", arguments
        if what == "-m":
            runner, (what, *rest) = "run_module", rest
        return right(number, "-c", f"{start}runpy.{runner}({what!r}, run_name='__main__')", *rest, **more)

    return mock.patch.object(ranks, "run_ranks", run)


FAULTS = {
    "attention": lambda: wrong(sdpa, "attention", given("softcap", "window")),
    "weights": lambda: wrong(sdpa, "attention_weights", given("alibi_slopes")),
    "hidden keys": lambda: wrong(sdpa, "attention", lambda q, k, v, **_: np.isnan(k.astype(float)).any(), leak),
    "varlen": lambda: wrong(sdpa, "attention_varlen", given("window")),
    "backward": lambda: wrong(sdpa, "attention_backward", given("sinks")),
    "varlen backward": lambda: wrong(sdpa, "attention_varlen_backward"),
    "multi-head attention": lambda: wrong(sdpa.MultiHeadAttention, "__call__"),
    "larger sizes": lambda: wrong(sdpa, "attention", lambda q, k, v, **_: k.shape[-2] > 257),
    "bits": lambda: wrong(sdpa, "attention", lambda *_, threads=None, **__: threads == 3, last_bit),
    "merge": lambda: wrong(sdpa, "merge", lambda outs, lses, **_: len(outs) > 2),
    "like torch": lambda: wrong(sdpa, "scaled_dot_product_attention", given("is_causal")),
    "additive": lambda: wrong(sdpa, "additive_attention", given("mask")),
    "linear": lambda: wrong(sdpa.Linear, "__call__", lambda layer, x, **_: x.shape[0] > 100),
    "feed-forward": lambda: wrong(sdpa.FeedForward, "__call__", given("residual")),
    "norms": lambda: wrong(
        sys.modules["test_norms"], "call", lambda norm, *_, **options: norm is sdpa.rms_norm and "residual" in options
    ),
    "rotary": lambda: wrong(sdpa, "rotary", given("cos")),
    "arguments": lambda: other_error(sdpa.KVCache, "append"),
    "saved caches": lambda: mock.patch.object(cache_files, "_check_names", lambda header: None),
    "models": lambda: mock.patch.object(model_files.Safetensors, "_check", lambda file, size: None),
    "good folders": lambda: mock.patch.object(cache_files, "FLOATS", ("float64",)),
    "encoders": lambda: wrong(models.Encoder, "__call__", given("lengths")),
    "decoders": lambda: wrong(models.Decoder, "__call__", given("caches")),
    "positions of three": lambda: wrong(models, "mrope_positions"),
    "commands": lambda: other_error(models, "load"),
    "laboratory": lambda: wrong(sdpa, "attention_weights"),
    "heatmaps": lambda: wrong(sys.modules["sdpa.lab._heatmap"], "_maps"),
    "cache": lambda: mock.patch.object(sdpa.KVCache, "truncate", cache_forgets_one),
    "paged": lambda: mock.patch.object(sdpa.PagedKVCache, "truncate", forgets_one),
    "distributed": lambda: on_ranks('wrong(sdpa.distributed, "attention", given("window"))'),
    "distributed caches": lambda: on_ranks('wrong(sdpa.distributed.KVCache, "attend")'),
    "distributed arguments": lambda: on_ranks('other_error(sdpa.distributed, "gather")'),
    "torch attention": lambda: wrong(sdpa, "attention_backward", given("mask")),
    "torch packed": lambda: wrong(sdpa.torch, "attention_varlen", given("softcap"), tensor_off),
    "torch beside": lambda: wrong(sdpa.torch, "merge", lambda outs, _: len(outs) > 2, tensor_off),
    "torch enabled": lambda: wrong(sdpa.torch._enable, "scaled_dot_product_attention", change=tensor_off),
    "torch modules": lambda: wrong(sdpa.torch._modules.Accelerated, "forward", change=tensor_off),
    "transformers": lambda: wrong(
        importlib.import_module("sdpa.huggingface._attention"), "attend_rows", lambda query, *_: query.shape[2] > 3,
        tensor_off,
    ),
}  # fmt: skip


def rounds_until_found(name, most=MOST_ROUNDS):
    """How many; None if the target never finds it."""
    from .kernels import use_kernel
    from .targets import TARGETS  # whose properties ask the profile when they are imported

    with FAULTS[name](), contextlib.redirect_stdout(sys.stderr):
        for number in range(most):
            use_kernel(number)
            try:
                TARGETS[name](number)
            except Exception:
                return number + 1
    return None


def main():
    from hypothesis import Phase, settings

    from .__main__ import EXAMPLES

    settings.register_profile("fuzz", max_examples=EXAMPLES, database=None, phases=[Phase.generate])
    settings.load_profile("fuzz")
    from .targets import TARGETS

    names = sys.argv[1:] or TARGETS  # without those that need what is not installed
    found = {}
    for name in names:
        begin = time.monotonic()
        found[name] = rounds_until_found(name)
        after = f"after {found[name]} rounds" if found[name] else "NOT FOUND"
        print(f"{name:24} {after}, {time.monotonic() - begin:.1f} s", flush=True)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
