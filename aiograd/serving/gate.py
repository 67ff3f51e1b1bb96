"""The gate: progressive validation of candidates, and of versions after their promotion. It decides; the trainer computes outputs and acts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.serving.arguments import checked_count, checked_real
from aiograd.serving.versions import Version
from aiograd.tensors.core import TensorCore, host_array
from aiograd.tensors.plain import plain_array


class Verdict(Enum):
    """The decision of a gate about the newer of two versions."""

    WAIT = "wait"
    PROMOTE = "promote"
    DROP = "drop"
    KEEP = "keep"
    ROLLBACK = "rollback"


class Gate:
    """Promotes a candidate if it does at least as well as the serving version, and takes it back if it does worse afterwards.

    Both versions are judged on the same examples, each before it is learned from. After `window` of them the candidate is promoted if its mean is
    at most the other's plus `tolerance`, else dropped. After a promotion the version before is judged along for another window; if the new
    mean is higher than the old one plus `tolerance`, the promotion is taken back. A metric that is not finite makes the mean infinite.

        >>> ag.serving.Gate(lambda outputs, targets: ((outputs.numpy() - targets) ** 2).mean(axis=1), window=100).window
        100

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
        self.metric: Callable[..., Any] = metric
        self.window: int = checked_count("Gate(window=)", window)
        self.tolerance: float = checked_real("Gate(tolerance=)", tolerance, "a finite number of at least 0")


class GateComparison:
    """One window of examples, by which a gate judges two versions; the newer one is a candidate, or on probation where it serves."""

    def __init__(self, gate: Gate, newer: Version, older: Version, *, is_probation: bool = False) -> None:
        self.gate, self.newer, self.older, self.is_probation = gate, newer, older, is_probation
        #: rows so far, and the sums of their metric for both versions
        self.rows = 0
        self.sums: tuple[float, ...] = (0.0, 0.0)

    @property
    def serving(self) -> Version:
        """The version that serves while they are compared."""
        return self.newer if self.is_probation else self.older

    def judge(self, outputs: Sequence[Any], targets: Sequence[Any], rows: int) -> Verdict:
        """Add a batch by the outputs of the newer and the older version; `Verdict.WAIT` until the window is full, after which it is over."""
        newer, older = self.sums = tuple([_sum(total, self._measure(each, targets, rows)) for total, each in zip(self.sums, outputs, strict=True)])
        self.rows += rows
        is_worse = newer / self.rows > older / self.rows + self.gate.tolerance
        if self.rows < self.gate.window:
            return Verdict.WAIT
        if self.is_probation:
            return Verdict.ROLLBACK if is_worse else Verdict.KEEP
        return Verdict.DROP if is_worse or math.isinf(newer) else Verdict.PROMOTE

    def _measure(self, outputs: Any, targets: Sequence[Any], rows: int) -> list[float]:
        """The metric of each row of a batch."""
        result = self.gate.metric(outputs, *targets)
        try:
            values = np.asarray(host_array(result) if isinstance(result, TensorCore) else plain_array(result))
        except ValueError:  # lists of several lengths, masked elements
            values = np.empty((), object)
        if values.dtype.kind not in "biuf" or values.shape != (rows,):
            found = f"{values.dtype} of shape {list(values.shape)}" if values.dtype != object else f"a {type(result).__name__}"
            raise ArgumentError(f"the metric of a gate returned {found}, expected one number per row, [{rows}]: reduce over all axes but the first")
        return values.astype(np.float64).tolist()  # type: ignore[no-any-return]


def _sum(total: float, values: list[float]) -> float:
    """The sum, correctly rounded; infinite if a value is not finite."""
    try:
        total = math.fsum((total, *values))
    except (OverflowError, ValueError):  # beyond the largest number, or the sum of both infinities
        return math.inf
    return total if math.isfinite(total) else math.inf
