"""What is fuzzed: a name, and a function of a seed that draws examples and checks them.

Most targets are properties and state machines of the tests.  What the tests have no property for is in the other
modules of this package.
"""

import importlib.util
import inspect

import test_backward
import test_cache
import test_layer
import test_options_property
import test_paged
import test_varlen
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from sdpa._runtime import kernels

from . import arguments, calls, commands, files, laboratory, layers, models, ranks

STEPS = 40  # of a state machine, in each example


def of_property(test):
    """A property is a test for Hypothesis; it may ask for the kernel, as the fixture of that name gives it."""
    takes_kernel = "kernel" in inspect.signature(test).parameters

    def run(number):
        seed(number)(test)(*([kernels.default] if takes_kernel else []))

    return run


def of_machine(machine):
    def run(number):
        run_state_machine_as_test(seed(number)(machine), settings=settings(deadline=None, stateful_step_count=STEPS))

    return run


PROPERTIES = {
    "attention": test_options_property.test_any_problem,
    "weights": test_options_property.test_any_weights,
    "hidden keys": test_options_property.test_keys_that_nobody_sees_may_hold_anything,
    "varlen": test_varlen.test_any_lengths,
    "backward": test_backward.test_any_problem,
    "varlen backward": test_backward.test_any_sequences,
    "multi-head attention": test_layer.test_any_combination,
    **calls.PROPERTIES,
    **layers.PROPERTIES,
    **arguments.PROPERTIES,
    **files.PROPERTIES,
    **models.PROPERTIES,
    **commands.PROPERTIES,
    **laboratory.PROPERTIES,
}
LEFT_OUT = [name for name in ("torch", "transformers", "matplotlib", "mpi4py") if not importlib.util.find_spec(name)]
if "torch" not in LEFT_OUT:
    from . import with_torch

    PROPERTIES |= with_torch.PROPERTIES
MACHINES = {"cache": test_cache.AnyOrder, "paged": test_paged.History}
TARGETS = {name: of_property(test) for name, test in PROPERTIES.items()}
TARGETS |= {name: of_machine(machine) for name, machine in MACHINES.items()}
TARGETS |= ranks.TARGETS
