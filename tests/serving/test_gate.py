"""The gate: phases, exact means, metrics that are not finite."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.serving.gate import Gate, GateComparison, Verdict
from aiograd.serving.versions import Version

_NUMBERS = st.floats(-1e6, 1e6)
NEWER, OLDER = (Version.of(number, {}, digest="") for number in (2, 1))


def comparison(*, is_probation: bool = False, **options: Any) -> GateComparison:
    """A comparison with the outputs as metric."""
    return GateComparison(Gate(lambda outputs: outputs, **options), NEWER, OLDER, is_probation=is_probation)


def judged(compared: GateComparison, newer: list[float], older: list[float]) -> Verdict:
    return compared.judge((np.array(newer), np.array(older)), (), len(newer))


@given(
    st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 9), st.floats(0, 100), st.booleans()
)  # fmt: skip
def test_a_verdict_follows_from_exact_means(
    pairs: list[tuple[float, float]], window: int, batch: int, tolerance: float, is_probation: bool
) -> None:
    compared = comparison(window=window, tolerance=tolerance, is_probation=is_probation)
    for start in range(0, len(pairs), batch):
        part = pairs[: start + batch]
        newer, older = (list(column) for column in zip(*part[start:], strict=True))
        verdict = judged(compared, newer, older)
        means = [sum(map(Fraction, column)) / len(part) for column in zip(*part, strict=True)]
        assert compared.rows == len(part)
        assert [total / len(part) for total in compared.sums] == pytest.approx([float(mean) for mean in means], abs=1e-9)
        if len(part) < window:
            assert verdict is Verdict.WAIT
            continue
        margin = means[0] - means[1] - Fraction(tolerance)
        if abs(margin) > 1e-8:
            worse, better = (Verdict.ROLLBACK, Verdict.KEEP) if is_probation else (Verdict.DROP, Verdict.PROMOTE)
            assert verdict is (worse if margin > 0 else better)
        return


def test_the_version_that_serves_and_whole_batches() -> None:
    assert comparison().serving is OLDER and comparison(is_probation=True).serving is NEWER
    compared = comparison(window=2)
    assert [judged(compared, [1.0], [1.5]), judged(compared, [1.0], [0.5])] == [Verdict.WAIT, Verdict.PROMOTE]
    assert judged(comparison(window=2), [1.0, 1.0, 9.0], [1.0, 1.0, 8.0]) is Verdict.DROP, "the batch in which the window ends is judged whole"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_the_worst(bad: float) -> None:
    assert judged(comparison(window=2, tolerance=1e9), [bad, -1e9], [1.0, 1.0]) is Verdict.DROP
    assert judged(comparison(window=2), [1e300, 1e300], [bad, 0.0]) is Verdict.PROMOTE
    assert judged(comparison(window=2), [bad, 0.0], [bad, 0.0]) is Verdict.DROP, "a candidate shows that it is finite"
    for newer, older, verdict in (([bad], [1.0], Verdict.ROLLBACK), ([1.0], [bad], Verdict.KEEP), ([bad], [bad], Verdict.KEEP)):
        assert judged(comparison(window=1, is_probation=True), newer, older) is verdict
    early = comparison(window=2)
    assert judged(early, [bad], [0.0]) is Verdict.WAIT and judged(early, [0.0], [9e9]) is Verdict.DROP


def test_sums_beyond_the_largest_number() -> None:
    assert judged(comparison(window=2), [1.7e308, 1.7e308], [1.0, 1.0]) is Verdict.DROP
    assert judged(comparison(window=2), [1.0, 1.0], [1.7e308, 1.7e308]) is Verdict.PROMOTE


def test_good_bad_and_drifting_streams() -> None:
    rng = np.random.default_rng(0)
    for shift, verdict in ((-0.2, Verdict.PROMOTE), (0.2, Verdict.DROP)):
        noise = rng.random((200, 2))
        assert judged(comparison(), list(noise[:, 0] + shift), list(noise[:, 1])) is verdict
    assert judged(comparison(window=100), [0.5] * 100, [0.6] * 100) is Verdict.PROMOTE
    assert judged(comparison(window=100, is_probation=True), [0.5 + n / 100 for n in range(100)], [0.6] * 100) is Verdict.ROLLBACK


# ---- metrics


@pytest.mark.parametrize(
    "result", [np.array([1.0, 2.0]), np.array([1, 2], np.int32), [1.0, 2.0], (1, 2), ag.tensor([1.0, 2.0], requires_grad=True), np.float32([1, 2])]
)
def test_results_of_a_metric(result: Any) -> None:
    assert measured(lambda outputs: result) == [1, 2]


def measured(metric: Any, *targets: Any, outputs: Any = None) -> list[float]:
    return GateComparison(Gate(metric), NEWER, OLDER)._measure(outputs, targets, 2)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (np.array(1.0), "float64 of shape []"),
        (np.ones(3), "float64 of shape [3]"),
        (np.ones((2, 1)), "float64 of shape [2, 1]"),
        (ag.ones(3), "float32 of shape [3]"),
        (np.ones(2, complex), "complex128 of shape [2]"),
        (["a", "b"], "<U1 of shape [2]"),
        ("ab", "<U2 of shape []"),
        (None, "a NoneType"),
        ([[1.0], [1.0, 2.0]], "a list"),
        (object(), "a object"),
        (np.ma.array([1.0, 2.0], mask=[True, False]), "a MaskedArray"),
    ],
)
def test_results_that_are_not_one_number_per_row(result: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match="expected one number per row") as error:
        measured(lambda outputs, targets: result, None)
    assert f"returned {found}," in str(error.value)


def test_targets_are_passed_on_and_errors_of_a_metric_are_its_own() -> None:
    assert measured(lambda outputs, x, y: outputs + x * y, 3, 4, outputs=np.ones(2)) == [13, 13]
    compared = GateComparison(Gate(lambda outputs: 1 / 0 if outputs is None else outputs, window=1), NEWER, OLDER)
    with pytest.raises(ZeroDivisionError):
        compared.judge((np.ones(1), None), (), 1)
    assert (compared.rows, compared.sums) == (0, (0.0, 0.0)), "a batch adds nothing if its metric fails"


@pytest.mark.parametrize(("option", "values"), [("window", (0, 2.5, True, None)), ("tolerance", (-1.0, math.nan, math.inf, "0"))])
def test_options_of_a_gate(option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ArgumentError, match=rf"^Gate\({option}="):
            Gate(len, **{option: value})
    with pytest.raises(ArgumentTypeError, match=r"expected a function metric\(outputs, \*targets\), found str"):
        Gate("loss")  # type: ignore[arg-type]
