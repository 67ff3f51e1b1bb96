"""Figures of a run, from the lines that its training processes wrote.

A line is a mapping (or its JSON text) with ``t`` (seconds on the machine's monotonic clock when the step was committed), ``began`` (when it
began), ``who``, ``pid``, ``kind`` ("step"; other kinds are passed over), ``step``, ``first`` and ``count`` (the positions of its samples in the
order of all samples), ``bits`` (a hash of the weights, or "").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Figures:
    """What a run came to.

    Attributes:
        useful: distinct samples a second over those of the undisturbed run.
        to_next: for each fault, in order of time: seconds until the first step that began after it was committed; infinite if none was.
        p50, p99, longest: of `to_next`, by nearest rank; 0 without a fault.
        lost: positions between the first and the last used that no committed step has.
        twice: uses of a position beyond its first.
    """

    useful: float
    to_next: tuple[float, ...]
    p50: float
    p99: float
    longest: float
    lost: int
    twice: int


def figures(
    lines: Iterable[Mapping[str, Any] | str], faults: Iterable[float | Mapping[str, Any]], began: float, ended: float, calm_rate: float
) -> Figures:
    """Figures of a run from `began` to `ended`.

    Args:
        lines: of its processes, in any order.
        faults: when faults struck, or mappings with that as ``t``.
        began, ended: the time that counts for `Figures.useful`, seconds on the clock of the lines.
        calm_rate: distinct samples a second of the undisturbed run; with 1 `Figures.useful` is a rate.

    Raises:
        ValueError: `ended` is not after `began`, or `calm_rate` is not above 0.
    """
    if not ended > began or not calm_rate > 0:
        raise ValueError(f"figures(began={began}, ended={ended}, calm_rate={calm_rate}): expected an end after the beginning, and a rate above 0")
    steps = [line for line in map(_read, lines) if line.get("kind") == "step"]
    in_time = _positions([line for line in steps if began <= line["t"] <= ended])
    used, uses = np.unique(_positions(steps), return_counts=True)
    to_next = tuple(_recovery(steps, struck) for struck in sorted(map(_time, faults)))
    return Figures(
        useful=len(np.unique(in_time)) / (ended - began) / calm_rate,
        to_next=to_next,
        p50=nearest_rank(to_next, 0.5),
        p99=nearest_rank(to_next, 0.99),
        longest=max(to_next, default=0.0),
        lost=int(used[-1] - used[0] + 1 - len(used)) if len(used) else 0,
        twice=int((uses - 1).sum()),
    )


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed; 0 without values."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1] if values else 0.0


def other_bits(lines: Iterable[Mapping[str, Any]], undisturbed: Iterable[Mapping[str, Any]]) -> int:
    """Steps with other weights than the same step of the undisturbed run has; a step that only one of the runs has does not count."""
    expected = {line["step"]: line["bits"] for line in undisturbed if line.get("kind") == "step" and line["bits"]}
    steps = [line for line in lines if line.get("kind") == "step" and line["bits"]]
    return sum(expected.get(line["step"], line["bits"]) != line["bits"] for line in steps)


def _read(line: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return json.loads(line) if isinstance(line, str) else line


def _time(fault: float | Mapping[str, Any]) -> float:
    return float(fault["t"] if isinstance(fault, Mapping) else fault)


def _positions(steps: Sequence[Mapping[str, Any]]) -> Any:
    runs = [np.arange(line["first"], line["first"] + line["count"]) for line in steps]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def _recovery(steps: Sequence[Mapping[str, Any]], struck: float) -> float:
    """Seconds from the fault to the commit of the first step that began after it."""
    after = [line for line in steps if line["began"] > struck]
    return min(after, key=lambda line: (line["began"], line["t"]))["t"] - struck if after else math.inf
