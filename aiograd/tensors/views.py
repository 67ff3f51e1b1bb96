"""Views: the results of rows marked ``view`` share memory and version counter with their argument."""

from __future__ import annotations

from typing import Any

from aiograd.ops.op import Op
from aiograd.tensors.accumulated import TensorExtra
from aiograd.tensors.core import SpecialView, TensorCore, View, counter_of

_new = object.__new__


def shares_memory(result: Any, source: Any) -> bool:
    """True if a row marked ``view`` returned the memory of its argument."""
    base = result.base
    if result is source or base is None:
        return result is source
    return base is source or base is source.base or _owner(base) is _owner(source)


def _owner(array: Any) -> Any:
    """The object at the end of the bases of an array; numpy makes windows by an object between two arrays."""
    while (base := getattr(array, "base", None)) is not None and base is not array:
        array = base
    return array


def make_view(op: Op, parent: TensorCore, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark the outputs of ``op(parent, *args, **kwargs)`` as views of `parent`."""
    counter = parent._vc
    if counter is None:
        counter = parent._vc = [0]
    for i, output in enumerate(outputs):
        output._vc = counter
        if (output._node is None and parent._node is not None) or op.outputs != 1 or output._data.dtype is not parent._data.dtype:
            view: View = _special_view(op, parent, output, None if op.outputs == 1 else i, args, kwargs)
        else:
            view = _new(View)
            view.parent, view.op, view.args, view.kwargs, view.version = parent, op, args, kwargs, counter[0]
        output._x = extra = _new(TensorExtra)
        extra._grad = extra.leaf = extra.retains = None
        extra.view = view


def _special_view(op: Op, parent: TensorCore, output: TensorCore, nr: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpecialView:
    unrecorded = output._node is None and parent._node is not None
    obstacle = None
    if unrecorded:
        obstacle = "was taken of a tensor that requires grad while no graph was recorded"
    elif output._data.dtype != parent._data.dtype:
        obstacle = f"was taken by {op.name}() of a tensor of another dtype"
    return SpecialView(parent, op, args, kwargs, counter_of(parent)[0], output=nr, is_frozen=unrecorded, obstacle=obstacle)
