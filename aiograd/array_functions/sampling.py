"""Random Tensors by functions, under PyTorch's names. Numbers come from a `Generator`, the default one of the running task where none is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.modes import no_grad
from aiograd.running.random import Generator, default_generator, seed
from aiograd.tensors.tensor import Tensor

__all__ = ["bernoulli", "manual_seed", "normal", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]

Shape = int | Sequence[int]

#: PyTorch's name
manual_seed = seed


def _drawn(tensor: Tensor, device: str | None, requires_grad: bool) -> Tensor:
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def rand(
    shape: Shape = (), *, generator: Generator | None = None, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Numbers uniformly distributed in [0, 1), of a real floating dtype (the default dtype)."""
    return _drawn((generator or default_generator()).uniform(shape, dtype=dtype), device, requires_grad)


def randn(
    shape: Shape = (), *, generator: Generator | None = None, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Numbers of the standard normal distribution, of a real floating dtype (the default dtype)."""
    return _drawn((generator or default_generator()).normal(shape, dtype=dtype), device, requires_grad)


def randint(
    low: int, high: int | Shape | None = None, shape: Shape | None = None, *, generator: Generator | None = None, dtype: Any = np.int64,
    device: str | None = None, requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Integers uniformly distributed in [low, high); ``randint(high, shape)`` begins at 0.

    Args:
        low, high: ends of the interval.
        shape: of the result.
        generator: where the numbers come from.
        dtype: of the result, an integer dtype (a floating one too, as in PyTorch).
        device: of the result; None: the host.
        requires_grad: make it a leaf, with gradients that accumulate in ``.grad``.

    Returns:
        A new Tensor.

    Raises:
        ArgumentError: no shape, or an interval without numbers.
    """
    if shape is None and (high is None or isinstance(high, (tuple, list))):
        low, high, shape = 0, low, high
    elif shape is not None and high is None:
        low, high = 0, low
    if shape is None or isinstance(high, (tuple, list)):
        raise ArgumentError(f"randint({low}, {high}): expected the ends of the interval and a shape, such as randint(0, 10, (3,))")
    wanted = np.dtype(dtype)
    drawn = (generator or default_generator()).integers(low, high, shape, dtype=wanted if wanted.kind in "iu" else np.int64)  # type: ignore[arg-type]
    return _drawn(drawn.astype(wanted, copy=False), device, requires_grad)


def randperm(n: int, *, generator: Generator | None = None, dtype: Any = np.int64, device: str | None = None) -> Tensor:
    """The numbers 0 to `n` - 1 in random order."""
    return _drawn((generator or default_generator()).permutation(n).astype(dtype, copy=False), device, False)


def rand_like(
    x: ArrayLike, /, *, generator: Generator | None = None, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Numbers as of `rand`, of the shape, dtype and device of `x`."""
    like = as_tensor(x)
    return rand(like.shape, generator=generator, dtype=dtype or like.dtype, device=device or like.device, requires_grad=requires_grad)


def randn_like(
    x: ArrayLike, /, *, generator: Generator | None = None, dtype: Any = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Numbers as of `randn`, of the shape, dtype and device of `x`."""
    like = as_tensor(x)
    return randn(like.shape, generator=generator, dtype=dtype or like.dtype, device=device or like.device, requires_grad=requires_grad)


def randint_like(
    x: ArrayLike, /, low: int, high: int | None = None, *, generator: Generator | None = None, dtype: Any = None, device: str | None = None
) -> Tensor:
    """Integers as of `randint`, of the shape, dtype and device of `x`."""
    like = as_tensor(x)
    return randint(low, high, like.shape, generator=generator, dtype=dtype or like.dtype, device=device or like.device)


def normal(
    mean: ArrayLike = 0.0, std: ArrayLike = 1.0, shape: Shape | None = None, *, generator: Generator | None = None, dtype: Any = None
) -> Tensor:
    """Normally distributed numbers; `mean` and `std` may be arrays, and take gradients where they are Tensors.

    Args:
        mean, std: of the distribution, numbers or arrays that broadcast.
        shape: of the result; None: `mean` and `std` broadcast.
        generator: where the numbers come from.
        dtype: of the numbers that are drawn.

    Returns:
        A new Tensor.

    Raises:
        ArgumentError: a `std` that is negative or NaN.
    """
    middle, spread = as_tensors(mean, std)
    if not bool((spread.detach() >= 0).all()):
        raise ArgumentError("normal(): expected numbers of at least 0 in std")
    wanted = dtype or np.result_type(*(x.dtype for x in (middle, spread) if x.dtype.kind == "f") or (np.float32,))
    size = np.broadcast_shapes(middle.shape, spread.shape) if shape is None else shape
    return middle + spread * randn(size, generator=generator, dtype=wanted, device=middle.device if middle.ndim else spread.device)


def check_probabilities(p: Tensor) -> None:
    """Raise unless the numbers of a tensor of the host are probabilities.

    Raises:
        ArgumentError: they are not.
    """
    values = p._data
    if values.__class__ is np.ndarray and not ((values >= 0) & (values <= 1)).all():
        raise ArgumentError(f"bernoulli() of numbers from {values.min()} to {values.max()}: expected probabilities between 0 and 1")


def bernoulli(p: ArrayLike, /, *, generator: Generator | None = None) -> Tensor:
    """1 with the probabilities of `p`, else 0, in the shape and dtype of `p`; without a gradient.

    Raises:
        ArgumentTypeError: `p` is not of a real floating dtype. ArgumentError: numbers outside of 0 to 1, or NaN.
    """
    chances = as_tensor(p)
    if chances.dtype.kind != "f":
        raise ArgumentTypeError(f"bernoulli() of dtype {chances.dtype}: expected probabilities of a real floating dtype")
    check_probabilities(chances)
    with no_grad():
        drawn: Tensor = rand_like(chances, generator=generator, dtype=np.float32 if chances.dtype == np.float16 else None) < chances
        return drawn.astype(chances.dtype)
