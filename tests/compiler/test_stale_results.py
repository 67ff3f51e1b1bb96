"""No function of the package runs as a program that has kept values of the recorded call: each is called again with other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag

rng = np.random.default_rng(0)
#: functions that leave the tables, or that numpy answers
OTHERS: dict[str, Callable[[Any], Any]] = {
    "np.from_dlpack": lambda x: np.from_dlpack(x.detach()), "from_dlpack": lambda x: ag.from_dlpack(x.detach()), "copy": copy.copy,
    "deepcopy": lambda x: copy.deepcopy(x.detach()), "np.ma": lambda x: np.ma.masked_array(np.ones((3, 3))) * x.detach(), "np.sort": np.sort,
    "np.unique": lambda x: np.unique(x.detach()), "np.nonzero": lambda x: np.nonzero(x.detach()), "np.median": lambda x: np.median(x.detach()),
    "tensor": ag.tensor, "asarray": lambda x: ag.asarray(x, dtype=np.float64), "list": lambda x: ag.stack(list(x)),
    "in": lambda x: x * (0.5 in x.detach()), "format": lambda x: x * len(f"{x.detach()[0, 0]:.3f}"),
}  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    found = {f"array_functions.{name}": function for name, function in vars(ag.array_functions.public).items() if not name.startswith("_")}
    found |= {f"functional.{name}": getattr(ag.nn.functional, name) for name in ag.nn.functional.__all__}
    # whose elements are arbitrary
    methods = [name for name in dir(ag.Tensor) if not name.startswith("_") and name not in ("backward", "register_hook", "new_empty")]
    found |= {f"Tensor.{name}": getattr(ag.Tensor, name) for name in methods}
    return {name: function for name, function in (found | OTHERS).items() if callable(function) and not isinstance(function, type)}


def drawn(*shape: int) -> Any:
    return ag.tensor(rng.uniform(0.1, 0.9, shape).astype(np.float32), requires_grad=True)


ARGUMENTS: tuple[Callable[[], tuple[Any, ...]], ...] = (
    lambda: (drawn(3, 3),), lambda: (drawn(3, 3), drawn(3, 3)), lambda: (drawn(3, 3), 1), lambda: (drawn(3, 3), 0.5), lambda: (drawn(3, 3), (3, 3)),
    lambda: ([drawn(3), drawn(3)],), lambda: (drawn(3, 3), drawn(3, 3), drawn(3, 3)), lambda: (drawn(2, 3, 3, 3), drawn(4, 3, 2, 2)),
)  # fmt: skip


def tensors(value: Any) -> Any:
    """The numbers of a result as new Tensors; None for anything else."""
    if isinstance(value, (tuple, list)):
        return tuple(map(tensors, value))
    if isinstance(value, (ag.Tensor, np.ndarray, np.generic, float, int)):
        return ag.asarray(value) * 1
    return None


def bits(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return None if value is None else np.nan_to_num(value.detach().numpy()).tobytes()


def seeded(call: Callable[..., Any], args: tuple[Any, ...], seed: int) -> Any:
    ag.seed(seed)
    return bits(call(*args))


def outcome(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The bits of a result, or the type of the error: not every matrix that is drawn is positive definite."""
    try:
        return seeded(call, args, 3)
    except ag.errors.AiogradError as error:
        return type(error)


def accepts(called: Callable[..., Any], compiled: Callable[..., Any], draw: Callable[[], tuple[Any, ...]]) -> bool:
    """True if a function takes such arguments and returns numbers; records the compiled one."""
    try:
        first = seeded(called, draw(), 0)
        seeded(compiled, draw(), 0)
    except Exception:
        return False
    return "None" not in str(first)


def count_stale_cases(every: int = 1, first: int = 0) -> tuple[int, int]:
    """Check one of so many functions; returns how many calls of functions were checked, and how many of them ran as programs."""
    cases = programs = 0
    for name, function in [*functions().items()][first::every]:
        for draw in ARGUMENTS:

            def called(*args: Any, function: Any = function) -> Any:
                return tensors(function(*args))

            compiled = ag.compile(called, on_break="eager")
            if not accepts(called, compiled, draw):
                continue
            args = draw()
            assert outcome(compiled, args) == outcome(called, args), name
            cases += 1
            programs += compiled.statistics().runs
    return cases, programs


@pytest.mark.filterwarnings("ignore")
def test_no_result_is_stale() -> None:
    cases, programs = count_stale_cases()
    assert cases > 400 and programs > 300, (cases, programs)
