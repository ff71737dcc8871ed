"""`python -m sdpa` with any arguments: it ends with a result or a message, never with a traceback."""

import atexit
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import PROPERTY, examples

from sdpa.__main__ import main

from .files import READERS


@functools.cache
def folders():
    """Of an encoder, of a decoder, and of nothing; with the same names in each run, which a seed draws from."""
    place = Path(tempfile.gettempdir()) / f"sdpa-fuzz-{os.getpid()}"
    place.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for name in ("bert", "llama"):
        READERS[name].write(place / name)
    return [str(place / name) for name in ("bert", "llama", "nothing")]


WORDS = st.sampled_from(
    ["", "-", "--", "1 2 3", "1,2", "0", "-1", "6", "7", "99999999999999999999", "a cat", "1 x", "é"]
)
NUMBER = st.sampled_from(["0", "1", "2", "3", "-1", "1.5", "x", "", "nan", "inf", "1e400", "99999999999999999999"])
FEW = NUMBER.filter(lambda text: len(text) < 10)  # tokens, one after the other
DTYPE = st.sampled_from(["float16", "bfloat16", "float32", "float64", "int8", "float31", ""])
OPTIONS = {
    "--ids": st.none(), "--dtype": DTYPE, "--threads": NUMBER, "--npy": st.just("-"), "--json": st.just("-"),
    "--tokens": FEW, "--temperature": NUMBER, "--top-k": NUMBER, "--top-p": NUMBER, "--seed": NUMBER, "--cache": DTYPE,
    "--help": st.none(), "--nothing": st.none(),
}  # fmt: skip


@st.composite
def lines(draw):
    command = draw(st.sampled_from(["embed", "generate", "generate", "info", "lab", "", "nothing"]))
    line = [command, draw(st.sampled_from(folders())), draw(WORDS)] if command in ("embed", "generate") else [command]
    if command == "lab":
        return [command, draw(st.sampled_from(["--help", "nothing", "--seeds", "-1"]))]
    for option in draw(st.lists(st.sampled_from(list(OPTIONS)), max_size=5)):
        value = draw(OPTIONS[option])
        line += [option] if value is None else [option, value]
    if draw(st.booleans()):
        line.append("--ids")
    return line


@settings(PROPERTY, max_examples=examples(300))
@given(lines(), WORDS)
def commands(line, given):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        mock.patch.object(sys, "argv", ["sdpa", *line]), mock.patch.object(sys, "stdin", io.StringIO(given)),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as errors, warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        try:
            main()
        except SystemExit as end:
            assert end.code in (None, 0, 2), (end.code, errors.getvalue())


PROPERTIES = {"commands": commands}
