"""What the tests of the engine share: kernels, arrays, layouts, and the unit in which errors are measured."""

import itertools
import zlib
from collections import defaultdict

import pytest
from hypothesis import settings
from support.kernels import WIDENING

from sdpa._runtime import kernels

# Which cases of a test run.


def pytest_addoption(parser):
    parser.addoption(
        "--cover", type=int, metavar="N",
        help="of each test run so many cases that each combination of N values of its parameters is in one; 0: one",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config, items):
    strength = config.getoption("cover")
    if strength is None:
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in functions.values() for item in covering(cases, strength)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def covering(cases, strength):
    """Some of the cases of a test function, the same each time, that hold each combination of `strength` values of its
    parameters: first those with many that no other has, for which an order without a pattern is best."""
    parts = {}
    for case in cases:
        values = list(enumerate(case.callspec.id.split("-"))) if hasattr(case, "callspec") else []
        at_most = case.get_closest_marker("cover")
        together = min(strength, len(values), *(at_most.args if at_most else ()))
        parts[case] = set(itertools.combinations(values, together))
    cases = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    seen, kept = set(), []
    for most in range(max(map(len, parts.values())), -1, -1):
        for case in cases:
            if len(parts[case] - seen) > most:
                seen |= parts[case]
                kept.append(case)
    return kept


settings.register_profile("thorough", max_examples=100)
settings.register_profile("quick", max_examples=20)
settings.register_profile("few", max_examples=5)


@pytest.fixture(params=WIDENING.values(), ids=WIDENING)
def kernel(request, monkeypatch):
    """Every test that takes this fixture runs once per instruction set."""
    monkeypatch.setattr(kernels, "default", request.param)
    return request.param
