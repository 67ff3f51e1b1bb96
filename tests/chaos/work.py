"""The work of drivers: contexts with backward passes, calls of all sorts, optimizer steps, and the attempts of another tenant."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Coroutine
from random import Random
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.kinds import Kind
from aiograd.errors import (
    AiogradError,
    CommitUnknown,
    ContextNotFoundError,
    ContextReleasedError,
    DistributedError,
    ProtocolError,
    ReferenceLostError,
    RemoteError,
    StepError,
)
from tests.chaos import programs
from tests.chaos.hosts import DRIVER, TENANT, Host, World
from tests.chaos.jobs import JobFailed
from tests.chaos.mix import Activity
from tests.chaos.oracle import Book, power
from tests.chaos.promises import Notes
from tests.chaos.service import Failure, all_of, is_same, new_values

#: what user code and its libraries raise here; aiograd's own errors are typed, and nothing else may come out
USERS = (Failure, JobFailed)
#: seconds that passes and calls are given
SECONDS = (2.0, 5.0)
#: kinds of messages that a context of one's own in which no pass ever was may take, and may refuse
TAKEN, REFUSED = (Kind.CALL, Kind.ABORT, Kind.OUTCOME, Kind.RELEASE), (Kind.CALL, Kind.MARK, Kind.GRADIENT, Kind.COMMIT)
NESTING = 3


class Work:
    """The work of one incarnation of a driver.

    Args:
        world: the run.
        host: the driver.
        books: where contexts are entered, so that somebody can look after them if the driver dies.
    """

    def __init__(self, world: World, host: Host, books: list[Book]) -> None:
        self.world = world
        self.host = host
        self.notes = world.notes
        self.books = books
        #: those who may be called
        self.peers = [name for name in world.names if name != TENANT]

    async def do(self, activity: Activity, random: Random) -> None:
        """Be busy with something."""
        self.notes.tell(f"{self.host.name} begins {activity}")
        await {
            "context": self.context,
            "echo": self.echo,
            "tally": self.tally,
            "steps": self.steps,
            "nap": self.nap,
            "probe": self.probe,
        }[activity](random)

    # ---------------------------------------------------------------- contexts

    async def context(self, random: Random, program: list[Any] | None = None, passes: int | None = None) -> None:
        """Forward, then some backward passes; gradients are checked before the context is left.

        Args:
            program: what to differentiate; None: something at random.
            passes: how many; None: some.
        """
        host = self.host
        drawn = programs.draw(random, self.peers, 1, NESTING) if program is None else program
        # outside of all hosts: no fault touches it
        want = await asyncio.create_task(programs.reference(drawn, host.name, self.peers), context=contextvars.Context())
        lingering: asyncio.Task[None] | None = None
        try:
            async with self.open() as ctx:
                if program is None and random.random() < 0.15:
                    lingering = asyncio.create_task(self.nap(Random(random.random())))
                x = programs.new_input()
                book = Book(self.world, host, ctx, x, want, {name: self.world.hosts[name] for name in self.hosts()})
                outputs = await self.forward(drawn, x, random)
                if outputs is not None:
                    self.books.append(book)
                    await self.passes(ctx, book, programs.total(outputs), passes or random.randint(1, 3), random)
                    self.books.remove(book)
        finally:
            if lingering is not None:
                await lingering  # the end of the context ends it

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Context]:
        """A context that is seen to be left in time."""
        block = self.host.worker.context()
        ctx = await block.__aenter__()
        try:
            yield ctx
        finally:
            self.notes.released(ctx.key)
            # it tells the others and waits for what runs in it, which is cancelled
            await self.host.timed("leaving a context", self.host.worker.limits.silence + 1.0, block.__aexit__(None, None, None))

    def hosts(self) -> list[str]:
        """The driver, and those who may be called, as far as they are alive."""
        return [name for name in dict.fromkeys((self.host.name, *self.peers)) if name in self.world.hosts]

    async def forward(self, program: list[Any], x: ag.Tensor, random: Random) -> list[ag.Tensor] | None:
        """Run a program; None where that failed or was given up."""
        task = asyncio.ensure_future(programs.execute(program, [x], self.host.served.leaves, self.host.served))
        self.give_up(task, random)
        try:
            async with asyncio.timeout(2 * self.world.limits.default_deadline):  # of a job that never returns nobody is told
                return await task
        except TimeoutError:
            self.notes.count("forward TimeoutError")
            self.notes.expect(not self.notes.quiet(), "forward did not end although nothing was wrong")
        except asyncio.CancelledError:
            self.notes.count("forward cancelled")
            _pass_on_cancellation()
        except (DistributedError, *USERS) as error:
            self.failed("forward", error)
        return None

    async def passes(self, ctx: Context, book: Book, loss: ag.Tensor, count: int, random: Random) -> None:
        """Backward passes over one graph, which all but the last of them keep; sometimes all at the same time."""
        at_once, is_fast = random.random() < 0.25, random.random() < 0.1
        numbers = list(range(count))
        while numbers:
            now, numbers = (numbers, []) if at_once else (numbers[:1], numbers[1:])
            keep = bool(numbers) or len(now) > 1
            await all_of([self.one_pass(ctx, book, loss, number, Random(random.random()), keep=keep, is_fast=is_fast) for number in now])
            book.check()

    async def one_pass(self, ctx: Context, book: Book, loss: ag.Tensor, number: int, random: Random, *, keep: bool, is_fast: bool) -> None:
        """One backward pass, entered into the book."""
        seconds = random.choice(SECONDS)
        create_graph = random.random() < 0.1
        doubts = len(ctx.in_doubt)
        pass_ = ctx.backward(
            loss * float(power(number)), retain_graph=keep, create_graph=create_graph, mode="fast" if is_fast else "smart", timeout=seconds
        )
        what = f"backward {number} of {ctx.id[:12]}"
        others = tuple(name for name in book.held if name != self.host.name)
        book.begin(number)
        ended: list[BaseException] = []
        task = asyncio.ensure_future(_noting(ended, self.host.timed(what, seconds, pass_)))
        self.give_up(task, random)
        is_cancelled = False
        try:
            await task
        except asyncio.CancelledError:
            is_cancelled = True
            committed = bool(ended) and getattr(ended[0], "committed", False)
            book.end(number, is_in=committed, doubtful=others if len(ctx.in_doubt) > doubts else ())
            outcome = "cancelled, committed" if committed else "cancelled"
        except CommitUnknown as error:
            book.end(number, is_in=error.committed, doubtful=error.workers)
            outcome = "commit unknown"
        except (AiogradError, *USERS) as error:
            committed = getattr(error, "committed", False)
            book.end(number, is_in=committed, doubtful=others if len(ctx.in_doubt) > doubts else ())
            outcome = f"{type(error).__name__}, committed" if committed else type(error).__name__
            self.notes.tell(f"{what}: {error}")
            self.judge(what, error, may_fail=is_fast)
        else:
            book.end(number, is_in=True)
            outcome = "committed"
        self.notes.count(f"backward {outcome}")
        if is_cancelled:
            _pass_on_cancellation()

    def failed(self, what: str, error: Exception) -> None:
        """Something failed: count it, and see whether it may fail like that."""
        self.notes.count(f"{what} {type(error).__name__}")
        self.judge(what, error)

    def judge(self, what: str, error: Exception, *, may_fail: bool = False) -> None:
        """Nothing fails while nothing is wrong, unless it `may_fail`; and whatever is wrong, honest workers never break the protocol."""
        said = f"{type(error).__name__}: {error}"
        self.notes.expect(may_fail or not self.notes.quiet(), f"{what} failed although nothing was wrong: {said}")
        self.notes.expect(not isinstance(error, ProtocolError), f"{what} failed as if somebody had broken the protocol: {said}")

    def give_up(self, task: asyncio.Future[Any], random: Random) -> None:
        """Cancel a task after a while, now and then."""
        if random.random() < self.world.mix.cancels and self.world.may_fail:
            seconds = random.uniform(0, 0.15)
            timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    # ---------------------------------------------------------------- calls

    async def ask(self, what: str, make: Any, random: Random, timeout: float | None = None) -> Any:
        """Ask for something outside of contexts; None where it failed as it may."""
        try:
            return await self.host.served.ask(what, make, timeout)
        except (DistributedError, *USERS) as error:
            self.failed(what, error)
            return None

    async def echo(self, random: Random) -> None:
        """Send values of all sorts there and back, in many frames."""
        peer = random.choice(self.peers)
        values = new_values(random, random.choice((1, 100, 1000)))
        answer = await self.ask("echo", lambda token, until: self.host.worker.call(peer, "echo", values, token, until), random)
        if answer is not None:
            self.notes.expect(is_same(answer, values), f"{peer} gave back other values")
            self.notes.count("echo")

    async def tally(self, random: Random) -> None:
        """Count on another worker: each call counts once or not at all, and those that were answered once."""
        peer = random.choice(self.peers)
        home = self.world.hosts.get(peer)
        ref = await self.plainly("making a tally", self.host.worker.remote(peer, "Tally"))
        if ref is None or home is None or self.world.hosts.get(peer) is not home:
            return
        tally = self.behind(ref, home)
        answered = 0
        for number in range(random.randint(1, 4)):
            adding = asyncio.ensure_future(self.plainly("adding", ref.call("add", power(number), timeout=2.0)))
            self.give_up(adding, random)
            try:
                answered |= power(number) if await adding is not None else 0
            except asyncio.CancelledError:
                _pass_on_cancellation()
            most = power(number + 1) // 255  # a one for each call so far
            is_right = not tally.value & ~most and tally.value & answered == answered
            self.notes.expect(is_right or self.world.hosts.get(peer) is not home, f"{peer} counted {tally.value:#x}; answered were {answered:#x}")
        self.notes.count("tally")
        await self.plainly("deleting a tally", ref.delete(timeout=2.0))

    def behind(self, ref: dist.RemoteRef, home: Any) -> Any:
        """The object behind a reference."""
        return home.worker._objects.table.find(ref.key, ref.epoch, self.host.keyring.default_principal).value

    async def plainly(self, what: str, request: Coroutine[Any, Any, Any]) -> Any:
        """As `ask`, for requests without a token."""
        try:
            return await self.host.timed(what, self.world.limits.default_deadline, request)
        except (DistributedError, *USERS) as error:
            self.failed(what, error)
            return None

    async def nap(self, random: Random) -> None:
        """Let another worker wait, perhaps by way of a third one, and perhaps give up."""
        first, second = random.choice(self.peers), random.choice(self.peers)
        seconds, timeout = random.choice((0.1, 1.0, 3.0)), random.choice((0.5, 2.0, 5.0))
        call = self.host.worker.call
        task = asyncio.ensure_future(
            self.host.served.ask("nap", lambda token, until: call(first, "nap", seconds, second, token, until, timeout=timeout), timeout)
        )
        if random.random() < 0.5:
            asyncio.get_running_loop().call_later(random.uniform(0, 1.0), task.cancel)
        try:
            await task
            self.notes.count("nap")
        except asyncio.CancelledError:
            self.notes.count("nap cancelled")
            _pass_on_cancellation()
        except (DistributedError, *USERS) as error:
            self.notes.count(f"nap {type(error).__name__}")
            self.judge("nap", error, may_fail=True)

    # ---------------------------------------------------------------- optimizer steps

    async def steps(self, random: Random) -> None:
        """Training: the gradient of each step is a power of two of its own, so that the parameters tell which steps were taken, and how often."""
        worker, world = self.host.worker, self.world
        owners = random.sample(self.peers, random.randint(1, len(self.peers)))
        homes = {name: world.hosts.get(name) for name in owners}
        refs = await asyncio.gather(*(self.plainly("making a module", worker.remote(name, "Scale")) for name in owners))
        if any(ref is None or home is None or world.hosts.get(home.name) is not home for ref, home in zip(refs, homes.values(), strict=True)):
            return
        scales = {name: self.behind(ref, homes[name]) for name, ref in zip(owners, refs, strict=True)}
        optimizer = dist.DistributedOptimizer(worker, ag.optim.SGD, refs, lr=1.0, maximize=True)
        taken, maybe = dict.fromkeys(owners, 0), dict.fromkeys(owners, 0)
        for number in range(random.randint(1, 4)):
            is_over = await self.one_step(optimizer, dict(zip(owners, refs, strict=True)), number, taken, maybe)
            for name in owners:
                if world.hosts.get(name) is not homes[name]:
                    continue
                found = scales[name].weight.detach().numpy()
                factor = int(found[0])
                is_right = (found == factor * programs.new_input().detach().numpy()).all() and factor & ~maybe[name] == taken[name] & ~maybe[name]
                is_right = is_right and not factor & ~(taken[name] | maybe[name])
                self.notes.expect(is_right, f"the parameter on {name} is {found}; taken were steps {taken[name]:#x}, perhaps {maybe[name]:#x}")
            if is_over:
                return

    async def one_step(
        self, optimizer: dist.DistributedOptimizer, refs: dict[str, dist.RemoteRef], number: int, taken: dict[str, int], maybe: dict[str, int]
    ) -> bool:
        """Forward, backward, step; returns whether that is the end of it."""
        x = programs.new_input().detach()
        try:
            async with self.open() as ctx:
                outputs = await asyncio.gather(*(ref.call("forward", x) for ref in refs.values()))
                loss = programs.total(outputs) * float(power(number))
                try:
                    await self.host.timed("backward for a step", self.world.limits.default_deadline, ctx.backward(loss))
                except CommitUnknown:
                    with contextlib.suppress(DistributedError):
                        await optimizer.step(ctx)
                        self.notes.expect(False, "a step was taken with gradients that may not be complete")
                    raise
                for name in refs:
                    maybe[name] |= power(number)
                try:
                    await self.host.timed("a step", 2 * self.world.limits.default_deadline, optimizer.step(ctx))  # it makes the optimizers first
                except StepError as error:
                    for name in error.applied:
                        taken[name] |= power(number)
                        maybe[name] &= ~power(number)
                    raise
                for name in refs:
                    taken[name] |= power(number)
                    maybe[name] &= ~power(number)
        except (DistributedError, *USERS) as error:
            self.failed("step", error)
            return True
        self.notes.count("step")
        return False

    # ---------------------------------------------------------------- what another tenant tries

    async def probe(self, random: Random) -> None:
        """Name a context of somebody else's in a message of every kind: nobody may know it."""
        for _ in range(random.randint(1, 4)):
            await asyncio.sleep(random.uniform(0, 0.3))
            mine = self.host.keyring.default_principal
            known = [
                (name, context)
                for name, host in self.world.hosts.items()
                if name != self.host.name
                for context in host.worker._contexts
                if context.principal != mine
            ]
            if not known:
                continue
            name, context = random.choice(known)
            await self.intrude(name, context, random)

    async def intrude(self, name: str, context: Context, random: Random) -> None:
        """Send one message about a foreign context: the answer is that of a context that never was.

        A call that opens a context opens one of the tenant's own, of the same id, and what follows is about that one.
        """
        key, pass_id = context.key, next(iter(context.participants), (DRIVER, 1))
        edge = next(iter(context.send_nodes), 1)
        opens = random.random() < 0.5
        heading = (key, context.origin, (-1,), 0, opens)
        messages: dict[Kind, tuple[Any, ...]] = {
            Kind.CALL: ("nap", [0.0, name, self.notes.new_token(self.notes.clock() + 2.0, None), 0.0], {}, True, heading),
            Kind.MARK: (key, *pass_id, [edge]),
            Kind.GRADIENT: (key, *pass_id, (edge, [None], 0), 2, []),
            Kind.COMMIT: (key, *pass_id),
            Kind.ABORT: (key, *pass_id, "because"),
            Kind.OUTCOME: (key, *pass_id),
            Kind.RELEASE: (key,),
        }
        kind = random.choice(list(messages))
        is_opening = kind is Kind.CALL and opens and context.origin != name
        if kind is Kind.RELEASE:
            self.world.buried.add((name, key))
        if is_opening:
            self.world.squatted.add((name, key))
        what = f"a {kind.name} about a context of another principal"
        try:
            answer = await self.host.timed("a probe", 2.0, self.host.worker.endpoint.request(name, kind, messages[kind], 2.0))
            is_own = (name, key) in self.world.squatted and kind in TAKEN
            self.notes.expect(is_own and (kind is not Kind.OUTCOME or answer in ("unknown", "aborted")), f"{name} answers {what} with {answer!r}")
            self.notes.count("probe of its own context")
        except ContextNotFoundError as error:
            self.notes.expect("knows no such autograd context" in str(error) and not is_opening, f"{name} answers {what} with {error}")
            self.notes.count("probe refused")
        except ContextReleasedError as error:
            self.notes.expect((name, key) in self.world.buried | self.world.squatted, f"{name} tells strangers of its contexts: {error}")
        except DistributedError as error:
            is_network = not isinstance(error, RemoteError | ReferenceLostError) and not error.path
            is_own = (name, key) in self.world.squatted and kind in REFUSED
            self.notes.expect(is_network or is_own, f"{name} answers {what} with {type(error).__name__}: {error}")


async def fresh_pass(host: Host, peer: str, notes: Notes) -> None:
    """A pass that has to succeed."""
    async with host.worker.context() as ctx:
        x = programs.new_input()
        (y,) = await host.served.call(peer, [[["multiply", 0, 0]], [1]], [x])
        await ctx.backward(y.sum())
        is_right = np.array_equal(ctx.grads[x].numpy(), programs.parameters(peer)[0].numpy())
        notes.expect(is_right, f"after everything has healed {peer} gives {host.name} wrong gradients")


async def _noting(ended: list[BaseException], awaitable: Any) -> None:
    """Await something; keep what it raised as it was."""
    try:
        await awaitable
    except BaseException as error:
        ended.append(error)
        raise


def _pass_on_cancellation() -> None:
    """Raise where the running task itself was cancelled, and not only what it waited for."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
