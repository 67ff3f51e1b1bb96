"""PassSteps: the record of a backward pass, step by step, as text and as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiograd.running import notebook
from aiograd.running.types import Shape
from aiograd.viz.step_page import StepPicture, step_page

#: height of the page in a notebook, in pixels
FRAME_HEIGHT = 720


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """A gradient as it was at one time.

    Attributes:
        shape, dtype, device: of the gradient.
        values: the elements of a small one, read-only; None of a large one.
        norm: Euclidean norm.
        low, high: the smallest and the largest element, of complex gradients their magnitudes; None, as `norm`, where there are no elements, or
            the pass failed before they were read from a device.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> steps = await ag.viz.step((x * x).sum(), params={"x": x})
    >>> steps.seed.shape, steps.seed.values, steps[2].inputs[0].high
    ((), array(1., dtype=float32), 4.0)
    """

    shape: Shape
    dtype: np.dtype[Any]
    device: str
    values: np.ndarray[Any, Any] | None = None
    norm: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.content.split())}"

    @property
    def kind(self) -> str:
        """Shape, dtype and device as text."""
        place = "" if self.device == "cpu" else f" {self.device}"
        return f"{'×'.join(map(str, self.shape)) or 'scalar'} {self.dtype}{place}"

    @property
    def content(self) -> str:
        """The values as text; of a large gradient norm and range."""
        if self.values is None:
            return "not read" if self.norm is None else f"norm {self.norm:.4g}, from {self.low:.4g} to {self.high:.4g}"
        return np.array2string(self.values, precision=4, separator=", ", max_line_width=40, threshold=self.values.size + 1)


@dataclass(frozen=True, slots=True)
class SentGradient:
    """A gradient that a step sends along one of its node's edges.

    Attributes:
        output: number of the edge.
        target: title of the node at its end.
        target_input: number of that node's input.
        gradient: the gradient; None where the rule gives none.
        arrived: how many of the gradients that the target waits for have arrived, this one included.
        expected: how many it waits for.
        total: the sum at that input so far; None where there is none yet.
        target_step: number of the step in which the target runs; None if the pass does not come to it.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> steps = await ag.viz.step((x * x).sum(), params={"x": x})
    >>> first = steps[1].contributions[0]
    >>> first.target, first.arrived, first.expected, first.total.values
    ('x', 1, 2, array([1., 2.], dtype=float32))
    """

    output: int
    target: str
    target_input: int
    gradient: GradientSummary | None
    arrived: int
    expected: int
    total: GradientSummary | None
    target_step: int | None = None

    @property
    def target_text(self) -> str:
        """Title and step of the target, and its input where that is not the first."""
        step = "" if self.target_step is None else f" (step {self.target_step})"
        return f"{self.target}{step}{f', input {self.target_input}' if self.target_input else ''}"


@dataclass(frozen=True, slots=True)
class PassStep:
    """One node that ran in a pass; printed it is a few lines.

    Attributes:
        number: of the step, from 1.
        node: name of the node, such as ``MulBackward``.
        title: its title in the picture: that name, or the name of a parameter.
        sequence_nr: its sequence number: of the nodes that are ready the one with the highest runs first.
        place: file and line of the forward that recorded the node; "" where they are not known.
        code: that line.
        expected: how many gradients the node has waited for.
        inputs: the complete gradients of its inputs, before hooks; None where there is none.
        hooks: names of the hooks that run at the node.
        note: a remark on the node, or "".
        contributions: the gradients that leave along its edges; empty at a leaf.
        accumulated: at a leaf, the gradient that a backward adds to ``.grad``; None elsewhere.
        ready: titles of the nodes that are ready after the step, the next one first.
        error: the error of a step that failed, as text; "" of one that did not.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> steps = await ag.viz.step((x * x).sum(), params={"x": x})
    >>> steps[1].node, steps[1].inputs[0].values, len(steps[1].contributions)
    ('MulBackward', array([1., 1.], dtype=float32), 2)
    """

    number: int
    node: str
    title: str
    sequence_nr: int
    place: str
    code: str
    expected: int
    inputs: tuple[GradientSummary | None, ...]
    hooks: tuple[str, ...]
    note: str
    contributions: tuple[SentGradient, ...] = ()
    accumulated: GradientSummary | None = None
    ready: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        lines = [f"step {self.number}: {self.title}"]
        if self.place:
            lines.append(f"recorded at {self.place}{f': {self.code}' if self.code else ''}")
        lines += [f"in: {_text(grad)}" for grad in self.inputs]
        if self.hooks:
            lines.append(f"hooks: {', '.join(self.hooks)}")
        for each in self.contributions:
            total = f"; {each.arrived} of {each.expected} there, sum {_text(each.total)}" if each.expected > 1 else ""
            lines.append(f"to {each.target_text}: {_text(each.gradient)}{total}")
        if self.accumulated is not None:
            lines.append(f"to .grad: {self.accumulated}")
        return "\n  ".join([*lines, *(line for line in (self.note, self.error) if line)])


def _text(grad: GradientSummary | None) -> str:
    return "none" if grad is None else str(grad)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PassSteps(Sequence[PassStep]):
    """The steps of one pass, in the order in which they ran; ``steps[0]`` is step 1. The record keeps no graph alive.

    Printed it is all steps as text; as the last line of a notebook's cell it is a page to step through, forward and back.

    Attributes:
        steps: the steps.
        seed: the gradient that the pass began with.
        error: the error of the last step, with its traceback; None if the pass came to its end.
        picture: the graph as it is drawn.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> steps = await ag.viz.step((x * x).sum(), params={"x": x})
    >>> len(steps), [step.title for step in steps]
    (3, ['SumBackward', 'MulBackward', 'x'])
    >>> print(steps[1])
    step 2: MulBackward
      in: 2 float32: [1., 1.]
      to x (step 3): 2 float32: [1., 2.]; 1 of 2 there, sum 2 float32: [1., 2.]
      to x (step 3): 2 float32: [1., 2.]; 2 of 2 there, sum 2 float32: [2., 4.]
    """

    steps: tuple[PassStep, ...]
    seed: GradientSummary
    error: Exception | None
    picture: StepPicture

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"<PassSteps: {len(self)} steps{'' if self.error is None else f', failed with {type(self.error).__name__}'}>"

    def __str__(self) -> str:
        return "\n".join([f"the pass begins with {self.seed}", *map(str, self.steps)])

    @property
    def html(self) -> str:
        """The page as the text of an HTML document, which loads nothing."""
        return step_page(self.steps, self.seed, self.picture)

    def _repr_html_(self) -> str:
        return notebook.frame(self.html, "A backward pass, step by step", FRAME_HEIGHT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, for a browser.

        Args:
            path: of the file, ``.html``.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(self.html, encoding="utf-8")
