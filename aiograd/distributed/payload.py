"""Arguments and results of remote calls: trees of plain values, Tensors and RemoteRefs ↔ trees of types that the codec supports.

A Tensor that appears twice is sent once and arrives as one Tensor. The differentiable Tensors of a message, each once and in the order in
which they appear, are the edges of its send node and the inputs of its recv node.

Note [Parameters are copied]
    Large arrays are not copied into a message: they are read while frames are sent, and again if frames have to be resent. So the arrays must
    not change until the answer has come. Results of operations are rarely modified in place, but optimizers modify
    parameters, maybe while a call is under way; leaves that require grad are therefore copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CoroutineType
from typing import Any

import numpy as np

from aiograd.coordination.device_copies import STAYS, LevelArrayError, level_of
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.codec import WireReference, WireTensor
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.tensor_table import INLINE
from aiograd.distributed.rpc.values import SENT_AS
from aiograd.errors import ArgumentTypeError, LimitError
from aiograd.running.caller import type_found
from aiograd.tensors.core import TensorCore, make

#: types that are sent as they are
_PLAIN = frozenset((str, int, float, bool, type(None), complex, bytes))


class UnsendableError(Exception):
    """A value of a type that cannot be sent; `explain` turns it into the error for the user."""

    def __init__(self, value: object) -> None:
        super().__init__(type(value).__name__)
        self.value = value


def explain(error: UnsendableError | RecursionError, what: str, values: Iterable[tuple[str, Any]]) -> Exception:
    """The error for values that cannot be sent.

    Args:
        what: the operation, such as "calling square on b".
        values: the values with their names, such as "argument 0".
    """
    if isinstance(error, RecursionError):
        return LimitError(f"{what}: a value is nested too deep to be sent, or contains itself")
    found = error.value
    kind = type(found)
    place = next((name + path for name, value in values if (path := _path_to(found, value)) is not None), "a value")
    if isinstance(found, TensorCore):
        return LevelArrayError(
            f"{what}: {place} is a tensor of {level_of(found._data)}, shape {list(found.shape)}, which stands for more than one value; only a plain "
            f"one can be sent. {STAYS}"
        )
    if kind is dict:
        key = next(key for key in found if key.__class__ is not str)  # type: ignore[attr-defined]
        return ArgumentTypeError(f"{what}: {place} has a key of type {type(key).__name__}; the keys of a dict that is sent are str")
    if isinstance(found, (np.ndarray, np.generic)):
        name, advice = f"numpy.{kind.__name__}", "wrap it in ag.tensor(...), or take .item() of a number"
    else:
        name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
        base = next((base for base in kind.__mro__[1:] if base in _PLAIN or base in (list, tuple, dict)), None)
        advice = "convert it first, or keep it on its worker and send a RemoteRef to it" if base is None else f"convert it to {base.__name__} first"
    if isinstance(found, CoroutineType):
        return ArgumentTypeError(f"{what}: {place} is a {type_found(found)}")
    return ArgumentTypeError(
        f"{what}: {place} has type {name}; what can be sent is None, bool, int, float, complex, str, bytes, list, tuple, dict with str keys, Tensor "
        f"and RemoteRef, each of exactly that type: {advice}"
    )


def _path_to(found: object, value: Any) -> str | None:
    """The path to a value in a tree, as indices."""
    if value is found:
        return ""
    items: Iterable[tuple[Any, Any]] = enumerate(value) if value.__class__ in (list, tuple) else value.items() if value.__class__ is dict else ()
    return next((f"[{key!r}]{path}" for key, item in items if (path := _path_to(found, item)) is not None), None)


class NotOnHostError(Exception):
    """A value has a Tensor with data on a device, and there is no copy of it."""


def device_tensors(value: Any, found: list[Any] | None = None) -> list[Any]:
    """The Tensors in a tree with data that is not on the host."""
    found = [] if found is None else found
    if isinstance(value, TensorCore):
        if value._data.__class__ is not np.ndarray:
            found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            device_tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            device_tensors(item, found)
    return found


class Packing:
    """Turns values into types that the codec supports, for one message.

    Args:
        records: True if differentiable Tensors stay connected to the graph.
        encoding: the wire encoding of floating-point tensors.
        hosted: host copies of Tensors that live on devices, by ``id``.
    """

    __slots__ = ("records", "encoding", "hosted", "differentiable", "tangents", "levels", "inputs", "_memo")

    #: the tangents beside the values, their levels and the inputs that they come from; see `aiograd.distributed.tangents`
    tangents: list[Any] | None
    levels: Sequence[Any]
    inputs: Mapping[Any, int]

    def __init__(self, records: bool, encoding: Encoding, hosted: Mapping[int, Any]) -> None:
        self.records = records
        self.encoding = encoding
        self.hosted = hosted
        self.tangents = None
        self.levels, self.inputs = (), {}
        #: Tensors that require grad, each once, in order
        self.differentiable: list[Any] = []
        self._memo: dict[int, WireTensor] = {}

    def pack(self, value: Any) -> Any:
        """The value with every Tensor and RemoteRef replaced.

        Raises:
            UnsendableError: it contains a value that cannot be sent. RecursionError: it is nested too deep. NotOnHostError: a Tensor lives on a
            device, and is not among `hosted`.
        """
        kind = value.__class__
        if kind in _PLAIN:
            return value
        if isinstance(value, TensorCore):
            return self._tensor(value)
        if kind is list:
            return [self.pack(item) for item in value]
        if kind is tuple:
            return tuple([self.pack(item) for item in value])
        if kind is dict:
            for key in value:
                if key.__class__ is not str and SENT_AS.get(key.__class__) is not str:
                    raise UnsendableError(value)
            return {key if key.__class__ is str else str(key): self.pack(item) for key, item in value.items()}
        if kind is RemoteRef:
            return value.to_wire()
        if kind in SENT_AS:
            return SENT_AS[kind](value)
        raise UnsendableError(value)

    def _tensor(self, tensor: Any) -> WireTensor:
        wire = self._memo.get(id(tensor))
        if wire is None:
            array = self.hosted.get(id(tensor))
            if array is None:
                array = tensor._data
                if array.__class__ is not np.ndarray:
                    raise NotOnHostError
            is_wanted = self.records and tensor.requires_grad
            if is_wanted:
                self.differentiable.append(tensor)
            if array.nbytes > INLINE and tensor.requires_grad and tensor.is_leaf:
                array = array.copy()  # see Note [Parameters are copied]
            encoding = self.encoding if array.dtype.kind == "f" and array.dtype.itemsize >= 4 else Encoding.PLAIN
            wire = self._memo[id(tensor)] = WireTensor(array, is_wanted, encoding)
        return wire


class Unpacking:
    """Turns decoded data back into values, for one message.

    Args:
        reference: makes a RemoteRef.
    """

    __slots__ = ("reference", "differentiable", "_memo")

    def __init__(self, reference: Callable[[WireReference], RemoteRef]) -> None:
        self.reference = reference
        #: Tensors that the sender marked as differentiable, each once, in order
        self.differentiable: list[Any] = []
        self._memo: dict[int, Any] = {}

    @property
    def tensors(self) -> list[Any]:
        """The Tensors so far, each once, in the order in which they appeared."""
        return list(self._memo.values())

    def unpack(self, value: Any) -> Any:
        """The value with Tensors (outside of any graph as yet) and RemoteRefs in place."""
        kind = value.__class__
        if kind in _PLAIN:
            return value
        if kind is WireTensor:
            tensor = self._memo.get(id(value))
            if tensor is None:
                tensor = self._memo[id(value)] = make(value.array)
                if value.requires_grad:
                    self.differentiable.append(tensor)
            return tensor
        if kind is list:
            return [self.unpack(item) for item in value]
        if kind is tuple:
            return tuple([self.unpack(item) for item in value])
        if kind is dict:
            return {key: self.unpack(item) for key, item in value.items()}
        if kind is WireReference:
            return self.reference(value)
        return value
