"""SimulatedNetwork: hosts in one process, and between them connections that break, stall and are slow as a seed says.

Note [What runs where]
    Code belongs to the host that it was started for: `SimulatedNetwork.spawn` starts a coroutine on a host as a process of its own, and
    ``with network.host(name):`` says it of a block; both pass on to every task, timer and callback made there. Code that belongs to no host
    is the test's own, is never stopped, and sees everything at once.

Source: the simulator of FoundationDB (hosts as owners of actors, clogging, swizzling).
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import Failpoint
from aiograd.errors import ArgumentError, LoopError
from aiograd.testing.clock import SimulatedLoop
from aiograd.testing.network.access import Access
from aiograd.testing.network.channel import SimulatedChannel
from aiograd.testing.network.faults import Faults
from aiograd.testing.network.hosts import Host, SimulatedTransport
from aiograd.testing.network.links import FaultsOf, Links
from aiograd.testing.owner import OWNER

T = TypeVar("T")


class SimulatedNetwork(Links):
    """A network of named hosts with faults drawn from a seed. One network serves one loop.

    On a `SimulatedLoop` everything can be repeated and hosts can be killed and frozen. On another loop it carries frames as well, and
    faults happen in real time.

    Args:
        seed: decides everything that is drawn.
        faults: the faults of each link for which `set_faults` has set no others; None: none, frames arrive in the loop's next turn. Or a function
            ``faults(source, target)`` of the names of two hosts, such as one that knows which hosts are in one data centre.
        room: bytes on their way, per channel and direction, from which a sender is asked to stop.
        access: the line of each host by its name, or a function ``access(name)``: an `AccessLink`, which all connections of the host share, or None.
            Hosts without a line send and receive any number of bytes at once.

    Raises:
        ArgumentError: another `seed`, or `faults` or `access` is neither what it says nor a function.

    >>> network = ag.testing.SimulatedNetwork(seed=1)
    >>> left = network.transport("left")
    >>> await left.listen("", 0, lambda channel: None)
    'sim://left'
    """

    def __init__(self, seed: int | str = 0, *, faults: Faults | FaultsOf | None = None, room: int = 1 << 20, access: Access | None = None) -> None:
        super().__init__(seed, Faults() if faults is None else faults, access)
        self.room = room
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hosts: dict[str, Host] = {}

    def __repr__(self) -> str:
        return f"SimulatedNetwork(seed={self.seed!r}, faults={self._faults})"

    # ---- what tests and transports share

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the network is used on: the one that was running when it was first used.

        Raises:
            LoopError: another loop is running now, or none.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError as error:
            if self._loop is not None and self._loop.is_running():
                return self._loop  # the caller is a job of the executor
            raise LoopError("a simulated network is used inside a running event loop, such as that of simulated_run") from error
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise LoopError("this simulated network was used on another event loop before; make one network for each run")
        return running

    def find(self, name: str) -> Host | None:
        """The present incarnation of a host; None if there never was one.

        Args:
            name: name of the host.

        Returns:
            The host, or None.
        """
        return self._hosts.get(name)

    # ---- hosts

    def transport(self, name: str) -> SimulatedTransport:
        """The transport for code on the host `name`, which is made if there is none yet.

        Args:
            name: name of the host.

        Returns:
            The transport, for ``Worker(transport=...)``.

        Raises:
            ArgumentError: the host was killed and not restarted.
        """
        return SimulatedTransport(self, self._alive(name))

    @property
    def current(self) -> str | None:
        """Name of the host that the running code belongs to; None in the test's own."""
        owner = OWNER.get()
        return None if owner is None else owner.name.partition("#")[0]

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Let code in this block, and all that it starts, belong to the host `name`. See Note [What runs where].

        Args:
            name: name of the host.

        Returns:
            A context manager.

        Raises:
            ArgumentError: the host was killed and not restarted.
        """
        token = OWNER.set(self._alive(name).owner)
        try:
            yield
        finally:
            OWNER.reset(token)

    def spawn(self, name: str, main: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run a coroutine on the host `name`, in a context of its own as a new process has.

        Args:
            name: the host, made if there is none yet.
            main: the coroutine to run.

        Returns:
            A future with its outcome; `HostKilledError` if the host is killed first. Cancelling it cancels the coroutine.

        Raises:
            ArgumentError: the host was killed and not restarted.
        """
        loop = self.loop
        try:
            host = self._alive(name)
        except ArgumentError:
            main.close()
            raise
        outcome: asyncio.Future[T] = loop.create_future()
        task = loop.create_task(main, name=f"{name}:{getattr(main, '__qualname__', 'main')}", context=host.context())
        task.add_done_callback(partial(_hand_over, host, outcome), context=contextvars.Context())
        outcome.add_done_callback(lambda _: task.cancel() if outcome.cancelled() else None)
        host.outcomes.append(outcome)  # type: ignore[arg-type]
        return outcome

    def kill(self, name: str, *, silent: bool = False) -> None:
        """Kill a host as SIGKILL kills a process: nothing of it runs again, and its frames on their way arrive or not, by chance.

        Args:
            name: the host. No effect on one that is dead already.
            silent: nothing tells its peers, as when the power fails. Else its connections are reset.

        Raises:
            ArgumentError: no such host.
            LoopError: the loop is not simulated.
            Killed: called by code of that host, which ends here.
        """
        host, loop = self._known(name), self._simulated("kill")
        if not host.owner.is_dead:
            try:
                self._hit(name, "kill")
                loop.kill(host.owner)
            finally:
                host.die(silent, loop.time())

    def restart(self, name: str) -> None:
        """Let a new incarnation take the name; one that is alive is killed. The new one runs nothing until something is spawned on it.

        Args:
            name: name of the host.

        Raises:
            ArgumentError: no such host.
            LoopError: the loop is not simulated.
            Killed: called by code of that host, which ends here.
        """
        host = self._known(name)
        try:
            self.kill(name)
        finally:
            self._hosts[name] = self._incarnation(name, host.incarnation + 1)

    def stop(self, name: str) -> None:
        """Close the listener and all channels of a host; its code goes on, and connecting to it is refused until it listens again.

        Args:
            name: name of the host.

        Raises:
            ArgumentError: no such host.
        """
        self._known(name).stop()

    def freeze(self, name: str, seconds: float) -> None:
        """Freeze a host as SIGSTOP freezes a process: nothing of it runs for a while, frames for it wait, its timers run out.

        Args:
            name: the host.
            seconds: for how long. Freezing a frozen host can only make it longer.

        Raises:
            ArgumentError: no such host, or `seconds` is no number of at least 0.
            LoopError: the loop is not simulated.
        """
        host, loop = self._known(name), self._simulated("freeze")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ArgumentError(f"freeze({name!r}, {seconds!r}): expected seconds, a number of at least 0")
        self._hit(name, "freeze")
        host.frozen_until = max(host.frozen_until, loop.time() + seconds)
        loop.freeze(host.owner)
        loop.call_at(host.frozen_until, _thaw, loop, host, context=contextvars.Context())

    def reset(self, a: str, b: str) -> None:
        """Break every connection between two hosts. Of the frames on their way from `a` to `b` an unknown part arrives, of the others nothing.

        Args:
            a: name of the one host.
            b: name of the other.

        Raises:
            ArgumentError: no such host.
        """
        now = self.loop.time()
        self._known(a)
        self._known(b)
        broken: set[SimulatedChannel] = set()
        for source, target in ((a, b), (b, a)):
            host = self._hosts.get(source)
            for channel in [] if host is None else list(host.channels):
                if channel.peer_name == target and channel.other_end not in broken:
                    self._hit(source, "reset")
                    channel.reset(now)
                    broken.add(channel)

    # ---- protocol points

    def at(self, point: str, name: str, action: str | Callable[[], object], *, hit: int = 1) -> Failpoint:
        """Do something when a host reaches a protocol point.

        Args:
            point: one of `aiograd.distributed.failpoints.POINTS`.
            name: the host.
            action: ``"kill"``, ``"kill silently"`` or a function.
            hit: at which of the times that the host reaches the point, counted from 1.

        Returns:
            The armed event; it is disarmed by itself when a simulated loop is closed.

        Raises:
            ArgumentError: an unknown point, action or host.
        """
        self._check_host(name)
        actions: dict[str, Callable[[], object]] = {"kill": partial(self.kill, name), "kill silently": partial(self.kill, name, silent=True)}
        if isinstance(action, str):
            if action not in actions:
                raise ArgumentError(f"at({point!r}, action={action!r}): expected 'kill', 'kill silently' or a function")
            action = actions[action]
        failpoint = failpoints.arm(point, action, hit=hit, when=lambda: self.current == name)
        self._at_close(failpoint.disarm)
        return failpoint

    def observe_points(self) -> Callable[[], None]:
        """Remember which protocol point each host has reached last, for `point_coverage`.

        Returns:
            A function that ends it; the closing of a simulated loop ends it too.
        """
        stop = failpoints.observe(self._reached)
        self._at_close(stop)
        return stop

    @property
    def open_channels(self) -> int:
        """Ends of channels that are open on living hosts."""
        return sum(len(host.channels) for host in self._hosts.values() if not host.owner.is_dead)

    # ---- helpers

    def _alive(self, name: str) -> Host:
        host = self._hosts.get(name)
        if host is None:
            if not name or "#" in name or ":" in name or "/" in name:
                raise ArgumentError(f"host name {name!r}: expected letters, digits, '.', '-' and '_'")
            host = self._hosts[name] = self._incarnation(name, 0)
        elif host.owner.is_dead:
            raise ArgumentError(f"host {name} was killed; call restart({name!r}) to let a new incarnation take its name")
        return host

    def _known(self, name: str) -> Host:
        host = self._hosts.get(name)
        if host is None:
            near = difflib.get_close_matches(str(name), self._hosts, 1)
            raise ArgumentError(
                f"no host {name!r} in this network{f': did you mean {near[0]!r}?' if near else ''}; there are: {', '.join(self._hosts) or 'none'}. "
                "spawn(), host() and transport() make a host"
            )
        return host

    def _check_host(self, name: str) -> None:
        if self._hosts:
            self._known(name)

    def _incarnation(self, name: str, number: int) -> Host:
        return Host(self, name, number, self.stream(f"entropy:{name}#{number}"))

    def _simulated(self, what: str) -> SimulatedLoop:
        if not isinstance(self.loop, SimulatedLoop):
            raise LoopError(f"{what}: only code on a SimulatedLoop can be stopped from outside; run the test with simulated_run or virtual_clock")
        return self.loop

    def _at_close(self, callback: Callable[[], object]) -> None:
        if isinstance(self.loop, SimulatedLoop):
            self.loop.at_close(callback)

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def _hit(self, name: str, kind: str) -> None:
        self._records.hit(kind, name, None)

    def _reached(self, point: str) -> None:
        name = self.current
        if name is not None:
            self._records.last_point[name] = point


def _hand_over(host: Host, outcome: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    if outcome in host.outcomes:
        host.outcomes.remove(outcome)
    if outcome.done():
        if not task.cancelled():
            task.exception()  # the outcome was cancelled: the error is of no interest
    elif task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _thaw(loop: SimulatedLoop, host: Host) -> None:
    if loop.time() >= host.frozen_until:
        loop.thaw(host.owner)
