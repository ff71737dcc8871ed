"""Fuzzers: what the tests ask for, on examples without end, on every kernel of the machine.

    python -m tests.fuzz --minutes 60                           all of them, in turns
    python -m tests.fuzz --minutes 5 --only attention,paged     some of them
    python -m tests.fuzz --only attention --seed 7 --minutes 0  one round again, which failed
    python -m tests.fuzz.guided --minutes 60                    what reads files, guided by coverage (needs atheris)
    python -m tests.fuzz.planted                                whether each target finds a fault planted for it

Begin with targets.py for what is fuzzed, and running.py for how.  Examples come from Hypothesis, so that a failure is
printed with the smallest arguments that Hypothesis finds.
"""

import sys
from pathlib import Path

# What tests import from each other and from tests/support, as pytest lets them.
for _folder in ("models", "layer", "cache", "backward", "attention", "."):
    sys.path.insert(0, str((Path(__file__).parents[1] / _folder).resolve()))
