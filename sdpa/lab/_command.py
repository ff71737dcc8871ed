"""`python -m sdpa lab`: the options of the experiments are those of their functions."""

import argparse
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from .._report import drawing, terminal
from . import EXPERIMENTS, _page
from ._experiment import carry_out
from ._machine import machine

PAGE = "sdpa-lab.html"
TEXT = "experiments on attention: which claims about 1/√d_k hold"


def add_to(commands):
    """The command `lab` among those of `python -m sdpa`."""
    description = f"Experiments on attention, on the kernels of sdpa.  All of them: about a minute; writes {PAGE}."
    parser = commands.add_parser("lab", help=TEXT, description=description)
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--html", metavar="FILE", type=file_to_write, help=f"the page, instead of {PAGE}")
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument("--json", metavar="FILE", type=file_to_write, help="write all numbers to this file")
    parser.set_defaults(run=lambda arguments: _all(parser, arguments))
    experiments = parser.add_subparsers(metavar="EXPERIMENT", title="experiments; each has options and --help")
    for experiment in EXPERIMENTS:
        _add_experiment(experiments, experiment)


def _add_experiment(parsers, experiment):
    text = f"{experiment.title}.  {terminal.plain(experiment.claim)}".replace("%", "%%")
    parser = parsers.add_parser(experiment.name, help=experiment.title.replace("%", "%%"), description=text)
    # A default here would overrule what is given before the name of the experiment.
    for flag, what in ("--html", "a page"), ("--json", "the numbers"):
        parser.add_argument(flag, metavar="FILE", type=file_to_write, default=argparse.SUPPRESS, help=f"write {what}")
    for name, default in experiment.options.items():
        flag = f"--{name.replace('_', '-')}"
        read, metavar = _reader(default)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        parser.add_argument(
            flag, metavar=metavar, type=read, default=argparse.SUPPRESS, dest=f"option {name}", help=f"default {shown}"
        )
    parser.set_defaults(run=lambda arguments: _one(experiment, parser, arguments))


def _reader(default):
    """What reads an option, by its default, and how help writes it."""
    if isinstance(default, tuple):
        number, metavar = _reader(sum(default))  # a float if any is
        return lambda text: tuple(number(part) for part in text.split(",")), f"{metavar},..."
    return (_whole, "N") if isinstance(default, int) else (_finite, "X")


def _whole(text):
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _finite(text):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def file_to_write(text):
    """A file that can be written, as far as one can tell before the experiments run."""
    path = Path(text)
    wrong = (
        "is a folder" if path.is_dir()
        else "is in a folder that does not exist" if not path.parent.is_dir()
        else "" if os.access(path if path.exists() else path.parent, os.W_OK)
        else "cannot be written"
    )  # fmt: skip
    if wrong:
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return path


def _all(parser, arguments):
    try:
        page = None if arguments.no_html else arguments.html or file_to_write(PAGE)
    except argparse.ArgumentTypeError as error:
        parser.error(f"the page {error}; choose another with --html, or --no-html")
    progress = terminal.Progress(len(EXPERIMENTS))
    runs = []
    for experiment in EXPERIMENTS:
        runs.append(_carry_out(experiment, {}, progress))
    _print(terminal.summary(runs))
    _write(runs, page, arguments.json)


def _one(experiment, parser, arguments):
    if arguments.no_html and arguments.html:
        parser.error("argument --html: not allowed with argument --no-html")
    chosen = {name.split()[1]: value for name, value in vars(arguments).items() if name.startswith("option ")}
    try:
        run = _carry_out(experiment, chosen, terminal.Progress(1))
    except ValueError as error:
        # The functions name the arguments that are wrong; anything else is a fault of theirs.
        wrong = [name for name in chosen if re.search(rf"\b{name}\b", str(error))]
        if not wrong:
            raise
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        parser.error(f"argument {options}: {error}")
    _print(terminal.report(run))
    _write([run], arguments.html, arguments.json)


def _carry_out(experiment, chosen, progress):
    progress.begin(experiment.name)
    try:
        run = carry_out(experiment, chosen, progress)
    except BaseException:
        progress.clear()
        raise
    progress.end(run.seconds)
    return run


def _print(text):
    """Also where the terminal has no √."""
    coding = sys.stdout.encoding or "utf-8"
    print(text.encode(coding, "replace").decode(coding))


def _write(runs, page, numbers):
    if page is not None:
        figures = drawing.available()
        page.write_text(_page.page(runs, figures=figures, date=time.strftime("%Y-%m-%d %H:%M")), encoding="utf-8")
        print(f"\nThe page{'' if figures else ', without figures'}: {page.resolve()}")
        if not figures:
            print("Figures need matplotlib: pip install matplotlib")
    if numbers is not None:
        record = {"machine": machine(), "experiments": {run.experiment.name: _record(run) for run in runs}}
        text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
        numbers.write_text(text, encoding="utf-8")
        print(f"The numbers: {numbers.resolve()}")


def _record(run):
    findings = [finding._asdict() for finding in run.experiment.findings(run.numbers)]
    options = run.experiment.options | run.chosen
    return {"options": options, "seconds": run.seconds, "findings": findings, "numbers": run.numbers}


def _plain(value):
    """As JSON has it: arrays are lists, and numbers that are not finite strings."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == np.float32:
            value = value.astype(str).astype(float)  # with the digits that tell it from others, half of those it has
        value = value.tolist() if value.dtype.kind in "biufSU" else value.astype(float).tolist()
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    return value
