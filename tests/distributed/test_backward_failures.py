"""Passes that fail: the error says what and where, nothing has changed anywhere, everybody is idle again, and the next pass works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed import failpoints
from aiograd.distributed.kinds import Kind
from aiograd.errors import (
    ContextError,
    DeadlineError,
    GradientError,
    GraphFreedError,
    HookError,
    LimitError,
    PassAbortedError,
    RemoteError,
    WorkerLostError,
)
from tests.distributed.passes_kit import GRAPHS, Here, Log, Misbehave, Net, Stage, Suspend, after, before, passes, same
from tests.distributed.workers import settled, simulate, until, values, view


class Fault:
    """Something that goes wrong in the backward of one worker, as long as it is switched on."""

    def __init__(self) -> None:
        self.on = True

    def rule(self, g: Any) -> Any:
        if self.on:
            raise ValueError("boom")
        return g

    async def suspend(self, g: Any) -> Any:
        await asyncio.sleep(0)
        return self.rule(g)

    def misshape(self, g: Any) -> Any:
        return ag.tensor(np.ones(2, np.float32)) if self.on else g

    def hook(self, *grads: Any) -> None:
        if self.on:
            raise ValueError("boom")

    async def slow_hook(self, *grads: Any) -> None:
        await asyncio.sleep(0)
        self.hook()

    def replace(self, g: Any) -> Any:
        return g.detach().reshape(1, -1) if self.on else None


def _rule(fault: Fault, y: Any) -> Any:
    return Misbehave.apply(y, fault.rule)


def _async_rule(fault: Fault, y: Any) -> Any:
    return Suspend.apply(y, fault.suspend)


def _wrong_shape(fault: Fault, y: Any) -> Any:
    return Misbehave.apply(y, fault.misshape)


def _hook(fault: Fault, y: Any) -> Any:
    y.register_hook(fault.hook)
    return y


def _async_hook(fault: Fault, y: Any) -> Any:
    y.register_hook(fault.slow_hook)
    return y


def _bad_hook(fault: Fault, y: Any) -> Any:
    y.register_hook(fault.replace)
    return y


def _prehook(fault: Fault, y: Any) -> Any:
    y.grad_fn.register_prehook(fault.hook)
    return y


def _posthook(fault: Fault, y: Any) -> Any:
    y.grad_fn.register_hook(fault.hook)
    return y


Spoil = Callable[[Fault, Any], Any]
#: what goes wrong -> the name of the node that is blamed, the type of the error, its text
SPOILS: dict[Spoil, tuple[str, type[Exception], str]] = {
    _rule: ("MisbehaveBackward", ValueError, "boom"),
    _async_rule: ("SuspendBackward", ValueError, "boom"),
    _wrong_shape: ("MisbehaveBackward", GradientError, "shape"),
    _hook: ("MulBackward", ValueError, "boom"),
    _async_hook: ("MulBackward", ValueError, "boom"),
    _bad_hook: ("MulBackward", HookError, "has changed the size of value"),
    _prehook: ("MulBackward", ValueError, "boom"),
    _posthook: ("MulBackward", ValueError, "boom"),
}


class Spoiled(Stage):
    """A chain a → b → c → d, in which something goes wrong on one worker."""

    def __init__(self, where: str, spoil: Spoil, names: str = "abcd") -> None:
        super().__init__(names)
        self.fault = Fault()

        async def via(here: Here, path: str, x: Any) -> Any:
            y = x * here.weight
            if here.name in where:
                y = spoil(self.fault, y)
            return await here.call(path[0], "via", path[1:], y) if path else y

        self.functions["via"] = via

    async def graph(self, here: Here, x: Any) -> Any:
        """Every worker has a parameter that is reached before anything goes wrong, and one after."""
        y = await self.functions["via"](here, "bcd", x)
        return (y * here.weight).sum()

    async def right(self) -> dict[str, list[Any]]:
        self.fault.on = False
        wanted = await self.reference(self.graph)
        self.fault.on = True
        return wanted


def nothing(found: dict[str, list[Any]]) -> bool:
    return not any(grad is not None for grads in found.values() for grad in grads)


# -------------------------------------------------------------------- what is said, what has changed, what is left


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("where", "abcd")
async def test_an_error_anywhere_is_typed_and_located_and_changes_nothing(where: str, spoil: Spoil) -> None:
    node, kind, text = SPOILS[spoil]
    stage = Spoiled(where, spoil)
    wanted = await stage.right()
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await stage.graph(stage.here(opened[0]), stage.x)
        with pytest.raises(kind if where == "a" else RemoteError, match=text) as caught:
            await ctx.backward(loss, retain_graph=True)
        error = caught.value
        if isinstance(error, RemoteError):
            hops = "abcd".index(where)
            assert error.path == tuple("bcd"[:hops]), "each worker hands on what comes from behind it"
            assert str(error).startswith("".join(f"Error on Node {name}: " for name in error.path) + f"{node}: {kind.__name__}: ")
            assert (error.worker, error.function, error.type_name, error.code) == (where, node, kind.__name__, "raised")
            assert error.correlation_id
        assert not getattr(error, "committed", False)
        assert passes(opened) == [0, 0, 0, 0], "while the context is open"
        assert nothing(stage.found(ctx, opened)) and all(leaf.grad is None for leaves in stage.leaves.values() for leaf in leaves)
        stage.fault.on = False
        await ctx.backward(loss, retain_graph=True)
        same(stage.found(ctx, opened), wanted)
        assert [worker.statistics().passes_aborted for worker in opened] == [1, 1, 1, 1]


@pytest.mark.parametrize("where", "abcd")
async def test_without_the_graph_a_retry_names_the_first_error(where: str) -> None:
    stage = Spoiled(where, _rule)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await stage.graph(stage.here(opened[0]), stage.x)
        with pytest.raises((ValueError, RemoteError), match="boom"):
            await ctx.backward(loss)
        stage.fault.on = False
        for _ in range(2):
            with pytest.raises((GraphFreedError, RemoteError), match=r"second time|failed"):
                await ctx.backward(loss)
            assert passes(opened) == [0, 0, 0, 0] and nothing(stage.found(ctx, opened))
        again = await stage.graph(stage.here(opened[0]), stage.x)
        await ctx.backward(again)
        same(stage.found(ctx, opened), await stage.right())


async def test_what_an_earlier_pass_has_committed_is_as_it_was() -> None:
    stage = Spoiled("b", _rule)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await stage.graph(stage.here(opened[0]), stage.x)
        stage.fault.on = False
        await ctx.backward(loss, retain_graph=True)
        known = stage.found(ctx, opened)
        stage.fault.on = True
        for n in range(50):
            with pytest.raises(RemoteError, match="boom"):
                await ctx.backward(loss, retain_graph=True, mode="fast" if n % 2 else "smart")
            assert passes(opened) == [0, 0, 0, 0]
        same(stage.found(ctx, opened), known)
        stage.fault.on = False
        await ctx.backward(loss, retain_graph=True)
        same(stage.found(ctx, opened), {who: [None if g is None else g + g for g in grads] for who, grads in known.items()})


async def test_when_several_workers_fail_one_of_the_errors_is_raised() -> None:
    for where in ("bc", "abcd", "bd"):
        stage = Spoiled(where, _rule)
        async with stage.open() as opened, opened[0].context() as ctx:
            loss = await stage.graph(stage.here(opened[0]), stage.x)
            with pytest.raises((ValueError, RemoteError), match="boom"):
                await ctx.backward(loss)
            assert passes(opened) == [0, 0, 0, 0] and nothing(stage.found(ctx, opened))


def test_when_several_workers_fail_at_the_same_time_the_first_error_is_raised() -> None:
    """b and c fail side by side, c a little later; and d, which waits for c, hears of it."""
    ends: dict[str, float] = {}

    async def fail_later(g: Any, seconds: float, name: str) -> Any:
        try:
            await asyncio.sleep(seconds)
        finally:
            ends[name] = asyncio.get_running_loop().time()
        raise ValueError(f"boom on {name}")

    async def slow(here: Here, seconds: float, x: Any) -> Any:
        return Suspend.apply(x * here.weight, lambda g: fail_later(g, seconds, here.name))

    async def main() -> None:
        stage = Stage()
        stage.functions["slow"] = slow
        async with stage.open() as opened, opened[0].context() as ctx:
            a = opened[0]
            ys = [await a.call(name, "slow", seconds, stage.x) for name, seconds in (("b", 2.0), ("c", 1.0), ("d", 500.0))]
            began = asyncio.get_running_loop().time()
            with pytest.raises(RemoteError, match=r"^Error on Node c: .*boom on c$"):
                await ctx.backward((ys[0] + ys[1] + ys[2]).sum())
            assert {name: round(end - began, 2) for name, end in ends.items()} == {"b": 1, "c": 1, "d": 1}, "the others were cancelled at once"
            assert passes(opened) == [0, 0, 0, 0]

    simulate(main)


def test_an_error_is_known_at_once_although_other_workers_would_compute_for_long() -> None:
    async def main() -> None:
        stage = Stage("abc")
        slept: list[float] = []

        async def sleep(g: Any) -> Any:
            try:
                await asyncio.sleep(50)
            finally:
                slept.append(asyncio.get_running_loop().time())
            return g

        async def slow(here: Here, x: Any) -> Any:
            return Suspend.apply(x * here.weight, sleep)

        async def broken(here: Here, x: Any) -> Any:
            return Misbehave.apply(x * here.weight, Fault().rule)

        stage.functions.update(slow=slow, broken=broken)
        async with stage.open() as opened, opened[0].context() as ctx:
            a = opened[0]
            y, z = await a.call("b", "slow", stage.x), await a.call("c", "broken", stage.x)
            with pytest.raises(RemoteError, match="boom"):
                await ctx.backward((y + z).sum())
            assert slept and slept[0] < 1 and passes(opened) == [0, 0, 0]

    assert simulate(main) < 1


# -------------------------------------------------------------------- the reason, not its consequences


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_the_error_that_came_first_is_raised_and_not_what_followed_from_it(mode: str) -> None:
    """c fails. a sends it more gradients and hears that it has given up, before b, on whose behalf c was working, can say why."""

    async def fail(g: Any) -> Any:
        await asyncio.sleep(0.1)
        raise ValueError("boom")

    async def hold(g: Any) -> Any:
        await asyncio.sleep(0.5)
        return g

    async def linger(g: Any) -> Any:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.9)  # b takes its time to wind up

    async def broken(here: Here, x: Any) -> Any:
        return Suspend.apply(x * here.weight, fail)

    async def between(here: Here, x: Any) -> Any:
        return (await here.call("c", "broken", x)) + Suspend.apply(x * here.weight, linger)

    async def main() -> None:
        stage = Stage("abc")
        stage.functions.update(broken=broken, between=between)
        async with stage.open() as opened, opened[0].context() as ctx:
            a = opened[0]
            y, z = await a.call("b", "between", stage.x), await a.call("c", "weigh", stage.x)
            with pytest.raises(RemoteError, match=r"^Error on Node b: Error on Node c: .*boom$") as caught:
                await ctx.backward((y + Suspend.apply(z, hold)).sum(), mode=mode)
            assert caught.value.worker == "c" and passes(opened) == [0, 0, 0]

    simulate(main)


def test_hearing_only_that_a_worker_has_given_up_is_enough_after_a_while() -> None:
    """c refuses what comes second, and nobody says why, while d goes on computing: that is not waited for."""

    async def hold(g: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return g

    async def slow(here: Here, x: Any) -> Any:
        return Suspend.apply(x * here.weight, lambda g: hold(g, 50))

    async def main() -> None:
        stage = Stage()
        stage.functions["slow"] = slow
        came: list[float] = []

        def refuse() -> None:
            came.append(asyncio.get_running_loop().time())
            if len(came) == 2:
                raise PassAbortedError("given up here")

        async with stage.open() as opened, opened[0].context() as ctx:
            a, _, c, _ = opened
            y, z, d = await a.call("c", "weigh", stage.x), await a.call("c", "weigh", stage.x), await a.call("d", "slow", stage.x)
            with before(c, Kind.GRADIENT, refuse), pytest.raises(PassAbortedError, match="Error on Node c: given up here"):
                await ctx.backward((y + Suspend.apply(z, lambda g: hold(g, 1)) + d).sum())
            assert came[0] == 0 and came[1] == 1 and 1 < asyncio.get_running_loop().time() < 4
            assert passes(opened) == [0, 0, 0, 0]

    simulate(main)


# -------------------------------------------------------------------- a walk that fails


@pytest.mark.parametrize("how", ["raises", "is lost", "is late"])
def test_a_walk_that_fails_leaves_nobody_waiting(how: str) -> None:
    """b asks c and d. c has answered when d fails, and nobody but b knows of c."""

    async def main() -> None:
        board = Net()
        stage = Stage()
        async with stage.open(board, idle=how != "is lost") as opened, opened[0].context() as ctx:
            a, b, c, d = opened
            y = await a.call("b", "fork", "cd", stage.x)

            async def fail() -> None:
                await until(lambda: c.statistics().passes)
                if how == "raises":
                    raise ValueError("boom")
                if how == "is lost":
                    board.kill("d")
                await asyncio.sleep(100)

            with before(d, Kind.MARK, fail):
                kind = {"raises": RemoteError, "is lost": WorkerLostError, "is late": DeadlineError}[how]
                with pytest.raises(kind):
                    await ctx.backward(y.sum(), retain_graph=True, timeout=5)
            assert passes((a, b, c)) == [0, 0, 0] and nothing(stage.found(ctx, (a, b, c)))
            if how != "is lost":
                await ctx.backward(y.sum())
            else:
                await ctx.backward((await a.call("b", "weigh", stage.x)).sum())

    assert simulate(main) < 60


def test_an_abort_that_overtakes_the_walk_is_remembered() -> None:
    """The message that asks d is on its way while the pass is given up; when it arrives nothing may begin."""

    async def main() -> None:
        stage = Stage()
        async with stage.open() as opened, opened[0].context() as ctx:
            a, b, _, d = opened
            loss = await GRAPHS["chain"](stage.here(a), stage.x)
            asked: list[Any] = []
            held = asyncio.Event()
            request = b._core.endpoint.request

            async def hold(peer: str, kind: int, value: Any, timeout: float, principal: Any) -> Any:
                if kind == Kind.MARK:
                    asked.append((peer, value))
                    held.set()
                    await asyncio.sleep(1000)
                return await request(peer, kind, value, timeout, principal)

            b._core.endpoint.request = hold  # type: ignore[method-assign]
            running = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
            await held.wait()
            running.cancel()
            await asyncio.wait([running])
            b._core.endpoint.request = request  # type: ignore[method-assign]
            ((peer, value),) = asked
            assert peer == "c" and "c" in {w.name for w in opened if view(w, ctx).history.outcomes}, "c has heard of the end of it"
            with pytest.raises(PassAbortedError, match="too late for more of it"):
                await request(peer, Kind.MARK, value, 5, None)
            assert passes(opened) == [0, 0, 0, 0] and not view(d, ctx).history.outcomes
            await ctx.backward(loss)

    simulate(main)


async def test_a_context_that_is_released_while_a_walk_asks_others_ends_the_pass_with_that_reason() -> None:
    """The walk goes from b to c, and back to an edge of b that has gone with the context."""
    stage = Stage("abc")
    async with stage.open() as (a, b, c), a.context() as ctx:
        loss = (await a.call("b", "via", "cb", stage.x)).sum()

        async def release() -> None:
            await b._leases.release(view(b, ctx))

        with after(c, Kind.MARK, release), pytest.raises(ContextError, match="^Error on Node b: .* released while a backward pass was running"):
            await ctx.backward(loss)
        assert passes([a, b, c]) == [0, 0, 0]


def test_a_worker_that_is_told_to_stop_while_it_walks_asks_nobody_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = Stage("abc")

        async def long(here: Here, x: Any) -> Any:
            y = await here.call("c", "weigh", x)
            for _ in range(3000):
                y = y + 1
            return y

        stage.functions["long"] = long
        async with stage.open() as opened, opened[0].context() as ctx:
            a, b, c = opened
            loss = (await a.call("b", "long", stage.x)).sum()
            monkeypatch.setattr("aiograd.distributed.autograd.discovery.BUDGET", -1.0)  # it pauses at every look at the clock
            running = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
            await until(lambda: passes([b]) == [1])
            (pass_id,) = view(b, ctx).participants
            log = Log().watch(b)
            assert await c.endpoint.request("b", Kind.ABORT, (ctx.key, *pass_id, "no more"), 5) is True
            with pytest.raises(PassAbortedError, match="the pass was given up by c: no more"):
                await running
            assert "MARK" not in log.count() and passes(opened) == [0, 0, 0] and not view(c, ctx).participants
            monkeypatch.undo()
            await ctx.backward(loss)

    simulate(main)


async def test_a_loss_that_depends_on_another_context_on_another_worker() -> None:
    stage = Stage("abc")
    kept: list[Any] = []

    async def stash(here: Here, x: Any) -> None:
        kept.append(await here.call("c", "weigh", x))

    async def fetch(here: Here, x: Any) -> Any:
        return x * kept[0]

    stage.functions.update(stash=stash, fetch=fetch)
    async with stage.open() as opened:
        a = opened[0]
        async with a.context() as first:
            await a.call("b", "stash", stage.x)
        async with a.context() as ctx:
            y = await a.call("b", "fetch", stage.x)
            with pytest.raises(ContextError, match=r"Error on Node b: .* reaches values that came from c in another context"):
                await ctx.backward(y.sum())
            assert passes(opened) == [0, 0, 0] and nothing(stage.found(ctx, opened)) and first.is_released
    kept.clear()


# -------------------------------------------------------------------- messages that come too late


async def test_messages_of_a_pass_that_is_over_are_refused_and_change_nothing() -> None:
    stage = Spoiled("b", _rule)
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened[:2]
        loss = await stage.graph(stage.here(a), stage.x)
        sent: list[tuple[int, Any]] = []
        request = a._core.endpoint.request

        def keep(peer: str, kind: int, value: Any, *rest: Any) -> Any:
            if peer == "b":
                sent.append((kind, value))
            return request(peer, kind, value, *rest)

        a._core.endpoint.request = keep  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="boom"):
            await ctx.backward(loss, retain_graph=True)
        address = sent[0][1][:3]
        assert [Kind(kind).name for kind, _ in sent] == ["MARK", "GRADIENT", "ABORT"]
        for kind, value in sent[:2]:
            with pytest.raises(PassAbortedError, match=r"is over on b already \(aborted\): too late"):
                await request("b", kind, value, 5, None)
        with pytest.raises(PassAbortedError, match="told to commit a pass that b has not prepared"):
            await request("b", Kind.COMMIT, address, 5, None)
        assert await request("b", Kind.ABORT, sent[2][1], 5, None) is True
        assert await request("b", Kind.OUTCOME, address, 5, None) == "aborted"
        assert passes(opened) == [0, 0, 0, 0] and nothing(stage.found(ctx, opened)) and not view(b, ctx).participants

        stage.fault.on = False
        sent.clear()
        await ctx.backward(loss, retain_graph=True)
        known = stage.found(ctx, opened)
        assert [Kind(kind).name for kind, _ in sent] == ["MARK", "GRADIENT", "COMMIT"]
        for kind, value in sent[:2]:
            with pytest.raises(PassAbortedError, match=r"is over on b already \(committed\): too late"):
                await request("b", kind, value, 5, None)
        assert await request("b", Kind.COMMIT, sent[2][1], 5, None) is True, "and a second commit changes nothing"
        assert await request("b", Kind.ABORT, (*sent[2][1], "late"), 5, None) is True, "nor does an abort"
        assert await request("b", Kind.OUTCOME, sent[2][1], 5, None) == "committed"
        same(stage.found(ctx, opened), known)


# -------------------------------------------------------------------- workers that are lost


# -------------------------------------------------------------------- after the commit


def _hooked(stage: Stage, where: str, hook: Callable[[Any], Any], kind: str) -> Callable[[], None]:
    """Put a hook on a leaf of a worker that runs after the commit; or a final callback."""
    leaf = stage.x if where == "a" else stage.weights[where]
    if kind == "hook":
        return leaf.register_post_accumulate_grad_hook(hook).remove
    return leaf.register_hook(lambda g: ag.graph.queue_callback(lambda: hook(leaf))).remove


@pytest.mark.parametrize("kind", ["hook", "callback"])
@pytest.mark.parametrize("where", "abd")
async def test_an_error_after_the_commit_says_so_and_rolls_nothing_back(where: str, kind: str) -> None:
    stage = Stage()
    wanted = await stage.reference(GRAPHS["chain"])

    async def fail(leaf: Any) -> None:
        await asyncio.sleep(0)
        raise ValueError("too late")

    async with stage.open() as opened, opened[0].context() as ctx:
        remove = _hooked(stage, where, fail, kind)
        loss = await GRAPHS["chain"](stage.here(opened[0]), stage.x)
        with pytest.raises(ValueError if where == "a" else RemoteError, match="too late") as caught:
            await ctx.backward(loss, retain_graph=True)
        assert caught.value.committed is True  # type: ignore[union-attr, attr-defined]
        if isinstance(caught.value, RemoteError):
            assert (caught.value.worker, caught.value.function) == (where, "AccumulateGrad" if kind == "hook" else "final callback")
        same(stage.found(ctx, opened), wanted)
        assert passes(opened) == [0, 0, 0, 0] and not ctx.in_doubt
        remove()
        await ctx.backward(loss)


async def test_hooks_that_fail_on_several_workers() -> None:
    stage = Stage()
    wanted = await stage.reference(GRAPHS["chain"])

    def fail(leaf: Any) -> None:
        raise ValueError("too late")

    async with stage.open() as opened, opened[0].context() as ctx:
        removes = [_hooked(stage, where, fail, "hook") for where in "abcd"]
        with pytest.raises(ValueError, match="too late") as caught:
            await ctx.backward(await GRAPHS["chain"](stage.here(opened[0]), stage.x))
        assert caught.value.committed is True  # type: ignore[attr-defined]
        same(stage.found(ctx, opened), wanted)
        assert not ctx.in_doubt
        for remove in removes:
            remove()


class Endless:
    """A hook that never returns."""

    def __init__(self) -> None:
        self.began = 0
        self.cancelled = 0

    async def __call__(self, leaf: Any) -> None:
        self.began += 1
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("kind", ["hook", "callback"])
@pytest.mark.parametrize("how", ["cancelled", "timeout", "released"])
@pytest.mark.parametrize("where", "ab")
def test_hooks_that_do_not_return_end_with_their_pass(where: str, how: str, kind: str) -> None:
    endless = Endless()

    async def main() -> None:
        stage = Stage("ab")

        async def graph(here: Here, x: Any) -> Any:
            return (await here.call("b", "weigh", x)).sum()

        wanted = await stage.reference(graph)
        async with stage.open() as opened:
            a, b = opened
            async with a.context() as ctx:
                remove = _hooked(stage, where, endless, kind)
                loss = await graph(stage.here(a), stage.x)
                running = asyncio.ensure_future(ctx.backward(loss, timeout=5 if how == "timeout" else None, retain_graph=True))
                await asyncio.sleep(1)
                assert endless.began == 1
                same(stage.found(ctx, opened), wanted)
                if how == "cancelled":
                    running.cancel()
                if how != "released":
                    with pytest.raises((asyncio.CancelledError, DeadlineError)) as caught:
                        await running
                    assert isinstance(caught.value, asyncio.CancelledError if how == "cancelled" else DeadlineError)
                    assert caught.value.committed is True  # type: ignore[union-attr]
                    same(stage.found(ctx, opened), wanted)
                    remove()
                    if where == "a" or how == "timeout":
                        assert passes(opened) == [0, 0] and endless.cancelled == 1 and not ctx.in_doubt
                        await ctx.backward(loss)
                remove()
            if how == "released":
                with pytest.raises((ContextError, RemoteError)) as caught_late:
                    await running
                assert caught_late.value.committed is True
            await settled(a, b)
            assert endless.cancelled == 1

    assert simulate(main) < 12


def test_hooks_end_when_nobody_waits_for_them_any_more() -> None:
    """The initiator dies after its commit; what it has committed stays."""
    endless = Endless()

    async def main() -> None:
        board = Net()
        stage = Stage("ab")
        async with stage.open(board, idle=False) as opened:
            block = opened[0].context()
            ctx = await block.__aenter__()
            _hooked(stage, "b", endless, "hook")
            running = asyncio.ensure_future(ctx.backward((await opened[0].call("b", "weigh", stage.x)).sum()))
            await asyncio.sleep(1)
            board.kill("a")
            await asyncio.sleep(3)
            assert endless.cancelled == 1 and passes(opened)[1] == 0
            assert values(view(opened[1], ctx).grads[stage.weights["b"]]) == values(stage.x)
            running.cancel()
            await asyncio.wait([running])
            await block.__aexit__(None, None, None)

    simulate(main)


# -------------------------------------------------------------------- commits that fail


async def _with_two_graphs(stage: Stage, opened: Any, ctx: Any) -> Any:
    """A loss whose parameters have gradients already, so that the commit has something to add up."""
    loss = await GRAPHS["chain"](stage.here(opened[0]), stage.x)
    await ctx.backward(loss, retain_graph=True)
    return loss


async def test_a_commit_that_fails_on_the_initiator_is_an_abort_everywhere() -> None:
    stage = Stage()
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await _with_two_graphs(stage, opened, ctx)
        known = stage.found(ctx, opened)
        slot = view(opened[0], ctx).slots[stage.x._node]
        good = slot.grad

        def spoil() -> None:
            slot.grad = np.ones(7, np.float32)  # the sum that was staged is stale now, and another cannot be made

        # the initiator is the last of the four to have everything staged
        with failpoints.arm("commit.before_prepare", spoil, hit=4), pytest.raises(ValueError, match="broadcast"):
            await ctx.backward(loss, retain_graph=True)
        slot.grad = good
        same(stage.found(ctx, opened), known)
        assert passes(opened) == [0, 0, 0, 0] and not ctx.in_doubt
        outcomes = [list(view(worker, ctx).history.outcomes.values()) for worker in opened]
        assert outcomes == [["committed", "aborted"]] * 4
        await ctx.backward(loss)


# -------------------------------------------------------------------- exceptions of other kinds


class StopEverything(BaseException):
    """As KeyboardInterrupt, without stopping the test."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopEverything])
async def test_what_is_no_ordinary_exception_ends_the_pass_all_the_same(error: type[BaseException]) -> None:
    fail = [True]

    def rule(g: Any) -> Any:
        if fail[0]:
            raise error("now")
        return g

    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "weigh", Misbehave.apply(stage.x * 1, rule))
        with pytest.raises(error):
            await ctx.backward(y.sum(), retain_graph=True)
        assert passes(opened) == [0, 0] and nothing(stage.found(ctx, opened))
        fail[0] = False
        await ctx.backward(y.sum())
        assert values(ctx.grads[stage.x]) == values(stage.weights["b"])


async def test_what_is_no_ordinary_exception_on_another_worker_is_one_here() -> None:
    stage = Stage("ab")

    def rule(g: Any) -> Any:
        raise StopEverything("now")

    async def broken(here: Here, x: Any) -> Any:
        return Misbehave.apply(x * here.weight, rule)

    stage.functions["broken"] = broken
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "broken", stage.x)
        with pytest.raises(RemoteError, match="now") as caught:
            await ctx.backward(y.sum())
        assert caught.value.type_name == "StopEverything" and passes(opened) == [0, 0] and nothing(stage.found(ctx, opened))
        await ctx.backward((await opened[0].call("b", "weigh", stage.x)).sum())


async def test_a_rule_that_raises_a_cancellation_by_itself_is_an_error_of_its_worker() -> None:
    async def rule(g: Any) -> Any:
        raise asyncio.CancelledError

    stage = Stage("ab")

    async def broken(here: Here, x: Any) -> Any:
        return Suspend.apply(x * here.weight, rule)

    stage.functions["broken"] = broken
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "broken", stage.x)
        with pytest.raises((RemoteError, PassAbortedError)) as caught:
            await ctx.backward(y.sum())
        assert passes(opened) == [0, 0] and nothing(stage.found(ctx, opened))
        assert "Error on Node b" in str(caught.value)


@pytest.fixture
async def noted() -> AsyncIterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("aiograd.distributed")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_the_traceback_stays_in_the_log_of_the_worker(noted: list[logging.LogRecord]) -> None:
    stage = Spoiled("c", _rule)
    async with stage.open() as opened, opened[0].context() as ctx:
        loss = await stage.graph(stage.here(opened[0]), stage.x)
        with pytest.raises(RemoteError) as caught:
            await ctx.backward(loss)
    error = caught.value
    assert not getattr(error, "__notes__", []) and "test_backward_failures" not in str(error)
    lines = [record for record in noted if error.correlation_id in record.getMessage()]
    assert len(lines) == 2, "one on each worker that the error has passed"
    story = lines[0].getMessage()
    assert story.startswith("c: ") and "Traceback" in story and "ValueError" in story
    assert "recorded at" in story, "with the line of the forward"


SENDS_NO_GRADIENT = {("ring", "c"), ("spiral", "c"), ("twice", "b"), ("twice", "c")}


@pytest.mark.parametrize("who", "abc")
@pytest.mark.parametrize("graph", ["chain", "ring", "spiral", "triangle", "twice", "crossing", "knot"])
def test_gradients_that_cannot_be_sent_at_all_fail_the_pass_at_once(graph: str, who: str) -> None:
    async def main() -> None:
        stage = Stage()
        async with stage.open() as opened, opened[0].context() as ctx:
            endpoint = opened["abc".index(who)].endpoint
            send, refused = endpoint.request, 0

            def request(peer: str, kind: int, value: Any, timeout: float, principal: str | None = None) -> Any:
                nonlocal refused
                if kind == Kind.GRADIENT:
                    refused += 1
                    raise LimitError("too large")
                return send(peer, kind, value, timeout, principal)

            loss = await GRAPHS[graph](stage.here(opened[0]), stage.x)
            endpoint.request = request  # type: ignore[method-assign]
            began = asyncio.get_running_loop().time()
            with contextlib.suppress(LimitError, RemoteError):
                await ctx.backward(loss, retain_graph=True)
                assert not refused
            assert refused or (graph, who) in SENDS_NO_GRADIENT
            assert asyncio.get_running_loop().time() - began < 1.0
            endpoint.request = send  # type: ignore[method-assign]
            await ctx.backward(loss)
            assert not any(passes(opened))

    simulate(main)
