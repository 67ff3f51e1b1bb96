"""Parameter: a leaf that a module owns and an optimizer updates."""

from __future__ import annotations

from typing import Any, Self

from aiograd.array_functions.conversion import as_tensor
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor


class Parameter(Tensor):
    """A Tensor that becomes part of a module's state when it is assigned as an attribute.

    Operations on it give ordinary Tensors. It takes attributes of one's own (``p.tag = 1``), which copies keep.

    Args:
        data: a Tensor (its graph is left behind), an array or nested lists; memory is shared where it can be.
        requires_grad: True if gradients are wanted.

    Raises:
        ArgumentTypeError: gradients are wanted of a dtype that has none.

    >>> p = ag.nn.Parameter([1.0, 2.0])
    >>> p
    Parameter containing:
    tensor([1., 2.], requires_grad=True)
    >>> await (p * p).sum().backward()
    >>> p.grad
    tensor([2., 4.])
    """

    __slots__ = ("__dict__",)

    def __new__(cls, data: Any, requires_grad: bool = True) -> Self:
        source = as_tensor(data)
        parameter: Self = make(source._data, shared_with=source, cls=cls)
        return parameter.requires_grad_() if requires_grad else parameter

    def detach(self) -> Tensor:  # type: ignore[override]
        """The same data as an ordinary Tensor outside of the graph.

        Returns:
            A Tensor.
        """
        return make(self._data, shared_with=self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"
