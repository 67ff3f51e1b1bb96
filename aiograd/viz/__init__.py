"""Drawing the backward graph of a tensor, and the program of a compiled function, as DOT text or as an SVG that needs no other program.

::

    Path("graph.svg").write_text(ag.viz.graph_svg(loss, params=dict(model.named_parameters())))
"""

from __future__ import annotations

from aiograd.viz.dot import graph_dot, program_dot
from aiograd.viz.memory import memory_svg
from aiograd.viz.svg import graph_svg, program_svg

__all__ = ["graph_dot", "graph_svg", "memory_svg", "program_dot", "program_svg"]
