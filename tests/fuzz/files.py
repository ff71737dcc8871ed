"""Folders in which something is damaged: saved caches, and models.

Whatever they hold, they are refused with ValueError (or FileNotFoundError), which names the folder, or they work; and
reading them takes memory in proportion to their size.
"""

import contextlib
import copy
import functools
import json
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draw import rng
from support.models import draw_tensors, write
from support.problems import PROPERTY, examples
from test_cache_files import works

import sdpa

MEMORY = 2_000_000, 30  # bytes, and more for each byte of the files
NUMBERS = [-1, 0, 1, 2, 3, 5, 64, 255, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]
VALUES = st.sampled_from(NUMBERS) | st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
BYTES = st.sampled_from([*b'0123456789[]{}",:-.eE\\ ']) | st.integers(0, 255)


class Reader(NamedTuple):
    """`write` makes a good folder; `load` reads one, and `use` uses what was read."""

    write: Callable[[Path], Any]
    load: Callable[[Path], Any]
    use: Callable[[Any], Any]


def write_cache(folder, **options):
    cache = sdpa.KVCache(2, 1, 4, **options)
    cache.append(*rng(0).standard_normal((2, 2, 1, 7, 4)), [7, 6])
    cache.save(folder)


SMALL = dict(vocab_size=7, max_position_embeddings=9)
LIKE_BERT = SMALL | dict(hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=3)
LIKE_LLAMA = LIKE_BERT | dict(num_key_value_heads=1)
LIKE_GPT2 = dict(vocab_size=7, n_embd=4, n_layer=2, n_head=1, n_positions=9)
ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4, beta_fast=32, attention_factor=None)


def write_model(folder, kind, changes, shards=1, beside=()):
    config, tensors = draw_tensors(kind, **changes)
    write(folder, config, tensors, shards)
    for name, contents in beside:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(contents))


def use_encoder(model):
    try:
        model([[1, 2, 3], [4]])
        model.embed([[1, 2, 3], [4]])
    except ValueError as error:  # a padding token near the end leaves RoBERTa few places
        if "places for" not in str(error):
            raise


def use_decoder(model):
    list(model.generate([1, 2, 3], 2))
    model([1, 2, 3])


POOLED = (
    ("sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": False}),
    ("modules.json", [{"idx": 0, "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
)  # fmt: skip
GENERATION = (("generation_config.json", {"eos_token_id": [3, 4]}),)


def cache_reader(mmap=False, **options):
    load = functools.partial(sdpa.KVCache.load, mmap=mmap)
    return Reader(functools.partial(write_cache, **options), load, works)


def model_reader(kind, changes, use, **options):
    make = functools.partial(write_model, kind=kind, changes=changes, **options)
    return Reader(make, sdpa.models.load, use)


READERS = {
    "a cache": cache_reader(),
    "a mapped cache": cache_reader(mmap=True),
    "a cache with a window": cache_reader(window=3, keep=1),
    "a cache of int8": cache_reader(dtype=np.int8),
    "bert": model_reader("bert", LIKE_BERT, use_encoder, beside=POOLED),
    "roberta": model_reader("roberta", LIKE_BERT | dict(max_position_embeddings=11), use_encoder),
    "llama": model_reader("llama", LIKE_LLAMA | dict(rope_scaling=ROPE), use_decoder, beside=GENERATION),
    "qwen2": model_reader("qwen2", LIKE_LLAMA | dict(use_sliding_window=True, sliding_window=3,
                                                     layer_types=["sliding_attention"]), use_decoder),
    "gpt2 in two files": model_reader("gpt2", LIKE_GPT2, use_decoder, shards=2),
}  # fmt: skip


@functools.cache
def good_files(name):
    """The contents of the files of a good folder, by their names."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "folder"
        READERS[name].write(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Refused(Exception):
    """As it must be."""


def check(name, changed):
    """Read the good folder with the `changed` files; None for a file that is missing."""
    reader, files = READERS[name], good_files(name) | changed
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a file holds may be NaN
        folder = Path(place) / "folder"
        for file, data in files.items():
            if data is not None:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(data)
        size = sum(len(data) for data in files.values() if data is not None)
        with traced_memory() as peak_so_far:
            peak = None
            try:
                read = reader.load(folder)
                peak = peak_so_far()
                reader.use(read)  # which reads some of the files
            except (ValueError, FileNotFoundError) as error:
                if str(folder) not in str(error):
                    raise
                raise Refused from None
            finally:
                peak = peak_so_far() if peak is None else peak
                assert peak <= MEMORY[0] + MEMORY[1] * size, f"{peak} bytes of memory for {size} bytes of files"


@contextlib.contextmanager
def traced_memory():
    """A function that returns the most bytes since the beginning.  Who calls very often starts tracemalloc beforehand:
    each start leaves some KB of what NumPy allocates behind (CPython 3.11)."""
    starts = not tracemalloc.is_tracing()
    if starts:
        tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        if starts:
            tracemalloc.stop()


SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # does not wear a disk out


def other_json(draw, contents):
    """The same but for one place, at any depth, which is changed, deleted or doubled."""
    contents = copy.deepcopy(contents)
    places = []

    def walk(inside):
        for key in range(len(inside)) if isinstance(inside, list) else list(inside):
            places.append((inside, key))
            if isinstance(inside[key], (dict, list)):
                walk(inside[key])

    if isinstance(contents, (dict, list)):
        walk(contents)
    if not places:
        return draw(VALUES)
    inside, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["change", "change", "change", "delete", "double"]))
    if what == "delete":
        del inside[key]
    elif what == "double":
        if isinstance(inside, list):
            inside.append(inside[key])
        else:
            inside[draw(st.sampled_from([*inside, "x"]))] = inside[key]
    else:
        inside[key] = draw(VALUES)
    return contents


def other_bytes(draw, data):
    """Some bytes changed, inserted or deleted."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)) | st.integers(0, min(len(data), 140)))
        count = draw(st.sampled_from([0, 0, 1, 1, 2, 8, 100, 10**6]))
        data[at : at + count] = bytes(draw(st.lists(BYTES, max_size=12)))
    return bytes(data)


@st.composite
def damaged(draw, files):
    """Files by name, one or several of them changed."""
    changed = {}
    for name in draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=3)):
        data = changed.get(name, files[name]) or b""
        try:
            if name.endswith(".safetensors"):
                size = 8 + int.from_bytes(data[:8], "little")
                header, rest = json.loads(data[8:size]), data[size:]
            else:
                size, header, rest = 0, json.loads(data), None
        except ValueError:
            size = None
        if draw(st.integers(0, 19)) == 0:
            changed[name] = None
        elif size is None or draw(st.integers(0, 3)) == 0:
            changed[name] = other_bytes(draw, data)
        else:
            text = json.dumps(other_json(draw, header)).encode()
            changed[name] = text if rest is None else len(text).to_bytes(8, "little") + text + rest
    return changed


@settings(PROPERTY, max_examples=examples(1000))
@given(st.data())
def saved_caches(data):
    _check_damaged(data, [name for name in READERS if "cache" in name])


@settings(PROPERTY, max_examples=examples(1000))
@given(st.data())
def models(data):
    _check_damaged(data, [name for name in READERS if "cache" not in name])


def _check_damaged(data, names):
    name = data.draw(st.sampled_from(names))
    try:
        check(name, data.draw(damaged(good_files(name))))
    except Refused:
        pass


@settings(PROPERTY, max_examples=examples(20))
@given(st.sampled_from(list(READERS)))
def good_folders(name):
    """Nothing is refused that is not damaged."""
    check(name, {})


PROPERTIES = {"saved caches": saved_caches, "models": models, "good folders": good_folders}
