"""What `make test` runs of the tests, and what only `make test-all` runs: the cases that carry the marker `sweep`.

`make test` runs every test function, with each case of each of its parametrizations once. These are sweeps:

* of parametrizations that are crossed, the combinations in which every case has had its turn;
* the cases of one parametrization that repeat the same promise: seeds, sizes, networks, data types (`swept`);
* the second event loop, where a test is not about the loop (`LOOP_MATTERS`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

#: beginnings of the paths of the tests that `make test` runs on asyncio's loop and on uvloop: they are about tasks, cancellation and fairness
LOOP_MATTERS = ("tests/engine/test_async_", "tests/testing/", "tests/test_offloading.py", "tests/test_top_level.py", "tests/distributed/test_deadlines.py")

#: the functions of a run all of whose cases are sweeps
WHOLLY_SWEPT = pytest.StashKey[set[str]]()

_LOOP = "_asyncio_loop_factory"


def swept(cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """The cases of a parametrization, of which `make test` runs the first `keep`."""
    listed = list(cases)
    return [*listed[:keep], *map(_sweep, listed[keep:])]


def _sweep(case: Any) -> Any:
    if isinstance(case, tuple) and hasattr(case, "marks"):  # of pytest.param
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.sweep], id=case.id)
    return pytest.param(*(case if type(case) in (tuple, list) else (case,)), marks=pytest.mark.sweep)


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the sweeps among collected tests, and note the functions that have no other case."""
    had: defaultdict[str, set[Any]] = defaultdict(set)
    functions: dict[str, bool] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("sweep") is None and not _is_new(item, had[function]):
            item.add_marker("sweep")
        functions[function] = functions.get(function, True) and item.get_closest_marker("sweep") is not None
    config.stash[WHOLLY_SWEPT] = {function for function, is_swept in functions.items() if is_swept}


def _is_new(item: pytest.Item, had: set[Any]) -> bool:
    """True if a test has a case that no test of its function had before. Each ``parametrize`` has its cases, and so has each fixture's ``params``."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return True
    values = dict(callspec.params)
    loop = values.pop(_LOOP, None)
    if loop is not None and not item.nodeid.startswith(LOOP_MATTERS):
        if loop is asyncio.new_event_loop:
            return False
        loop = None
    cases = {(_LOOP, id(loop))}
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        group = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        cases.add(tuple((name, id(values.pop(name))) for name in group if name in values))
    cases.update((name, id(value)) for name, value in values.items())
    if cases <= had:
        return False
    had |= cases
    return True
