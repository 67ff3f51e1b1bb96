"""Drawing the backward graph of a tensor, and the program of a compiled function, as DOT text or as an SVG that needs no other program.

A backward pass is shown step by step, as text or as a page.

::

    Path("graph.svg").write_text(ag.viz.graph_svg(loss, params=dict(model.named_parameters())))
    (await ag.viz.step(loss)).save("step.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use
from aiograd.viz.dot import graph_dot, program_dot
from aiograd.viz.memory import memory_svg
from aiograd.viz.pass_steps import GradientSummary, PassStep, PassSteps, SentGradient
from aiograd.viz.stepping import step
from aiograd.viz.svg import graph_svg, program_svg

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "SentGradient", "GradientSummary", "PassStep", "PassSteps", "graph_dot", "graph_svg", "memory_svg", "program_dot", "program_svg", "step",
]  # fmt: skip
