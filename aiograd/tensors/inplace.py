"""In-place modification: version counters, and what happens to the graph.

Note [In place is out of place plus a write]
    With a graph to record, ``x += y`` records the out-of-place row, writes its result into the memory of ``x`` and gives ``x`` the node of
    the result. Nothing that was saved is overwritten unnoticed: the version counter, shared by all views, tells.
    Without a graph the value is written directly.

Note [Modifying a view]
    When the modified tensor is a view, the tensor it was taken from changes too. Its new node is a ``setitem`` of the new value into the old
    base, through a flat index that the view's own operation computes; the view, and each sibling when it is used next, gets the node of
    the same view taken of the new base.

Source: the rules of PyTorch's ``VariableTypeUtils.h`` (check_inplace) and CopySlices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.errors import InPlaceError, ShapeError
from aiograd.modes import current_mode
from aiograd.tensors.core import TensorCore, View, counter_of, refresh
from aiograd.tensors.record import constant

#: ``setitem(x, value, index)`` and ``reshape(x, shape)``, bound by the module that has the rows
SetItem = Callable[[Any, Any, Any], Any]


def check_in_place(tensor: TensorCore, what: str) -> None:
    """Raise where modifying the tensor in place would lose a gradient.

    Raises:
        InPlaceError: it is a leaf that requires grad, or a view of one, and operations are being recorded.
    """
    if not current_mode().grad:
        return
    if tensor._node is not None and tensor._node.is_leaf:
        raise InPlaceError(f"{what}: a leaf Variable that requires grad is being used in an in-place operation. Use no_grad(), or an out-of-place operation.")
    base = base_of(tensor)
    if base is not tensor and base._node is not None and base._node.is_leaf:
        raise InPlaceError(f"{what}: a view of a leaf Variable that requires grad is being used in an in-place operation. Use no_grad(), or clone it first.")


def base_of(tensor: TensorCore) -> TensorCore:
    """The tensor at the start of a chain of views."""
    while tensor._x is not None and tensor._x.view is not None:
        tensor = tensor._x.view.parent
    return tensor


def assign(tensor: TensorCore, value: Any, what: str, setitem: SetItem, reshape: Callable[[Any, Any], Any]) -> TensorCore:
    """Give `tensor` the value (a Tensor, recorded or not) in place.

    Args:
        what: name of the operation for messages.
        setitem, reshape: the rows.

    Raises:
        InPlaceError: see `check_in_place`. ShapeError: the value does not broadcast to the tensor's shape.
    """
    check_in_place(tensor, what)
    refresh(tensor)
    if not isinstance(value, TensorCore):
        value = constant(value, tensor.dtype)
    if np.broadcast_shapes(value.shape, tensor.shape) != tensor.shape:
        raise ShapeError(f"{what}: a value of shape {list(value.shape)} does not fit in place into shape {list(tensor.shape)}")
    records = current_mode().grad and (value._node is not None or tensor._node is not None or base_of(tensor)._node is not None)
    if not records:
        write(tensor, value._data)
        return tensor
    _record_assignment(tensor, value, setitem, reshape)
    write(tensor, value._data)
    _stamp(tensor)
    return tensor


def write(tensor: TensorCore, data: Any) -> None:
    """Write values into the tensor's memory and count the modification."""
    tensor._data[...] = data
    counter_of(tensor)[0] += 1


def _record_assignment(tensor: TensorCore, value: TensorCore, setitem: SetItem, reshape: Callable[[Any, Any], Any]) -> None:
    view = None if tensor._x is None else tensor._x.view
    if view is None:
        new = value if value.shape == tensor.shape and value.dtype == tensor.dtype else setitem(tensor.detach(), value, Ellipsis)
        tensor._node, tensor._nr = new._node, new._nr
    else:
        parent = view.parent
        refresh(parent)
        index = view.op(np.arange(parent.size).reshape(parent.shape), *view.args, **view.kwargs)
        flat = setitem(reshape(parent, (-1,)), value, index)
        _record_assignment(parent, reshape(flat, parent.shape), setitem, reshape)
        again = view.op(_shadow(parent), *view.args, **view.kwargs)
        tensor._node, tensor._nr = again._node, again._nr
    if tensor._x is not None and tensor._x.retains is not None:
        tensor._x.retains.extra.retain_hooks.pop(tensor._nr, None)
        tensor._x.retains = None
        tensor.retain_grad()


def _shadow(tensor: TensorCore) -> TensorCore:
    """The tensor without its place in a chain of views, for recording only."""
    shadow: Any = tensor.detach()
    shadow._vc = None
    shadow._node, shadow._nr = tensor._node, tensor._nr
    return shadow  # type: ignore[no-any-return]


def _stamp(tensor: TensorCore) -> None:
    """Every view in the chain has its new node already."""
    counter = counter_of(tensor)[0]
    while tensor._x is not None and tensor._x.view is not None:
        view: View = tensor._x.view
        view.version = counter
        tensor = view.parent
