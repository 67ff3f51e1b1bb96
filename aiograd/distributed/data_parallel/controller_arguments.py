"""Arguments that `DataParallel.create` and `LocalSteps.create` share, checked. The first argument of each function is the class that takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.distributed.rpc.keyring import check_names
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray


def checked_workers(what: str, driver: Any, names: Any) -> list[str]:
    """The names of the workers, of which there is at least one, beside this process's worker."""
    if not isinstance(driver, Worker):
        raise ArgumentTypeError(f"{what}: expected this process's dist.Worker, found {type(driver).__name__}")
    given = list(check_names(what, names))
    if not given:
        raise ArgumentError(f"{what}: expected the name of at least one worker, found none")
    return given


def name_of_optimizer(what: str, name: str, optimizer: Any) -> str:
    """The name of an optimizer that is given as its class or its name."""
    found = getattr(optimizer, "__name__", optimizer)
    if not isinstance(found, str):
        raise ArgumentTypeError(f"{what}({name}=...): expected an optimizer class such as ag.optim.AdamW, found {type(optimizer).__name__}")
    return found


def checked_options(what: str, name: str, options: Any) -> dict[str, Any]:
    """Options by name; none for None."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(each, str) for each in options):
        raise ArgumentTypeError(f"{what}({name}={options!r}): expected a dict of options by name, such as {{'lr': 1e-3}}")
    return dict(options)


def checked_optimizer_state(state: Any, name: str = "optimizer_state_dict") -> dict[str, Any]:
    """The state of an optimizer, as ``state_dict`` gives it, with Tensors for arrays.

    Args:
        state: the state.
        name: of the method that gives it.
    """
    what = f"load_{name}: expected a dict with 'state' and 'param_groups', as {name}() returns it"
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{what}; found {type(state).__name__}")
    values, groups = state.get("state"), state.get("param_groups")
    if not isinstance(values, Mapping) or not isinstance(groups, Sequence) or not all(isinstance(each, Mapping) for each in groups):
        raise ArgumentError(f"{what}; found 'state' of {type(values).__name__} and 'param_groups' of {type(groups).__name__}")
    found: dict[int, dict[str, Any]] = {}
    for number, each in values.items():
        is_number = type(number) is int or (isinstance(number, str) and number.isdecimal())
        if not is_number or not isinstance(each, Mapping):
            raise ArgumentError(f"{what}; found a {type(each).__name__} as the state of parameter {number!r}")
        found[int(number)] = {name: sendable(value) for name, value in each.items()}
    return {"state": found, "param_groups": [dict(group) for group in groups]}


def sendable(value: Any) -> Any:
    """A value as it can be sent: arrays as Tensors."""
    if isinstance(value, (np.ndarray, np.generic)):
        return asarray(value)
    if isinstance(value, TensorCore) and value.requires_grad:
        raise ArgumentError(f"an argument of shape {list(value.shape)} requires grad, and the replicas are on other workers: detach() it")
    return value


def checked_count(what: str, name: str, count: Any, most: float = math.inf, least: int = 1) -> int:
    """A whole number from `least` to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        above = f" and at most {most}" if most < math.inf else ""
        raise ArgumentError(f"{what}({name}={count!r}): expected a whole number of at least {least}{above}")
    return count


def checked_method(what: str, name: str, method: Any) -> str:
    """The name of a public method."""
    if not isinstance(method, str) or not method or method.startswith("_"):
        raise ArgumentError(f"{what}({name}={method!r}): expected the name of a public method of the module")
    return method
