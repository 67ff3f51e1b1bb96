"""The gate: progressive validation of candidates, and of versions after their promotion. It decides; the trainer judges and acts."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ServingError
from aiograd.serving.versions import Array
from aiograd.tensors.core import TensorCore, host_array
from aiograd.tensors.plain import plain_array


class Verdict(Enum):
    """The decision of a gate about the newer of two versions."""

    WAIT = "wait"
    PROMOTE = "promote"
    DROP = "drop"
    KEEP = "keep"
    ROLLBACK = "rollback"


class GatePhase(Enum):
    """The state of a gate: `begin` leads from idle to candidate, a promotion to probation, any other verdict and `abandon` to idle."""

    IDLE = "idle"
    CANDIDATE = "candidate"
    PROBATION = "probation"


class GateDecision(NamedTuple):
    """A verdict, the number of rows that were judged in the phase, and the mean metric of both versions; infinite if a value was not finite."""

    verdict: Verdict
    rows: int
    newer: float
    older: float


class Gate:
    """Promotes a candidate if it does at least as well as the serving version, and takes it back if it does worse afterwards.

    Both versions are judged on the same examples, each before it is learned from. After `window` of them the candidate is promoted if its mean is
    at most the other's plus `tolerance`, else dropped. After a promotion the version before is judged along for another window; if the new
    mean is higher than the old one plus `tolerance`, the promotion is taken back. A metric that is not finite makes the mean infinite.

        >>> gate = ag.serving.Gate(lambda outputs, targets: (outputs - targets) ** 2, window=2)
        >>> gate.begin()
        >>> errors = gate.measure(np.array([1.0, 2.0]), np.array([1.0, 3.0]), rows=2)
        >>> gate.judge(errors, np.array([0.5, 0.5]))
        GateDecision(verdict=<Verdict.PROMOTE: 'promote'>, rows=2, newer=0.5, older=0.5)

    Args:
        metric: ``metric(outputs, *targets)`` returns one number per row, lower is better.
        window: examples per decision; the batch in which it ends is judged whole.
        tolerance: by how much the newer version's mean may be higher.

    Raises:
        ArgumentError, ArgumentTypeError: settings that cannot be.
    """

    def __init__(self, metric: Callable[..., Any], *, window: int = 200, tolerance: float = 0.0) -> None:
        if not callable(metric):
            raise ArgumentTypeError(f"Gate: expected a function metric(outputs, *targets), found {type(metric).__name__}")
        if type(window) is not int or window < 1:
            raise ArgumentError(f"Gate(window={window!r}): expected an int of at least 1")
        if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
            raise ArgumentError(f"Gate(tolerance={tolerance!r}): expected a finite number of at least 0")
        self.metric, self.window, self.tolerance = metric, window, float(tolerance)
        self.phase = GatePhase.IDLE
        self._rows, self._newer, self._older = 0, 0.0, 0.0

    def measure(self, outputs: Any, *targets: Any, rows: int) -> Array:
        """The metric of a batch.

        Args:
            outputs: outputs of the model.
            targets: columns that the model does not get.
            rows: number of rows of the batch.

        Returns:
            One float64 per row.

        Raises:
            ArgumentError: the metric returned another number of values, or no real numbers.
        """
        result = self.metric(outputs, *targets)
        try:
            values = np.asarray(host_array(result) if isinstance(result, TensorCore) else plain_array(result))
        except ValueError:  # lists of several lengths, masked elements
            values = np.empty((), object)
        if values.dtype.kind not in "biuf" or values.shape != (rows,):
            found = f"{values.dtype} of shape {list(values.shape)}" if values.dtype != object else f"a {type(result).__name__}"
            raise ArgumentError(f"the metric of a gate returned {found}, expected one number per row, [{rows}]: reduce over all axes but the first")
        return values.astype(np.float64)

    def begin(self) -> None:
        """Start to compare a candidate with the serving version.

        Raises:
            ServingError: a comparison is running.
        """
        if self.phase is not GatePhase.IDLE:
            raise ServingError(f"the gate compares versions already (phase {self.phase.value}): wait for its verdict, or call abandon() first")
        self._enter(GatePhase.CANDIDATE)

    def abandon(self) -> None:
        """End a comparison without a verdict, as when a version was promoted or rolled back by hand."""
        self._enter(GatePhase.IDLE)

    def judge(self, newer: Array, older: Array) -> GateDecision:
        """Add a batch to the comparison, and decide if the window is full.

        Args:
            newer: the metric of each row with the candidate, or with the promoted version on probation.
            older: the metric of the same rows with the serving version, or with the one before the promotion.

        Returns:
            The decision; `Verdict.WAIT` until the window is full.

        Raises:
            ArgumentError: the arrays are not both one number per row, or have no rows. ServingError: no comparison is running.
        """
        if self.phase is GatePhase.IDLE:
            raise ServingError("the gate compares nothing: call begin() first")
        shapes = [getattr(values, "shape", ()) for values in (newer, older)]
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not len(newer) or any(values.dtype.kind not in "biuf" for values in (newer, older)):
            raise ArgumentError(f"Gate.judge: found values of shapes {shapes}, expected arrays of one number per row, with at least one row")
        self._rows += len(newer)
        self._newer, self._older = _added(self._newer, newer), _added(self._older, older)
        means = self._newer / self._rows, self._older / self._rows
        is_worse = means[0] > means[1] + self.tolerance
        if self._rows < self.window:
            verdict = Verdict.WAIT
        elif self.phase is GatePhase.PROBATION:
            verdict = Verdict.ROLLBACK if is_worse else Verdict.KEEP
        else:
            verdict = Verdict.DROP if is_worse or math.isinf(means[0]) else Verdict.PROMOTE
        decision = GateDecision(verdict, self._rows, *means)
        if verdict is not Verdict.WAIT:
            self._enter(GatePhase.PROBATION if verdict is Verdict.PROMOTE else GatePhase.IDLE)
        return decision

    def _enter(self, phase: GatePhase) -> None:
        self.phase = phase
        self._rows, self._newer, self._older = 0, 0.0, 0.0


def _added(total: float, values: Array) -> float:
    """The sum, correctly rounded; infinite if a value is not finite."""
    try:
        total = math.fsum((total, *values.tolist()))
    except (OverflowError, ValueError):  # beyond the largest number, or the sum of both infinities
        return math.inf
    return total if math.isfinite(total) else math.inf
