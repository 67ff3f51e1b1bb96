"""One operation on every rank, messages delivered in any order: values, bits, bytes sent, and messages that should not come."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.collectives.exchange import CONTRIBUTION, VALUES, CollectiveExchange, MeshExchange, Message
from aiograd.distributed.collectives.operation import Operation, OperationKind, specs_of
from aiograd.distributed.collectives.ring import RingExchange
from aiograd.errors import ProtocolError

Arrays = list[Any]
K = OperationKind
Exchange = type[CollectiveExchange]

#: how a few members do it, and how many
EXCHANGES: tuple[Exchange, ...] = (MeshExchange, RingExchange)


def run(
    operations: list[Operation], arrays: list[Arrays], random: Random, piece: int, direct: int, exchange_class: Exchange = MeshExchange
) -> tuple[list[Arrays], list[int]]:
    """Carry out an operation; returns the results and the bytes sent, by rank."""
    size = len(arrays)
    exchanges = [exchange_class(operations[rank], rank, size, arrays[rank], piece, direct) for rank in range(size)]
    under_way: list[tuple[int, Message]] = []
    late = {rank for rank in range(size) if random.random() < 0.3}
    sent = [0] * size

    def post(rank: int, messages: list[Message]) -> None:
        for message in messages:
            assert message.to != rank
            sent[rank] += sum(array.nbytes for array in message.arrays)
            under_way.append((rank, message))

    waiting: dict[int, list[tuple[int, Message]]] = {rank: [] for rank in late}
    for rank in sorted(set(range(size)) - late):
        post(rank, exchanges[rank].begin())
    while under_way or late:
        if late and (not under_way or random.random() < 0.1):
            rank = late.pop()
            post(rank, exchanges[rank].begin())
            under_way += waiting.pop(rank)
            continue
        sender, message = under_way.pop(random.randrange(len(under_way)))
        if message.to in late:
            waiting[message.to].append((sender, message))
            continue
        copies = [array.copy() for array in message.arrays]
        exchange = exchanges[message.to]
        post(message.to, exchange.receive(sender, exchanges[sender].operation, message.round, message.part, message.piece, copies))
    assert all(exchange.is_done and not exchange.awaited for exchange in exchanges)
    return [exchange.result() for exchange in exchanges], sent


def sizes(random: Random, exchange_class: Exchange) -> int:
    return random.randrange(1, 7) if exchange_class is MeshExchange else random.randrange(2, 9)


def drawn(random: Random, size: int, dtype: str) -> list[Arrays]:
    """The same number of arrays of the same shapes on every rank."""
    generator = np.random.default_rng(random.getrandbits(32))
    shapes = [tuple(random.choice((0, 1, 2, 3, 7, 40)) for _ in range(random.randrange(3))) for _ in range(random.randrange(1, 6))]
    if dtype == "i8":
        return [[generator.integers(-9, 9, shape) for shape in shapes] for _ in range(size)]
    values = [[(generator.standard_normal(shape) * 10.0 ** generator.integers(-4, 4, shape)) for shape in shapes] for _ in range(size)]
    return [[np.asarray(value, dtype) for value in each] for each in values]


def by_rank(function: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


ORACLES: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda values: by_rank(np.add, values),
    "mean": lambda values: np.asarray(by_rank(np.add, values) / np.asarray(len(values), values[0].real.dtype), values[0].dtype),
    "max": lambda values: by_rank(np.maximum, values),
    "min": lambda values: by_rank(np.minimum, values),
}


@pytest.mark.parametrize("exchange_class", EXCHANGES)
@pytest.mark.parametrize("seed", range(60))
def test_all_reduce_has_the_bits_of_a_sum_in_the_order_of_ranks(seed: int, exchange_class: Exchange) -> None:
    random = Random(seed)
    size, dtype = sizes(random, exchange_class), random.choice(("f4", "f8", "c8", "i8"))
    reduction = random.choice([name for name in ORACLES if not (dtype == "i8" and name == "mean") and not (dtype == "c8" and name in ("max", "min"))])
    arrays = drawn(random, size, dtype)
    before = [[array.copy() for array in each] for each in arrays]
    operation = Operation(K.ALL_REDUCE, reduction, 0, specs_of(arrays[0]))
    results, _ = run([operation] * size, arrays, random, random.choice((8, 64, 1024)), random.choice((0, 1 << 20)), exchange_class)
    for result in results:
        for index, array in enumerate(result):
            expected = ORACLES[reduction]([each[index] for each in before])
            assert array.shape == expected.shape and array.dtype == expected.dtype and array.tobytes() == expected.tobytes()
            assert not any(np.shares_memory(array, each[index]) for each in arrays)
    assert all(np.array_equal(a, b) for old, new in zip(before, arrays, strict=True) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("exchange_class", EXCHANGES)
@pytest.mark.parametrize("seed", range(40))
def test_reduce_scatter_gives_each_rank_its_rows(seed: int, exchange_class: Exchange) -> None:
    random = Random(seed)
    size = sizes(random, exchange_class)
    shape = (random.choice((0, 1, 5, 17)), random.choice((0, 1, 9)))
    arrays = [[np.random.default_rng([seed, rank]).standard_normal(shape).astype("f4")] for rank in range(size)]
    operation = Operation(K.REDUCE_SCATTER, "sum", 0, specs_of(arrays[0]))
    results, _ = run([operation] * size, arrays, random, random.choice((8, 64)), random.choice((0, 1 << 20)), exchange_class)
    expected = np.array_split(ORACLES["sum"]([each[0] for each in arrays]), size)
    for rank, (part,) in enumerate(results):
        assert part.shape == expected[rank].shape and part.tobytes() == expected[rank].tobytes()


@pytest.mark.parametrize("exchange_class", EXCHANGES)
@pytest.mark.parametrize("seed", range(40))
def test_all_gather_gives_everybody_everything(seed: int, exchange_class: Exchange) -> None:
    random = Random(seed)
    size = sizes(random, exchange_class)
    arrays = [drawn(random, 1, random.choice(("f4", "i8")))[0][:1] for _ in range(size)]
    operations = [Operation(K.ALL_GATHER, specs=specs_of(each)) for each in arrays]
    results, _ = run(operations, arrays, random, random.choice((8, 64)), random.choice((0, 1 << 20)), exchange_class)
    for result in results:
        for found, (given,) in zip(result, arrays, strict=True):
            assert found.shape == given.shape and found.dtype == given.dtype and found.tobytes() == given.tobytes()
            assert not np.shares_memory(found, given)


@pytest.mark.parametrize("exchange_class", EXCHANGES)
@pytest.mark.parametrize("seed", range(40))
def test_broadcast_gives_everybody_what_the_root_has(seed: int, exchange_class: Exchange) -> None:
    random = Random(seed)
    size = sizes(random, exchange_class)
    root, known = random.randrange(size), random.random() < 0.5
    arrays = drawn(random, size, "f4")
    operations = [Operation(K.BROADCAST, "", root, specs_of(each) if known or rank == root else ()) for rank, each in enumerate(arrays)]
    given = [each if known or rank == root else [] for rank, each in enumerate(arrays)]
    results, _ = run(operations, given, random, random.choice((8, 64)), random.choice((0, 1 << 20)), exchange_class)
    for result in results:
        assert [array.tobytes() for array in result] == [array.tobytes() for array in arrays[root]]
        assert [array.shape for array in result] == [array.shape for array in arrays[root]]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_sends_no_more_than_a_ring_would(size: int) -> None:
    arrays = [[np.ones(size * 1000, "f4")] for _ in range(size)]
    operation = Operation(K.ALL_REDUCE, "sum", 0, specs_of(arrays[0]))
    _, sent = run([operation] * size, arrays, Random(0), 256, 0)
    assert set(sent) == {2 * (size - 1) * 1000 * 4}


def test_on_a_ring_each_rank_sends_to_the_next_one_and_rank_0_alone() -> None:
    size = 9
    for nbytes, direct in ((36_000, 0), (36, 1 << 20)):
        arrays = [[np.ones(nbytes // 4, "f4")] for _ in range(size)]
        for kind in (K.ALL_REDUCE, K.REDUCE_SCATTER, K.ALL_GATHER, K.BROADCAST, K.BARRIER):
            specs = () if kind is K.BARRIER else specs_of(arrays[0])
            operation = Operation(kind, "sum" if "reduce" in kind else "", 0, specs)
            receivers: dict[int, set[int]] = {rank: set() for rank in range(size)}
            sent = [0] * size
            exchanges = [RingExchange(operation, rank, size, arrays[rank] if specs else [], 256, direct) for rank in range(size)]
            under_way = [(rank, message) for rank in range(size) for message in exchanges[rank].begin()]
            while under_way:
                sender, message = under_way.pop(0)
                receivers[sender].add(message.to)
                sent[sender] += sum(array.nbytes for array in message.arrays)
                copies = [array.copy() for array in message.arrays]
                received = exchanges[message.to].receive(sender, operation, message.round, message.part, message.piece, copies)
                under_way += [(message.to, each) for each in received]
            assert all(receivers[rank] <= {0, (rank + 1) % size} for rank in range(1, size)), (kind, receivers)
            if direct == 0 and kind is not K.ALL_GATHER:
                assert max(sent) <= 2 * nbytes, (kind, sent)


def test_a_barrier_waits_for_everybody() -> None:
    exchange = MeshExchange(Operation(K.BARRIER), 0, 3, [])
    assert [message.to for message in exchange.begin()] == [1, 2] and exchange.is_symmetric
    exchange.receive(1, Operation(K.BARRIER), VALUES, 1, 0, [])
    assert not exchange.is_done and exchange.awaited == [2]
    exchange.receive(2, Operation(K.BARRIER), VALUES, 2, 0, [])
    assert exchange.is_done


def test_nan_and_zeros_with_a_sign_come_through() -> None:
    arrays = [[np.array([-0.0, np.nan, 1.0])], [np.array([-0.0, 1.0, np.inf])]]
    for reduction, expected in (("sum", [-0.0, np.nan, np.inf]), ("max", [-0.0, np.nan, np.inf])):
        operation = Operation(K.ALL_REDUCE, reduction, 0, specs_of(arrays[0]))
        for (result,), _ in zip(*run([operation] * 2, arrays, Random(0), 8, 0), strict=True):
            assert np.array_equal(result, expected, equal_nan=True) and np.signbit(result[0])


ODD: dict[str, tuple[int, int, int, int, list[Any]]] = {
    "a round that there is not": (1, 3, 0, 0, [np.zeros(2)]),
    "a part of another rank": (1, CONTRIBUTION, 1, 0, [np.zeros(2)]),
    "values of a part of another rank": (1, VALUES, 2, 0, [np.zeros(2)]),
    "a piece that there is not": (1, CONTRIBUTION, 0, 9, [np.zeros(2)]),
    "a negative piece": (1, CONTRIBUTION, 0, -1, [np.zeros(2)]),
    "a negative part": (1, CONTRIBUTION, -3, 0, [np.zeros(2)]),
    "another dtype": (1, CONTRIBUTION, 0, 0, [np.zeros(2, "f4")]),
    "another shape": (1, CONTRIBUTION, 0, 0, [np.zeros(3)]),
    "nothing": (1, CONTRIBUTION, 0, 0, []),
    "too much": (1, CONTRIBUTION, 0, 0, [np.zeros(2), np.zeros(2)]),
    "of itself": (0, CONTRIBUTION, 0, 0, [np.zeros(2)]),
    "of a rank that there is not": (5, CONTRIBUTION, 0, 0, [np.zeros(2)]),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", [K.ALL_REDUCE, K.REDUCE_SCATTER, K.BROADCAST, K.ALL_GATHER, K.BARRIER])
@pytest.mark.parametrize("direct", [0, 1 << 20])
@pytest.mark.parametrize("exchange_class", EXCHANGES)
def test_a_message_that_should_not_come_changes_nothing(name: str, kind: OperationKind, direct: int, exchange_class: Exchange) -> None:
    if (name, kind) == ("nothing", K.BARRIER):
        name = "too much"  # nothing is what it is to send
    arrays = [[np.arange(12.0)] for _ in range(3)]
    operation = Operation(kind, "sum" if "reduce" in kind else "", 2 if kind is K.BROADCAST else 0, () if kind is K.BARRIER else specs_of(arrays[0]))
    exchange = exchange_class(operation, 0, 3, arrays[0], 16, direct)
    exchange.begin()
    sender, round, part, piece, odd = ODD[name]
    if exchange_class is MeshExchange and odd:
        odd = [*odd, np.zeros(2)]  # its messages have two of these pieces
    with pytest.raises(ProtocolError, match=rf"rank {sender} sent a piece"):
        exchange.receive(sender, operation, round, part, piece, odd)
    assert not exchange.is_done


def test_a_piece_that_comes_twice_is_refused() -> None:
    arrays = [np.arange(12.0)]
    operation = Operation(K.ALL_REDUCE, "sum", 0, specs_of(arrays))
    exchange = MeshExchange(operation, 0, 3, arrays, 16, 0)
    exchange.begin()
    pieces = [np.zeros(2), np.zeros(2)]
    exchange.receive(1, operation, CONTRIBUTION, 0, 0, pieces)
    with pytest.raises(ProtocolError, match="a piece that has come before"):
        exchange.receive(1, operation, CONTRIBUTION, 0, 0, pieces)


def test_a_message_has_several_pieces_and_no_more_bytes_than_its_share() -> None:
    first = [32, 32, 16, 16, 32]
    for count, expected in ((40, [first, [32] * 4]), (39, [first, [32, 32, 32, 28]]), (13, [first, [20]]), (11, [[*first, 12]]), (41, None)):
        given = [np.zeros(20, "f4"), np.zeros(2, "f8"), np.zeros(count, "f4")]
        operation = Operation(K.ALL_REDUCE, "sum", 0, specs_of(given))
        sent = MeshExchange(operation, 0, 2, given, 32, 0).begin()
        part = 0 if expected else 1  # two members take one round if it is not too much
        assert [(message.round, message.part, message.piece) for message in sent] == [(CONTRIBUTION, part, index) for index in range(len(sent))]
        assert not expected or [[array.nbytes for array in message.arrays] for message in sent] == expected
