"""Parameters of a torch module as Parameters: one memory, one gradient, one ``requires_grad``, which are torch's.

Note [Torch is asked]
    Everything that both libraries can change is kept in one place, the torch parameter, and looked up there. So nothing has to be brought up to
    date, be it that a torch optimizer's ``zero_grad`` comes between forward and backward, that ``module.half()`` replaces the memory, that a
    parameter is frozen, or that a module of aiograd is moved. `SharedParameter` has properties in the place of a Tensor's slots for this, and
    `SharedGradient`, the node where its gradient arrives, has one in the place of its ``grad``.

Note [One for each]
    A torch parameter has one `SharedParameter`, whichever modules it belongs to and however often they are wrapped. Two would each stage a sum
    with the gradient there is, and the second commit would overwrite the first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.hooks import Hook, HookDict
from aiograd.graph.node import Node
from aiograd.interop.extras import from_extra
from aiograd.interop.torch.conversion import TorchCounter, array_over, name_of_device, over_array, refuse_graph, tensor_over
from aiograd.nn.parameter import Parameter
from aiograd.tensors.core import TensorCore, make

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")

#: the values of ``keep_grad``: where gradients arrive
SIDES = ("both", "aiograd", "torch")


class SharedHooks(HookDict):
    """The post-accumulate hooks of a `SharedParameter`, and after them the hooks of the torch parameter, as long as that has a gradient.

    Args:
        source: the torch parameter.
    """

    __slots__ = ("source",)

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def __bool__(self) -> bool:
        return len(self) > 0 or bool(getattr(self.source, "_post_accumulate_grad_hooks", None))

    def calls(self) -> Iterator[Hook]:
        """The hooks in order; each takes the `SharedParameter`."""
        yield from super().calls()
        theirs = getattr(self.source, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in list(theirs.items()):
            if key in theirs and self.source.grad is not None:
                yield functools.partial(_call_of_torch, hook, self.source)


def _call_of_torch(hook: Hook, source: Any, _: Any) -> Any:
    """Call a post-accumulate hook of torch as torch does, with grad mode off."""
    with torch.no_grad():
        return hook(source)


class SharedGradient(AccumulateGrad):
    """Where the gradient of a `SharedParameter` arrives: in ``grad`` of the torch parameter.

    Args:
        source: the torch parameter.
        leaf: the `SharedParameter`.
        is_hidden: True if aiograd's ``grad`` is to stay None.
    """

    __slots__ = ("source", "_seen", "is_hidden")

    source: Any

    def __init__(self, source: Any, leaf: SharedParameter, is_hidden: bool) -> None:
        self.source = None
        super().__init__(leaf._data.shape, leaf._data.dtype, name_of_device(source.device), leaf)
        self.source = source
        self.post_accumulate_hooks = SharedHooks(source)
        self.is_hidden = is_hidden
        #: the torch gradient that was looked up last, and its Tensor
        self._seen: tuple[Any, Any] = (None, None)

    @property
    def grad(self) -> Any:
        """The torch parameter's gradient as a Tensor; the same Tensor as long as it is the same."""
        found = self.source.grad
        if found is None:
            return None
        seen, tensor = self._seen
        if found is not seen:
            tensor = tensor_over(found.detach())
            self._seen = (found, tensor)
        return tensor

    @grad.setter
    def grad(self, value: Any) -> None:
        if self.source is None:
            return  # the base class begins with None; torch may have a gradient already
        if value is None:
            self.source.grad, self._seen = None, (None, None)
            return
        is_tensor = isinstance(value, TensorCore)
        array = value._data if is_tensor else value
        base = getattr(array, "base", None)
        found = base if getattr(base, "__aiograd_gives__", False) else over_array(array)
        self.source.grad = found
        self._seen = (found, value) if is_tensor else (None, None)

    def seen_grad(self) -> Any:
        """The gradient for the user, as a Tensor or None; None where it is for torch alone.

        Returns:
            A Tensor, or None.
        """
        return None if self.is_hidden else self.grad


class SharedParameter(Parameter):
    """A parameter of a torch module as a Parameter over its memory. See Note [Torch is asked].

    It is made by `shared_parameter`.
    """

    torch_parameter: Any
    side: str
    #: the node where its gradient arrives, be it wanted or not
    leaf: AccumulateGrad

    def __new__(cls, data: Any, requires_grad: bool = True) -> Self:
        """Raise: `wrap` makes them.

        Raises:
            ArgumentTypeError: always.
        """
        raise ArgumentTypeError(f"{cls.__name__}: parameters of torch modules are made by interop.torch.wrap(module)")

    @classmethod
    def _of(cls, source: Any, side: str) -> Self:
        parameter: Self = object.__new__(cls)
        parameter.torch_parameter, parameter.side = source, side
        parameter._nr, parameter._x = 0, None
        parameter._vc = TorchCounter(source)  # type: ignore[assignment]
        parameter._look_up()
        gradient = SharedGradient if side != "aiograd" else AccumulateGrad
        options = (source, parameter, side == "torch") if side != "aiograd" else (*parameter._facts(), parameter)
        parameter.leaf = gradient(*options)
        return parameter

    def _facts(self) -> tuple[Any, ...]:
        return self._array.shape, self._array.dtype, name_of_device(self.torch_parameter.device)

    def _look_up(self) -> None:
        """Take the memory that the torch parameter has now."""
        source = self.torch_parameter
        self._array = array_over(source.detach())
        self._place = (source.data_ptr(), source.dtype, source.shape, source.stride())
        leaf = self.__dict__.get("leaf")
        if leaf is not None:
            leaf.shape, leaf.dtype, leaf.device = self._facts()

    def edge(self) -> tuple[AccumulateGrad, int]:
        """The node at which its gradient arrives, even if the torch parameter has other memory meanwhile."""
        if self.torch_parameter.data_ptr() != self._place[0]:
            self._look_up()
        return self.leaf, 0

    @property
    def _data(self) -> Any:
        source = self.torch_parameter
        if (source.data_ptr(), source.dtype, source.shape, source.stride()) != self._place:
            self._look_up()
        return self._array

    @_data.setter
    def _data(self, array: Any) -> None:
        self.torch_parameter.data = over_array(array)
        self._look_up()

    @property
    def _node(self) -> Node | None:
        return self.leaf if self.torch_parameter.requires_grad else None

    @_node.setter
    def _node(self, node: Node | None) -> None:
        self.torch_parameter.requires_grad_(node is not None)

    def requires_grad_(self, value: bool = True) -> Self:
        """Switch `requires_grad` on or off, of the torch parameter too; returns the parameter.

        Args:
            value: True: gradients are wanted.

        Returns:
            The parameter itself.

        Raises:
            ArgumentTypeError: the dtype is not floating point.
        """
        if value and self.dtype.kind not in "fc":
            raise ArgumentTypeError(
                f"requires_grad_(): only tensors of floating point and complex dtype can require gradients, found {self.dtype}"
            )
        self.torch_parameter.requires_grad_(bool(value))
        return self

    def __copy__(self) -> Parameter:  # type: ignore[override]
        return Parameter(self.detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:  # type: ignore[override]
        """A Parameter of its own; where the wrapped module is copied along, the parameter of the copy (`TorchModule.__deepcopy__`)."""
        copied = Parameter(np.copy(self._data), self.requires_grad)
        grad = self.grad
        if grad is not None:
            copied.grad = make(np.copy(grad._data))
        memo[id(self)] = copied
        return copied


_known: weakref.WeakValueDictionary[int, SharedParameter] = weakref.WeakValueDictionary()


def shared_parameter(source: Any, side: str, name: str) -> SharedParameter:
    """The Parameter of a torch parameter; always the same one, as long as it is referred to.

    Args:
        source: the torch parameter.
        side: where gradients arrive, one of `SIDES`.
        name: its path, for messages.

    Raises:
        ArgumentError: it is shared already, with gradients on another side, or has no memory yet. ArgumentTypeError: numpy has no such dtype.
        GraphError: it is part of torch's graph.
        DeviceError: it is on a device that aiograd does not have.
    """
    if torch.nn.parameter.is_lazy(source):
        raise ArgumentError(f"wrapping a torch module: parameter {name} has no shape yet. Call the torch module once, and wrap it then.")
    if source.grad_fn is not None:  # put there by torch.func.functional_call
        refuse_graph(f"calling a wrapped torch module within torch.func.functional_call: the tensor in the place of parameter {name}")
    found = _known.get(id(source))
    if found is None:
        found = _known.setdefault(id(source), SharedParameter._of(source, side))
    if found.side != side:
        raise ArgumentError(
            f"wrapping a torch module with keep_grad={side!r}: parameter {name} belongs to a module that has been wrapped with "
            f"keep_grad={found.side!r}, and its gradients arrive in one way only. Wrap both the same way."
        )
    return found
