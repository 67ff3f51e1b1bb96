"""The pytest plugin: a virtual clock, a simulated network and leak checks as fixtures. Loaded by itself wherever aiograd and pytest are installed.

It changes nothing for tests that do not ask for one of its fixtures.

Note [How a test gets the virtual clock]
    A test that is ``async def`` must run on the simulated loop from its start, so the choice is made where pytest-asyncio asks which
    loops to run a test on. The hook is wrapped: whatever loops a project runs its tests on, a test that asks for `virtual_clock` runs
    once, on the simulated loop. Tests that do not ask keep what their project says, or asyncio's current policy if it says nothing.
    Without pytest-asyncio the fixture serves ``def`` tests, through `VirtualClock.run`. Other plugins, such as anyio's, run a test on a
    loop of their own, where its sleeps would be real ones: such a test is refused when it begins.

Note [What every run pays]
    The plugin is imported by every run of pytest in an environment that has aiograd. So it imports the bare package and nothing of what it
    gives before a fixture asks for it, in particular not the network, which brings all of `aiograd.distributed`.

Note [One registration]
    The entry point is named as this module, so that loading it by ``-p`` or from a conftest meets the same name and is not a second
    registration. Entry points are imported before coverage tools that are plugins start to measure; to measure aiograd itself, start the
    tool first: ``coverage run -m pytest``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from aiograd import testing
from aiograd.engine.run import aclose_default_engine, running_loop
from aiograd.errors import LoopError
from aiograd.testing.clock import SimulatedLoop
from aiograd.testing.leaks import LeakCheck, refuse
from aiograd.testing.simulation import Simulation, simulated_run

if TYPE_CHECKING:
    from aiograd.testing.network import SimulatedNetwork

try:
    import pytest_asyncio
except ImportError:  # async tests are then run by something else, which runs async fixtures as well
    async_fixture: Callable[..., Any] = pytest.fixture
else:
    async_fixture = pytest_asyncio.fixture

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class VirtualClock:
    """The value of the `virtual_clock` fixture: the simulated loop of an async test, or runs on fresh loops for a plain test."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    @property
    def loop(self) -> SimulatedLoop:
        """The simulated loop that the test runs on.

        Raises:
            LoopError: the running loop is not simulated, or none is running.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise LoopError("virtual_clock.loop: no loop is running; in a `def` test use virtual_clock.run(coroutine_function)") from error
        if not isinstance(loop, SimulatedLoop):
            raise LoopError(f"virtual_clock.loop: {type(loop).__name__} is running, which is not simulated; in a `def` test use virtual_clock.run")
        return loop

    def time(self) -> float:
        """The virtual time of the running test, in seconds."""
        return self.loop.time()

    def advance(self, seconds: float) -> None:
        """Move the clock without running anything, see `SimulatedLoop.advance`."""
        self.loop.advance(seconds)

    def run(self, main: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any) -> Simulation[T]:
        """`simulated_run` with the options of the test's ``virtual_clock`` marker; `options` win over them."""
        return simulated_run(main, *args, **{**self._options, **options})


def _options(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("virtual_clock")
    return {} if marker is None else dict(marker.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "virtual_clock(seed, order, executor): how the `virtual_clock` fixture makes its simulated loop")
    config.addinivalue_line("markers", "simulated_network(seed, faults): how the `simulated_network` fixture makes its network")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Generator[None, Mapping[str, LoopFactory] | None, Mapping[str, LoopFactory]]:
    """See Note [How a test gets the virtual clock]."""
    chosen = yield
    if "virtual_clock" in getattr(item, "fixturenames", ()):
        return {"virtual": functools.partial(SimulatedLoop, **_options(item))}
    return {"asyncio": asyncio.new_event_loop} if chosen is None else chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse a test that asks for the virtual clock and that somebody else runs on a loop of his own."""
    test = getattr(item, "obj", None)
    if "virtual_clock" in getattr(item, "fixturenames", ()) and inspect.iscoroutinefunction(test):
        item.obj = _on_virtual_time(test)  # type: ignore[attr-defined]


def _on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        loop = running_loop()
        if not isinstance(loop, SimulatedLoop):
            found = "no loop of asyncio" if loop is None else type(loop).__name__
            raise LoopError(
                f"virtual_clock: {test.__name__} runs on {found}, whose time is real. Have pytest-asyncio 1.5 or later run it (@pytest.mark.asyncio, "
                "and not @pytest.mark.anyio), or write it as a `def` test that calls virtual_clock.run(coroutine_function)"
            )
        await test(*args, **kwargs)

    return checked


@pytest.fixture
def virtual_clock(request: pytest.FixtureRequest) -> VirtualClock:
    """A clock that jumps instead of waiting: ``await asyncio.sleep(3600)`` returns at once. See `VirtualClock`.

    Choose how it draws with ``@pytest.mark.virtual_clock(seed=3, order="permuted")``.
    """
    return VirtualClock(_options(request.node))


@pytest.fixture
def simulated_network(virtual_clock: VirtualClock, request: pytest.FixtureRequest) -> SimulatedNetwork:
    """A network of hosts in this process, for an async test, which then runs on the virtual clock. See `SimulatedNetwork`.

    Choose what it does with ``@pytest.mark.simulated_network(seed=3, faults=Faults(reset=0.1))``.
    """
    marker = request.node.get_closest_marker("simulated_network")
    return testing.SimulatedNetwork(**({} if marker is None else marker.kwargs))


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fail the test if it leaves threads or file descriptors behind, counted after its event loop is closed."""
    check = LeakCheck()
    yield
    refuse(check.find())


@async_fixture
async def _tasks_left_on_the_loop() -> AsyncIterator[None]:
    check = LeakCheck()
    yield
    await aclose_default_engine()  # made by the first pass on a loop; nobody else is there to close it
    refuse(await check.find_tasks())


@pytest.fixture
def task_leak_check(leak_check: None, request: pytest.FixtureRequest) -> None:
    """As `leak_check`; an async test also fails if it leaves tasks on its loop. Closes the loop's default engine before it looks.

    The order matters: set up before the test's loop is made, and so ended after it is closed, for what a loop holds is no leak.
    """
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_tasks_left_on_the_loop")
