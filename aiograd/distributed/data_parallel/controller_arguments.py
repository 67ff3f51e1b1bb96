"""Arguments that `DataParallel.create` and `LocalSteps.create` share, checked. The first argument of each function is the class that takes them."""

from __future__ import annotations

import math
from typing import Any

from aiograd.distributed.rpc.keyring import check_names
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ArgumentTypeError


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
