"""Groups of workers: joining, operations, and the ways in which they end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.collectives.operation import Operation, OperationKind
from aiograd.distributed.error_wire import to_wire
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveError,
    DeadlineError,
    DistributedError,
    ProtocolError,
    UnknownPeerError,
    WorkerLostError,
)
from aiograd.testing import Faults, SimulatedNetwork
from tests.distributed.groups import everywhere, groups
from tests.distributed.memory import Switchboard
from tests.distributed.workers import PATIENT, SECRET, busy, simulate, until, workers

OTHER_SECRET = b"fedcba9876543210" * 2
NAMES = ("w0", "w1", "w2")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [3, 50_000])
async def test_operations_on_every_rank(count: int, size: int) -> None:
    names = tuple(f"w{i}" for i in range(count))
    async with groups(*names) as (_, joined):
        values = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(count)]
        total = values[0].copy()
        for value in values[1:]:
            total += value
        for result in await everywhere(joined, lambda group: group.all_reduce([values[group.rank], values[group.rank][:5]])):
            assert [array.tobytes() for array in result] == [total.tobytes(), total[:5].tobytes()]
        for rank, result in enumerate(await everywhere(joined, lambda group: group.reduce_scatter(values[group.rank]))):
            assert result.tobytes() == np.array_split(total, count)[rank].tobytes()
        for result in await everywhere(joined, lambda group: group.all_gather(values[group.rank][: group.rank])):
            assert [array.tobytes() for array in result] == [value[:rank].tobytes() for rank, value in enumerate(values)]
        for result in await everywhere(joined, lambda group: group.broadcast([values[group.rank]] if group.rank == count - 1 else None, count - 1)):
            assert [array.tobytes() for array in result] == [values[-1].tobytes()]
        assert await everywhere(joined, lambda group: group.barrier()) == [None] * count
        assert [(group.rank, group.size, group.names) for group in joined] == [(rank, count, names) for rank in range(count)]


async def test_members_with_other_limits_are_one_error_that_says_so() -> None:
    board = Switchboard()
    async with (
        workers("w0", board=board, limits=dataclasses.replace(PATIENT, message_bytes=1 << 20)) as (small,),
        workers("w1", board=board) as (large,),
    ):
        small.add_peer("w1", large.url)
        large.add_peer("w0", small.url)
        joined = await asyncio.gather(*(dist.join_group(worker, NAMES[:2]) for worker in (small, large)))
        assert [found[0][0] for found in await everywhere(list(joined), lambda group: group.all_reduce([np.ones(10)]))] == [2.0, 2.0]
        for error in await everywhere(list(joined), lambda group: group.all_reduce([np.ones(200_000)])):
            assert isinstance(error, CollectiveError)
            assert "members whose Limits differ" in str(error) or "longer than Limits.message_bytes=1048576" in str(error)
        await asyncio.gather(*(group.aclose() for group in joined))
        await until(lambda: not busy(small) and not busy(large))


async def test_tensors_and_single_arrays_are_taken() -> None:
    async with groups(*NAMES[:2]) as (_, joined):
        one = ag.tensor([1.0, 2.0], requires_grad=True)
        for result in await everywhere(joined, lambda group: group.all_reduce(one, "mean")):
            assert isinstance(result, np.ndarray) and result.tolist() == [1.0, 2.0] and not np.shares_memory(result, one.detach().numpy())
        for result in await everywhere(joined, lambda group: group.all_reduce((one, one), op="max")):
            assert [each.tolist() for each in result] == [[1.0, 2.0]] * 2
        for result in await everywhere(joined, lambda group: group.broadcast(one)):
            assert result.tolist() == [1.0, 2.0]


async def test_operations_under_way_at_once_are_told_apart_by_their_order() -> None:
    async with groups(*NAMES) as (_, joined):

        async def many(group: dist.Group) -> list[Any]:
            return await asyncio.gather(*(group.all_reduce(np.full(4, 10.0**k)) for k in range(20)))

        for results in await everywhere(joined, many):
            assert [result.tolist() for result in results] == [[3 * 10.0**k] * 4 for k in range(20)]


async def test_the_caller_may_change_its_arrays_afterwards() -> None:
    async with groups(*NAMES) as (_, joined):

        async def twice(group: dist.Group) -> list[Any]:
            array = np.ones(3)
            first = await group.all_reduce(array)
            array[:] = np.nan
            first[:] += 1
            return [first.tolist(), (await group.all_reduce(np.ones(3))).tolist()]

        assert await everywhere(joined, twice) == [[[4.0] * 3, [3.0] * 3]] * 3


REFUSED: dict[str, Callable[[dist.Group], Coroutine[Any, Any, Any]]] = {
    "an operation that there is not": lambda group: group.all_reduce([np.ones(2)], "product"),
    "no array": lambda group: group.all_reduce(["text"]),
    "objects": lambda group: group.all_reduce([np.array([None])]),
    "the mean of integers": lambda group: group.all_reduce([np.ones(2, np.int64)], "mean"),
    "the maximum of complex numbers": lambda group: group.all_reduce([np.ones(2, np.complex64)], "max"),
    "foreign byte order": lambda group: group.all_gather(np.ones(2, ">f4")),
    "no rows": lambda group: group.reduce_scatter(np.float32(1.0)),
    "a rank that there is not": lambda group: group.broadcast(np.ones(2), root=3),
    "a root without values": lambda group: group.broadcast(None, root=group.rank),
    "no member": lambda group: group.without("w9"),
    "a member": lambda group: group.with_("w1"),
    "no time": lambda group: group.barrier(timeout=-1.0),
    "no lists": lambda group: group.sum_in_turn(None),  # type: ignore[arg-type]
    "nothing to apply": lambda group: group.commit(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
async def test_wrong_arguments_leave_the_group_as_it_was(name: str) -> None:
    async with groups(*NAMES) as (_, joined):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            await REFUSED[name](joined[0])
        assert await everywhere(joined, lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3


DIFFERENT: dict[str, Callable[[dist.Group], Coroutine[Any, Any, Any]]] = {
    "another operation": lambda group: group.barrier() if group.rank == 1 else group.all_reduce(np.ones(2)),
    "another reduction": lambda group: group.all_reduce(np.ones(2), "max" if group.rank == 1 else "sum"),
    "another shape": lambda group: group.all_reduce(np.ones(2 + (group.rank == 1))),
    "another dtype": lambda group: group.all_reduce(np.ones(2, "f4" if group.rank == 1 else "f8")),
    "another root": lambda group: group.broadcast(np.ones(2), root=int(group.rank == 1)),
    "another shape, large": lambda group: group.all_reduce(np.ones(50_000 + (group.rank == 1))),
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_ranks_that_do_not_do_the_same_are_named(name: str) -> None:
    async with groups(*NAMES) as (_, joined):
        found = await everywhere(joined, DIFFERENT[name])
        errors = found[:2] if name == "another root" else found  # w2 may have had its values from w0 before
        assert all(isinstance(error, CollectiveError) for error in errors), errors
        assert all("every member has to call the same operations" in str(error) and "w1 (rank 1)" in str(error) for error in errors)
        assert all("every member has to call" in str(error) for error in await everywhere(joined, lambda group: group.barrier()))


def test_a_rank_that_does_not_come_is_named() -> None:
    async def main() -> None:
        async with groups(*NAMES) as (_, joined):

            async def some(group: dist.Group) -> Any:
                if group.rank != 2:
                    await group.barrier(timeout=2.0)

            errors = await everywhere(joined, some)
            assert all(isinstance(error, DeadlineError) and "w2 (rank 2)" in str(error) for error in errors[:2])
            with pytest.raises(DeadlineError):
                await joined[2].barrier()

    assert 2.0 <= simulate(main) < 3.0


async def test_cancelling_one_rank_ends_the_operation_on_all() -> None:
    async with groups(*NAMES) as (_, joined):
        tasks = [asyncio.ensure_future(group.barrier()) for group in joined[:2]]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        with pytest.raises(CollectiveError, match=r"barrier\(\) \(operation 0\) was cancelled on w0 \(rank 0\)"):
            await tasks[1]
        with pytest.raises(CollectiveError, match="cancelled on w0"):
            await joined[2].barrier()


@pytest.mark.parametrize("size", [3, 1_000_000])
def test_a_member_that_is_lost_is_one_typed_error_on_all_others(size: int) -> None:
    async def main() -> None:
        async with workers(*NAMES, "w3", idle=False) as opened:
            joined = list(await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened[:3])))
            began = asyncio.get_running_loop().time()
            tasks = [asyncio.ensure_future(group.all_reduce(np.ones(size))) for group in joined[:2]]
            await asyncio.sleep(0.01)
            opened[2].endpoint.transport.crash()  # type: ignore[attr-defined]
            for task in tasks:
                with pytest.raises(WorkerLostError) as caught:
                    await task
                assert caught.value.worker == "w2"
            assert asyncio.get_running_loop().time() - began < 4.0
            # the survivors go on, first alone, then with another worker in its place
            left = await asyncio.gather(*(group.without("w2") for group in joined[:2]))
            assert [(group.rank, group.names) for group in left] == [(0, ("w0", "w1")), (1, ("w0", "w1"))]
            assert await everywhere(left, lambda group: group.all_reduce(np.ones(1))) == [2.0] * 2
            grown = await asyncio.gather(*(group.with_("w3") for group in left), dist.join_group(opened[3], ["w0", "w1", "w3"]))
            assert await everywhere(list(grown), lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
            with pytest.raises(CollectiveError, match="closed"):
                await left[0].barrier()

    simulate(main)


async def test_a_member_that_has_left_is_named() -> None:
    async with groups(*NAMES) as (_, joined):
        assert await everywhere(joined, lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
        await joined[1].aclose()
        await joined[1].aclose()
        for group in (joined[0], joined[2]):
            with pytest.raises(CollectiveError, match=r"w1 \(rank 1\) has left it"):
                await group.barrier()


async def test_a_member_may_leave_as_soon_as_it_has_its_result() -> None:
    async with groups(*NAMES) as (_, joined):

        async def last(group: dist.Group) -> Any:
            async with group:
                return (await group.all_reduce(np.ones(100_000))).sum()

        assert await everywhere(joined, last) == [300_000.0] * 3


def test_a_member_that_starts_later_is_waited_for_and_one_that_was_lost_is_an_error_at_once() -> None:
    async def main() -> None:
        board, now = Switchboard(), asyncio.get_running_loop().time
        async with workers("w0", "w1", board=board, idle=False) as (w0, w1):
            w0.add_peer("w2", "memory://w2")
            w1.add_peer("w2", "memory://w2")
            early = [asyncio.ensure_future(dist.join_group(worker, NAMES)) for worker in (w0, w1)]
            with pytest.raises(DeadlineError, match="did not join"):
                await dist.join_group(w0, ["w0", "w2"], name="other", timeout=5.0)
            assert not any(task.done() for task in early)
            peers = {"w0": w0.url, "w1": w1.url}
            async with dist.Worker("w2", secret=SECRET, transport=board.transport("w2"), peers=peers) as w2:
                joined = await asyncio.gather(*early, dist.join_group(w2, NAMES))
                assert await everywhere(list(joined), lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
                w2.endpoint.transport.crash()  # type: ignore[attr-defined]
                began = now()
                with pytest.raises(WorkerLostError):
                    await dist.join_group(w0, ["w0", "w2"], name="other")
                assert now() - began < 4.0

    simulate(main)


async def test_joining_with_other_names_is_an_error_on_both() -> None:
    async with workers(*NAMES) as opened:
        errors = await asyncio.gather(dist.join_group(opened[0], ["w0", "w1"]), dist.join_group(opened[1], ["w1", "w0"]), return_exceptions=True)
        assert all(isinstance(error, CollectiveError) and "the same names in the same order" in str(error) for error in errors)
        joined = await asyncio.gather(dist.join_group(opened[0], ["w0", "w1"]), dist.join_group(opened[1], ["w0", "w1"]))
        assert await everywhere(list(joined), lambda group: group.all_reduce(np.ones(1))) == [2.0] * 2
        await asyncio.gather(*(group.aclose() for group in joined))


def test_joining_waits_for_all_and_names_those_who_do_not_come() -> None:
    async def main() -> None:
        async with workers(*NAMES) as opened:
            errors = await asyncio.gather(*(dist.join_group(worker, NAMES, timeout=3.0) for worker in opened[:2]), return_exceptions=True)
            assert all(isinstance(error, DeadlineError) for error in errors)
            assert all("join_group: w2 did not join group 'default' within 3 s" in str(error) for error in errors)
            late = asyncio.ensure_future(dist.join_group(opened[0], NAMES, timeout=30.0))
            await asyncio.sleep(10.0)
            joined = [*await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened[1:])), await late]
            assert await everywhere(joined, lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
            await asyncio.gather(*(group.aclose() for group in joined))

    simulate(main)


async def begun(*attempts: asyncio.Future[Any]) -> None:
    """Let members meet."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(each.done() for each in attempts)


@pytest.mark.parametrize("count", [3, 18], ids=["mesh", "ring"])
async def test_members_that_wait_learn_at_once_that_one_has_given_up_joining(count: int) -> None:
    """Those that have met it, and one that comes later, once; then all can join again."""
    names = [f"w{i}" for i in range(count)]
    async with workers(*names) as opened:
        attempts = [asyncio.ensure_future(dist.join_group(worker, names)) for worker in opened[:-1]]
        await begun(*attempts)
        attempts[1].cancel()
        _, *others = await asyncio.gather(attempts[1], attempts[0], *attempts[2:], return_exceptions=True)
        late = (await asyncio.gather(dist.join_group(opened[-1], names), return_exceptions=True))[0]
        for error in (*others, late):
            assert isinstance(error, CollectiveError) and "joining group 'default' was cancelled on w1" in str(error), error
            assert error.worker == "w1"
        again = asyncio.ensure_future(dist.join_group(opened[-1], names))
        await begun(again)
        joined = [*await asyncio.gather(*(dist.join_group(worker, names) for worker in opened[:-1])), await again]
        assert await everywhere(joined, lambda group: group.all_reduce(np.ones(1))) == [float(count)] * count
        with pytest.raises(ArgumentError, match="is in a group 'default' already"):
            await dist.join_group(opened[1], names)
        await asyncio.gather(*(group.aclose() for group in joined))


async def test_one_that_comes_when_others_have_begun_again_joins_them() -> None:
    async with workers(*NAMES) as opened:
        attempts = [asyncio.ensure_future(dist.join_group(worker, NAMES)) for worker in opened[:2]]
        await begun(*attempts)
        attempts[0].cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        attempts = [asyncio.ensure_future(dist.join_group(worker, NAMES)) for worker in opened[:2]]
        await begun(*attempts)
        joined = await asyncio.gather(*attempts, dist.join_group(opened[2], NAMES))
        assert await everywhere(list(joined), lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
        await asyncio.gather(*(group.aclose() for group in joined))


def test_a_member_whose_own_time_is_over_tells_the_others() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        async with workers(*NAMES) as opened:
            waiting = [dist.join_group(worker, NAMES, timeout=timeout) for worker, timeout in zip(opened[:2], (2.0, 40.0), strict=True)]
            began = now()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert now() - began < 2.5
            assert all(isinstance(error, DeadlineError) for error in errors), errors
            assert all("join_group: w2 did not join group 'default' within 2 s" in str(error) for error in errors)
            late = asyncio.ensure_future(dist.join_group(opened[2], NAMES))  # w1 would have waited for it
            with pytest.raises(DeadlineError, match="w2 did not join"):
                await late

    simulate(main)


def test_an_attempt_that_was_given_up_is_forgotten_when_its_time_is_over() -> None:
    async def main() -> None:
        async with workers(*NAMES) as opened:
            attempt = asyncio.ensure_future(dist.join_group(opened[0], NAMES, timeout=5.0))
            await asyncio.sleep(1.0)
            attempt.cancel()
            await asyncio.sleep(5.0)
            waiting = [asyncio.ensure_future(dist.join_group(worker, NAMES)) for worker in opened[1:]]
            await asyncio.sleep(5.0)
            joined = await asyncio.gather(dist.join_group(opened[0], NAMES), *waiting)
            await asyncio.gather(*(group.aclose() for group in joined))

    simulate(main)


@pytest.mark.parametrize("count", [4, 18], ids=["mesh", "ring"])
def test_leaving_a_group_that_has_failed_does_not_wait_for_the_member_that_was_lost(count: int) -> None:
    """Not even for rank 0 of a large group, which members tell of failures."""
    names = [f"w{i}" for i in range(count)]

    async def main() -> None:
        loop, network = asyncio.get_running_loop(), SimulatedNetwork(1, faults=Faults(latency=(1e-3, 2e-3)))
        took: dict[str, float] = {}

        async def member(name: str) -> None:
            peers = {other: f"sim://{other}" for other in names if other != name}
            async with dist.Worker(name, secret=SECRET, transport=network.transport(name), peers=peers) as worker:
                group = await dist.join_group(worker, names)
                await group.barrier()
                if name == names[0]:
                    network.kill(name, silent=True)
                with pytest.raises(WorkerLostError):
                    await group.barrier()
                began = loop.time()
                await group.aclose()
                took[name] = loop.time() - began
                await asyncio.sleep(60.0 - loop.time())

        await asyncio.gather(*(network.spawn(name, member(name)) for name in names), return_exceptions=True)
        assert set(took) == set(names[1:]) and max(took.values()) < 0.1, took

    simulate(main)


@pytest.mark.parametrize("silent", [False, True], ids=["crashes", "falls silent"])
@pytest.mark.parametrize("count", [4, 18], ids=["mesh", "ring"])
def test_members_learn_of_the_loss_of_one_that_others_have_met(count: int, silent: bool) -> None:
    """Also one that starts after the loss, and has never met it; for the others it has been there."""
    names = [f"w{i}" for i in range(count)]

    async def main() -> None:
        loop, network = asyncio.get_running_loop(), SimulatedNetwork(1, faults=Faults(latency=(1e-3, 2e-3)))
        ended: dict[str, tuple[float, BaseException]] = {}

        async def member(name: str) -> None:
            peers = {other: f"sim://{other}" for other in names if other != name}
            async with dist.Worker(name, secret=SECRET, transport=network.transport(name), peers=peers) as worker:
                try:
                    await dist.join_group(worker, names, timeout=30.0)
                except DistributedError as error:
                    ended[name] = loop.time(), error
                await asyncio.sleep(60.0 - loop.time())

        hosts = [network.spawn(name, member(name)) for name in names[:-1]]
        await asyncio.sleep(1.0)
        network.kill("w0", silent=silent)  # of a large group the one that everybody asks
        await asyncio.sleep(dist.Limits().silence + 0.5)
        assert set(ended) == set(names[1:-1])
        began = loop.time()
        hosts.append(network.spawn(names[-1], member(names[-1])))
        await asyncio.gather(*hosts, return_exceptions=True)
        when, error = ended[names[-1]]
        assert when < began + (dist.Limits().silence if count > 16 else 0.0) + 0.1, when
        assert all(isinstance(error, WorkerLostError) and error.worker == "w0" and "w0" in str(error) for _, error in ended.values()), ended

    simulate(main)


async def test_a_member_that_gives_up_for_a_reason_of_its_own_names_it() -> None:
    async with workers(*NAMES) as opened:
        opened[0].endpoint.remove_peer("w2")
        waiting = asyncio.ensure_future(dist.join_group(opened[1], NAMES))
        await begun(waiting)
        with pytest.raises(UnknownPeerError):
            await dist.join_group(opened[0], NAMES)
        with pytest.raises(CollectiveError, match=r"failed: UnknownPeerError: .* on w0") as found:
            await waiting
        assert found.value.worker == "w0"


async def test_news_of_another_attempt_change_nothing() -> None:
    async with workers(*NAMES) as opened:
        waiting = [asyncio.ensure_future(dist.join_group(worker, NAMES)) for worker in opened[:2]]
        await begun(*waiting)
        error = to_wire(CollectiveError("of an earlier attempt"), "w0", "", "")
        for sender in (opened[0], opened[2]):
            assert await sender.endpoint.request("w1", Kind.COLLECTIVE, ("withdraw", "default", bytes(16), error), 5)
        joined = await asyncio.gather(*waiting, dist.join_group(opened[2], NAMES))
        assert await opened[0].endpoint.request("w1", Kind.COLLECTIVE, ("withdraw", "default", bytes(16), error), 5)
        assert await everywhere(list(joined), lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
        await asyncio.gather(*(group.aclose() for group in joined))


async def test_names_that_cannot_be_used() -> None:
    async with workers("w0", "w1") as (w0, _):
        for names, match in (
            (["w0", "w0"], "w0 stands twice"),
            (["w1"], "w0 is not among the names"),
            ("w0", "expected a list"),
            ([], "not among"),
            (["w0", "a b"], "worker name"),
        ):
            with pytest.raises(ArgumentError, match=match):
                await dist.join_group(w0, names)
        with pytest.raises(UnknownPeerError):
            await dist.join_group(w0, ["w0", "w9"])
        with pytest.raises(ArgumentError, match="group name"):
            await dist.join_group(w0, ["w0"], name="")
        for worker in (["w0", "w1"], None, "w0"):
            with pytest.raises(ArgumentTypeError, match=r"expected this process's dist\.Worker"):
                await dist.join_group(worker, ["w0"])


async def test_groups_of_other_names_and_principals_are_apart() -> None:
    async with workers(*NAMES) as opened:
        a = list(await asyncio.gather(*(dist.join_group(worker, NAMES, name="a") for worker in opened)))
        b = list(await asyncio.gather(*(dist.join_group(worker, NAMES[::-1], name="b") for worker in opened)))
        results = await asyncio.gather(
            everywhere(a, lambda group: group.all_gather(np.array(group.rank))), everywhere(b, lambda group: group.all_gather(np.array(group.rank)))
        )
        assert [[int(value) for value in each] for each in results[0] + results[1]] == [[0, 1, 2]] * 6
        await a[0].aclose()
        assert await everywhere(b, lambda group: group.all_reduce(np.ones(1))) == [3.0] * 3
        await asyncio.gather(*(group.aclose() for group in a + b))


async def test_another_principal_reaches_nothing_with_leaked_keys() -> None:
    """Its answers are those about a group that never was, and the group goes on."""
    server = Keyring(SECRET, kid="k1")
    server.add("k2", OTHER_SECRET, principal="tenant")
    tenant = Keyring(OTHER_SECRET, kid="k2", principal="tenant")
    async with workers("w0", "w1", "x", secrets={"w0": Keyring(SECRET, kid="k1"), "w1": server, "x": tenant}) as (w0, w1, x):
        joined = list(await asyncio.gather(*(dist.join_group(worker, ["w0", "w1"]) for worker in (w0, w1))))
        operation = Operation(OperationKind.BARRIER).to_wire()
        told: list[list[str]] = []
        for key in (joined[0].key, bytes(16)):
            told.append([])
            messages: list[tuple[Any, ...]] = [
                ("piece", key, "default", 0, (operation, 2, 0, 0, [])),
                ("leave", key, "default", 0),
                ("fail", key, "default", to_wire(CollectiveError("over"), "w0", "", "")),
            ]
            for message in messages:
                try:
                    told[-1].append(repr(await x.endpoint.request("w1", Kind.COLLECTIVE, message, 5)))
                except CollectiveError as error:
                    told[-1].append(str(error))
        assert told[0] == told[1] and "is not in group 'default'" in told[0][0] and told[0][1:] == ["True", "True"]
        assert await everywhere(joined, lambda group: group.all_reduce(np.ones(1))) == [2.0] * 2
        await asyncio.gather(*(group.aclose() for group in joined))


MALFORMED: list[Any] = [
    None, (), ("join",), ("join", "g", ["a", "b"], b"short"), ("join", 1, [], bytes(16)), ("piece", b"", "g"), ("leave", b"", 1), ("shout", b""),
    ("withdraw", "g", "nonce", {}), ("withdraw", b"g", bytes(16), {}),
]  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED, ids=str)
async def test_malformed_requests_are_refused(message: Any) -> None:
    async with workers("w0", "w1") as (w0, _):
        with pytest.raises(DistributedError):
            await w0.endpoint.request("w1", Kind.COLLECTIVE, message, 5)


@pytest.mark.parametrize(
    "message",
    [
        (),
        (1, 2),
        (b"barrier", 0, 0, 0, []),
        (b'["barrier","",0,[]]', "2", 0, 0, []),
        (b'["barrier","",0,[]]', 2, 0, 0, [1]),
        ('["barrier","",0,[]]', 2, 0, 0, []),
        (b'["jump","",0,[]]', 2, 0, 0, []),
        (b'["all_reduce","sum",0,[[[1e999],"<f8"]]]', 1, -1, 0, []),
        (b'["all_reduce","sum",0,[[[1],{}]]]', 1, -1, 0, []),
        (b'["all_reduce","sum",0,[[[1],"f"]],0]', 1, -1, 0, []),
        (b"null", 1, -1, 0, []),
        (b"\xff", 1, -1, 0, []),
        (b"[" * 100_000, 1, -1, 0, []),
    ],
    ids=lambda message: str(message)[:60],
)
async def test_malformed_pieces_are_refused_and_the_operation_goes_on(message: Any) -> None:
    async with groups("w0", "w1") as (opened, joined):
        waiting = asyncio.ensure_future(joined[1].all_reduce(np.ones(1)))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolError):
            await opened[0].endpoint.request("w1", Kind.COLLECTIVE, ("piece", joined[0].key, "default", 0, message), 5)
        assert await joined[0].all_reduce(np.ones(1)) == [2.0] and await waiting == [2.0]


@pytest.mark.parametrize("names", [("w0", "w1"), ("w0", "w1", "w2")])
async def test_messages_are_as_short_as_the_members_take(names: tuple[str, ...]) -> None:
    given = np.arange(50_000, dtype=np.float32)
    for tight in ({"message_bytes": 1 << 14}, {"bytes_per_peer": 1 << 14}):
        async with groups(*names, limits=dataclasses.replace(PATIENT, **tight)) as (_, joined):
            for found in await everywhere(joined, lambda group: group.all_reduce(given)):
                assert np.array_equal(found, given * len(names))


async def test_the_smallest_operations_take_one_request_for_each_pair() -> None:
    async with groups(*NAMES) as (opened, joined):
        requests: list[str] = []
        for worker in opened:
            served = worker._core.handlers[Kind.COLLECTIVE]

            async def noting(caller: Any, value: Any, timeout: float, served: Any = served) -> Any:
                requests.append(value[0])
                return await served(caller, value, timeout)

            worker._core.handlers[Kind.COLLECTIVE] = noting
        for operation in (lambda group: group.all_reduce(np.ones(1)), lambda group: group.barrier()):
            requests.clear()
            await everywhere(joined, operation)
            assert requests == ["piece"] * 3
