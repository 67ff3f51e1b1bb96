"""Fixtures of every test: both event loops for async ones, a leak check, and Hypothesis profiles.

The fixtures themselves ship with the package (``pytest_aiograd``); here they become the rule.

Note [Collected tests are frozen]
    Twenty thousand collected tests are most of a million objects that live as long as the run. Full collections of garbage would look at all of
    them each time: those of tests that count objects or look for cycles, and the automatic ones. So they are frozen when they have been
    collected, and none is looked at before. Garbage of a test is found as before. Tests of the collector's settings thaw them (`thawed`), in a
    process of their own. `aiograd.run` counts what is frozen, which takes a tenth of a second here: tests that call it often pass
    ``tune_gc=False``.

Note [Assertions of helpers]
    An optimized Python leaves assertions out, but for those that pytest rewrites: of modules whose names begin with ``test_``, and of all others of
    this folder too, before the first of them is imported. Plugins of the command line (``-p tests.cpus.threads``) are imported before.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping

import pytest
from hypothesis import HealthCheck, settings

helpers = {f"tests.{name.partition('.')[0]}" for name in os.listdir(os.path.dirname(__file__)) if name != "conftest.py"}
pytest.register_assert_rewrite(*(helpers - sys.modules.keys()))

from aiograd.graph.node import Node  # noqa: E402
from tests import sweeps  # noqa: E402
from tests.loops import LOOPS  # noqa: E402
from tests.support import reference_counts_only  # noqa: E402
from tests.watchdog import Watchdog  # noqa: E402

#: a third, and the least number, as they are rounded to the nearest
ROUNDED = float.fromhex("0x1.5555555555555p-2"), -float.fromhex("0x1.5555555555555p-2"), float.fromhex("0x1p-1074")

pytest_plugins = ["pytest_aiograd", "pytester"]

# The same examples every time, however slow the machine: a failure in CI is a failure everywhere. `dev` explores.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test runs on asyncio's loop and on uvloop, but once those that open real sockets, start processes or look at rules only."""
    factories = LOOPS.copy()
    if len(factories) > 1 and any(item.get_closest_marker(name) for name in ("proc", "net", "sim", "one_loop")):
        del factories["asyncio"]
    return factories


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Sweeps are marked when all parametrizations are known."""
    result = yield
    sweeps.mark_cases(metafunc)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The documentation's own tests are marked before ``-m`` chooses."""
    sweeps.mark(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """See Note [Collected tests are frozen]."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return result


@pytest.fixture
def thawed() -> Iterator[None]:
    """The collector as a process has it that froze nothing."""
    gc.collect()
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory is freed by reference count only."""
    with reference_counts_only():
        yield


@pytest.fixture
def frantic_threads() -> Iterator[None]:
    """Threads are switched as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


_watchdog = Watchdog()


def pytest_itemcollected(item: pytest.Item) -> None:
    """An async test that hangs is ended, on every loop."""
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = _watchdog.bounded(item.obj)  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _watched() -> None:
    _watchdog.start()


@pytest.fixture(scope="session", autouse=True)
def _first_loop_opens_process_wide_descriptors() -> None:
    """libuv opens a pipe for signals with its first loop and keeps it; open it before any leak check takes stock."""
    for new_event_loop in LOOPS.values():
        new_event_loop().close()


@pytest.fixture(autouse=True)
def _no_node_is_reordered() -> None:
    """Passes take the paths that they take in a process of their own: no test before has made a node that forbids short cuts to all."""
    Node.any_reordered = False


@pytest.fixture(autouse=True)
def _the_processor_rounds_as_ever() -> Iterator[None]:
    """To the nearest, and least numbers count: native code can change that, for everything that runs later on the thread."""
    yield
    one, three, least = 1.0, 3.0, 5e-324
    assert (one / three, -one / three, least * one) == ROUNDED, "the processor rounds in another way after this test"


@pytest.fixture
def _no_unhandled_errors() -> Iterator[None]:
    """Nothing fails where nobody looks: a callback that raises, a task whose exception is never retrieved."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if records:
        pytest.fail("reported to the event loop's exception handler: " + "\n".join(record.getMessage() for record in records), pytrace=False)


@pytest.fixture(autouse=True)
def _no_leaks(_no_unhandled_errors: None, task_leak_check: None) -> None:
    """No test leaves tasks, threads or file descriptors behind."""
