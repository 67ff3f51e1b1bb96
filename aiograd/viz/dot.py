"""DOT text, for Graphviz."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiograd.compiler.program import Program
from aiograd.viz.picture import Kind, Picture, Roots, picture_of, program_picture, shortened

_STYLES: dict[Kind, str] = {
    "root": 'shape=box, style="rounded,filled", fillcolor="#24292f", color="#24292f", fontcolor="#ffffff"',
    "operation": 'shape=box, style="rounded,filled", fillcolor="#f6f8fa", color="#8c959f"',
    "function": 'shape=box, style="rounded,filled", fillcolor="#fff1e5", color="#bc6a2a"',
    "parameter": 'shape=box, style="filled", fillcolor="#ddf4e4", color="#3d8b57"',
    "leaf": 'shape=box, style="filled,dashed", fillcolor="#f3f8f4", color="#7fa88c"',
}


def graph_dot(
    roots: Roots,
    *,
    params: Mapping[str, Any] | None = None,
    names: Any = None,
    shapes: bool = True,
    edge_shapes: bool = False,
    saved: bool = False,
    max_nodes: int = 10_000,
) -> str:
    """The backward graph as DOT text; arrows point the way gradients flow. ``dot -Tsvg`` draws it.

    Args:
        roots, params, names, shapes, edge_shapes, saved: as for `graph_svg`.
        max_nodes: refuse larger graphs.

    Returns:
        The text of a DOT file.

    Raises:
        NoGraphError, ArgumentTypeError, ArgumentError: as for `graph_svg`.
    """
    picture = picture_of("graph_dot()", roots, params=params, names=names, shapes=shapes, edge_shapes=edge_shapes, saved=saved, max_nodes=max_nodes)
    return _picture_dot(picture, "backward")


def program_dot(program: Program, *, max_nodes: int = 10_000) -> str:
    """The program of a compiled function as DOT text; ``dot -Tsvg`` draws it.

    Args:
        program: from ``compiled.programs``.
        max_nodes: refuse larger programs.

    Returns:
        The text of a DOT file.

    Raises:
        ArgumentError: the program has more statements, inputs and captured tensors. ArgumentTypeError: it is no program.
    """
    return _picture_dot(program_picture("program.dot()", program, max_nodes), "program")


def _picture_dot(picture: Picture, name: str) -> str:
    boxes, arrows, _ = picture
    lines = [f"digraph {name} {{", '  node [fontname="Helvetica", fontsize=11];', '  edge [fontname="Helvetica", fontsize=9, color="#57606a"];']
    for i, box in enumerate(boxes):
        text = "\\n".join(_escape(line) for line in (shortened(box.title), *box.lines))
        lines.append(f'  n{i} [label="{text}", tooltip="{_escape(box.title)}", {_STYLES[box.kind]}];')
    for arrow in arrows:
        label = f' [label="{_escape(arrow.label)}"]' if arrow.label else ""
        lines.append(f"  n{arrow.source} -> n{arrow.target}{label};")
    return "\n".join([*lines, "}"]) + "\n"


def _escape(text: str) -> str:
    text = "".join(character if character.isprintable() else " " for character in text)
    return text.replace("\\", "\\\\").replace('"', '\\"')
