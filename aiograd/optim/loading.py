"""Saved states of optimizers, checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.tensor import Tensor

#: arrays of a state that begin with zeros when an option is switched on, so they may be missing
OPTIONAL = frozenset({"momentum_buffer", "grad_avg", "max_exp_avg_sq"})


def count(value: Any) -> int:
    """A saved number of steps.

    Args:
        value: a number, or a Tensor or array of one element.

    Returns:
        The number.

    Raises:
        ValueError: it is none. TypeError, OverflowError, RuntimeError: it is of another kind.
    """
    number = int(value)
    if number < 0 or number != float(value):
        raise ValueError(value)
    return number


def share(value: Any) -> float:
    """A saved number from 0 to 1; as `count`."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(value)
    return number


#: numbers in words, by the function that converts them
EXPECTED: dict[Callable[[Any], Any], str] = {count: "a whole number of at least 0", share: "a number from 0 to 1", float: "a number"}


def saved_number(what: str, name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    """A number of a saved state.

    Args:
        what: the call and the place, for messages.
        name: of the number.
        convert: `count`, `share` or ``float``.
        value: the saved value.

    Returns:
        The number.

    Raises:
        ArgumentError: it is no such number.
    """
    try:
        number = convert(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if number != number:
        raise ArgumentError(f"{what}: {name} is {value!r:.100}, expected {EXPECTED[convert]}")
    return number


def saved_groups(what: str, mine: list[dict[str, Any]], state: Any, defaults: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    """The groups of a saved state.

    Args:
        what: the call, for messages.
        mine: the groups that are there.
        state: the saved state.
        defaults: options that the state may lack.

    Returns:
        The groups, with the parameters of `mine`; and the parameters by their numbers in the state.

    Raises:
        ArgumentError: the state has no such groups, or the other part is no dict of dicts.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise ArgumentError(f"{what}: expected a dict with 'state' and 'param_groups', as state_dict() returns it")
    saved, states = state["param_groups"], state["state"]
    if not isinstance(saved, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved
    ):
        raise ArgumentError(f"{what}: expected a list of dicts with lists of 'params' as 'param_groups', as state_dict() returns it")
    if not isinstance(states, Mapping) or not all(isinstance(values, Mapping) for values in states.values()):
        raise ArgumentError(f"{what}: expected a dict of dicts by number of a parameter as 'state', as state_dict() returns it")
    sizes, found = [len(group["params"]) for group in mine], [len(group["params"]) for group in saved]
    if sizes != found:
        raise ArgumentError(f"{what}: found groups of {found} parameters, expected {sizes}")
    numbers = [number for group in saved for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers) or len({*numbers}) != len(numbers):
        raise ArgumentError(f"{what}: found {numbers} as 'params' in 'param_groups', expected different numbers, as state_dict() gives them")
    known = defaults.keys() | {"initial_lr"}
    groups = [
        {"params": group["params"], **defaults, **{name: value for name, value in theirs.items() if name in known}}
        for group, theirs in zip(mine, saved, strict=True)
    ]
    for group in groups:
        if "initial_lr" in group:
            saved_number(what, "initial_lr", float, group["initial_lr"])
    return groups, dict(zip(numbers, (p for group in mine for p in group["params"]), strict=True))


def saved_array(what: str, value: TensorCore | np.ndarray[Any, Any], expected: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check an array of a saved state.

    Args:
        what: the call and the array, for messages.
        value: the array.
        expected: its shape.
        dtype: of the parameter.

    Raises:
        ArgumentError: it is of another shape, or has no values for this dtype.
    """
    if tuple(value.shape) != expected:
        raise ArgumentError(f"{what} has shape {list(value.shape)}, expected {list(expected)}")
    if value.dtype.kind in "OSUMm" or (value.dtype.kind == "c" and dtype.kind != "c"):
        raise ArgumentError(f"{what} is of dtype {value.dtype}, expected {dtype}")


def check_entries(what: str, values: Mapping[str, Any], numbers: Mapping[str, Any], arrays: tuple[str, ...]) -> None:
    """Check that the state of a parameter has what the next step reads.

    Args:
        what: the call and the parameter, for messages.
        values: by name; empty for a parameter that has not been updated.
        numbers, arrays: names of its numbers, and of its arrays.

    Raises:
        ArgumentError: something is missing, or no array.
    """
    missing = [name for name in (*numbers, *arrays) if name not in values and name not in OPTIONAL]
    if values and missing:
        raise ArgumentError(f"{what} has no {', '.join(missing)}; found {', '.join(map(str, values))}")
    for name in OPTIONAL.union(arrays).intersection(values):
        if not isinstance(values[name], TensorCore):
            raise ArgumentError(f"{what} has {type(values[name]).__name__} as {name}, expected a Tensor")
