"""`VirtualClock`: the value of the fixture of that name in the pytest plugin, ``pytest_aiograd``. It needs no pytest."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiograd.engine.run import running_loop
from aiograd.errors import LoopError
from aiograd.testing.clock import SimulatedLoop
from aiograd.testing.simulation import Simulation, simulated_run

T = TypeVar("T")


class VirtualClock:
    """The simulated loop of an async test, or runs on fresh loops for a plain test.

    Args:
        options: of the test's ``virtual_clock`` marker.
    """

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


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A test that refuses to run where time is real.

    Args:
        test: an ``async def``.

    Returns:
        The same test; it raises LoopError when it begins on a loop that is not simulated.
    """

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
