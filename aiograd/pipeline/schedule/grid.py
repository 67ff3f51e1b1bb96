"""A schedule as text: one line per step, one column per rank.

Used to print schedules and to show where one is wrong; it takes the bare rows, so that a schedule that is refused can be shown as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.running import notebook

MARK: Final = "<-- ERROR HERE"
#: steps shown before and after the wrong one; a schedule can have thousands
AROUND: Final = 12
#: steps shown in a notebook
HTML_STEPS: Final = 200
#: backgrounds of computations in a notebook
_COLOURS: Final = {ActionKind.F: "#bcd4f2", ActionKind.I: "#f8d3ae", ActionKind.W: "#c4e3c1", ActionKind.B: "#efc0c7"}


def format_grid(ranks: Sequence[Sequence[Action | None]], error: tuple[int, int] | None = None) -> str:
    """Draws rows of actions as an aligned grid.

    Args:
        ranks: the actions of each rank, None for an idle step.
        error: rank and step to mark with "<-- ERROR HERE" and the rank's name; only the steps around it are drawn then.

    Returns:
        Lines joined by newlines, without one at the end and without spaces at the end of lines.
    """
    steps = max(map(len, ranks), default=0)
    first, last = 0, steps
    if error is not None:
        first, last = max(0, error[1] - AROUND), min(steps, error[1] + AROUND + 1)
    columns = [[f"Rank {rank}", *(str(action) if action else "" for action in row[first:last])] for rank, row in enumerate(ranks)]
    widths = [max(map(len, column)) for column in columns]
    digits = len(str(max(steps - 1, 0)))
    labels = [" " * (len("Step ") + digits + 1), *(f"Step {step:0{digits}}:" for step in range(first, last))]
    lines = []
    for line, label in enumerate(labels):
        cells = (column[line] if line < len(column) else "" for column in columns)
        text = " ".join([label, *(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))])
        if error is not None and line == error[1] - first + 1:
            text = f"{text.rstrip()}  {MARK} (rank {error[0]})"
        lines.append(text.rstrip())
    if first > 0:
        lines.insert(1, "...")
    if last < steps:
        lines.append("...")
    return "\n".join(lines)


def grid_html(heading: str, ranks: Sequence[Sequence[Action | None]]) -> str:
    """Rows of actions as an HTML table for a notebook: one row per rank, one column per step, coloured by kind."""
    steps = max(map(len, ranks), default=0)
    shown = min(steps, HTML_STEPS)
    if shown < steps:
        heading = f"{heading}; the first {shown} of {steps} steps"
    rows, colours = [], []
    for rank, row in enumerate(ranks):
        cells = [*row[:shown], *(None for _ in range(shown - len(row)))]
        rows.append([f"rank {rank}", *(str(action) if action else "" for action in cells)])
        colours.append(["", *(_COLOURS.get(action.kind, "") if action else "" for action in cells)])
    return notebook.table(heading, ["", *map(str, range(shown))], rows, colours)
