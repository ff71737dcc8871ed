"""The description of the options: every public function knows those it should, and nothing is written twice."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.accuracy import assert_same_bits
from support.draw import draw
from support.processes import ROOT

import sdpa
from sdpa._options import AttentionOptions, CacheOptions, InputOptions
from sdpa._options.signatures import described

OF_RESULTS = {"return_lse", "out"}
ALL = set(described(AttentionOptions))
TAKES = {
    "attention": ALL,
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
    else:
        call = lambda **wrong: function(name)(*arguments[name], **more, **wrong)  # noqa: E731
    method = name.split(".")[-1]
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'casual'.*'causal'"):
        call(casual=True)


@pytest.mark.parametrize("options", [AttentionOptions, InputOptions, CacheOptions])
def test_all_are_described(options):
    for name, option in described(options).items():
        assert option.meaning.endswith((".", "\n")), name
        assert options.__doc__


def test_help_lists_them():
    for name, option in described(AttentionOptions).items():
        assert f"\n    {name} : {option.meaning[:40]}" in sdpa.attention.__doc__


def test_readme_describes_each():
    text = Path(ROOT, "README.md").read_text(encoding="utf-8")
    for name in ALL:
        assert re.search(rf"`{name}\b", text), name


def test_what_counts_as_what_it_is():
    """Lists, memory maps and other subclasses, and NumPy's own True."""
    query, key, value = draw(dtype=np.float32)
    expected = sdpa.attention(query, key, value, causal=True, sinks=np.arange(4.0))

    class Own(np.ndarray):
        pass

    views = [x.view(Own) for x in (query, key, value)]
    result = sdpa.attention(*views, causal=np.True_, sinks=[0, 1, 2, 3])
    assert type(result) is np.ndarray
    assert_same_bits(result, expected)
    assert_same_bits(sdpa.attention(query, key, value, causal=np.bool_(True), sinks=np.arange(4)), expected)


def test_type_checkers_know_them(tmp_path):
    code = tmp_path / "uses.py"
    code.write_text(
        "import numpy as np, sdpa\nx = np.ones((2, 3))\nsdpa.attention(x, x, x, causal=True, scale=0.5)\n"
        "sdpa.attention(x, x, x, casual=True)\nsdpa.attention_weights(x, x, out=x)\n"
        "sdpa.attention(x, x, x, scale='big')\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path), str(code)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = sorted({int(number) for number in re.findall(r"uses\.py:(\d+): error", said)})
    assert lines == [4, 5, 6], said
