"""The description of the options: every public function knows those it should, and documents follow from it."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.accuracy import assert_same_bits
from support.draw import draw, rng
from support.processes import ROOT

import sdpa
from sdpa._options import WORDS, AttentionOptions, CacheOptions, InputOptions
from sdpa._options.signatures import described

OF_RESULTS = {"return_lse", "out"}
ALL = set(described(AttentionOptions))
TAKES = {
    "attention": ALL,
    "explain": ALL,
    "additive_attention": ALL,
    "attention_varlen": ALL,
    "attention_weights": ALL - OF_RESULTS,
    "attention_backward": ALL - {"return_lse"},  # out is an argument
    "attention_varlen_backward": ALL - {"return_lse"},
    "KVCache.attend": ALL - {"kv_lengths"},
    "PagedKVCache.attend": ALL,
    "MultiHeadAttention.__call__": ALL - OF_RESULTS,
}


def function(name):
    first, *rest = name.split(".")
    found = getattr(sdpa, first)
    return getattr(found, rest[0]) if rest else found


def options_of(name):
    """name: default, of the keywords of the signature that are options."""
    parameters = inspect.signature(function(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in ALL}


@pytest.mark.parametrize("name", TAKES)
def test_who_knows_which_options(name):
    """An option that is added to the description is known to all of these, or this fails."""
    known = set(inspect.signature(function(name)).parameters)
    assert known & ALL == TAKES[name]


@pytest.mark.parametrize("name", TAKES)
def test_an_unknown_option_is_named(name):
    query, key, value = draw(B=1)
    packed = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    arguments = {
        "attention": (query, key, value),
        "explain": (query, key, value),
        "additive_attention": (query, key, value, np.ones((3, 20)), np.ones((3, 20)), np.ones(3)),
        "attention_varlen": packed,
        "attention_weights": (query, key),
        "attention_backward": (query, query, key, value, query, query),
        "attention_varlen_backward": (packed[0], *packed, packed[0], packed[0]),
    }
    more = {"cu_seqlens_q": [0, 37], "cu_seqlens_k": [0, 133]} if "varlen" in name else {}
    if "Multi" in name:
        layer = sdpa.MultiHeadAttention(20, 1, in_proj_weight=np.ones((60, 20)), out_proj_weight=np.ones((20, 20)))
        call = lambda **wrong: layer(query[0, 0], **wrong)  # noqa: E731
    elif "Cache" in name:
        cache = sdpa.KVCache(1, 2, 20) if name[0] == "K" else sdpa.PagedKVCache(9, 4, 2, 20)
        call = lambda **wrong: cache.attend(query[0], *([] if name[0] == "K" else [cache.allocate()]), **wrong)  # noqa: E731
    elif "Multi" in name:
        layer = sdpa.MultiHeadAttention(20, 1, in_proj_weight=np.ones((60, 20)), out_proj_weight=np.ones((20, 20)))
        call = lambda **wrong: layer(query[0, 0], **wrong)  # noqa: E731
    else:
        call = lambda **wrong: function(name)(*arguments[name], **more, **wrong)  # noqa: E731
    method = name.split(".")[-1]
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'softcup'.*'softcap'"):
        call(softcup=2.0)


@pytest.mark.parametrize("options", [AttentionOptions, InputOptions, CacheOptions])
def test_all_are_described(options):
    for name, option in described(options).items():
        assert option.kind and option.meaning.endswith("."), name
        assert options.__doc__


@pytest.mark.parametrize("name", TAKES)
def test_help_lists_them(name):
    """All options of the signature, in its order, with their defaults; no word was left to be filled in."""
    text = inspect.getdoc(function(name))
    assert not re.search(r"\{\w+\}", text)
    listed = re.findall(r"^(\w+) : .*?(?:, default (\w+))?$", text, re.MULTILINE)
    taken = [(option, "" if default is None else str(default)) for option, default in options_of(name).items()]
    assert [one for one in listed if one in taken] == taken


def in_table(text):
    """With shapes as code."""
    return re.sub(r"(?<= )\([A-Z, ]+\)", r"`\g<0>`", text.format_map(WORDS))


def test_the_table_of_the_documentation():
    """It follows from the description, and from the signatures."""
    takers = [name for name in TAKES if name not in ("explain", "additive_attention", "attention_varlen")]
    lines = ["| option | what it is | what it does | not an option of |", "|---|---|---|---|"]
    for name, option in described(AttentionOptions).items():
        kind = in_table(option.kind) + ("" if option.default is None else f", default {option.default}")
        without = ", ".join(f"`{taker.removesuffix('.__call__')}`" for taker in takers if name not in options_of(taker))
        lines.append(f"| `{name}` | {kind} | {in_table(option.meaning)} | {without} |")
    table = "\n".join(lines) + "\n"
    page = "docs/reference/options.md"
    assert table in Path(ROOT, page).read_text(encoding="utf-8"), f"paste this into {page}:\n\n{table}"


@pytest.mark.parametrize("name", ["softcap", "alibi_slopes"])
def test_hacking_names_all_files_that_know_an_option(name):
    hacking = Path(ROOT, "HACKING.md").read_text(encoding="utf-8")
    section = hacking.split("## A mask, or another option\n")[1].split("\n## ")[0]
    named = re.findall(r"\]\(([\w/.]+)\)", section)
    files = [file for folder in ("sdpa", "csrc", "tests/support") for file in Path(ROOT, folder).rglob("*.*")]
    written = [file for file in files if file.suffix in {".py", ".pyx", ".pxi", ".c", ".h"} and file.name != "_core.c"]
    know = [file for file in written if re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))]
    assert len(know) > 5 and {file.relative_to(ROOT).as_posix() for file in know} <= set(named)


class Own(np.ndarray):
    pass


def mapped(array, folder):
    """The same in a file that is mapped into memory."""
    file = np.memmap(folder / f"{len(list(folder.iterdir()))}.bin", array.dtype, "w+", shape=array.shape)
    file[...] = array
    return file


KINDS = {
    "lists": lambda array, folder: array.tolist(),
    "a subclass": lambda array, folder: array.view(Own),
    "memory maps": mapped,
    "read-only": lambda array, folder: np.broadcast_to(array, array.shape),
}


def weighted(query, key, value, options):
    """Calls of all public functions on arrays that `given` makes of plain ones, with a flag that is `true`."""
    out, lse = sdpa.attention(query, key, value, return_lse=True, **options)
    turned = [x[0].swapaxes(0, 1).copy() for x in (query, key, value)]
    packed, packed_lse = sdpa.attention_varlen(*turned, cu_seqlens_q=[0, 5], return_lse=True, **options)
    rows, names = np.array([0, 5]), list(options)

    def call(function, arrays, given, true, **more):
        chosen = dict(zip(names, map(given, options.values()))) | {"causal": true}
        return function(*map(given, arrays), **chosen, **{name: given(x) for name, x in more.items()})

    def cache(given, true):
        cache = sdpa.KVCache(1, 2, 6, value_dim=12, dtype=np.float64)
        cache.append(given(key), given(value), lengths=given(np.array([5])))
        return call(cache.attend, [query], given, true), cache.keys

    def pages(given, true):
        cache = sdpa.PagedKVCache(4, 4, 2, 6, value_dim=12, dtype=np.float64)
        sequence = cache.allocate()
        cache.append(given(np.array([sequence])), given(turned[1]), given(turned[2]), given(rows))
        attend = lambda query, **more: cache.attend(query, given(np.array([sequence])), **more)  # noqa: E731
        return call(attend, turned[:1], given, true, cu_seqlens_q=rows)

    def layer(given, true):
        weights = rng(3).standard_normal((24, 8)), rng(4).standard_normal((8, 24))
        own = sdpa.MultiHeadAttention(
            8, 2, head_dim=4, in_proj_weight=given(weights[0]), out_proj_weight=given(weights[1][:, :8]),
            in_proj_bias=given(weights[0][:, 0]), batch_first=true, rotary={"interleaved": true},
        )  # fmt: skip
        inputs = [np.ones((2, 5, 8)) * np.arange(8)]
        return call(own, inputs, given, true, positions=np.arange(5)), own(*map(given, inputs), return_weights=true)

    return {
        "attention": lambda *by: call(sdpa.attention, (query, key, value), *by),
        "attention, return_lse": lambda given, true: sdpa.attention(given(query), key, value, return_lse=true),
        "attention_weights": lambda *by: call(sdpa.attention_weights, (query, key), *by),
        "attention_backward": lambda *by: call(
            sdpa.attention_backward, (out, query, key, value, out, lse), *by, grad_lse=lse
        ),
        "attention_varlen": lambda *by: call(sdpa.attention_varlen, turned, *by, cu_seqlens_q=rows, cu_seqlens_k=rows),
        "attention_varlen_backward": lambda *by: call(
            sdpa.attention_varlen_backward, (packed, *turned, packed, packed_lse), *by, cu_seqlens_q=rows
        ),
        "additive_attention": lambda *by: call(
            sdpa.additive_attention, (query, key, value, np.ones((3, 6)), np.ones((3, 6)), np.ones(3)), *by
        ),
        "scaled_dot_product_attention": lambda given, true: sdpa.scaled_dot_product_attention(
            *map(given, (query, key, value)), is_causal=true, enable_gqa=true
        ),
        "merge": lambda given, true: sdpa.merge([given(out)] * 2, [given(lse)] * 2),
        "rotary": lambda given, true: sdpa.rotary(given(query), given(np.arange(5)), interleaved=true),
        "explain": lambda *by: call(sdpa.explain, (query, key, value), *by)[:7],
        "KVCache": cache,
        "PagedKVCache": pages,
        "MultiHeadAttention": layer,
    }


NAMES = list(weighted(*draw(1, 2, 2, 5, 5, 6, dtype=np.float64), {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_counts_as_what_it_is(name, kind, tmp_path):
    """Lists, memory maps and other subclasses, and NumPy's own True: of every public function."""
    options = dict(bias=rng(1).standard_normal((5, 5)), mask=rng(2).random((5, 5)) < 0.9, sinks=np.arange(2.0))
    call = weighted(*draw(1, 2, 2, 5, 5, 6, dtype=np.float64), options)[name]
    results = call(lambda array: array, True), call(lambda array: KINDS[kind](array, tmp_path), np.True_)
    for expected, found in zip(*map(leaves, results), strict=True):
        assert type(found) is type(expected)
        if isinstance(found, np.ndarray):
            assert_same_bits(found, expected)
        else:
            assert found == expected


def leaves(result):
    if isinstance(result, tuple):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def test_type_checkers_know_them(tmp_path):
    code = tmp_path / "uses.py"
    code.write_text(
        "import numpy as np, sdpa\nx = np.ones((2, 3))\nsdpa.attention(x, x, x, causal=True, scale=0.5)\n"
        "sdpa.attention(x, x, x, casual=True)\nsdpa.attention_weights(x, x, out=x)\n"
        "sdpa.attention(x, x, x, scale='big')\nsdpa.explain(x, x, x, casual=True)\n"
        "sdpa.KVCache(1, 1, 3).attend(x, kv_lengths=1)\n"
        "layer = sdpa.MultiHeadAttention(3, 1, out_proj_weight=x)\nlayer(x, causal=True, softcap=1.0)\n"
        "layer(x, softcup=1.0)\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path), str(code)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = sorted({int(number) for number in re.findall(r"uses\.py:(\d+): error", said)})
    assert lines == [4, 5, 6, 7, 8, 11], said
