"""Arguments of schedules, checked; the first argument of each function is the call that error messages name."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.optim.optimizer import Group


def checked_groups(what: str, optimizer: Any) -> list[Group]:
    """The groups of an optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        raise ArgumentTypeError(f"{what}: expected an optimizer such as ag.optim.SGD(parameters, lr=0.1), found {type(optimizer).__name__}")
    return groups


def check_numbers(what: str, **given: Any) -> None:
    """Raise for an argument that is no real number."""
    for name, value in given.items():
        if not _is_number(value):
            raise ArgumentTypeError(f"{what}({name}={value!r}): expected a number, found {type(value).__name__}")


def checked_milestones(what: str, milestones: Any) -> list[int]:
    """Numbers of steps."""
    given: list[Any] = list(milestones) if isinstance(milestones, Iterable) else [None]
    if not all(isinstance(each, Integral) and not isinstance(each, bool) for each in given):
        raise ArgumentTypeError(f"{what}(milestones={milestones!r}): expected a list of numbers of steps, such as [30, 80]")
    return [int(each) for each in given]


def one_for_each(what: str, name: str, value: Any, groups: int) -> list[float]:
    """Numbers for the groups of an optimizer: one for all, or one each."""
    values: list[Any] = [value] * groups if _is_number(value) else list(value) if isinstance(value, (list, tuple)) else [None]
    if not all(map(_is_number, values)):
        raise ArgumentTypeError(f"{what}({name}={value!r}): expected a number, or a list of one for each of the {groups} groups")
    if len(values) != groups:
        raise ArgumentError(f"{what}({name}): found {len(values)} numbers for {groups} groups")
    return [float(each) for each in values]


def as_number(what: str, value: Any) -> float:
    """A number, also one in a Tensor or an array."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentTypeError(f"{what}: expected a number, found {value!r:.100} ({error})") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
