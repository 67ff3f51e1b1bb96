"""A pass that is cancelled, at every step that the loop takes while it runs: it is committed on all workers or nowhere, and all is well after.

Each scene is run once to its end, and then again and again, cancelled one step later each time, until it ends before that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

import aiograd as ag
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import CommitUnknown, DeadlineError, RemoteError
from aiograd.testing import SimulatedLoop
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Net, Stage, Suspend, forever, passes, same, scaled
from tests.distributed.workers import context_here, settled, simulate
from tests.support import cancel
from tests.sweeps import swept

pytestmark = pytest.mark.usefixtures("virtual_clock")

LIMITS = Limits(default_deadline=10.0)


class Scene:
    """The run that is cancelled. Subclasses say how it begins.

    Args:
        graph: what is differentiated.
        whole: numbers that are exact in any order, for schedules in which calls are not made in the same order each time.
        options: of `Context.backward`.
    """

    def __init__(self, graph: str, *, whole: bool = False, **options: Any) -> None:
        self.stage = Stage("abc" if graph in ("ring", "spiral", "triangle", "twice", "crossing") else "abcd", whole=whole)
        self.graph = GRAPHS[graph] if graph in GRAPHS else WASTEFUL[graph][0]
        self.options = options
        self.counts: Counter[str] = Counter()
        self.hooks = 0

    async def prepare(self, here: Here, ctx: Any) -> Callable[[], Awaitable[None]]:
        """The forward part; returns what runs the pass."""
        loss = await self.graph(here, self.stage.x)
        return lambda: ctx.backward(loss, retain_graph=True, **self.options)

    async def reference(self) -> dict[str, list[Any]]:
        return await self.stage.reference(self.graph)


class Busy(Scene):
    """Rules that suspend on every worker, and hooks before and after the commit that do."""

    def __init__(self, graph: str, **options: Any) -> None:
        super().__init__(graph, **options)

        async def pause(g: Any) -> Any:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return g

        async def after(leaf: Any) -> None:
            self.hooks += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.stage.suspend("weigh", pause)
        for leaf in (self.stage.x, self.stage.weights["b"], self.stage.weights["c"]):
            leaf.register_hook(pause)
            leaf.register_post_accumulate_grad_hook(after)


class OnExecutor(Scene):
    """Rules that run on the executor."""

    def __init__(self, graph: str, **options: Any) -> None:
        super().__init__(graph, **options)

        class Elsewhere(ag.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x * 1

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                return g

        async def weigh(here: Here, x: Any) -> Any:
            return Elsewhere.apply(x * here.weight)

        self.stage.functions["weigh"] = weigh


class ByCallee(Scene):
    """The pass is started by a function on b, and it is the call that is cancelled."""

    async def prepare(self, here: Here, ctx: Any) -> Callable[[], Awaitable[None]]:
        async def differentiate(there: Here, x: Any) -> None:
            await context_here().backward((await there.call("c", "weigh", x * there.weight)).sum(), retain_graph=True)

        self.stage.functions["differentiate"] = differentiate
        dist_service = here.call.__self__._core.service  # type: ignore[attr-defined]
        with contextlib.suppress(ag.errors.ArgumentError):  # exposed already
            dist_service.function("differentiate")(self.stage._exposed("differentiate"))
        y = self.stage.x * 1
        return lambda: here.call("b", "differentiate", y)

    async def reference(self) -> dict[str, list[Any]]:
        async def graph(here: Here, x: Any) -> Any:
            return (await here.call("c", "weigh", x * self.stage.weights["b"])).sum()

        return await self.stage.reference(graph)


async def play(scene: Scene, cancels: Callable[[int], list[int]], *, board: Net | None = None) -> int:
    """Run a scene with the cancellations that `cancels` has for each round, until there are none any more; returns the number of rounds.

    `cancels` gets the number of the round, counted from 0, and says after how many steps the pass is to be cancelled.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    stage = scene.stage
    wanted = await scene.reference()
    async with stage.open(board or Net(), limits=LIMITS) as opened:
        async with opened[0].context() as ctx:  # opens connections
            await (await scene.prepare(stage.here(opened[0]), ctx))()
        await settled(*opened)
        tasks = asyncio.all_tasks()
        n = unscathed = 0
        while unscathed < 3:
            at = cancels(n)
            scene.hooks = 0
            async with opened[0].context() as ctx:
                run = await scene.prepare(stage.here(opened[0]), ctx)
                running = asyncio.ensure_future(run())
                for step in at:
                    loop.at_step(loop.steps + step, running.cancel)
                outcome = "committed"
                try:
                    await running
                    unscathed += bool(at)
                except asyncio.CancelledError as error:
                    unscathed = 0
                    outcome = "cancelled after the commit" if getattr(error, "committed", False) else "cancelled"
                if isinstance(scene, ByCallee) and outcome != "committed":
                    await until_idle(opened)
                    outcome = "cancelled" if all(grad is None for grads in stage.found(ctx, opened).values() for grad in grads) else "committed"
                assert passes(opened) == [0] * len(opened), f"{outcome} at {at}: a pass goes on"
                scene.counts[outcome] += 1
                found = stage.found(ctx, opened)
                if outcome == "cancelled":
                    assert all(grad is None for grads in found.values() for grad in grads), f"cancelled at {at}: {found}"
                    assert not scene.hooks, "no hook that follows a commit has run"
                else:
                    same(found, wanted)
                assert not any(worker.statistics().in_doubt for worker in opened)
                await run()
                same(stage.found(ctx, opened), wanted if outcome == "cancelled" else scaled(wanted, 2))
            await settled(*opened)
            left = {task for task in asyncio.all_tasks() - tasks if not task.done()}
            assert not left, f"{outcome} at {at}: {left}"
            n += 1
    return n


async def until_idle(opened: Any) -> None:
    for _ in range(1000):
        if not any(worker.statistics().calls or worker.statistics().passes for worker in opened):
            return
        await asyncio.sleep(0)


SCENES: dict[str, Callable[[], Scene]] = {
    "chain": lambda: Scene("chain"),
    "chain, fast": lambda: Scene("chain", mode="fast"),
    "ring": lambda: Scene("ring"),
    "diamond": lambda: Scene("diamond"),
    "forked, fast": lambda: Scene("forked", mode="fast"),
    "twice": lambda: Scene("twice"),
    "half used": lambda: Scene("half_used"),
    "recorded": lambda: Scene("spiral", create_graph=True),
    "busy diamond": lambda: Busy("diamond"),
    "busy crossing": lambda: Busy("crossing"),
    "executor": lambda: OnExecutor("diamond"),
    "by a callee": lambda: ByCallee("chain"),
}


@pytest.mark.parametrize("name", swept(SCENES, keep=2))
def test_cancelled_at_every_step(name: str) -> None:
    scene = SCENES[name]()
    rounds: list[int] = []

    async def main() -> None:
        rounds.append(await play(scene, lambda n: [n + 1]))

    simulate(main)
    assert rounds[0] > 30 and scene.counts["cancelled"] > 15, f"there was little to cancel: {scene.counts}"
    if name != "by a callee":
        assert scene.counts["cancelled after the commit"] > 0, scene.counts


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_cancelled_at_every_step_of_a_schedule_that_is_drawn(seed: int) -> None:
    scene = Busy("diamond", whole=True) if seed % 2 else Scene("forked", whole=True)

    async def main() -> None:
        await play(scene, lambda n: [n + 1])

    simulate(main, seed=seed, order="permuted")
    assert scene.counts["cancelled"] > 15


@pytest.mark.sim
async def test_cancelled_again_while_it_is_being_cancelled() -> None:
    scene = Busy("twice")
    random = Random(0)

    loop = asyncio.get_running_loop()
    stage = scene.stage
    wanted = await scene.reference()
    async with stage.open(Net(), limits=LIMITS) as opened:
        for _ in range(60):
            async with opened[0].context() as ctx:
                run = await scene.prepare(stage.here(opened[0]), ctx)
                running = asyncio.ensure_future(run())
                first = random.randint(1, 250)
                for step in (first, first + random.randint(1, 5), first + random.randint(1, 40)):
                    loop.at_step(loop.steps + step, running.cancel)  # type: ignore[attr-defined]
                committed = True
                try:
                    await running
                except asyncio.CancelledError as error:
                    committed = getattr(error, "committed", False)
                # who is impatient does not wait for the others to hear of it; they do
                await asyncio.sleep(0.1)
                assert not any(passes(opened))
                if not ctx.in_doubt:
                    same(stage.found(ctx, opened), wanted if committed else {who: [None] * len(grads) for who, grads in wanted.items()})
                scene.counts["committed" if committed else "cancelled"] += 1
                await run()
            await settled(*opened)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not tasks, tasks
    assert scene.counts["cancelled"] > 16 and scene.counts["committed"] > 4


# -------------------------------------------------------------------- deadlines


class Slow(Scene):
    """Every rule takes a while, and so does every message."""

    def __init__(self, graph: str, **options: Any) -> None:
        super().__init__(graph, **options)

        async def pause(g: Any) -> Any:
            await asyncio.sleep(0.03)
            return g

        self.stage.suspend("weigh", pause)


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("how", ["deadline", "asyncio.timeout"])
async def test_a_timeout_at_any_time(how: str, mode: str) -> None:
    scene = Slow("diamond", mode=mode)
    counts: Counter[str] = Counter()

    board = Net()
    stage = scene.stage
    wanted = await scene.reference()
    loop = asyncio.get_running_loop()
    async with stage.open(board, limits=LIMITS) as opened:
        n = done = 0
        while done < 3:
            n += 1
            seconds = n * 0.004
            async with opened[0].context() as ctx:
                loss = await scene.graph(stage.here(opened[0]), stage.x)
                board.latency = 0.005
                began = loop.time()
                outcome = "committed"
                try:
                    if how == "deadline":
                        await ctx.backward(loss, retain_graph=True, timeout=seconds, mode=mode)
                    else:
                        async with asyncio.timeout(seconds):
                            await ctx.backward(loss, retain_graph=True, mode=mode)
                    done += 1
                except DeadlineError as error:
                    assert how == "deadline"
                    outcome = "late, but committed" if error.committed else "late"
                except TimeoutError as error:
                    assert how == "asyncio.timeout" and type(error) is TimeoutError
                    outcome = "late, but committed" if getattr(error.__cause__ or error.__context__, "committed", False) else "late"
                took = loop.time() - began
                assert took <= seconds + LIMITS.heartbeat, f"{took} s of {seconds} s"
                await asyncio.sleep(0.2)
                assert passes(opened) == [0, 0, 0, 0], outcome
                counts[outcome] += 1
                found = stage.found(ctx, opened)
                same(found, {who: [None] * len(grads) for who, grads in wanted.items()} if outcome == "late" else wanted)
                assert not ctx.in_doubt, outcome
                await ctx.backward(loss, mode=mode)
                same(stage.found(ctx, opened), wanted if outcome == "late" else scaled(wanted, 2))
                board.latency = 0.0
                await asyncio.sleep(0.1)
            await settled(*opened)
    assert counts["late"] > 20 and counts["committed"] > 2


async def test_the_deadline_of_a_remote_rule_is_that_of_the_pass() -> None:
    """A rule three workers away that never ends is cancelled there, and the error says where the time went."""

    stage = Stage()
    cancelled: list[float] = []

    async def forever(g: Any) -> Any:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            raise

    async def via(here: Here, path: str, x: Any) -> Any:
        y = x * here.weight
        return await here.call(path[0], "via", path[1:], y) if path else Suspend.apply(y, forever)

    stage.functions["via"] = via
    async with stage.open(limits=LIMITS) as opened, opened[0].context() as ctx:
        loss = await GRAPHS["chain"](stage.here(opened[0]), stage.x)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match=r"Error on Node b: Error on Node c: Error on Node d: .* did not end in time on d"):
            await ctx.backward(loss, timeout=4)
        assert began + 2.5 < cancelled[0] <= began + 4 and passes(opened) == [0, 0, 0, 0]


@pytest.mark.parametrize(("inner", "outer"), [(1.0, 2.0), (2.0, 1.0)])
async def test_of_two_timeouts_the_right_one_ends_the_pass(inner: float, outer: float) -> None:
    stage = Stage("ab")
    stage.suspend("weigh", forever)
    async with stage.open(limits=LIMITS) as opened, opened[0].context() as ctx:
        loss = (await opened[0].call("b", "weigh", stage.x)).sum()
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(outer):
                await ctx.backward(loss, timeout=inner)
        assert isinstance(caught.value, DeadlineError) is (inner < outer)
        assert asyncio.get_running_loop().time() < 1.5 and passes(opened) == [0, 0]


async def test_a_cancellation_is_not_lost_in_a_timeout() -> None:
    """The deadline has passed and the workers are being told, which takes a while; the cancellation that comes then goes on."""

    board = Net()
    stage = Stage("ab")
    stage.suspend("weigh", forever)
    async with stage.open(board, limits=LIMITS) as opened, opened[0].context() as ctx:
        loss = (await opened[0].call("b", "weigh", stage.x)).sum()
        running = asyncio.ensure_future(ctx.backward(loss, timeout=1))
        await asyncio.sleep(0.5)
        board.cut("b")
        await asyncio.sleep(0.6)
        assert not running.done()
        await cancel(running)
        board.heal("b")
        await asyncio.sleep(5)
        assert passes(opened) == [0, 0]


async def test_a_function_that_differentiates_for_its_caller_is_cancelled_with_it() -> None:
    stage = Stage("abc")
    stage.suspend("weigh", forever)
    ends = stage.differentiates("weigh")
    async with stage.open(limits=LIMITS) as opened, opened[0].context() as ctx:
        calling = asyncio.ensure_future(opened[0].call("b", "differentiate", stage.x))
        await asyncio.sleep(1)
        assert passes(opened) == [1, 1, 1]
        await cancel(calling)
        await asyncio.sleep(1)
        assert passes(opened) == [0, 0, 0] and ends == ["CancelledError"]
        with pytest.raises((DeadlineError, RemoteError, CommitUnknown)):
            await opened[0].call("b", "differentiate", stage.x, timeout=2)
        await asyncio.sleep(1)
        assert passes(opened) == [0, 0, 0] and len(ends) == 2
        assert all(grad is None for grads in stage.found(ctx, opened).values() for grad in grads)
