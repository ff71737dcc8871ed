"""The choice of cases with --cover."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import covering

PARAMETERS = ["abcdef", "uvwxyz", "1234", "+*"]


class Case:
    """What `covering` asks of a test item."""

    def __init__(self, values, marked=None):
        self.values, self.marked = values, marked
        self.callspec = SimpleNamespace(id="-".join(values))
        self.nodeid = f"test[{self.callspec.id}]"

    def get_closest_marker(self, name):
        return self.marked if name == "cover" else None


def cases(**more):
    return [Case(values, **more) for values in itertools.product(*PARAMETERS)]


@pytest.mark.parametrize("strength, most", [(0, 1), (1, 6), (2, 40), (3, 150), (4, 288), (9, 288)])
def test_each_combination_is_in_a_case(strength, most):
    kept = [case.values for case in covering(cases(), strength)]
    together = min(strength, len(PARAMETERS))
    for places in itertools.combinations(range(len(PARAMETERS)), together):
        wanted = set(itertools.product(*(PARAMETERS[place] for place in places)))
        assert {tuple(values[place] for place in places) for values in kept} == wanted
    assert len(kept) == len(set(kept)) <= most


def test_the_choice_is_the_same_each_time_and_in_any_order():
    first, second = (covering(some, 2) for some in (cases(), cases()[::-1]))
    assert {case.values for case in first} == {case.values for case in second}


def test_a_mark_asks_for_less_not_for_more():
    mark = SimpleNamespace(args=(1,))
    assert len(covering(cases(marked=mark), 2)) == len(covering(cases(), 1))
    assert len(covering(cases(marked=SimpleNamespace(args=(3,))), 2)) == len(covering(cases(), 2))


def test_a_test_without_parameters_is_a_case():
    alone = Case("")
    del alone.callspec
    assert covering([alone], 2) == [alone]
