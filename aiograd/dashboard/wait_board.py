"""WaitBoard: the waits of all workers as a graph for the page: a box for each work that waits or is awaited, an arrow for each wait.

Work that has waited for less than `LEAST` seconds is not shown: a cluster that computes waits all the time. Cycles are found among the waits of all
workers, whose reports come from different moments; one that lasts is there to stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.dashboard.pass_graph import LETTER, MARGIN, PAD, TALL, TIME_LETTERS
from aiograd.distributed.waits import HeldLoop, Wait, WaitReport, Work
from aiograd.errors import ArgumentError

#: seconds from which on a wait is shown; rows of a report of a worker, boxes of the graph, and letters of a box
LEAST, MOST_ROWS, MOST_BOXES, LETTERS = 1.0, 100, 24, 28
#: pixels between two boxes of a worker, with room for an arrow
GAP = 34.0


def wait_rows(report: WaitReport) -> dict[str, Any]:
    """The waits of one worker for its report, the longest first, and the loops of its peers that it knows to be held up."""
    waits = sorted((wait for wait in report.waits if wait.seconds >= LEAST), key=lambda wait: -wait.seconds)[:MOST_ROWS]
    return {
        "waits": [[wait.task, wait.on, wait.on_task, wait.what, wait.line, wait.seconds, wait.message] for wait in waits],
        "held": [[loop.worker, loop.seconds, loop.line] for loop in report.held[:MOST_ROWS]],
    }


class WaitBoard:
    """The waits of all workers."""

    def __init__(self) -> None:
        self._waits: dict[str, list[Wait]] = {}
        self._held: dict[str, list[HeldLoop]] = {}
        self._picture: dict[str, Any] | None = None

    def arrived(self, worker: str, rows: Any) -> None:
        """The rows of a report; malformed ones are left out. A worker tells of its own waits only."""
        rows = rows if isinstance(rows, dict) else {}
        self._waits[worker] = _read(lambda row: Wait(worker, *row), rows.get("waits"))
        self._held[worker] = _read(lambda row: HeldLoop(*row), rows.get("held"))
        self._picture = None

    def forget(self, worker: str) -> None:
        """A worker is lost: it waits for nothing any more."""
        self._waits.pop(worker, None)
        self._held.pop(worker, None)
        self._picture = None

    def picture(self) -> dict[str, Any]:
        """The graph for the page, in the form of `pass_graph.picture`, with the rows that a click shows."""
        if self._picture is None:
            held = {loop.worker: loop for loops in self._held.values() for loop in sorted(loops, key=lambda loop: loop.seconds)}
            waits = sorted((wait for rows in self._waits.values() for wait in rows), key=lambda wait: -wait.seconds)
            self._picture = _drawn(WaitReport(tuple(waits), tuple(held[name] for name in sorted(held))))
        return self._picture


def _read(make: Any, rows: Any) -> list[Any]:
    found = []
    for row in rows[:MOST_ROWS] if isinstance(rows, list) else ():
        try:
            found.append(make(row))
        except (ArgumentError, TypeError):  # a row that is none
            continue
    return found


def _drawn(report: WaitReport) -> dict[str, Any]:
    """The picture of a report with its longest waits first."""
    around = {edge for cycle in report.cycles for edge in zip(cycle, (*cycle[1:], cycle[0]), strict=True)}
    circling = {work for edge in around for work in edge}
    rows = sorted(report.waits, key=lambda wait: (wait.work, wait.needs) not in around)  # cycles first, then by length
    numbers: dict[Work, int] = {}
    shown: list[Wait] = []
    for wait in rows:
        ends = [end for end in (wait.work, wait.needs) if end is not None]
        if len(numbers.keys() | {*ends}) <= MOST_BOXES:
            shown.append(wait)
            for end in ends:
                numbers.setdefault(end, len(numbers))
    longest: dict[Work, int] = {}
    for i, wait in enumerate(shown):
        longest.setdefault(wait.work, i)
    boxes: list[dict[str, Any]] = [{} for _ in numbers]
    frames: list[dict[str, Any]] = []
    x = tallest = 0.0
    for worker in dict.fromkeys(name for name, _ in numbers):
        works = [work for work in numbers if work[0] == worker]
        labels = [task if len(task) <= LETTERS else f"{task[: LETTERS - 1]}…" for _, task in works]
        width = max(len(worker) * LETTER * 1.2, *(max(len(label), TIME_LETTERS) * LETTER + 2 * PAD for label in labels))
        below = (TALL + GAP) / 2 * (len(frames) % 2)  # so that arrows pass between the boxes of the next worker
        for i, (work, label) in enumerate(zip(works, labels, strict=True)):
            row = longest.get(work)  # of its longest wait
            boxes[numbers[work]] = {
                "worker": worker, "name": label, "x": round(x + MARGIN + width / 2, 1), "y": 2 * MARGIN + TALL / 2 + i * (TALL + GAP) + below,
                "w": round(max(len(label), TIME_LETTERS) * LETTER + 2 * PAD, 1), "h": TALL,
                "us": 0 if row is None else round(1e6 * shown[row].seconds), "place": row, "cycle": work in circling,
            }  # fmt: skip
        height = len(works) * (TALL + GAP) - GAP + 3 * MARGIN + below
        frames.append({"worker": worker, "x": round(x, 1), "w": round(width + 2 * MARGIN, 1), "h": round(height, 1)})
        tallest = max(tallest, height)
        x += width + 3 * MARGIN
    arrows: dict[tuple[int, int], dict[str, Any]] = {}
    for i, wait in enumerate(shown):
        if wait.needs is not None:
            pair = numbers[wait.work], numbers[wait.needs]
            drawn = {"from": pair[0], "to": pair[1], "place": i, "cycle": (wait.work, wait.needs) in around, "crosses": True, "points": []}
            arrows.setdefault(pair, drawn)
    return {
        "boxes": boxes, "arrows": sorted(arrows.values(), key=lambda arrow: arrow["cycle"]), "frames": frames,
        "width": round(max(x - MARGIN, 0.0), 1), "height": round(tallest, 1),
        "rows": [_row(wait) for wait in shown], "waits": len(report.waits), "cycles": len(report.cycles),
        "held": [[loop.worker, loop.seconds, loop.line] for loop in report.held],
    }  # fmt: skip


def _row(wait: Wait) -> Sequence[Any]:
    return [wait.worker, wait.task, wait.on, wait.on_task, wait.what, wait.line, round(wait.seconds, 3), wait.message]
