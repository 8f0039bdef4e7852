"""What `make test` leaves out is never all cases of a value."""

from __future__ import annotations

import itertools

import pytest

from tests.sample import diagonals


def test_each_value_of_each_factor_is_run_and_an_nth_of_all_cases() -> None:
    for shape in (shape for count in (2, 3, 4) for shape in itertools.product((2, 3, 4, 5, 9), repeat=count)):
        cases = list(itertools.product(*map(range, shape)))
        chosen = [cases[number] for number in diagonals(cases)]
        for factor, values in enumerate(shape):
            assert {case[factor] for case in chosen} == set(range(values)), shape
        assert len(chosen) * min(shape) <= len(cases) + len(cases) // max(shape), shape


@pytest.mark.parametrize("shape", [(3, 2, 2), (9, 2, 2), (4, 2, 2), (2, 2, 2), (5, 3, 3), (4, 2, 3, 2)], ids=str)
def test_two_factors_meet_in_each_pair_of_their_values_where_there_is_a_third(shape: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, shape)))
    chosen = [cases[number] for number in diagonals(cases)]
    for one, other in itertools.combinations(range(len(shape)), 2):
        pairs = {(case[one], case[other]) for case in chosen}
        assert pairs == set(itertools.product(range(shape[one]), range(shape[other])))


def test_values_given_together_are_one_factor_and_one_factor_is_run_whole() -> None:
    assert diagonals([(0, 0), (1, 1), (2, 2)]) == [0, 1, 2]
    assert diagonals([(0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)]) == [0, 3]
    assert diagonals([(0, 0), (0, 1), (0, 2)]) == [0, 1, 2]
    assert diagonals([]) == []
