"""The command line: python -m sdpa info | demo | lab."""

import argparse

import sdpa

from . import _demo
from .lab import _command


def info():
    """What was built and what of it is in use, a line each."""
    for name, value in sdpa.build_info().items():
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        print(f"{name.replace('_', ' '):14}{value}")


def main():
    parser = argparse.ArgumentParser(prog="python -m sdpa", description=sdpa.__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, text in (
        ("info", info, "what was built, and what of it this machine uses"),
        ("demo", _demo.demo, "a few calls against plain NumPy: the same numbers, and how much faster (a few seconds)"),
    ):
        commands.add_parser(name, help=text, description=text).set_defaults(run=lambda _, run=run: run())
    _command.add_to(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
