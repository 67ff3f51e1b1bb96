"""functional_call: a module with other parameters and buffers, for one call.

Note [Nothing is swapped]
    PyTorch puts the given tensors into the module and takes them out again. Between an await and the next, other tasks would see them. Here the
    modules on the way are copied, as shallow as can be, and the copies hold the given tensors: any number of calls may run at once. Attributes that
    a ``forward`` assigns to its own module are lost with the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.nn.module import Module
from aiograd.tensors.core import TensorCore


def functional_call(
    module: Module,
    parameters_and_buffers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with other tensors in place of its parameters and buffers; the module stays as it is.

    Args:
        module: the module to call.
        parameters_and_buffers: Tensors by path, as in ``state_dict()``, or several such mappings; the module's own serve for all others.
        args: arguments of the call, a tuple, or one that is none.
        kwargs: arguments of the call by name.
        tie_weights: True if a tensor that replaces one of several shared ones replaces them all.
        strict: True if every parameter and buffer must be given.

    Returns:
        The module's result; a coroutine where its ``forward`` is ``async def``.

    Raises:
        ArgumentError: a path that the module does not have, one given twice, a shape that differs, or one that is missing with `strict`.
        ArgumentTypeError: something else than a module, mappings and tensors.
    """
    given: dict[str, Any] = {}
    for mapping in [parameters_and_buffers] if isinstance(parameters_and_buffers, Mapping) else parameters_and_buffers:
        twice = given.keys() & mapping.keys()
        if twice:
            raise ArgumentError(f"functional_call: {', '.join(sorted(twice))} given twice")
        given.update(mapping)
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    unknown, missing = given.keys() - own.keys(), own.keys() - given.keys()
    if unknown or (strict and missing):
        wrong = [f"it has no {', '.join(sorted(unknown))}"] * bool(unknown) + [f"not given: {', '.join(sorted(missing))}"] * bool(strict and missing)
        raise ArgumentError(f"functional_call of {type(module).__name__}: {'; '.join(wrong)}")
    for path, value in given.items():
        if not isinstance(value, TensorCore):
            raise ArgumentTypeError(f"functional_call: {path} is a {type(value).__name__}, expected a Tensor")
        if value.shape != own[path].shape:
            raise ArgumentError(f"functional_call: {path} has shape {list(value.shape)}, expected {list(own[path].shape)}")
    shared = {id(own[path]): value for path, value in given.items()} if tie_weights else {}
    called = twin_of(module, {path: given.get(path, shared.get(id(tensor))) for path, tensor in own.items()})
    return called(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))


def twin_of(module: Module, tensors: Mapping[str, Any]) -> Module:
    """A copy of a module and of the modules below it, which holds `tensors` and shares everything else.

    Args:
        module: the module, which stays as it is.
        tensors: Tensors by path; the module's own serve for all other paths and where the value is None.
    """
    by_place: dict[int, dict[str, Any]] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for path, tensor in tensors.items():
        if tensor is not None:
            where, _, name = path.rpartition(".")
            while where not in modules:  # the path goes on inside of a module of another library
                where, _, outer = where.rpartition(".")
                name = f"{outer}.{name}"
            by_place.setdefault(id(modules[where]), {})[name] = tensor
    return _copied(module, by_place, {})


def _copied(module: Module, by_place: Mapping[int, Mapping[str, Any]], seen: dict[int, Module]) -> Module:
    """The module, copied where something in or below it is replaced."""
    if id(module) in seen:
        return seen[id(module)]
    twin = copy.copy(module)
    seen[id(module)] = twin
    twin.__dict__.update({name: _copied(value, by_place, seen) for name, value in module.__dict__.items() if isinstance(value, Module)})
    twin._hold(by_place.get(id(module), {}))
    return twin
