"""Sources that scripts take for granted: a base class, and tensors side by side. Anything with ``__getitem__`` and ``__len__`` serves as well."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.tensor import Tensor


class Dataset:
    """Base class of sources, for scripts that name one: subclasses define ``__getitem__``, and ``__len__`` where they have a length.

    >>> class Squares(ag.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return float(index**2)
    >>> list(ag.data.DataLoader(Squares(), batch_size=2))
    [tensor([0., 1.]), tensor([4., 9.])]
    """

    def __getitem__(self, index: Any) -> Any:
        """The example at `index`.

        Args:
            index: an int.

        Returns:
            The example.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__()")


class TensorDataset(Dataset):
    """Rows of tensors: example i is the tuple of row i of each.

    Args:
        *tensors: at least one; their first axes are of one length.

    Raises:
        ArgumentError: no tensors, or lengths that differ. ArgumentTypeError: something else than Tensors.

    >>> rows = ag.data.TensorDataset(ag.tensor([[1.0], [2.0]]), ag.tensor([0, 1]))
    >>> len(rows), rows[1]
    (2, (tensor([2.]), tensor(1)))
    """

    def __init__(self, *tensors: Tensor) -> None:
        if not all(hasattr(tensor, "shape") for tensor in tensors):
            raise ArgumentTypeError(f"TensorDataset: expected Tensors, found {', '.join(type(tensor).__name__ for tensor in tensors)}")
        if not tensors or len({tensor.shape[:1] for tensor in tensors} | {()}) != 2:
            found = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
            raise ArgumentError(f"TensorDataset: found tensors of shapes {found}; expected at least one, all with as many rows")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """The rows at `index`, in a tuple.

        Args:
            index: an int, or anything that indexes a Tensor.

        Returns:
            A Tensor of each.
        """
        return tuple(tensor[index] for tensor in self.tensors)
