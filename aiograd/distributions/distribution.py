"""Distribution: the part that all distributions have in common.

A distribution has a batch shape, the shape of its broadcast parameters, and an event shape, the shape of one draw. A sample has the shape
``sample_shape + batch_shape + event_shape``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.conversion import as_tensor
from aiograd.array_functions.manipulation import broadcast_arrays
from aiograd.errors import ArgumentError, ArgumentTypeError, NoRuleError, ShapeError
from aiograd.running.modes import get_default_dtype, no_grad
from aiograd.running.random import Generator, default_generator
from aiograd.running.types import Shape
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor


class Distribution:
    """Base of distributions.

    Args:
        batch_shape, event_shape: see the module.
        validate_args: True to check values on the host: parameters when it is made, what `log_prob` is asked of.
        generator: draws the samples; None: the default generator of the running task.

    >>> distribution = ag.distributions.Normal(ag.zeros(3), 1.0)
    >>> isinstance(distribution, ag.distributions.Distribution), distribution.batch_shape
    (True, (3,))
    >>> distribution.sample((2,)).shape
    (2, 3)
    """

    #: True if samples can be differentiated by the parameters
    has_rsample: bool = False

    def __init__(
        self, batch_shape: Sequence[int], event_shape: Sequence[int] = (), validate_args: bool = True, generator: Generator | None = None
    ) -> None:
        self.batch_shape: tuple[int, ...] = tuple(batch_shape)
        self.event_shape: tuple[int, ...] = tuple(event_shape)
        self.validate_args = validate_args
        self.generator = generator

    def sample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        """A draw, or an array of them, outside of any graph.

        Args:
            sample_shape: how many draws, as a shape; () is one.

        Returns:
            A Tensor of shape ``sample_shape + batch_shape + event_shape``.
        """
        with no_grad():
            return self.rsample(sample_shape).detach()

    def rsample(self, sample_shape: int | Sequence[int] = ()) -> Tensor:
        """A draw as a differentiable function of the parameters.

        Args:
            sample_shape: how many draws, as a shape; () is one.

        Returns:
            A Tensor of shape ``sample_shape + batch_shape + event_shape``.

        Raises:
            NoRuleError: the distribution has none.
        """
        raise NoRuleError(f"{type(self).__name__}.rsample: samples have no derivative; use sample(), and log_prob() for gradients")

    def log_prob(self, value: Any) -> Tensor:
        """The logarithm of the density, or of the probability, at a value.

        Args:
            value: a draw, or an array of them.

        Returns:
            A Tensor of the batch shape, broadcast with the shape of `value`.

        Raises:
            ArgumentError: a value on the host outside of the support, if `validate_args`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no log_prob()")

    def entropy(self) -> Tensor:
        """The entropy.

        Returns:
            A Tensor of the batch shape, in nats.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no entropy()")

    @property
    def mean(self) -> Tensor:
        """The mean."""
        raise NotImplementedError(f"{type(self).__name__} defines no mean")

    @property
    def variance(self) -> Tensor:
        """The variance."""
        raise NotImplementedError(f"{type(self).__name__} defines no variance")

    @property
    def stddev(self) -> Tensor:
        """The standard deviation."""
        return self.variance.sqrt()

    # ---------------------------------------------------------------- for subclasses

    def _shape(self, sample_shape: int | Sequence[int]) -> tuple[int, ...]:
        given = tuple(sample_shape) if isinstance(sample_shape, Iterable) else (sample_shape,)
        if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in given):
            raise ArgumentError(f"{type(self).__name__}: sample shape {sample_shape!r}, expected ints of at least 0")
        return (*map(int, given), *self.batch_shape, *self.event_shape)

    @property
    def _generator(self) -> Generator:
        return self.generator or default_generator()

    def _require_classes(self, value: Tensor) -> None:
        """Check the last axis of a value.

        Raises:
            ShapeError: it is no event.
        """
        if value.shape[-1:] != self.event_shape:
            raise ShapeError(f"{type(self).__name__}: found a value of shape {list(value.shape)}, expected (..., {self.event_shape[0]})")

    def _require(self, name: str, value: Tensor, holds: Callable[[Any], Any], expected: str) -> None:
        """Check numbers on the host.

        Raises:
            ArgumentError: values that the distribution does not take.
        """
        if not self.validate_args or value.device != "cpu":
            return
        array = host_array(value)
        good = holds(array)
        if not np.all(good):
            bad = np.asarray(array)[~np.broadcast_to(good, np.shape(array))] if np.shape(good) == np.shape(array) else np.asarray(array).reshape(-1)
            raise ArgumentError(f"{type(self).__name__}: {name} has {float(bad.reshape(-1)[0]):.6g}, expected {expected}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_shape={list(self.batch_shape)}, event_shape={list(self.event_shape)})"


def parameters(name: str, *given: Any) -> list[Tensor]:
    """Parameters as floating Tensors of one shape; numbers take the dtype of the arrays.

    Raises:
        ArgumentTypeError: a parameter that is no real number.
        ShapeError: their shapes do not broadcast.
    """
    dtypes = [np.dtype(x.dtype) for x in given if hasattr(x, "dtype") and np.dtype(x.dtype).kind == "f"]
    dtype = np.result_type(*dtypes) if dtypes else get_default_dtype()
    place = next((x.device for x in given if isinstance(x, Tensor) and x.device != "cpu"), "cpu")
    found = [as_tensor(x, dtype) for x in given]
    if any(x.dtype.kind not in "fiub" for x in found):
        raise ArgumentTypeError(f"{name}: parameters have dtypes {[str(x.dtype) for x in found]}, expected real numbers")
    found = [x if x.dtype == dtype else x.astype(dtype) for x in found]
    found = [x if x.device == place else x.to(place) for x in found]
    joint_shape(name, "parameters", *[x.shape for x in found])
    return list(broadcast_arrays(*found)) if len(found) > 1 else found


def joint_shape(name: str, what: str, *shapes: Shape) -> Shape:
    """The shape that arrays broadcast to.

    Raises:
        ShapeError: there is none.
    """
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as error:
        raise ShapeError(f"{name}: found {what} of shapes {', '.join(str(list(shape)) for shape in shapes)}, expected ones that broadcast") from error


def drawn(array: Any, like: Tensor) -> Tensor:
    """Numbers drawn on the host as a Tensor beside another, in its dtype."""
    values: Tensor = make(np.asarray(array, like.dtype))
    return values if like.device == "cpu" else values.to(like.device)
