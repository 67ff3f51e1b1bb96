"""The pytest plugin of aiograd: a virtual clock, a simulated network and leak checks as fixtures. Loaded by itself wherever both are installed.

It changes nothing for tests that do not ask for one of its fixtures, with one exception: a use of a deprecated name of aiograd is an error, unless
the project's own ``filterwarnings`` say otherwise.

Note [How a test gets the virtual clock]
    A test that is ``async def`` must run on the simulated loop from its start, so the choice is made where pytest-asyncio asks which
    loops to run a test on. The hook is wrapped: on any loops of a project, a test that asks for `virtual_clock` runs
    once, on the simulated loop. Tests that do not ask keep what their project says, or asyncio's current policy if it says nothing.
    Without pytest-asyncio the fixture serves ``def`` tests, through `VirtualClock.run`. Other plugins, such as anyio's, run a test on a
    loop of their own, where its sleeps would be real ones: such a test is refused when it begins.

Note [What every run pays]
    The plugin is imported by every run of pytest in an environment that has aiograd, most of which never use it. So it is a module beside the
    package, since importing a part of a package imports the package, and it imports aiograd where a test asks for a fixture, in its functions. At
    its top it imports what pytest and pytest-asyncio have imported already.

Note [One registration]
    The entry point is named as this module, so that loading it by ``-p`` or from a conftest meets the same name and is not a second registration.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping

    from aiograd.testing.network import SimulatedNetwork
    from aiograd.testing.virtual_clock import VirtualClock

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

try:
    import pytest_asyncio
except ImportError:  # async tests are then run by something else, which runs async fixtures as well
    async_fixture: Callable[..., Any] = pytest.fixture
else:
    async_fixture = pytest_asyncio.fixture


#: the arguments of each marker, in order
_ARGUMENTS = {"virtual_clock": ("seed", "order", "executor"), "simulated_network": ("seed", "faults", "access", "room")}


def _options(item: pytest.Item, name: str) -> dict[str, Any]:
    """The arguments of the marker of this name by their names; empty if the test has none."""
    marker, names = item.get_closest_marker(name), _ARGUMENTS[name]
    if marker is None:
        return {}
    options = dict(zip(names, marker.args, strict=False))
    if len(marker.args) > len(names) or not marker.kwargs.keys() <= {*names} - options.keys():
        found = [*map(repr, marker.args), *(f"{key}={value!r}" for key, value in marker.kwargs.items())]
        raise pytest.UsageError(f"{item.nodeid}: found the marker {name}({', '.join(found)}); expected {name}({', '.join(names)}), each once")
    return {**options, **marker.kwargs}


def _asks_for_the_clock(item: pytest.Item) -> bool:
    return "virtual_clock" in getattr(item, "fixturenames", ())


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, and uses of deprecated names errors."""
    config.getini("filterwarnings").insert(0, "error:.* is deprecated since aiograd :DeprecationWarning")
    texts = {"virtual_clock": "makes its simulated loop", "simulated_network": "makes its network"}
    for name, text in texts.items():
        config.addinivalue_line("markers", f"{name}({', '.join(_ARGUMENTS[name])}): how the `{name}` fixture {text}")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Generator[None, Mapping[str, LoopFactory] | None, Mapping[str, LoopFactory]]:
    """See Note [How a test gets the virtual clock]."""
    chosen = yield
    if _asks_for_the_clock(item):
        from aiograd.testing import SimulatedLoop

        return {"virtual": functools.partial(SimulatedLoop, **_options(item, "virtual_clock"))}
    if chosen is None:
        import asyncio

        return {"asyncio": asyncio.new_event_loop}
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse a test that asks for the virtual clock and that another plugin runs on a loop of its own."""
    test = getattr(item, "obj", None)
    if _asks_for_the_clock(item) and inspect.iscoroutinefunction(test):
        from aiograd.testing.virtual_clock import on_virtual_time

        item.obj = on_virtual_time(test)  # type: ignore[attr-defined]


@pytest.fixture
def virtual_clock(request: pytest.FixtureRequest) -> VirtualClock:
    """A clock that jumps instead of waiting: ``await asyncio.sleep(3600)`` returns at once. See `VirtualClock`.

    Choose how it draws with ``@pytest.mark.virtual_clock(seed=3, order="permuted")``.
    """
    from aiograd.testing.virtual_clock import VirtualClock

    return VirtualClock(_options(request.node, "virtual_clock"))


@pytest.fixture
def simulated_network(virtual_clock: VirtualClock, request: pytest.FixtureRequest) -> SimulatedNetwork:
    """A network of hosts in this process, for an async test, which then runs on the virtual clock. See `SimulatedNetwork`.

    Choose its faults with ``@pytest.mark.simulated_network(seed=3, faults=Faults(reset=0.1))``.
    """
    from aiograd.testing import SimulatedNetwork

    return SimulatedNetwork(**_options(request.node, "simulated_network"))


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fail the test if it leaves threads or file descriptors behind, counted after its event loop is closed."""
    from aiograd.testing.leaks import LeakCheck, refuse

    check = LeakCheck()
    yield
    refuse(check.find())


@async_fixture
async def _tasks_left_on_the_loop() -> AsyncIterator[None]:
    from aiograd.engine.run import aclose_default_engine
    from aiograd.testing.leaks import LeakCheck, refuse

    check = LeakCheck()
    yield
    await aclose_default_engine()  # made by the first pass on a loop; nothing else is there to close it
    refuse(await check.find_tasks())


@pytest.fixture
def task_leak_check(leak_check: None, request: pytest.FixtureRequest) -> None:
    """As `leak_check`; an async test also fails if it leaves tasks on its loop. Closes the loop's default engine before it looks.

    The order matters: set up before the test's loop is made, and so ended after it is closed, for objects that a loop holds are no leak.
    """
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_tasks_left_on_the_loop")
