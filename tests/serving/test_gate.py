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
from aiograd.errors import ArgumentError, ArgumentTypeError, ServingError
from aiograd.serving.gate import Gate, GatePhase, Verdict

_NUMBERS = st.floats(-1e6, 1e6)


def begun(**options: Any) -> Gate:
    gate = Gate(lambda outputs, targets: outputs - targets, **options)
    gate.begin()
    return gate


def judged(gate: Gate, newer: list[float], older: list[float]) -> Verdict:
    return gate.judge(np.array(newer), np.array(older)).verdict


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 9), st.floats(0, 100))
def test_a_verdict_follows_from_exact_means(pairs: list[tuple[float, float]], window: int, batch: int, tolerance: float) -> None:
    gate = begun(window=window, tolerance=tolerance)
    for start in range(0, len(pairs), batch):
        part = pairs[: start + batch]
        newer, older = zip(*part[start:], strict=True)
        decision = gate.judge(np.array(newer), np.array(older))
        means = [sum(map(Fraction, column)) / len(part) for column in zip(*part, strict=True)]
        assert decision.rows == len(part) and [decision.newer, decision.older] == pytest.approx([float(mean) for mean in means], abs=1e-9)
        if len(part) < window:
            assert decision.verdict is Verdict.WAIT and gate.phase is GatePhase.CANDIDATE
            continue
        margin = means[0] - means[1] - Fraction(tolerance)
        if abs(margin) > 1e-8:
            assert decision.verdict is (Verdict.DROP if margin > 0 else Verdict.PROMOTE)
        return


@given(st.lists(_NUMBERS, min_size=1, max_size=30), st.lists(_NUMBERS, min_size=30, max_size=30), st.booleans())
def test_probation_compares_the_same_way(newer: list[float], older: list[float], is_split: bool) -> None:
    gate = begun(window=1)
    assert judged(gate, [0.0], [0.0]) is Verdict.PROMOTE and gate.phase is GatePhase.PROBATION
    gate.window = len(newer)
    older = older[: len(newer)]
    if is_split and len(newer) > 1:
        assert judged(gate, newer[:1], older[:1]) is Verdict.WAIT
        newer, older = newer[1:], older[1:]
    decision = gate.judge(np.array(newer), np.array(older))
    assert decision.verdict is (Verdict.ROLLBACK if decision.newer > decision.older else Verdict.KEEP) and gate.phase is GatePhase.IDLE


def test_the_phases() -> None:
    gate = Gate(lambda outputs: outputs, window=2)
    assert gate.phase is GatePhase.IDLE
    with pytest.raises(ServingError, match=r"the gate compares nothing: call begin\(\) first"):
        judged(gate, [1.0], [1.0])
    gate.begin()
    with pytest.raises(ServingError, match=r"compares versions already \(phase candidate\)"):
        gate.begin()
    assert [judged(gate, [1.0], [1.5]), judged(gate, [1.0], [0.5])] == [Verdict.WAIT, Verdict.PROMOTE]
    with pytest.raises(ServingError, match=r"phase probation"):
        gate.begin()
    assert [judged(gate, [1.0], [0.9]), judged(gate, [1.0], [1.0])] == [Verdict.WAIT, Verdict.ROLLBACK]
    gate.begin()
    assert judged(gate, [1.0, 1.0, 9.0], [1.0, 1.0, 8.0]) is Verdict.DROP, "the batch in which the window ends is judged whole"
    gate.begin()
    assert judged(gate, [9.0], [0.0]) is Verdict.WAIT
    gate.abandon()
    gate.begin()
    assert judged(gate, [1.0, 1.0], [1.0, 1.0]) is Verdict.PROMOTE, "nothing is left of a comparison that was abandoned"
    assert judged(gate, [1.0, 1.0], [1.0, 1.0]) is Verdict.KEEP


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_the_worst(bad: float) -> None:
    assert judged(begun(window=2, tolerance=1e9), [bad, -1e9], [1.0, 1.0]) is Verdict.DROP
    assert judged(begun(window=2), [1e300, 1e300], [bad, 0.0]) is Verdict.PROMOTE
    assert judged(begun(window=2), [bad, 0.0], [bad, 0.0]) is Verdict.DROP, "a candidate shows that it is finite"
    for newer, older, verdict in (([bad], [1.0], Verdict.ROLLBACK), ([1.0], [bad], Verdict.KEEP), ([bad], [bad], Verdict.KEEP)):
        gate = begun(window=1)
        assert judged(gate, [0.0], [0.0]) is Verdict.PROMOTE and judged(gate, newer, older) is verdict
    early = begun(window=2)
    assert judged(early, [bad], [0.0]) is Verdict.WAIT and judged(early, [0.0], [9e9]) is Verdict.DROP


def test_sums_beyond_the_largest_number() -> None:
    assert judged(begun(window=2), [1.7e308, 1.7e308], [1.0, 1.0]) is Verdict.DROP
    assert judged(begun(window=2), [1.0, 1.0], [1.7e308, 1.7e308]) is Verdict.PROMOTE


def test_good_bad_and_drifting_streams() -> None:
    rng = np.random.default_rng(0)
    for shift, verdict in ((-0.2, Verdict.PROMOTE), (0.2, Verdict.DROP)):
        gate, noise = begun(), rng.random((200, 2))
        assert judged(gate, list(noise[:, 0] + shift), list(noise[:, 1])) is verdict
    drifting = begun(window=100)
    assert judged(drifting, [0.5] * 100, [0.6] * 100) is Verdict.PROMOTE
    assert judged(drifting, [0.5 + n / 100 for n in range(100)], [0.6] * 100) is Verdict.ROLLBACK


# ---- metrics


@pytest.mark.parametrize(
    "result", [np.array([1.0, 2.0]), np.array([1, 2], np.int32), [1.0, 2.0], (1, 2), ag.tensor([1.0, 2.0], requires_grad=True), np.float32([1, 2])]
)
def test_results_of_a_metric(result: Any) -> None:
    values = Gate(lambda outputs: result).measure("outputs", rows=2)
    assert values.dtype == np.float64 and values.tolist() == [1, 2]


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
        Gate(lambda outputs, targets: result).measure(None, None, rows=2)
    assert f"returned {found}," in str(error.value)


def test_targets_are_passed_on_and_errors_of_a_metric_are_its_own() -> None:
    assert Gate(lambda outputs, x, y: outputs + x * y).measure(np.ones(2), 3, 4, rows=2).tolist() == [13, 13]
    with pytest.raises(ZeroDivisionError):
        Gate(lambda outputs: 1 / 0).measure(None, rows=1)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (np.ones(2), np.ones(3)),
        (np.ones(0), np.ones(0)),
        (np.ones((2, 1)), np.ones((2, 1))),
        (np.array(1.0), np.array(1.0)),
        ([1.0], [1.0]),
        (np.array(["a"]), np.array(["b"])),
        (np.ones(1), np.ones(1, complex)),
        (None, None),
    ],
)
def test_values_that_cannot_be_judged(newer: Any, older: Any) -> None:
    gate = begun(window=1)
    with pytest.raises(ArgumentError, match=r"Gate\.judge: found values of shapes"):
        gate.judge(newer, older)
    assert gate.phase is GatePhase.CANDIDATE and judged(gate, [1.0], [1.0]) is Verdict.PROMOTE


@pytest.mark.parametrize(("option", "values"), [("window", (0, 2.5, True, None)), ("tolerance", (-1.0, math.nan, math.inf, "0"))])
def test_options_of_a_gate(option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ArgumentError, match=rf"^Gate\({option}="):
            Gate(len, **{option: value})
    with pytest.raises(ArgumentTypeError, match=r"expected a function metric\(outputs, \*targets\), found str"):
        Gate("loss")  # type: ignore[arg-type]
