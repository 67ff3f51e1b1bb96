"""TensorContainer: parameters and buffers, and the operations on all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from aiograd.array_functions.creation import zeros_like
from aiograd.errors import ArgumentTypeError
from aiograd.tensors.constants import checked_dtype
from aiograd.tensors.core import counter_of


class TensorContainer:
    """Base of modules: it moves and casts their Tensors, and clears gradients."""

    def parameters(self) -> Iterator[Any]:
        """The Tensors that have gradients."""
        raise NotImplementedError

    def buffers(self) -> Iterator[Any]:
        """The Tensors without."""
        raise NotImplementedError

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch gradients of all parameters on or off.

        Args:
            requires_grad: True: gradients are wanted.

        Returns:
            The module itself.
        """
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or fill them with zeros.

        Args:
            set_to_none: False: fill with zeros.
        """
        for parameter in self.parameters():
            grad = parameter.grad
            parameter.grad = None if set_to_none or grad is None else zeros_like(grad)

    def to(self, target: Any = None, *, device: str | None = None, dtype: Any = None) -> Self:
        """Move to a device and cast floating Tensors to a dtype, in place; parameters stay the same objects.

        Gradients go along. A graph recorded before must not be used afterwards.

        Args:
            target: a device name or a dtype, floating or complex.
            device, dtype: the same by name.

        Returns:
            The module itself.

        Raises:
            ArgumentTypeError: integers or booleans, in which there are no gradients; nothing has changed.
        """
        if target is not None:
            if isinstance(target, str) and target not in np.sctypeDict:
                device = target
            else:
                dtype = target
        wanted = None if dtype is None else checked_dtype(dtype)
        if wanted is not None and wanted.kind not in "fc":
            raise ArgumentTypeError(
                f"{type(self).__name__}.to({wanted}): expected a floating or complex dtype; others would truncate parameters and have no gradients"
            )
        for tensor in [*self.parameters(), *self.buffers()]:
            _convert(tensor, device, wanted)
        return self

    def float(self) -> Self:
        """Cast floating parameters and buffers to float32.

        Returns:
            The module itself.
        """
        return self.to(dtype=np.float32)

    def half(self) -> Self:
        """Cast floating parameters and buffers to float16.

        Returns:
            The module itself.
        """
        return self.to(dtype=np.float16)

    def double(self) -> Self:
        """Cast floating parameters and buffers to float64.

        Returns:
            The module itself.
        """
        return self.to(dtype=np.float64)

    def cpu(self) -> Self:
        """Move to the host.

        Returns:
            The module itself.
        """
        return self.to(device="cpu")


def _convert(tensor: Any, device: str | None, dtype: np.dtype[Any] | None) -> None:
    """Move and cast a leaf in place, with its gradient."""

    def converted(source: Any) -> Any:
        plain = source.detach()
        if dtype is not None and plain.dtype.kind in "fc":
            plain = plain.astype(dtype, copy=False)
        return plain if device is None else plain.to(device)

    value = converted(tensor)
    if value._data is tensor._data:
        return
    grad = tensor.grad
    tensor._data = value._data
    counter_of(tensor)[0] += 1  # a graph that has saved the old values must not go on with the new ones
    node = tensor._node if tensor._x is None or tensor._x.leaf is None else tensor._x.leaf
    if node is not None:
        # the node is kept, and with it the hooks on the leaf
        node.dtype, node.device = value.dtype, value.device
    if grad is not None:
        tensor.grad = converted(grad)
