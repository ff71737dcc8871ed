"""The command line: python -m sdpa info | demo | embed | generate | distributed | lab | bench."""

import argparse

import sdpa

from ._commands import bench, demo, distributed, embed, generate
from ._commands.info import info
from .lab import _command


def main():
    parser = argparse.ArgumentParser(prog="python -m sdpa", description=sdpa.__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, text in (
        ("info", info, "what was built, and which kernel this machine uses"),
        ("demo", demo.demo, "a few calls against plain NumPy: the same numbers, and how much faster (a few seconds)"),
    ):
        commands.add_parser(name, help=text, description=text).set_defaults(run=lambda _, run=run: run())
    for command in (embed, generate, distributed, _command):
        command.add_to(commands)
    # Its options are those of benchmarks/compare.py, --help among them.
    commands.add_parser("bench", help=bench.TEXT, add_help=False).set_defaults(run=None)
    arguments, others = parser.parse_known_args()
    if arguments.run is None:
        bench.bench(others)
        return
    if hasattr(arguments, "texts") and not any(other.startswith("-") for other in others):
        arguments.texts += others  # argparse takes none of them after an option
        others = []
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.run(arguments)


if __name__ == "__main__":
    main()
