"""The cases of tests that only `make test-all` runs: sweeps, which carry the marker `sweep`.

`make test` runs every test function, with each case of each of its parametrizations once. These are sweeps:

* of parametrizations that are crossed, the combinations of cases each of which has had its turn;
* seeds but the first, see `DRAWN`;
* the cases of a wide parametrization that repeat one promise: rows, sizes, programs (`swept`);
* asyncio's event loop, where there is uvloop and a test is not about the loop, see `LOOP_MATTERS`;
* the documentation's own code, which `make docs` runs, see `RUN_BY_DOCS`; it has the marker `docs` as well, and `REST=1` leaves it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests.loops import LOOPS

#: beginnings of the paths of the tests that `make test` runs on asyncio's loop and on uvloop: they are about tasks, cancellation and fairness
LOOP_MATTERS = (
    "tests/engine/test_async_",
    "tests/testing/",
    "tests/test_offloading.py",
    "tests/test_top_level.py",
    "tests/distributed/test_deadlines.py",
)

#: the modules that `make docs` runs whole, whatever else is left out
RUN_BY_DOCS = ("tests/test_documentation.py", "tests/test_recipes.py")

#: parameters that draw a case at random: one value is enough
DRAWN = ("seed", "block", "chunk", "schedule")

#: what `make test` and `make test-all REST=1` choose by: True for sweeps
RUNS = {"not sweep": False, "sweep and not docs": True}

#: the functions of a run all of whose cases are sweeps
WHOLLY_SWEPT = pytest.StashKey[set[str]]()

_LOOP = "_asyncio_loop_factory"


def swept(cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """The cases of a parametrization, of which `make test` runs `keep`, from its beginning to its end."""
    listed = list(cases)
    kept = {len(listed) * number // keep for number in range(keep)}
    return [case if number in kept else _sweep(case) for number, case in enumerate(listed)]


def _sweep(case: Any) -> Any:
    if isinstance(case, tuple) and hasattr(case, "marks"):  # of pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.sweep], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)


def mark_cases(metafunc: pytest.Metafunc) -> None:
    """Mark the sweeps among the cases of a function, and leave out those that the run deselects, before there are tests of them."""
    definition, cases = metafunc.definition, metafunc._calls
    if not cases or definition.nodeid.startswith(RUN_BY_DOCS):
        return
    had: set[Any] = set()
    is_swept = definition.get_closest_marker("sweep") is not None
    chosen: dict[bool, list[Any]] = {True: [], False: []}
    for case in cases:
        is_sweep = is_swept or any(each.name == "sweep" for each in case.marks) or not _is_new(definition, case.params, had)
        if is_sweep and not is_swept:
            case.marks.append(pytest.mark.sweep.mark)
        chosen[is_sweep].append(case)
    if not chosen[False]:
        metafunc.config.stash.setdefault(WHOLLY_SWEPT, set()).add(definition.nodeid)
    wanted = RUNS.get(metafunc.config.option.markexpr)
    if wanted is not None:
        metafunc._calls = chosen[wanted] or cases[:1]  # one is left to be deselected: without any there would be a test without parameters


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the tests of the documentation among collected ones, and note those without parameters that are sweeps."""
    wholly = config.stash.setdefault(WHOLLY_SWEPT, set())
    for item in items:
        if item.nodeid.startswith(RUN_BY_DOCS):
            item.add_marker("sweep")
            item.add_marker("docs")
        elif not hasattr(item, "callspec") and item.get_closest_marker("sweep") is not None:
            wholly.add(item.nodeid)


def _is_new(definition: pytest.Item, params: Mapping[str, object], had: set[Any]) -> bool:
    """True if there is a case that none of a function had before. Each ``parametrize`` has its cases, and so has a fixture with ``params``."""
    values = dict(params)
    loop = values.pop(_LOOP, None)
    if loop is asyncio.new_event_loop and "uvloop" in LOOPS and not definition.nodeid.startswith(LOOP_MATTERS):
        return False
    cases: set[tuple[tuple[str, int], ...]] = {((_LOOP, id(loop)),)}
    for marker in definition.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        group = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        cases.add(tuple((name, id(values.pop(name))) for name in group if name in values))
    cases.update(((name, id(value)),) for name, value in values.items())
    drawn = {case[0][0] for case in cases - had if len(case) == 1} & {*DRAWN} & {name for case in had for name, _ in case}
    if drawn or cases <= had:
        return False
    had |= cases
    return True
