"""TensorConversions: the values of a Tensor as numbers, lists, arrays, DLPack capsules, copies and text."""

from __future__ import annotations

import copy
import sys
from typing import Any, NoReturn, Self

import numpy as np

from aiograd.errors import ArgumentTypeError, GraphError, ShapeError
from aiograd.running import notebook
from aiograd.tensors.core import TensorCore, host_array, make, tell_read
from aiograd.tensors.followed import has_tangent
from aiograd.tensors.outside import array_advice, refuse_stores


class TensorConversions(TensorCore):
    """The methods of a Tensor that hand its values to Python and other libraries."""

    __slots__ = ()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values as a numpy array that shares memory; read-only where the tensor requires grad.

        Raises:
            NotReadyError: the data is still being computed and an event loop is running: ``await`` the tensor first.
        """
        array = host_array(self)
        if self.requires_grad:
            array = array.view()
            array.flags.writeable = False
        return array

    def item(self) -> Any:
        """The only element as a Python number."""
        if self.size != 1:
            raise ShapeError(f"item() of a tensor of shape {list(self.shape)}: only tensors of one element can be converted to a number")
        return host_array(self).item()

    def tolist(self) -> Any:
        """The values as nested lists of Python numbers."""
        return host_array(self).tolist()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"the truth value of a tensor of shape {list(self.shape)} is ambiguous: use any() or all()")
        return bool(host_array(self).item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        if self._node is not None:
            refuse_stores(sys._getframe(1))
        return float(self.item())

    def __complex__(self) -> complex:
        if self._node is not None:
            refuse_stores(sys._getframe(1))
        return complex(self.item())

    def __index__(self) -> int:
        if self.size != 1 or self.dtype.kind not in "iub":
            raise ArgumentTypeError(f"only integer tensors of one element can be used as an index, found {self.dtype} {list(self.shape)}")
        return int(self.item())

    def __len__(self) -> int:
        if not self._data.shape:
            raise ArgumentTypeError("len() of a 0-d tensor")
        return int(self._data.shape[0])

    def __hash__(self) -> int:
        return id(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.requires_grad:
            raise GraphError(
                f"converting a tensor that requires grad to a numpy array would drop its graph{array_advice(sys._getframe(1))} To make one tensor of "
                "a list of tensors use aiograd.stack()."
            )
        if has_tangent(self):
            self._data.__array__()  # raises
        return np.array(host_array(self), dtype=dtype, copy=copy)

    @property
    def _mask(self) -> Any:
        """The mask that numpy.ma reads beside ``_data`` when a masked array meets something else: a tensor has no mask."""
        if self.requires_grad:
            raise GraphError(
                "numpy.ma takes the values of a tensor that requires grad and would drop its graph. Fill the masked array, ``m.filled(0) * t``, "
                "or use detach()."
            )
        tell_read(self)
        return np.ma.nomask

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        if self.requires_grad:
            raise GraphError("exporting a tensor that requires grad would drop its graph: use detach() first")
        tell_read(self)
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._data.__dlpack__(**{name: option for name, option in options.items() if option is not None})

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    def __copy__(self) -> Self:
        copied: Any = make(self._data, shared_with=self, cls=type(self))
        if self.is_leaf:
            copied.requires_grad_(self.requires_grad)
        else:
            copied._node, copied._nr = self._node, self._nr
        attributes = getattr(self, "__dict__", None)
        if attributes:
            copied.__dict__.update(attributes)
        return copied  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_leaf:
            raise GraphError("only leaf tensors support deepcopy: this one was made by an operation. Use detach() or clone().")
        tell_read(self)
        copied: Any = make(np.copy(self._data), cls=type(self))
        memo[id(self)] = copied
        copied.requires_grad_(self.requires_grad)
        grad = self.grad
        if grad is not None:
            copied.grad = make(np.copy(grad._data))
        attributes = getattr(self, "__dict__", None)  # of a Parameter, or of a user's class
        if attributes:
            copied.__dict__.update(copy.deepcopy(attributes, memo))
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentTypeError("tensors cannot be pickled: pickles execute code when they are loaded. Save them with aiograd.save (safetensors).")

    # ---------------------------------------------------------------- text

    def __repr__(self) -> str:
        data = self._data
        ready = getattr(data, "__aiograd_is_ready__", None)
        if self.device == "cpu":
            body = np.array2string(data, separator=", ", prefix="tensor(", threshold=200)
        elif ready is not None and not ready():
            body = f"<pending>, shape={self.shape}"
        else:
            body = f"<{list(self.shape)}>"
        notes = [] if data.dtype in (np.float32, np.int64, np.bool_) else [f"dtype={data.dtype}"]
        if self.device != "cpu":
            notes.append(f"device={self.device!r}")
        if self.grad_fn is not None:
            notes.append(f"grad_fn=<{self.grad_fn.name}>")
        elif self.requires_grad:
            notes.append("requires_grad=True")
        return f"tensor({', '.join([body, *notes])})"

    def _repr_html_(self) -> str:
        grad = f", {self.grad_fn.name}" if self.grad_fn is not None else ", requires grad" if self.requires_grad else ""
        return notebook.card(f"Tensor {list(self.shape)} {self.dtype} on {self.device}{grad}", repr(self))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and self.size == 1 else repr(self)
