"""A summary of a module: its layers with output shapes, parameters and cost, seen in one forward.

Note [How layers are watched]
    `Module.__call__` looks its ``forward`` up on the instance, so for the time of one call each module has a ``forward`` of its own that notes
    the result. Modules without a summary pay nothing for it.

Note [Cost]
    The estimate is the engine's own: nanoseconds of backward, by which it decides whether a rule runs on the loop or on a thread. It is read
    from the nodes that a layer records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import iscoroutine
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.nn.module import Module
from aiograd.running import notebook
from aiograd.running.modes import ModeScope
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

COLUMNS = ("layer", "type", "output", "parameters", "cost")


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One call of one layer.

    Attributes:
        name: the layer's name in the module; "" is the module itself. A layer that is called twice has two entries.
        type: name of its class.
        outputs: shapes of the tensors that it returned.
        parameters: number of elements of all its parameters, its layers included; 0 where an entry before has counted them.
        cost: estimated nanoseconds of its backward pass, its layers included.
    """

    name: str
    type: str
    outputs: tuple[tuple[int, ...], ...]
    parameters: int
    cost: float

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The entry as text, in the order of the table's columns."""
        depth = self.name.count(".") + bool(self.name)
        label = "  " * depth + (self.name.rpartition(".")[2] or "(all)")
        return label, self.type, " ".join(str(list(shape)) for shape in self.outputs), f"{self.parameters:,}", f"{self.cost / 1e3:,.0f} µs"


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """The table that `summary` returns; printed it is text, in a notebook HTML.

    Attributes:
        layers: one entry per call, in the order in which the calls began; the first is the module itself.
        parameters: number of elements of all parameters, shared ones once.
        trainable: the elements that require grad.
    """

    layers: tuple[LayerSummary, ...]
    parameters: int
    trainable: int

    @property
    def heading(self) -> str:
        """The line above the table."""
        return f"{self.layers[0].type}: {self.parameters:,} parameters, {self.trainable:,} trainable"

    def __str__(self) -> str:
        rows = [COLUMNS, *(layer.cells for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.heading, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return notebook.table(self.heading, COLUMNS, [layer.cells for layer in self.layers])


def summary(module: Module, *inputs: Any, **kwargs: Any) -> ModuleSummary:
    """Call a module once and list its layers: output shapes, parameters, estimated cost of backward.

    The call is one like any other: statistics of BatchNorm move and Dropout draws unless the module is in ``eval()`` mode. No ``.grad`` changes.

    Args:
        module: the module; its layers are found by its attributes.
        *inputs: the arguments of its ``forward``.
        **kwargs: its keyword arguments.

    Returns:
        A `ModuleSummary`: its ``str`` is the table, and a notebook shows it as HTML.

    Raises:
        ArgumentTypeError: `module` is no Module.
        ArgumentError: a ``forward`` in it is ``async def``.

    Example:
        >>> import aiograd as ag
        >>> model = ag.nn.Sequential(ag.nn.Linear(4, 8), ag.nn.ReLU(), ag.nn.Linear(8, 2))
        >>> [(layer.name, layer.outputs, layer.parameters) for layer in ag.nn.summary(model, ag.zeros((5, 4))).layers]
        [('', ((5, 2),), 58), ('0', ((5, 8),), 40), ('1', ((5, 8),), 0), ('2', ((5, 2),), 18)]
    """
    if not isinstance(module, Module):
        raise ArgumentTypeError(f"nn.summary(): expected a Module, found {type(module).__name__}")
    calls: list[_Call] = []
    nodes: list[Any] = []
    with _watched(module, calls, nodes), ModeScope(grad=True, collect=nodes.append):
        module(*inputs, **kwargs)
    own = {id(parameter): parameter for parameter in module.parameters()}
    total = sum(parameter.size for parameter in own.values())
    trainable = sum(parameter.size for parameter in own.values() if parameter.requires_grad)
    seen = set[int]()
    layers = []
    for call in calls:
        count = 0 if id(call.module) in seen else sum(parameter.size for parameter in call.module.parameters())
        seen.add(id(call.module))
        cost = sum(node.estimate() for node in nodes[call.first : call.last] if hasattr(node, "estimate"))
        layers.append(LayerSummary(call.name, type(call.module).__name__, call.outputs, count, cost))
    return ModuleSummary(tuple(layers), total, trainable)


@dataclass(slots=True)
class _Call:
    """A call of one layer: the nodes that it recorded are those from `first` to `last`."""

    name: str
    module: Module
    first: int
    last: int = 0
    outputs: tuple[tuple[int, ...], ...] = field(default=())


@contextmanager
def _watched(module: Module, calls: list[_Call], nodes: list[Any]) -> Iterator[None]:
    """Note every call of a module and its layers. See Note [How layers are watched]."""
    found = list(module.named_modules())
    own = [(layer, layer.__dict__.get("forward")) for _, layer in found]
    try:
        for name, layer in found:
            object.__setattr__(layer, "forward", _watching(name, layer, layer.forward, calls, nodes))
        yield
    finally:
        for layer, forward in own:
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                object.__setattr__(layer, "forward", forward)


def _watching(name: str, layer: Module, forward: Callable[..., Any], calls: list[_Call], nodes: list[Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def watching(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, layer, len(nodes))
        calls.append(call)
        result = forward(*args, **kwargs)
        if iscoroutine(result):
            result.close()
            raise ArgumentError(f"nn.summary(): {type(layer).__name__}.forward is `async def`; a summary is made of one synchronous call")
        call.last = len(nodes)
        call.outputs = tuple(tensor.shape for tensor in leaves_of(result, TensorCore))
        return result

    return watching
