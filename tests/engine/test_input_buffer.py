"""InputBuffer and ReadyQueue: sums whose bits do not depend on the order of arrival, and the order of ready nodes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from aiograd.engine.input_buffer import FOLD_INLINE_BYTES, InputBuffer
from aiograd.engine.ready_queue import ReadyQueue
from aiograd.graph import Node
from tests.support import assert_raises

KEYS = [(-9, 0), (-9, 1), (-5, 0), (-1, 0)]


def contributions() -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=100).astype(np.float32) * 10.0**k for k in range(4)]


def total(order: Any, values: list[Any]) -> Any:
    buffer = InputBuffer(1, sorted(KEYS))
    for i in order:
        if buffer.add(KEYS[i], 0, values[i]):
            buffer.folding = True
            buffer.fold()
            buffer.folding = False
    (result,) = buffer.take()
    return result


def test_the_sum_is_the_same_to_the_bit_for_every_order_of_arrival() -> None:
    values = contributions()
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert any(expected.tobytes() != sum(np.array(values)[list(p)]).tobytes() for p in itertools.permutations(range(4)))  # order matters to the bits
    for order in itertools.permutations(range(4)):
        assert total(order, values).tobytes() == expected.tobytes()


def test_what_arrives_is_never_written_to() -> None:
    values = contributions()
    copies = [v.copy() for v in values]
    result = total(range(4), values)
    for value, copy in zip(values, copies, strict=True):
        np.testing.assert_array_equal(value, copy)
        assert not np.shares_memory(value, result)


def test_the_running_sum_is_one_array_that_is_added_to_in_place() -> None:
    buffer = InputBuffer(1, sorted(KEYS))
    values = contributions()
    buffer.add(KEYS[0], 0, values[0])
    assert buffer.sums[0] is values[0]  # nothing is copied before it has to be
    buffer.add(KEYS[1], 0, values[1])
    running = buffer.sums[0]
    assert running is not values[0]
    buffer.add(KEYS[2], 0, values[2])
    buffer.add(KEYS[3], 0, values[3])
    assert buffer.sums[0] is running


def test_none_counts_as_arrived_and_adds_nothing() -> None:
    values = contributions()
    values[0] = values[2] = None
    for order in itertools.permutations(range(4)):
        assert total(order, values).tobytes() == (values[1] + values[3]).tobytes()
    assert total(range(4), [None] * 4) is None


def test_inputs_are_summed_apart() -> None:
    buffer = InputBuffer(2, sorted(KEYS))
    for i, key in enumerate(KEYS):
        buffer.add(key, i % 2, np.array([10.0**i]))
    first, second = buffer.take()
    np.testing.assert_array_equal(first, [101.0])
    np.testing.assert_array_equal(second, [1010.0])


def test_large_sums_are_left_to_be_folded_off_the_loop_in_the_same_order() -> None:
    rng = np.random.default_rng(4)
    values = [rng.normal(size=FOLD_INLINE_BYTES // 8 + 1) for _ in range(4)]
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    for order in itertools.permutations(range(4)):
        buffer = InputBuffer(1, sorted(KEYS))
        asked = False
        for i in order:
            asked = buffer.add(KEYS[i], 0, values[i]) or asked
        assert asked
        buffer.fold()
        assert buffer.take()[0].tobytes() == expected.tobytes()


def test_what_arrives_while_a_fold_runs_waits_for_its_turn() -> None:
    values = [np.full(FOLD_INLINE_BYTES // 8 + 1, 10.0**k) for k in range(4)]
    buffer = InputBuffer(1, sorted(KEYS))
    buffer.add(KEYS[0], 0, values[0])
    assert buffer.add(KEYS[1], 0, values[1])
    buffer.folding = True
    assert not buffer.add(KEYS[2], 0, values[2])  # one fold at a time
    buffer.fold()
    buffer.folding = False
    assert buffer.add(KEYS[3], 0, values[3])
    buffer.fold()
    assert buffer.take()[0][0] == 1111.0


@pytest.mark.parametrize("seed", range(3))
def test_ready_nodes_come_by_number_then_by_arrival(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue = ReadyQueue()
    nodes = [Node() for _ in range(50)]
    for node in nodes:
        node.set_sequence_nr(int(rng.integers(0, 10)))
    for i in rng.permutation(50):
        queue.push(nodes[i], [i])
    expected = []
    arrivals: list[Node] = []
    rng = np.random.default_rng(seed)
    [rng.integers(0, 10) for _ in nodes]
    arrivals = [nodes[i] for i in rng.permutation(50)]
    expected = sorted(arrivals, key=lambda node: -node.sequence_nr)
    popped = []
    while queue:
        node, (i,) = queue.pop()
        assert nodes[i] is node
        popped.append(node)
    assert popped == expected
    assert_raises(IndexError, None, queue.pop)
