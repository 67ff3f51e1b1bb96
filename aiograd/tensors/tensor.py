"""Tensor: `TensorCore` with operators and numpy's protocols.

Operators use the calls of `aiograd.tensors.unrolled`. The other methods that compute are the public functions, which
`aiograd.array_functions.methods` puts on the base class `TensorMethods`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError, UnknownNameError
from aiograd.graph.boundary import BOUNDARY
from aiograd.ops import ROWS, Op
from aiograd.running import devices
from aiograd.running.caller import called
from aiograd.running.modes import no_grad
from aiograd.tensors import passes
from aiograd.tensors.constants import checked_dtype, constant, static
from aiograd.tensors.conversions import TensorConversions
from aiograd.tensors.core import TENSOR_CLASS, TensorCore, make
from aiograd.tensors.dispatch import array_function, array_ufunc
from aiograd.tensors.inplace import in_place, set_item
from aiograd.tensors.methods import TensorMethods
from aiograd.tensors.record import call
from aiograd.tensors.size import TensorSize
from aiograd.tensors.transfer import index_there, to_device
from aiograd.tensors.unrolled import binary, getitem, unary

_row = ROWS.__getitem__


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def reflected(self: Any, other: Any) -> Any:
        try:
            return function(constant(other, self._data.dtype), self)
        except ArgumentTypeError:
            return NotImplemented

    return reflected


_add, _sub, _mul, _div = binary(_row("add")), binary(_row("sub")), binary(_row("mul")), binary(_row("div"))
_GETITEM, _INDEX = _row("getitem"), _row("index")
_pow, _matmul, _mod, _floordiv = binary(_row("pow")), binary(_row("matmul")), binary(_row("remainder")), binary(_row("floor_divide"))
_and, _or, _xor = binary(_row("bitwise_and")), binary(_row("bitwise_or")), binary(_row("bitwise_xor"))
_lshift, _rshift = binary(_row("bitwise_left_shift")), binary(_row("bitwise_right_shift"))


def _divmod(x1: Any, x2: Any) -> Any:
    try:
        x2 = x2 if isinstance(x2, TensorCore) else constant(x2, x1._data.dtype)
    except ArgumentTypeError:
        return NotImplemented
    return call(_row("divmod"), (x1, x2), {})


def _run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = call(op, args, kwargs)
    return result


def _numpy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Call the implementation of a numpy function in the tables."""
    result: Tensor = array_function(function, args, kwargs)
    return result


class Tensor(TensorMethods["Tensor"], TensorConversions):
    """An array that records the operations on it, so that gradients can be computed; made by `aiograd.tensor` and operations.

    Attributes: ``shape ndim size dtype device T mT requires_grad grad grad_fn is_leaf``. ``await t`` waits until its data has been computed.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> x
    tensor([1., 2.], requires_grad=True)
    >>> loss = (x * x).sum()
    >>> await loss.backward()
    >>> loss.item(), x.grad
    (5.0, tensor([2., 4.]))
    """

    __slots__ = ()

    # ---------------------------------------------------------------- differentiation

    def backward(
        self, gradient: Any = None, *, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> Coroutine[Any, Any, None]:
        """Accumulate gradients of this tensor into the leaves it was computed from; await the result. See `aiograd.backward`.

        Args:
            gradient: gradient of this tensor, of its shape; may be left out for one element.
            retain_graph: keep saved values for another pass; None: as `create_graph`.
            create_graph: record the pass, for second derivatives.
            inputs: accumulate into these only; None: into every leaf.

        Returns:
            A coroutine; nothing runs before it is awaited. Cancelling it changes no gradient unless the pass was committed.
        """
        return called(passes.start_backward(self, gradient, retain_graph, create_graph, inputs), "Tensor.backward")

    # ---------------------------------------------------------------- protocols

    __array_priority__ = 1000
    __aiograd_priority__ = 1000

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return array_ufunc(ufunc, method, inputs, kwargs)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ArgumentError(f"__array_namespace__(api_version={api_version!r}): expected a version of the standard up to '2024.12'")
        return sys.modules["aiograd"]

    def __array_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return array_function(function, args, kwargs)

    def __aiograd_op__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(op, args, kwargs)

    # ---------------------------------------------------------------- operators

    if TYPE_CHECKING:

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __mod__(self, other: Any) -> Tensor: ...
        def __rmod__(self, other: Any) -> Tensor: ...
        def __floordiv__(self, other: Any) -> Tensor: ...
        def __rfloordiv__(self, other: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __pos__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]: ...
        def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]: ...
        def __iadd__(self, other: Any) -> Tensor: ...
        def __isub__(self, other: Any) -> Tensor: ...
        def __imul__(self, other: Any) -> Tensor: ...
        def __itruediv__(self, other: Any) -> Tensor: ...
        def __ipow__(self, other: Any) -> Tensor: ...
        def __imatmul__(self, other: Any) -> Tensor: ...
        def __imod__(self, other: Any) -> Tensor: ...
        def __ifloordiv__(self, other: Any) -> Tensor: ...
        def __iand__(self, other: Any) -> Tensor: ...
        def __ior__(self, other: Any) -> Tensor: ...
        def __ixor__(self, other: Any) -> Tensor: ...
        def __ilshift__(self, other: Any) -> Tensor: ...
        def __irshift__(self, other: Any) -> Tensor: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __rand__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __ror__(self, other: Any) -> Tensor: ...
        def __xor__(self, other: Any) -> Tensor: ...
        def __rxor__(self, other: Any) -> Tensor: ...
        def __lshift__(self, other: Any) -> Tensor: ...
        def __rlshift__(self, other: Any) -> Tensor: ...
        def __rshift__(self, other: Any) -> Tensor: ...
        def __rrshift__(self, other: Any) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
    else:
        __add__ = __radd__ = _add  # addition and multiplication of numbers commute to the bit
        __mul__ = __rmul__ = _mul
        __sub__, __rsub__ = _sub, _reflected(_sub)
        __truediv__, __rtruediv__ = _div, _reflected(_div)
        __pow__, __rpow__ = _pow, _reflected(_pow)
        __matmul__, __rmatmul__ = _matmul, _reflected(_matmul)
        __mod__, __rmod__ = _mod, _reflected(_mod)
        __floordiv__, __rfloordiv__ = _floordiv, _reflected(_floordiv)
        __divmod__, __rdivmod__ = _divmod, _reflected(_divmod)
        __neg__ = unary(_row("neg"))
        __pos__ = unary(_row("positive"))
        __abs__ = unary(_row("abs"))
        __iadd__, __isub__, __imul__, __itruediv__ = in_place("add", _add), in_place("sub", _sub), in_place("mul", _mul), in_place("div", _div)
        __ipow__, __imatmul__ = in_place("pow", _pow), in_place("matmul", _matmul)
        __imod__, __ifloordiv__ = in_place("remainder", _mod), in_place("floor_divide", _floordiv)
        __iand__, __ior__, __ixor__ = in_place("bitwise_and", _and), in_place("bitwise_or", _or), in_place("bitwise_xor", _xor)
        __ilshift__, __irshift__ = in_place("bitwise_left_shift", _lshift), in_place("bitwise_right_shift", _rshift)
        __eq__, __ne__ = binary(_row("eq")), binary(_row("ne"))
        __lt__, __le__, __gt__, __ge__ = binary(_row("lt")), binary(_row("le")), binary(_row("gt")), binary(_row("ge"))
        __and__ = __rand__ = _and  # these commute too
        __or__ = __ror__ = _or
        __xor__ = __rxor__ = _xor
        __lshift__, __rlshift__ = _lshift, _reflected(_lshift)
        __rshift__, __rrshift__ = _rshift, _reflected(_rshift)
        __invert__ = unary(_row("bitwise_not"))
        __hash__ = TensorCore.__hash__

    def __round__(self, ndigits: int | None = None) -> Tensor:
        return _run(_row("round"), (self,), {"decimals": ndigits or 0})

    def __getitem__(self, index: Any) -> Tensor:
        if _is_basic(index):
            return getitem(_GETITEM, self, index)  # type: ignore[no-any-return]
        return _run(_INDEX, (self, index_there(self, index)), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        set_item(self, static(index_there(self, index)), value, "item assignment")

    if not TYPE_CHECKING:  # a checker that sees it takes any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise UnknownNameError(type(self).__name__, name, lambda: dir(self))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    # ---------------------------------------------------------------- in-place methods

    def add_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        """``self += alpha * other``.

        Args:
            other: a Tensor, array or number that broadcasts to the shape of the tensor.
            alpha: a factor.

        Returns:
            The tensor.
        """
        return self.__iadd__(other if not isinstance(alpha, TensorCore) and alpha == 1 else other * alpha)

    def sub_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        """``self -= alpha * other``.

        Args:
            other: a Tensor, array or number that broadcasts to the shape of the tensor.
            alpha: a factor.

        Returns:
            The tensor.
        """
        return self.__isub__(other if not isinstance(alpha, TensorCore) and alpha == 1 else other * alpha)

    def mul_(self, other: Any) -> Tensor:
        """``self *= other``.

        Args:
            other: a Tensor, array or number that broadcasts to this shape.

        Returns:
            The tensor itself.
        """
        return self.__imul__(other)

    def div_(self, other: Any) -> Tensor:
        """``self /= other``.

        Args:
            other: a Tensor, array or number that broadcasts to this shape.

        Returns:
            The tensor itself.
        """
        return self.__itruediv__(other)

    def copy_(self, other: Any) -> Tensor:
        """Replace the values by the values of `other`, broadcast and cast.

        Args:
            other: a Tensor, array or number that broadcasts to this shape.

        Returns:
            The tensor itself.
        """
        set_item(self, ..., other, "copy_")
        return self

    def fill_(self, value: Any) -> Tensor:
        """Set every element to a number.

        Args:
            value: the number.

        Returns:
            The tensor itself.
        """
        set_item(self, ..., value, "fill_")
        return self

    def zero_(self) -> Tensor:
        """Set every element to 0.

        Returns:
            The tensor itself.
        """
        return self.fill_(0)

    # ---------------------------------------------------------------- dtype and device

    def astype(self, dtype: Any, *, copy: bool = True) -> Tensor:
        """The values with another dtype; gradients are cast back.

        Args:
            copy: return a new tensor even if the dtype is the same.
            dtype: the dtype.

        Returns:
            A Tensor.
        """
        wanted = checked_dtype(dtype)
        if wanted == self.dtype and not copy:
            return self
        return _run(_row("to_copy"), (self,), {"dtype": wanted})

    def to(
        self, target: Any = None, dtype: Any = None, *, device: Any = None, copy: bool = False, non_blocking: bool = True, memory_format: Any = None
    ) -> Tensor:
        """The tensor on a device, with a dtype, or both; the tensor itself if it is so already. Gradients are moved back.

        Args:
            target: a device (``"cpu"``, ``"cuda:0"``), a dtype, or a tensor for its device and dtype.
            dtype, device: the same by name.
            copy: return a new tensor even if nothing changes.
            non_blocking, memory_format: accepted for PyTorch's sake; copies never block, and elements lie as numpy lays them.

        Returns:
            A Tensor.

        Raises:
            DeviceError: no such device.
        """
        result = self
        for wanted in (target, device, dtype):
            if wanted is not None:
                result = result._with(wanted)
        return result.clone() if copy and result is self else result

    def _with(self, wanted: Any) -> Tensor:
        """The tensor on a device, with a dtype, or as another tensor."""
        if isinstance(wanted, TensorCore):
            return self._with(wanted.device)._with(wanted.dtype)
        if not isinstance(wanted, str) and isinstance(wanted, devices.Device):  # a protocol: asked last, for it takes 10 µs
            wanted = wanted.name
        if not isinstance(wanted, str) or wanted in np.sctypeDict:
            return self.astype(wanted, copy=False)
        device = devices.device(wanted)
        name = "cpu" if device is None else device.name
        if name == self.device or name == getattr(self._data, "device_beneath", None):
            return self
        return _run(to_device, (self,), {"device": name, "source": self.device})

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tensor:
        """`to` with the standard's name.

        Args:
            device: the device.
            stream: None.

        Returns:
            A Tensor; the tensor itself if it is there.

        Raises:
            DeviceError: no such device. ArgumentError: a stream.
        """
        if stream is not None:
            raise ArgumentError("to_device(stream=): expected None; use aiograd.cuda.Stream around the call")
        return self.to(device=device)

    def cpu(self) -> Tensor:
        """The tensor on the host.

        Returns:
            A Tensor; the tensor itself if it is there.
        """
        return self.to("cpu")

    @property
    def is_cuda(self) -> bool:
        """True if the data lives on a CUDA device."""
        return self.device.startswith("cuda")

    # ---------------------------------------------------------------- parts

    @property
    def data(self) -> Tensor:
        """The same data outside of the graph, as `detach`. Values assigned to it are written into the tensor; a graph notices the modification."""
        return self.detach()

    @data.setter
    def data(self, values: Any) -> None:
        source = values if isinstance(values, TensorCore) else constant(values, self.dtype)
        if source.shape != self.shape:
            raise ShapeError(f"setting .data: got shape {list(source.shape)}, expected {list(self.shape)}")
        if source._data is not self._data:
            with no_grad():
                set_item(self, ..., source, "setting .data")

    @property
    def T(self) -> Tensor:
        """Axes in reverse order."""
        return _numpy(np.transpose, self)

    @property
    def mT(self) -> Tensor:
        """The last two axes exchanged."""
        return _numpy(np.swapaxes, self, -1, -2)

    @property
    def real(self) -> Tensor:
        """Real parts."""
        return _run(_row("real"), (self,), {})

    @property
    def imag(self) -> Tensor:
        """Imaginary parts; zeros of real numbers."""
        return _run(_row("imag"), (self,), {})


def _is_basic(index: Any) -> bool:
    """True if numpy's basic indexing applies (the result is a view)."""
    for part in index if index.__class__ is tuple else (index,):
        cls = part.__class__
        if cls is slice:
            if part.start.__class__ is Tensor or part.stop.__class__ is Tensor or part.step.__class__ is Tensor:
                return False
        elif not (cls is int or cls is TensorSize or part is None or part is Ellipsis or isinstance(part, np.integer)):
            return False
    return True


TENSOR_CLASS[0] = Tensor
BOUNDARY.wrap = make
BOUNDARY.unwrap = lambda tensor: tensor._data
BOUNDARY.is_tensor = lambda value: isinstance(value, TensorCore)
