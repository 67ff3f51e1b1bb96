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
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

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

#: the functions of a run all of whose cases are sweeps
WHOLLY_SWEPT = pytest.StashKey[set[str]]()

_LOOP = "_asyncio_loop_factory"
HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None


def swept(cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """The cases of a parametrization, of which `make test` runs `keep`, from its beginning to its end."""
    listed = list(cases)
    kept = {len(listed) * number // keep for number in range(keep)}
    return [case if number in kept else _sweep(case) for number, case in enumerate(listed)]


def _sweep(case: Any) -> Any:
    if isinstance(case, tuple) and hasattr(case, "marks"):  # of pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.sweep], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the sweeps among collected tests, and note the functions that have no other case."""
    had: defaultdict[str, set[Any]] = defaultdict(set)
    functions: dict[str, bool] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.nodeid.startswith(RUN_BY_DOCS):
            item.add_marker("sweep")
            item.add_marker("docs")
            continue
        if item.get_closest_marker("sweep") is None and not _is_new(item, had[function]):
            item.add_marker("sweep")
        functions[function] = functions.get(function, True) and item.get_closest_marker("sweep") is not None
    config.stash[WHOLLY_SWEPT] = {function for function, is_swept in functions.items() if is_swept}


def _is_new(item: pytest.Item, had: set[Any]) -> bool:
    """True if a test has a case that none of its function had before. Each ``parametrize`` has its cases, and so has a fixture with ``params``."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return True
    values = dict(callspec.params)
    loop = values.pop(_LOOP, None)
    if loop is asyncio.new_event_loop and HAS_UVLOOP and not item.nodeid.startswith(LOOP_MATTERS):
        return False
    cases: set[tuple[tuple[str, int], ...]] = {((_LOOP, id(loop)),)}
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        group = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        cases.add(tuple((name, id(values.pop(name))) for name in group if name in values))
    cases.update(((name, id(value)),) for name, value in values.items())
    drawn = {case[0][0] for case in cases - had if len(case) == 1} & {*DRAWN} & {name for case in had for name, _ in case}
    if drawn or cases <= had:
        return False
    had |= cases
    return True
