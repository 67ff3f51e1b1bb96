"""A pass is a transaction over workers: gradients appear on all of them or on none, whatever happens to messages and workers around the commit.

Every scene has a chain a → b → c: a starts the pass, b and c have a weight each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import CommitUnknown, ContextError, PassAbortedError, StepError
from aiograd.transaction import Outcome
from tests.chaos.broken import without
from tests.distributed.passes_kit import Here, Net, Stage, after, before, passes, same
from tests.distributed.workers import simulate, values, view

LIMITS = Limits(default_deadline=10.0, lease=30.0)


class Scene:
    """The workers of a test, their context, and a loss."""

    def __init__(self, stage: Stage, board: Net, opened: tuple[dist.Worker, ...], ctx: Any, loss: Any, wanted: dict[str, list[Any]]) -> None:
        self.stage = stage
        self.board = board
        self.opened = opened
        self.a, self.b, self.c = opened
        self.ctx = ctx
        self.loss = loss
        self.wanted = wanted

    def committed(self) -> str:
        """The workers that have the gradients; fails where one has others."""
        names = ""
        found = self.stage.found(self.ctx, self.opened)
        for name, grads in found.items():
            if any(grad is not None for grad in grads):
                same({name: grads}, {name: self.wanted[name]})
                names += name
        return names

    def start(self, **options: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.ctx.backward(self.loss, **options))

    async def outcome(self, worker: dist.Worker) -> list[str]:
        return list(view(worker, self.ctx).history.outcomes.values())


async def graph(here: Here, x: Any) -> Any:
    y = await here.call("b", "weigh", x)
    return ((await here.call("c", "weigh", y)) * here.weight).sum()


@contextlib.asynccontextmanager
async def scene(board: Net | None = None, *, idle: bool = True, **options: Any) -> AsyncIterator[Scene]:
    board = board or Net()
    stage = Stage("abc")
    wanted = await stage.reference(graph)
    async with stage.open(board, idle=idle, limits=LIMITS, **options) as opened, opened[0].context() as ctx:
        loss = await graph(stage.here(opened[0]), stage.x)
        yield Scene(stage, board, opened, ctx, loss, wanted)


def now() -> float:
    return asyncio.get_running_loop().time()


# -------------------------------------------------------------------- the commit point


def test_gradients_appear_at_the_commit_and_not_before() -> None:
    async def main() -> None:
        seen: list[tuple[str, str]] = []
        async with scene() as s:
            with contextlib.ExitStack() as stack:
                for worker in s.opened[1:]:
                    stack.enter_context(after(worker, Kind.GRADIENT, lambda: seen.append(("gradients taken", s.committed()))))
                    stack.enter_context(before(worker, Kind.COMMIT, lambda: seen.append(("told", s.committed()))))
                s.stage.weights["c"].register_post_accumulate_grad_hook(lambda t: seen.append(("hook on c", s.committed())))
                with before(s.c, Kind.COMMIT, lambda: asyncio.sleep(2)):
                    running = s.start()
                    await asyncio.sleep(1)
                    assert s.committed() == "ab" and not running.done()
                    await running
            assert [where for what, where in seen if what == "gradients taken"] == ["", ""], "all is staged on all of them, and nothing can be seen"
            assert [where[0] for what, where in seen if what == "told"] == ["a", "a"], "the decision falls on the initiator"
            assert seen[-1] == ("hook on c", "abc"), "hooks see what was committed"
            assert s.committed() == "abc" and passes(s.opened) == [0, 0, 0]

    simulate(main)


def test_a_leafs_hook_sees_all_gradients_of_its_worker() -> None:
    async def main() -> None:
        stage = Stage("ab")
        extra = ag.tensor(np.ones(3, np.float32), requires_grad=True)
        seen: list[bool] = []

        async def two(here: Here, x: Any) -> Any:
            return x * here.weight * extra

        stage.functions["two"] = two
        async with stage.open() as opened, opened[0].context() as ctx:

            def hook(leaf: Any) -> None:
                grads = dist.current_context().grads  # type: ignore[union-attr]
                seen.append(extra in grads and stage.weights["b"] in grads)

            extra.register_post_accumulate_grad_hook(hook)
            stage.weights["b"].register_post_accumulate_grad_hook(hook)
            await ctx.backward((await opened[0].call("b", "two", stage.x)).sum())
            assert seen == [True, True]

    simulate(main)


async def test_only_the_initiator_commits_and_only_what_is_prepared() -> None:
    async with scene() as s:
        address: list[Any] = []
        held, go = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            address.extend(view(s.c, s.ctx).participants)
            held.set()
            await go.wait()

        with after(s.c, Kind.GRADIENT, hold):
            running = s.start()
            await held.wait()
            (pass_id,) = address
            with pytest.raises(PassAbortedError, match="told to commit a pass that c has not prepared"):
                await s.b.endpoint.request("c", Kind.COMMIT, (s.ctx.key, *pass_id), 5)
            with pytest.raises(PassAbortedError, match="told to commit a pass that b has not prepared"):
                await s.a.endpoint.request("b", Kind.COMMIT, (s.ctx.key, "a", pass_id[1] + 1), 5)
            assert await s.b.endpoint.request("c", Kind.OUTCOME, (s.ctx.key, *pass_id), 5) == "prepared"
            assert await s.c.endpoint.request("a", Kind.OUTCOME, (s.ctx.key, *pass_id), 5) == "undecided"
            assert await s.c.endpoint.request("a", Kind.OUTCOME, (s.ctx.key, "a", 5), 5) == "unknown"
            assert s.committed() == ""
            go.set()
            await running
        assert s.committed() == "abc"


def test_a_second_commit_joins_the_first_and_counts_nothing_twice() -> None:
    async def main() -> None:
        async with scene() as s:
            ran: list[float] = []

            async def hook(leaf: Any) -> None:
                await asyncio.sleep(2)
                ran.append(now())

            s.stage.weights["c"].register_post_accumulate_grad_hook(hook)
            running = s.start()
            await asyncio.sleep(1)
            (pass_id,) = view(s.c, s.ctx).participants
            assert s.committed() == "abc"
            again = [s.a.endpoint.request("c", Kind.COMMIT, (s.ctx.key, *pass_id), 5) for _ in range(3)]
            assert await asyncio.gather(*again) == [True, True, True] and len(ran) == 1 and now() >= ran[0]
            await running
            assert await s.a.endpoint.request("c", Kind.COMMIT, (s.ctx.key, *pass_id), 5) is True
            assert s.committed() == "abc"

    simulate(main)


def test_a_part_that_is_stopped_in_the_moment_of_its_commit_commits() -> None:
    """The decision has come, and the engine has not taken the step yet: only hooks may be cut short."""

    async def main() -> None:
        ran: list[str] = []

        async def hook(leaf: Any) -> None:
            ran.append("begun")
            await asyncio.sleep(0)
            ran.append("ended")

        async with scene() as s:
            s.stage.weights["c"].register_post_accumulate_grad_hook(hook)

            def stop() -> None:
                (part,) = view(s.c, s.ctx).participants.values()
                part.commit()
                part.stop(ContextError("stopped"))

            with before(s.c, Kind.COMMIT, stop), pytest.raises(ContextError, match="Error on Node c: stopped") as caught:
                await s.start()
            assert caught.value.committed is True and s.committed() == "abc" and "ended" not in ran and not s.ctx.in_doubt
            assert await s.outcome(s.c) == ["committed"] and passes(s.opened) == [0, 0, 0]

    simulate(main)


def test_what_is_not_known_in_time_is_known_later() -> None:
    """c is slow to confirm: the pass is reported as not known to be complete, and stays in doubt only until c has."""

    async def main() -> None:
        async with scene() as s:
            with before(s.c, Kind.COMMIT, lambda: asyncio.sleep(1.0)), pytest.raises(CommitUnknown, match="no confirmation"):
                await s.start(timeout=0.5)
            assert len(s.ctx.in_doubt) == 1 and s.committed() == "abc", "c has asked by itself when its time was over, but a has not heard of it"
            await asyncio.sleep(1.0)
            assert not s.ctx.in_doubt
            optimizer = dist.DistributedOptimizer(s.a, ag.optim.SGD, [s.a.refer(s.stage.x)], lr=1.0)
            await optimizer.step(s.ctx)

    simulate(main)


def test_a_worker_that_cannot_carry_out_a_commit_does_not_say_that_the_pass_was_aborted() -> None:
    """It was committed elsewhere: whoever else is prepared, and asks, must not take that for the decision."""

    async def main() -> None:
        async with scene() as s:

            def fail() -> None:
                raise RuntimeError("broken")

            def trouble() -> None:
                (participant,) = view(s.c, s.ctx).participants.values()
                participant.task.commit = fail  # type: ignore[method-assign]

            with before(s.c, Kind.COMMIT, trouble), pytest.raises(CommitUnknown) as caught:
                await s.start()
            assert caught.value.workers == ("c",) and s.committed() == "ab"
            assert await s.outcome(s.c) == ["unknown"] and len(view(s.c, s.ctx).in_doubt) == 1 and passes(s.opened) == [0, 0, 0]

    simulate(main)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("tries", [1, 4])
def test_a_worker_that_is_short_of_memory_commits_later(tries: int, is_told: bool) -> None:
    """It is told again; or it asks by itself and tries again, where it is told no more."""

    async def main() -> None:
        async with scene() as s:
            left = [MemoryError("no room")] * tries

            def scarce(commit: Callable[[], None]) -> None:
                if left:
                    raise left.pop()
                commit()

            def trouble() -> None:
                for participant in view(s.c, s.ctx).participants.values():  # none where it has asked meanwhile
                    participant.task.commit = functools.partial(scarce, participant.task.commit)  # type: ignore[method-assign]
                if not is_told:
                    raise ValueError("the request to commit is lost")

            with before(s.c, Kind.COMMIT, trouble), contextlib.nullcontext() if is_told else pytest.raises(CommitUnknown):
                await s.start(timeout=4.0)
            if not is_told:
                assert s.committed() == "ab"
                await asyncio.sleep(10.0)
            assert not left and s.committed() == "abc" and await s.outcome(s.c) == ["committed"] and passes(s.opened) == [0, 0, 0]
            assert not view(s.c, s.ctx).in_doubt

    simulate(main)


async def test_doubt_ends_with_the_news_that_the_pass_was_given_up() -> None:
    async with scene() as s:
        there, pass_id = view(s.c, s.ctx), ("a", 7)
        there.in_doubt.add(pass_id)
        there.history.remember(pass_id, Outcome.UNKNOWN)
        assert await s.a.endpoint.request("c", Kind.ABORT, (s.ctx.key, *pass_id, "it failed"), 5) is True
        assert not there.in_doubt and await s.outcome(s.c) == ["aborted"]


# -------------------------------------------------------------------- messages and connections that are lost


def _cut_at_commit(s: Scene, seconds: float, *pairs: str) -> Callable[[], None]:
    """When c is about to be told of the commit, it loses sight of others for a while."""
    request = s.a._core.endpoint.request
    at: list[float] = []

    async def spied(peer: str, kind: int, *rest: Any) -> Any:
        if kind == Kind.COMMIT and peer == "c" and not at:
            at.append(now())
            for pair in pairs:
                s.board.cut(*pair)
                asyncio.get_running_loop().call_later(seconds, s.board.heal, *pair)
        return await request(peer, kind, *rest)

    s.a._core.endpoint.request = spied  # type: ignore[method-assign]
    return lambda: setattr(s.a._core.endpoint, "request", request)


def test_who_cannot_reach_the_initiator_learns_of_the_commit_from_others() -> None:
    async def main() -> None:
        async with scene() as s:
            _cut_at_commit(s, 20.0, "ca")
            with pytest.raises(CommitUnknown, match=r"are committed on a, and c could not be told") as caught:
                await s.start()
            assert caught.value.committed is True and caught.value.workers == ("c",)
            await asyncio.sleep(5)
            assert s.committed() == "abc" and passes(s.opened) == [0, 0, 0], "b has told c"
            assert len(s.ctx.in_doubt) == 1 and not view(s.c, s.ctx).in_doubt
            await asyncio.sleep(20)

    simulate(main)


def test_that_another_worker_knows_nothing_of_a_pass_settles_nothing() -> None:
    """Only the initiator can say by that that the pass was aborted."""

    async def main() -> None:
        async with scene() as s:
            _cut_at_commit(s, 20.0, "ca")
            with after(s.b, Kind.COMMIT, view(s.b, s.ctx).history.outcomes.clear), pytest.raises(CommitUnknown):
                await s.start()
            await asyncio.sleep(8)
            assert s.committed() == "ab" and passes(s.opened) == [0, 0, 1], "b has forgotten what it has done"
            await asyncio.sleep(15)
            assert s.committed() == "abc" and passes(s.opened) == [0, 0, 0]

    simulate(main)


def test_an_initiator_that_knows_nothing_of_a_pass_never_decided_for_it() -> None:
    async def main() -> None:
        async with scene() as s:
            held = asyncio.Event()

            async def hold() -> None:
                held.set()
                await asyncio.sleep(1000)

            with after(s.c, Kind.GRADIENT, hold):
                running = s.start()
                await held.wait()
                (part,) = view(s.c, s.ctx).participants.values()
                mine = view(s.a, s.ctx).participants.pop(part.pass_id)
                part.ask_around()
                part.ask_around()
                await asyncio.sleep(1)
                assert await s.outcome(s.c) == ["aborted"]
                view(s.a, s.ctx).participants[part.pass_id] = mine
                with pytest.raises(PassAbortedError, match="the pass was aborted: a says so"):
                    await asyncio.wait_for(asyncio.shield(_error_of(part)), 5)
                running.cancel()
                await asyncio.wait([running])
            assert s.committed() == ""

    simulate(main)


async def _error_of(part: Any) -> None:
    await part.wait_ended()
    raise part.error


# -------------------------------------------------------------------- workers that are lost


def test_a_prepared_worker_that_is_lost_after_the_decision_is_named() -> None:
    async def main() -> None:
        async with scene(idle=False) as s:
            text = r"committed on a, and c could not be told \(.*c.*\)"
            with before(s.c, Kind.COMMIT, lambda: s.board.kill("c")), pytest.raises(CommitUnknown, match=text) as caught:
                await s.start()
            error = caught.value
            assert error.committed is True and error.workers == ("c",) and "restore a lost worker from a checkpoint" in str(error)
            assert s.committed().startswith("ab") and passes((s.a, s.b)) == [0, 0] and len(s.ctx.in_doubt) == 1
            assert s.a.statistics().in_doubt == 1

    assert simulate(main) < 10


def test_in_doubt_is_for_good_where_the_context_outlives_the_doubt() -> None:
    """c is kept alive by b, with which it can talk, but which does not know either: a has died before telling anybody."""

    async def main() -> None:
        async with scene(idle=False) as s:
            with after(s.b, Kind.GRADIENT, lambda: s.board.kill("a")):
                running = s.start()
                await asyncio.sleep(2)
            contexts = [view(worker, s.ctx) for worker in (s.b, s.c)]
            for context in contexts:
                context.openers.clear()  # as where its own code had opened it: no lease ends
            await asyncio.sleep(LIMITS.lease_seconds + 10)
            for worker, context in zip((s.b, s.c), contexts, strict=True):
                assert len(context.in_doubt) == 1 and not context.participants and worker.statistics().in_doubt == 1
                assert list(context.history.outcomes.values()) == ["unknown"], "what is not known is not said to be aborted"
                with worker.within(context):
                    optimizer = dist.DistributedOptimizer(worker, ag.optim.SGD, [s.stage.weights[worker.name]], lr=1.0)
                    with pytest.raises((CommitUnknown, StepError)):
                        await optimizer.step(context)
            assert s.committed() in ("", "a")
            running.cancel()
            await asyncio.wait([running])
            for worker, context in zip((s.b, s.c), contexts, strict=True):
                await worker._leases.release(context)

    simulate(main)


def test_no_step_is_taken_while_a_pass_is_undecided_somewhere_nor_after_it_stayed_unknown() -> None:
    async def main() -> None:
        async with scene() as s:
            _cut_at_commit(s, 8.0, "ca", "cb")
            optimizer = dist.DistributedOptimizer(s.a, ag.optim.SGD, [s.a.refer(s.stage.x)], lr=1.0)
            before_step = values(s.stage.x)
            with pytest.raises(CommitUnknown) as caught:
                await s.start()
            assert caught.value.workers == ("c",)
            with pytest.raises(CommitUnknown, match="may not be complete"):
                await optimizer.step(s.ctx)
            assert values(s.stage.x) == before_step
            await asyncio.sleep(10)
            with pytest.raises(CommitUnknown):
                await optimizer.step(s.ctx)  # also when all has settled: the caller was told to begin again

    simulate(main)


# -------------------------------------------------------------------- each protection is needed


def test_without_an_atomic_commit_a_failed_pass_leaves_gradients_behind() -> None:
    def boom(g: Any) -> Any:
        raise ValueError("boom")

    async def main() -> None:
        async with scene() as s:
            s.stage.x.register_hook(boom)  # the last thing that happens
            with pytest.raises(ValueError, match="boom"):
                await s.start()
            found.append(s.committed())

    found: list[str] = []
    simulate(main)
    with without("atomic_commit"):
        simulate(main)
    assert found == ["", "bc"]


def test_without_a_memory_of_commits_a_repeated_one_counts_twice() -> None:
    async def main() -> None:
        async with scene() as s:
            await s.start()
            (pass_id,) = view(s.c, s.ctx).history.outcomes
            await s.a.endpoint.request("c", Kind.COMMIT, (s.ctx.key, *pass_id), 5)
            with pytest.raises(AssertionError):
                s.committed()

    with without("commit_idempotent"):
        simulate(main)
