"""PyTorch's names for parameters: one table, and the form in which public functions accept them.

Note [Names of parameters]
    Functions carry the names of the Array API standard. `PARAMETERS` says which names of PyTorch mean the same, so that ``sum(x, dim=1,
    keepdim=True)`` is ``sum(x, axis=1, keepdims=True)``; `SHAPES` says which functions take a shape as several ints too, ``zeros(2, 3)``. The
    package puts both on every public function and method in one loop; no function mentions them. A call without such names costs one more
    Python call, and a function without such a parameter, elementwise functions for example, is left as it is.

Rejected: second parameters in every definition (a fact in a hundred places); catching the TypeError of the unknown name (an error inside
the function would look the same).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from aiograd.errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")

#: PyTorch's name, for one function as ``function.name``, -> the names here that mean the same; a function has one of them at most
PARAMETERS: dict[str, tuple[str, ...]] = {
    "dim": ("axis", "axes"),
    "dims": ("axis", "axes", "repetitions"),
    "dim0": ("axis1",),
    "dim1": ("axis2",),
    "transpose.dim0": ("axes",),
    "transpose.dim1": ("axis2",),
    **dict.fromkeys(("diagonal.dim1", "diag_embed.dim1"), ("axis1",)),
    **dict.fromkeys(("diagonal.dim2", "diag_embed.dim2"), ("axis2",)),
    "keepdim": ("keepdims",),
    "unbiased": ("correction",),
    "ddof": ("correction",),
    "diagonal": ("k",),
    "shifts": ("shift",),
    "start_dim": ("start",),
    "end_dim": ("end",),
    "end": ("stop",),
    "steps": ("num",),
    "size": ("shape",),
    "p": ("ord",),
    "index": ("indices",),
    "indices_or_sections": ("sections",),
    "DataLoader.dataset": ("source",),
    "DataLoader.num_workers": ("workers",),
    "DataLoader.collate_fn": ("collate",),
}
_OWN = frozenset(own for other, names in PARAMETERS.items() if "." not in other for own in names)
#: functions with names of their own
_NAMED = frozenset(other.partition(".")[0] for other in PARAMETERS if "." in other)
#: functions that take the shape as several ints too
SHAPES = frozenset("zeros ones empty rand randn".split())


class Parameters(NamedTuple):
    """The parameters of a function: their names, how many are positional only, and the name of the one that gathers the rest (``*shape``)."""

    names: tuple[str, ...]
    positional: int
    gathering: str | None


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The parameters that a function written in Python has."""
    code = (inspect.unwrap(function) if hasattr(function, "__wrapped__") else function).__code__
    count = code.co_argcount + code.co_kwonlyargcount
    return Parameters(
        code.co_varnames[:count], code.co_posonlyargcount, code.co_varnames[count] if code.co_flags & inspect.CO_VARARGS else None
    )


@functools.cache  # a function of the package is often a method too
def with_other_names(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, accepting the other names of its parameters; itself where none has any."""
    gathers = function.__name__ in SHAPES
    name = function.__qualname__.rpartition(".")[0] if function.__name__ == "__init__" else function.__name__
    parameters = parameters_of(function)
    if not gathers and name not in _NAMED and _OWN.isdisjoint(parameters.names) and parameters.gathering not in _OWN:
        return function
    names = frozenset(parameters.names[parameters.positional :])

    @functools.wraps(function)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not names.issuperset(kwargs):
            args, kwargs = _translated(name, parameters, args, kwargs)
        if gathers and len(args) > 1 and isinstance(args[1], (int, np.integer)):
            args = (args,)
        return function(*args, **kwargs)

    return accepting


def _translated(name: str, parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    known, given_first = parameters.names, parameters.names[: len(args)]
    if parameters.gathering is not None:
        known = (*known, parameters.gathering)
    found: dict[str, Any] = {}
    written: dict[str, str | None] = dict.fromkeys(given_first)  # under which name; None: by position
    for given, value in kwargs.items():
        others = PARAMETERS.get(f"{name}.{given}") or PARAMETERS.get(given, ())
        own = given if given in known else next((own for own in others if own in known), given)
        if own in written:
            first = "by position" if written[own] is None else f"as {written[own]}="
            raise ArgumentTypeError(f"{name}(): {own} is given twice, {first} and as {given}=; leave one out")
        written[own] = given
        found[own] = value
    for own in known[len(args) : parameters.positional]:  # a parameter that is positional only takes its place
        if own not in found:
            break
        args = (*args, found.pop(own))
    if parameters.gathering in found:
        args = (*args, found.pop(parameters.gathering))
    return args, found
