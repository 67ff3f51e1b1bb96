"""AccumulateGrad: how gradients arrive in ``.grad``, whose arrays they are, and what is never touched."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.graph.accumulate_grad import AccumulateGrad, Staged, commit, own
from tests.support import assert_raises, custom_function, leaf, same

# -------------------------------------------------------------------- accumulation


async def test_a_leaf_starts_without_gradient_and_sums_over_passes() -> None:
    x = leaf([1.0, 2.0])
    assert x.grad is None
    await (x * 2).sum().backward()
    same(x.grad, [2.0, 2.0])
    await (x * 3).sum().backward()
    same(x.grad, [5.0, 5.0])


async def test_the_gradient_has_shape_and_dtype_of_the_leaf_and_no_graph() -> None:
    x = ag.tensor(np.ones((2, 1), np.float32), requires_grad=True)
    await (x * ag.tensor(np.ones((2, 3)))).sum().backward()
    assert x.grad.shape == (2, 1) and x.grad.dtype == np.float32
    assert not x.grad.requires_grad
    same(x.grad, [[3.0], [3.0]])


async def test_a_gradient_handed_out_earlier_does_not_change() -> None:
    x = leaf([1.0])
    await (x * 2).sum().backward()
    first = x.grad
    array = first.numpy()
    await (x * 3).sum().backward()
    same(first, [2.0])
    assert array.tolist() == [2.0]
    same(x.grad, [5.0])


async def test_grad_can_be_set_and_cleared() -> None:
    x = leaf([1.0, 1.0])
    x.grad = ag.tensor([10.0, 20.0], dtype=np.float64)
    await (x * 2).sum().backward()
    same(x.grad, [12.0, 22.0])
    x.grad = None
    await (x * 2).sum().backward()
    same(x.grad, [2.0, 2.0])


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.ones(2), ArgumentTypeError, "ndarray"),
        (3.0, ArgumentTypeError, "float"),
        (ag.tensor(np.ones(3)), ShapeError, r"got shape \[3\], expected \[2\]"),
        (ag.tensor(np.ones(2, np.float32)), ArgumentTypeError, "got dtype float32, expected float64"),
    ],
)
def test_grad_set_to_something_that_does_not_fit_is_an_error(value: Any, error: type[Exception], words: str) -> None:
    x = leaf([1.0, 1.0])
    old = x.grad = ag.tensor([1.0, 2.0], dtype=np.float64)
    with pytest.raises(error, match=words):
        x.grad = value
    assert x.grad is old
    with pytest.raises(ArgumentError, match="the tensor itself"):
        x.grad = x


async def test_switching_requires_grad_keeps_the_gradient() -> None:
    x = leaf([1.0])
    await (x * 2).sum().backward()
    x.requires_grad_(False)
    assert not x.requires_grad
    same(x.grad, [2.0])
    x.requires_grad = True
    await (x * 2).sum().backward()
    same(x.grad, [4.0])
    x.detach_()
    assert not x.requires_grad
    same(x.grad, [4.0])


async def test_with_create_graph_gradients_are_added_out_of_place_and_keep_their_graph() -> None:
    x = leaf([3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await (x * x).sum().backward(create_graph=True)
        first = x.grad
        await (x * x).sum().backward(create_graph=True)
    assert x.grad is not first and x.grad.requires_grad
    same(first, [6.0])
    same(x.grad, [12.0])
    (second,) = await ag.grad(x.grad.sum(), x)
    same(second, [4.0])
    x.grad = None


# -------------------------------------------------------------------- whose array it is


@pytest.mark.parametrize("create_graph", [False, True])
async def test_a_gradient_of_the_caller_is_neither_stored_nor_modified(create_graph: bool) -> None:
    x, w = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    seed = ag.tensor([3.0, 4.0], dtype=np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            await (x + w).backward(seed, create_graph=create_graph)
            await x.backward(seed, create_graph=create_graph)
    same(seed, [3.0, 4.0])
    same(x.grad, [12.0, 16.0])
    same(w.grad, [6.0, 8.0])
    for tensor in (x, w):
        assert tensor.grad is not seed
        assert not np.shares_memory(tensor.grad.detach().numpy(), seed.numpy())
    assert not np.shares_memory(x.grad.detach().numpy(), w.grad.detach().numpy())
    x.grad = w.grad = None


async def test_a_gradient_kept_by_a_function_is_not_shared() -> None:
    kept: list[Any] = []

    @custom_function(inline=True)
    def Keep(ctx: Any, g: Any) -> Any:
        result = g * 2
        kept.append(result)
        return result

    x = leaf([1.0])
    await Keep.apply(x).sum().backward()
    await (x * 5).sum().backward()
    same(kept[0], [2.0])
    assert not np.shares_memory(kept[0].numpy(), x.grad.numpy())


def test_own_takes_an_array_that_nobody_else_has_and_copies_any_other() -> None:
    holder = [np.arange(3.0)]
    address = holder[0].ctypes.data
    alone = holder.pop()
    taken = own(alone)
    assert taken.ctypes.data == address
    whole = [np.arange(6.0).reshape(2, 3)]
    address = whole[0].ctypes.data
    assert own(whole.pop()).ctypes.data == address
    line = np.arange(6.0)
    for view in ([line.reshape(2, 3)], [np.arange(6.0)[:4]], [np.arange(6.0).reshape(2, 3).T], [np.broadcast_to(np.arange(3.0), (1, 3))]):
        address = view[0].ctypes.data
        assert own(view.pop()).ctypes.data != address
    shared = np.arange(3.0)
    others = [shared]
    assert own(shared) is not others[0]
    assert own(np.arange(6.0)[::2]).flags.c_contiguous
    assert isinstance(own(np.float64(2.0)), np.ndarray)


# -------------------------------------------------------------------- staging and committing


def staged(tensor: Any, values: Any) -> Staged:
    return Staged(tensor._node, np.array(values))


def test_nothing_is_seen_before_the_commit() -> None:
    x = leaf([1.0])
    entry = staged(x, [2.0])
    assert x.grad is None
    commit([entry])
    same(x.grad, [2.0])


def test_a_commit_on_top_of_another_loses_nothing() -> None:
    x = leaf([1.0])
    first, second = staged(x, [2.0]), staged(x, [3.0])
    commit([first])
    commit([second])
    same(x.grad, [5.0])


def test_a_gradient_cleared_or_modified_in_between_is_taken_as_it_is() -> None:
    x = leaf([1.0])
    commit([staged(x, [2.0])])
    entry = staged(x, [3.0])
    x.grad = None
    commit([entry])
    same(x.grad, [3.0])
    entry = staged(x, [3.0])
    with ag.no_grad():
        x.grad.zero_()
    commit([entry])
    same(x.grad, [3.0])


def test_first_gradients_are_added_to_what_has_been_committed_in_between() -> None:
    w, x, y = leaf([1.0]), leaf([1.0]), leaf([1.0])
    firsts = {w._node: np.array([2.0]), x._node: np.array([3.0])}
    commit([staged(x, [10.0]), staged(y, [20.0])])
    commit([staged(y, [5.0])], firsts)
    same(w.grad, [2.0])
    same(x.grad, [13.0])
    same(y.grad, [25.0])


def test_a_first_gradient_that_cannot_be_added_leaves_every_gradient_as_it_was() -> None:
    w, x, y = leaf([1.0]), leaf([1.0, 1.0]), leaf([1.0])
    entry = staged(y, [5.0])
    commit([staged(x, [10.0, 20.0])])
    assert_raises(ValueError, "broadcast", lambda: commit([entry], {w._node: np.array([2.0]), x._node: np.ones(3)}))
    assert w.grad is None and y.grad is None
    same(x.grad, [10.0, 20.0])


async def test_the_node_accumulates_at_once_when_it_is_called_by_hand() -> None:
    x = leaf([1.0])
    await x._node(np.array([4.0]))
    await x._node(None)
    same(x.grad, [4.0])


async def test_a_leaf_that_is_gone_takes_no_gradient_and_harms_nobody() -> None:
    w = leaf([1.0])
    x = leaf([1.0])
    node = x._node
    y = (x * 2 + w).sum()
    seen: list[float] = []
    x.register_hook(lambda g: seen.append(g.item()))
    del x
    assert isinstance(node, AccumulateGrad) and node.leaf() is None
    await y.backward()
    same(w.grad, [1.0])
    assert seen == [2.0]
