"""`python -m sdpa embed` and `generate`, as a user calls them."""

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from support.models import bytes_tokenizer, write_model
from support.processes import ROOT

import sdpa
from sdpa._commands import embed, generate


def command(*arguments, given="", **environment):
    run = subprocess.run(
        [sys.executable, "-m", "sdpa", *map(str, arguments)], input=given.encode(), capture_output=True, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip
    return run.returncode, run.stdout, run.stderr.decode()


def output(*arguments, **options):
    code, out, error = command(*arguments, **options)
    assert code == 0, error
    return out


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "bert", "bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def test_vectors_of_ids(bert, tmp_path):
    expected = sdpa.models.load(bert).embed([[5, 6, 7], [8, 9]])
    output("embed", bert, "5 6 7", "8, 9", "--ids", "--npy", tmp_path / "v.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)
    out = output("embed", bert, "--ids", "--npy", "-", given="5 6 7\n\n8 9\n")
    np.testing.assert_array_equal(np.load(io.BytesIO(out)), expected)
    found = json.loads(output("embed", bert, "--ids", "--json", "-", "5 6 7", "8 9"))
    assert [one["text"] for one in found] == ["5 6 7", "8 9"]
    np.testing.assert_allclose([one["vector"] for one in found], expected, atol=1e-6)
    double = np.load(io.BytesIO(output("embed", bert, "5 6 7", "--ids", "--npy", "-", "--dtype", "float64")))
    assert double.dtype == np.float64


def test_the_table_has_the_cosines(bert):
    lines = output("embed", "--ids", bert, "5 6 7", "8 9", "5 6 7").decode().splitlines()
    vectors = sdpa.models.load(bert).embed([[5, 6, 7], [8, 9], [5, 6, 7]])
    assert lines[0].split() == ["1", "2", "3"]
    for line, text, row in zip(lines[1:], ("5 6 7", "8 9", "5 6 7"), vectors @ vectors.T):
        numbers, shown = line.split("  " + text)[0].split(), line.endswith(text)
        assert shown
        np.testing.assert_allclose([float(number) for number in numbers[1:]], row, atol=1e-3)


def test_many_texts_are_embedded_in_parts(bert, monkeypatch, capsysbinary):
    monkeypatch.setattr(embed, "AT_ONCE", 2)
    monkeypatch.setattr(sys, "argv", ["sdpa", "embed", str(bert), "--ids", *"23456", "--npy", "-"])
    from sdpa.__main__ import main

    main()
    found = np.load(io.BytesIO(capsysbinary.readouterr().out))
    np.testing.assert_allclose(found, sdpa.models.load(bert).embed([[2], [3], [4], [5], [6]]), atol=1e-6)


def test_tokens_come_as_numbers(llama):
    expected = list(sdpa.models.load(llama).generate([5, 6, 7], 9))
    code, out, error = command("generate", llama, "5 6 7", "--ids", "--tokens", 9)
    assert code == 0 and [int(token) for token in out.split()] == expected
    assert re.fullmatch(r"3 tokens read in \d+\.\d\d s; 9 generated, \d+\.\d a second\n", error)
    options = ["--temperature", 1.2, "--top-k", 40, "--top-p", 0.9, "--seed", 3]
    out = output("generate", llama, "-", "--ids", "--tokens", 9, *options, given="5 6 7")
    expected = sdpa.models.load(llama).generate([5, 6, 7], 9, temperature=1.2, top_k=40, top_p=0.9, seed=3)
    assert [int(token) for token in out.split()] == list(expected)
    assert (
        len(output("generate", llama, "5", "--ids", "--tokens", 2, "--cache", "int8", "--dtype", "float64").split())
        == 2
    )
    assert "1 tokens read" in command("generate", llama, "5", "--ids", "--tokens", 1)[2]


def test_text(llama):
    bytes_tokenizer(llama)
    model = sdpa.models.load(llama)
    expected = "".join(model.generate("für", 12))
    assert output("generate", llama, "für", "--tokens", 12, PYTHONIOENCODING="utf-8").decode() == expected + "\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("embed", "nowhere", "text"), "embed: error: nowhere is no folder"),
        (("embed", "{bert}"), "embed: error: no TEXT is given, and none on the standard input"),
        (("embed", "{bert}", "--ids", "5 x"), "error: '5 x': with --ids it must be whole numbers"),
        (("embed", "{bert}", "--ids", "5 97"), "error: ids are from 5 to 97"),
        (("embed", "{bert}", "--ids", "9" * 20), "error: ids have dtype object: they must be whole numbers"),
        (("embed", "{bert}", "text"), "error: .*tokenizer.json is missing: .* token ids must be given"),
        (("embed", "{bert}", "--ids", "5", "--dtype", "int8"), "error: dtype is 'int8'"),
        (("embed", "{llama}", "--ids", "5"), "error: .* has the model 'llama': it must be of the kind Encoder"),
        (("embed", "{bert}", "--fast", "5"), "unrecognized arguments: --fast"),
        (("embed", "{bert}", "--npy", "a", "--json", "b", "5"), "not allowed with argument"),
        (("generate", "{bert}", "--ids", "5"), "error: .* has the model 'bert': it must be of the kind Decoder"),
        (("generate", "{llama}", "--ids", "5", "--top-p", "2"), "error: top_p is 2.0"),
        (("generate", "{llama}", "--ids", "5", "--cache", "int7"), "error: dtype is 'int7'"),
        (("generate", "{llama}", "--ids", "5", "6"), "unrecognized arguments: 6"),
        (("generate", "{llama}"), "the following arguments are required: PROMPT"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, bert, tmp_path):
    llama = write_model(tmp_path / "llama", "llama")
    code, out, error = command(*(one.format(bert=bert, llama=llama) for one in arguments))
    assert code == 2 and not out
    assert re.search(message, error) and "Traceback" not in error and "usage: python -m sdpa" in error


@pytest.mark.parametrize("name", ["embed", "generate"])
def test_help_has_examples(name):
    shown = output(name, "--help").decode()
    assert "examples:\n" in shown
    text = {"embed": embed, "generate": generate}[name].EXAMPLES
    for line in text.splitlines()[1:]:
        assert line in shown
        assert re.match(rf"  (mpiexec -n \d+ )?python -m sdpa {name} ", line)
