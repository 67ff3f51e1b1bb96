"""The device interface: the protocol of a device, and the registry of devices by name.

A device is a kind of array that implements numpy's protocols (``__array_ufunc__``, ``__array_function__``) plus an executor. The op
tables and the engine know no particular device.

Note [Attributes of a device array]
    ``shape``, ``dtype``, ``ndim``, ``size``, ``nbytes``, ``T``, arithmetic operators, indexing and ``array[index] = value``, numpy's protocols,
    and

    ==========================  ==========================================================================================
    ``__aiograd_device__``      the name of its device, ``"toy:0"``
    ``base``                    the array that it shares memory with, None where it has its own. It decides if the result of a row marked
                                ``view`` is a view, and if a leaf may keep the array as its gradient
    ``__aiograd_wait__()``      a coroutine that ends when the data is computed, and raises if it could not be computed
    ``__aiograd_is_ready__()``  True if reading would not block (also if reading would raise); starts deferred work
    ``__aiograd_op__(op,        runs a row with a kernel of its own, or returns NotImplemented; with ``__aiograd_priority__`` below a
    args, kwargs)``             Tensor's 1000
    ==========================  ==========================================================================================

    and, where the device has several streams, ``__aiograd_stream__``: the stream of the caller. A node that is recorded
    keeps it as ``stream``; the device reads it from `aiograd.graph.current_node` when the node's rule runs.

    ``__aiograd_op__`` has to implement every row with a forward that cannot be composed of numpy functions on device arrays: rows that fill an array
    piece by piece (adjoints of indexing, convolutions, pooling, recurrences) or make one like another (`zeros_like`).

Note [Where a device's work is started]
    Operations on device arrays may be called on any thread, the loop's included, so they only start work. The rules of nodes with
    gradients on a device run through the device's ``submit``, in a copy of the caller's context; rules of rows stay on the loop where
    the device ``launches_ahead``. `aiograd.graph.current_node` returns the node of the running rule. An array that a rule
    makes from static arguments is a host array, and so is a numpy array that a user mixes with Tensors: a device's operations
    accept host arrays beside their own and copy them.

Note [Late failures]
    Work that was started may fail later. A pass waits for the data of every gradient it delivers before it commits, so that a failure on a
    device is a failure of the pass and no ``grad`` changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from aiograd.errors import ArgumentError, DeviceError
from aiograd.ops.op import Fused
from aiograd.running.types import Array, Shape


@runtime_checkable
class Device(Protocol):
    """The interface of a device to the engine and ``Tensor.to``."""

    @property
    def name(self) -> str:
        """``kind:ordinal``."""

    @property
    def launches_ahead(self) -> bool:
        """True if operations on its arrays only queue work, in microseconds, on whichever thread they are called.

        The rules of rows then run on the loop, which thus queues work ahead of the device, instead of one `submit` for each node.
        """

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run on the device's own thread, in order of submission."""

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """A device array with the same values; must not keep a reference to `array`'s memory."""

    def fused(self, row: str) -> Fused | None:
        """The device's own kernels for a row: a forward that keeps what its rules name beside the output; see `aiograd.ops.op.Fused`.

        None: the row runs by ``__aiograd_op__`` and its plain rules. The same object each time.
        """

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """The values as a numpy array; waits for them. Called on the device's thread or outside a running loop."""


@runtime_checkable
class UpdatesParameters(Protocol):
    """Optional interface of a device: optimizer steps for many parameters at once."""

    def update_parameters(self, kind: str, members: Sequence[tuple[Array, Array, Sequence[Array]]], options: Mapping[str, Any]) -> bool:
        """Update parameters and their state in place, each to the bits that it would get alone.

        Args:
            kind: ``sgd`` or ``adam``, as the functions of `aiograd.kernels.optimizer`.
            members: parameter, gradient and state arrays of each, all of one dtype.
            options: the arguments of that function by name.

        Returns:
            True if the update was done; False if nothing has changed and the caller has to compute it by arithmetic on the arrays.
        """


@runtime_checkable
class ScalesGradients(Protocol):
    """Optional interface of a device: clipping by a norm, for many arrays at once."""

    def sum_of_squares(self, arrays: Sequence[Array]) -> Array | None:
        """The sum of the squares of all elements, 0-d, in a fixed order; None if the caller has to compute it by arithmetic on the arrays."""

    def scaled(self, arrays: Sequence[Array], scale: Array) -> Sequence[Array] | None:
        """New arrays, each times a 0-d one; None as above."""


@runtime_checkable
class DrawsMasks(Protocol):
    """Optional interface of a device: random numbers drawn on the device from a seed."""

    def dropout_mask(self, seed: tuple[int, int], shape: Shape, p: float, dtype: Any) -> Array:
        """Zeros with probability `p` in (0, 1), ``1 / (1 - p)`` elsewhere; the same for the same seed, two numbers of 64 bits."""


@runtime_checkable
class FillsArrays(Protocol):
    """Optional interface of a device: arrays of one number made on the device, without memory of the host."""

    def filled(self, shape: Shape, value: Any, dtype: Any) -> Array:
        """An array with this number everywhere."""


@runtime_checkable
class AdoptsTensors(Protocol):
    """Optional interface of a device: its operations take Tensors of other devices as they are, which keep their place in the graph there."""

    @property
    def depth(self) -> int:
        """A number that is higher the more devices this one lies within: it takes the Tensors of those with lower numbers."""

    def adopt(self, tensor: Any) -> Array:
        """An array of the device that stands for a Tensor of another, or a Tensor with a graph of its own that holds one."""

    def takes_graph(self, tensor: Any) -> bool:
        """True if the Tensor keeps its place in the graph of operations on this device."""


_devices: dict[str, Device] = {}
_factories: dict[str, Callable[[int], Device]] = {}
#: packages that implement devices: their functions compute from their arguments alone
_computing: set[str] = set()


def register_device(device: Device, computing: Iterable[str] = ()) -> None:
    """Make a device known under its name; replaces one of the same name.

    Args:
        device: the device.
        computing: names of packages and modules that implement it, with functions that compute from their arguments alone, as numpy's do.
            `ag.compile` records their results without reading how they come about; it watches all other Python functions.
    """
    _devices[device.name] = device
    _computing.update(computing)


def computing_packages() -> frozenset[str]:
    """Names of the packages and modules that registered devices name as ``computing``."""
    return frozenset(_computing)


def unregister_device(name: str) -> None:
    """Forget a device."""
    _devices.pop(name, None)


def register_device_kind(kind: str, factory: Callable[[int], Device]) -> None:
    """Make devices ``kind:ordinal`` on first use; the factory raises `DeviceError` where there is none."""
    _factories[kind] = factory


class DeviceName(str):
    """The name of a device that is there, as PyTorch's ``torch.device``: ``ag.device("cuda:0")``. A str, which everything takes that takes a device.

    Args:
        name: ``"cpu"``, or ``"kind:ordinal"`` such as ``"cuda:0"``.
        index: the ordinal, where the name has none.

    Other attributes belong to the device itself.

    Raises:
        DeviceError: no such device, with the names that exist. ArgumentError: not a device name.

    >>> ag.device("cpu") == "cpu", ag.device("cpu").type
    (True, 'cpu')
    """

    def __new__(cls, name: str, index: int | None = None) -> Self:
        """The name of a device, with its ordinal; the device is made where it is asked for the first time."""
        if not isinstance(name, str):
            raise ArgumentError(f"device({name!r}): expected 'cpu' or 'kind:ordinal' such as 'cuda:0'")
        found = device(name if index is None else f"{name}:{index}")
        return super().__new__(cls, "cpu" if found is None else found.name)

    @property
    def type(self) -> str:
        """The kind of the device, ``"cuda"``."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]
        """The ordinal of the device; None for ``"cpu"``."""
        ordinal = self.partition(":")[2]
        return int(ordinal) if ordinal else None

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or self == "cpu":
            raise AttributeError(f"device({str(self)!r}) has no attribute {attribute!r}")
        return getattr(device(str(self)), attribute)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[str]]:
        return str, (str(self),)


def device(name: str) -> Device | None:
    """The device of this name; None for ``"cpu"``.

    Args:
        name: ``"cpu"``, or ``"kind:ordinal"`` such as ``"cuda:0"``; without an ordinal number 0.

    Returns:
        The device. It is made where it is asked for the first time.

    Raises:
        DeviceError: no such device, with the names that exist. ArgumentError: not a device name.
    """
    if name == "cpu":
        return None
    found = _devices.get(name)
    if found is not None:
        return found
    kind, _, ordinal = name.partition(":")
    if not kind or (ordinal and not ordinal.isdecimal()):
        raise ArgumentError(f"device({name!r}): expected 'cpu' or 'kind:ordinal' such as 'cuda:0'")
    full = f"{kind}:{int(ordinal or 0)}"
    found = _devices.get(full)
    if found is not None:
        return found
    factory = _factories.get(kind)
    if factory is None:
        known = ", ".join(sorted({"cpu", *_devices, *_factories}))
        raise DeviceError(f"device({name!r}): no such device; known are {known}. Import the package that provides it first.")
    made = _devices[full] = factory(int(ordinal or 0))
    return made


@functools.lru_cache(256)
def name_of_device(name: str) -> DeviceName:
    """The name of a device that holds something, which is thus there."""
    return str.__new__(DeviceName, name)


def adopts(name: str) -> bool:
    """True for the name of a device that adopts Tensors: gradients of Tensors on any device may live there."""
    return hasattr(_devices.get(name), "adopt")  # what `AdoptsTensors` asks for, which costs ten times as much to check


def known_devices() -> list[str]:
    """The names of the host and of the devices that have been made."""
    return ["cpu", *sorted(_devices)]


def device_name_of(array: Array) -> str:
    """Name of the device an array lives on."""
    return "cpu" if isinstance(array, (np.ndarray, np.generic)) else getattr(array, "__aiograd_device__", "cpu")
