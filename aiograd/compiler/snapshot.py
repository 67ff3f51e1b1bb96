"""Snapshot: the state of all that a function can reach, to be put back after a call that is to leave no trace.

Note [Remembered state]
    From the function, its arguments, closure and globals on: Tensors with their arrays, versions and gradients, arrays, generators of random
    numbers, containers, and the attributes of objects of the user's classes and of aiograd's modules, optimizers, schedules and distributions. Every
    object stays the same object; its content is put back. Engines, workers, loops, locks, files and other objects of the standard library or of other
    packages are left alone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running.random_streams import RandomStream
from aiograd.tensors.core import TensorCore

#: packages of which no object and no global is looked into
_FOREIGN = frozenset({*sys.stdlib_module_names, "numpy", "scipy", "torch", "jax", "aiohttp", "uvloop", "numba", "llvmlite", "pytest", "_pytest"})
#: parts of the package with objects that have a state of the computation
_OWN = ("aiograd.nn", "aiograd.optim", "aiograd.distributions", "aiograd.tensors", "aiograd.running.random")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, np.dtype, np.ufunc)
_ABSENT = object()


def _is_followed(module: Any) -> bool:
    """True for a module with objects that are looked into."""
    name = module if isinstance(module, str) else ""
    package = name.partition(".")[0]
    if package == "aiograd":
        return name.startswith(_OWN)
    return package == "__main__" or package not in _FOREIGN


class Snapshot:
    """Remembers state; see the module's Note.

    Attributes:
        leaves: the nodes of leaves that were remembered.
        devices: names of other devices than the host with Tensors in the remembered state: these are not put back.
    """

    def __init__(self) -> None:
        self.leaves: list[AccumulateGrad] = []
        self.devices: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._known: dict[int, Any] = {}

    def remember(self, *roots: Any) -> None:
        """Add the state of all that can be reached from objects; objects that are known already are passed over."""
        waiting = list(roots)
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, _PLAIN) or id(thing) in self._known:
                continue
            self._known[id(thing)] = thing
            waiting += self._take(thing)

    def undo(self) -> None:
        """Put everything back; may be done several times."""
        for each in self._undo:
            each()

    def _take(self, thing: Any) -> Iterator[Any]:
        """Remember one object; gives the ones that it holds."""
        if isinstance(thing, np.ndarray):
            self._array(thing)
        elif isinstance(thing, TensorCore):
            yield from self._tensor(thing)
        elif isinstance(thing, np.random.Generator):
            state = thing.bit_generator.state
            self._undo.append(functools.partial(setattr, thing.bit_generator, "state", state))
        elif isinstance(thing, RandomStream):
            self._slots(thing, ("spawned", "_numpy"))
            yield thing._numpy
        elif isinstance(thing, AccumulateGrad):
            self.leaves.append(thing)
            self._slots(thing, ("grad",))
            yield thing.grad
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, types.MethodType):
            yield from (thing.__self__, thing.__func__)
        elif isinstance(thing, functools.partial):
            yield from (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, (tuple, frozenset)):
            yield from thing
        elif isinstance(thing, dict):
            self._undo.append(functools.partial(_refill, thing, dict(thing), thing.update))
            yield from (*thing.keys(), *thing.values())
        elif isinstance(thing, (list, deque)):
            self._undo.append(functools.partial(_refill, thing, tuple(thing), thing.extend))
            yield from tuple(thing)
        elif isinstance(thing, set):
            self._undo.append(functools.partial(_refill, thing, frozenset(thing), thing.update))
            yield from tuple(thing)
        elif type(thing).__module__ == "aiograd.compiler.compiled":
            yield vars(thing).get("function")
        elif _is_followed(type(thing).__module__):
            yield from self._object(thing)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if not array.flags.writeable or array.dtype.hasobject:
            return
        copy = array.copy()

        def restore() -> None:
            if array.tobytes() != copy.tobytes():
                array.flags.writeable = True
                array[...] = copy

        self._undo.append(restore)

    def _tensor(self, tensor: TensorCore) -> Iterator[Any]:
        if not isinstance(tensor._data, np.ndarray):
            self.devices.add(str(tensor.device))
        counter = tensor._vc
        if counter is not None:
            self._undo.append(functools.partial(_refill, counter, tuple(counter), counter.extend))
        self._slots(tensor, ("_data", "_node", "_nr", "_vc", "_x"))
        extra = tensor._x
        if extra is not None:
            self._slots(extra, ("_grad", "leaf", "retains", "view"))
            yield extra._grad
            yield extra.leaf
            if extra.view is not None:
                yield extra.view.parent
        yield tensor._data
        if isinstance(tensor._node, AccumulateGrad):
            yield tensor._node
        yield getattr(tensor, "__dict__", None)

    def _slots(self, thing: Any, names: tuple[str, ...]) -> None:
        found = [(name, getattr(thing, name)) for name in names]

        def restore() -> None:
            for name, value in found:
                if getattr(thing, name) is not value:
                    setattr(thing, name, value)

        self._undo.append(restore)

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # nothing is bound yet
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
            yield value
        yield from (function.__defaults__, function.__kwdefaults__)
        if not _is_followed(function.__module__) or (function.__module__ or "").startswith("aiograd."):
            return
        names = function.__globals__
        for name in _names_in(function.__code__):
            value = names.get(name, _ABSENT)
            self._undo.append(functools.partial(_rebind, names, name, value))
            if value is not _ABSENT:
                yield value

    def _object(self, thing: Any) -> Iterator[Any]:
        attributes = getattr(thing, "__dict__", None)
        if type(attributes) is dict:
            yield attributes
        for cls in type(thing).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                member = cls.__dict__.get(f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name)
                if not isinstance(member, types.MemberDescriptorType):
                    continue
                try:
                    value = member.__get__(thing)
                except AttributeError:
                    continue
                self._undo.append(functools.partial(member.__set__, thing, value))
                yield value
        yield from (type(thing).__dict__.get(name) for name in ("__call__", "forward"))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _rebind(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    elif names.get(name, _ABSENT) is not value:
        names[name] = value


def _refill(container: Any, content: Any, add: Callable[[Any], Any]) -> None:
    """Give a container its former content, where that is another one now."""
    now, before = (tuple(each.items() if isinstance(each, dict) else each) for each in (container, content))
    flat_now, flat_before = (_flat(each) if isinstance(content, dict) else each for each in (now, before))
    if len(flat_now) != len(flat_before) or any([mine is not yours for mine, yours in zip(flat_now, flat_before, strict=True)]):
        container.clear()
        add(content)


def _flat(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([part for item in items for part in item])
