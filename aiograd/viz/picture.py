"""The content of the picture of a graph: boxes with text and arrows between them, before layout.

Boxes and arrows come in the order of a walk from the roots along the edges, so the same graph gives the same picture. The walk keeps a
stack of its own: graphs are deeper than Python's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from aiograd.compiler.program import Program, Value, values_in
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Edge, Node
from aiograd.graph.released import ReleasedVariables
from aiograd.graph.saved import Packed
from aiograd.running.caller import type_found
from aiograd.tensors.core import TensorCore
from aiograd.tensors.passes import edge_of

Kind: TypeAlias = Literal["root", "operation", "function", "parameter", "leaf"]
Roots: TypeAlias = "TensorCore | GradientEdge | Edge | Node | Iterable[TensorCore | GradientEdge | Edge | Node]"

#: longer names are shortened in the middle
NAME_LENGTH = 44


class Box(NamedTuple):
    """A node, a leaf or an output."""

    kind: Kind
    title: str
    #: smaller text below the title
    lines: tuple[str, ...]


class Arrow(NamedTuple):
    """A gradient's way from one box to another, by their numbers."""

    source: int
    target: int
    label: str


class Picture(NamedTuple):
    """Boxes and arrows, and of the picture of a graph the box of each node; the arrows from a node stand together, in the order of its edges."""

    boxes: list[Box]
    arrows: list[Arrow]
    numbers: dict[Node, int]


def picture_of(
    what: str, roots: Any, *, params: Mapping[str, Any] | None, names: Any, shapes: bool, edge_shapes: bool, saved: bool, max_nodes: int
) -> Picture:
    """The boxes and arrows of the graph below `roots`.

    Args:
        what: name of the calling function, for messages.
        roots, params, names, shapes, edge_shapes, saved, max_nodes: as for `graph_svg`.

    Raises:
        NoGraphError, ArgumentTypeError: a root is no tensor with a graph. ArgumentError: more than `max_nodes` nodes, or a wrong `params`.
    """
    titles = _names(what, _with_names(what, params, names))
    starts = [_start(what, i, item) for i, item in enumerate(_listed(roots))]
    if not starts:
        raise ArgumentError(f"{what}: expected at least one tensor to draw the graph of")
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    numbers: dict[Node, int] = {}
    stack: list[Node] = []

    def number_of(node: Node) -> int:
        if node not in numbers:
            if len(numbers) >= max_nodes:
                raise ArgumentError(
                    f"{what}: the graph has more than max_nodes={max_nodes} nodes, which no picture makes clear. Draw a part of it (the graph of an "
                    "intermediate tensor), or raise max_nodes."
                )
            numbers[node] = len(boxes)
            boxes.append(_box(node, titles, shapes, saved))
            stack.append(node)
        return numbers[node]

    for i, (node, nr) in enumerate(starts):
        metadata = node.metadata_of(nr)
        boxes.append(Box("root", "output" if len(starts) == 1 else f"output {i}", _metadata_lines([metadata], shapes)))
        arrows.append(Arrow(len(boxes) - 1, number_of(node), _shape(metadata) if edge_shapes else ""))
        while stack:
            node = stack.pop()
            for child, child_nr in zip(node.next_nodes, node.next_nrs, strict=True):
                if child is not None:
                    label = _shape(child.metadata_of(child_nr)) if edge_shapes else ""
                    arrows.append(Arrow(numbers[node], number_of(child), label))
    return Picture(boxes, arrows, numbers)


def program_picture(what: str, program: Program, max_nodes: int) -> Picture:
    """The boxes and arrows of a compiled function's program, from its outputs to inputs and captured tensors.

    Args:
        what: name of the calling function, for messages.
        program: the program.
        max_nodes: refuse larger ones.

    Raises:
        ArgumentError: it is larger. ArgumentTypeError: it is no program.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"{what}: expected a program, of `compiled.programs`, found {type_found(program)}")
    count = len(program.statements) + len(program.inputs) + len(program.captured) + len(program.outputs)
    if count > max_nodes:
        raise ArgumentError(f"{what}: the program has {count} boxes, more than max_nodes={max_nodes}; give a larger max_nodes, or print(program)")
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    numbers: dict[str, int] = {}
    marks = program.marks()
    for statement in program.statements:
        ways = [marks[value.name] for value in statement.outputs if marks.get(value.name)][:1]
        lines = (*map(_value_line, statement.outputs), *ways, statement.place)
        box = Box("operation" if statement.is_row else "function", statement.op.name, lines)
        numbers.update((value.name, len(boxes)) for value in statement.outputs)
        boxes.append(box)
    for value in (*program.inputs, *program.captured):
        numbers[value.name] = len(boxes)
        boxes.append(Box("parameter" if value.records else "leaf", value.name, (_value_line(value),)))
    for value in program.outputs:
        arrows.append(Arrow(len(boxes), numbers[value.name], ""))
        boxes.append(Box("root", "output", (_value_line(value),)))
    for number, statement in enumerate(program.statements):
        for value in values_in([statement.arrays, statement.statics]):
            arrow = Arrow(number, numbers[value.name], "")
            if arrow not in arrows[-8:]:
                arrows.append(arrow)
    return Picture(boxes, arrows, {})


def _value_line(value: Value) -> str:
    return f"{'×'.join(map(str, value.shape)) if value.shape else 'scalar'} {value.dtype}"


def _listed(roots: Any) -> list[Any]:
    if isinstance(roots, (TensorCore, GradientEdge, Edge, Node)) or not isinstance(roots, Iterable):
        return [roots]
    return list(roots)


def _start(what: str, i: int, item: Any) -> tuple[Node, int]:
    if isinstance(item, Node):
        return item, 0
    if isinstance(item, Edge):
        if item.node is None:
            raise ArgumentError(f"{what}: element {i} is an edge that leads nowhere")
        return item.node, item.input_nr
    return edge_of(what, i, item)


def _with_names(what: str, params: Mapping[str, Any] | None, module: Any) -> Mapping[str, Any] | None:
    """`params`, and the parameters of a module by their names in it."""
    if module is None:
        return params
    if not callable(getattr(module, "named_parameters", None)):
        raise ArgumentTypeError(f"{what}: names is a {type(module).__name__}; expected a module, or use params= for a mapping")
    return {**dict(module.named_parameters()), **(params or {})}


def _names(what: str, params: Mapping[str, Any] | None) -> dict[Node, str]:
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        found = type(params).__name__
        raise ArgumentTypeError(f"{what}: params is a {found}; expected a mapping of names to tensors, as dict(module.named_parameters())")
    names: dict[Node, str] = {}
    for name, leaf in params.items():
        if not isinstance(leaf, TensorCore):
            raise ArgumentTypeError(f"{what}: params[{name!r}] is a {type(leaf).__name__}; expected a Tensor")
        node = leaf._node
        if node is not None:
            names[node] = f"{names[node]} = {name}" if node in names else str(name)  # tied parameters have several
    return names


def _box(node: Node, names: Mapping[Node, str], shapes: bool, saved: bool) -> Box:
    name = names.get(node)
    metadata = list(node.input_metadata)
    lines = _metadata_lines(metadata, shapes)
    if node.is_leaf:
        return Box("leaf" if name is None else "parameter", "leaf" if name is None else name, lines)
    if saved:
        lines = (*lines, _saved_line(node))
    title = node.name if name is None else f"{name} ({node.name})"
    return Box("operation" if node.is_builtin else "function", title, lines)


def _metadata_lines(metadata: Sequence[InputMetadata | None], shapes: bool) -> tuple[str, ...]:
    known = [entry for entry in metadata if entry is not None]
    if not shapes or not known:
        return ()
    first = known[0]
    kind = str(first.dtype) if first.device == "cpu" else f"{first.dtype} {first.device}"
    if len(known) > 3:
        return (f"{len(known)} × {kind}",)
    return (f"{', '.join(map(_shape, known))} {kind}",)


def _shape(metadata: InputMetadata | None) -> str:
    if metadata is None:
        return ""
    return "×".join(map(str, metadata.shape)) if metadata.shape else "scalar"


def _saved_line(node: Node) -> str:
    held = getattr(node, "_saved", None)
    if isinstance(held, ReleasedVariables):
        return "released"
    if isinstance(held, Packed):
        return "saves packed values"
    arrays: dict[int, int] = {}
    stack: list[Any] = [held]
    while stack:
        value = stack.pop()
        if isinstance(value, TensorCore):
            value = value._data
        if isinstance(value, tuple):
            stack.extend(value)
        elif isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__aiograd_device__"):
            arrays[id(value)] = int(value.nbytes)
    total = float(sum(arrays.values()))
    if not total:
        return "saves nothing"
    for unit in ("B", "KiB", "MiB"):
        if total < 1024:
            return f"saves {total:.0f} {unit}" if unit == "B" else f"saves {total:.1f} {unit}"
        total /= 1024
    return f"saves {total:.1f} GiB"


def shortened(name: str) -> str:
    """A name of at most `NAME_LENGTH` characters, without line breaks."""
    name = " ".join(name.split())
    if len(name) <= NAME_LENGTH:
        return name
    half = NAME_LENGTH // 2
    return f"{name[: half - 1]}…{name[-half:]}"
