"""Saved-tensor hooks: what is packed and unpacked, when, how often, and what goes wrong."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError, HookTypeError, ModifiedError
from aiograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from tests.support import assert_awaiting_raises, assert_raises, leaf, same


class Tally:
    """Counts what it packs and unpacks."""

    def __init__(self) -> None:
        self.packed: list[Any] = []
        self.unpacked: list[int] = []

    def pack(self, tensor: Any) -> int:
        self.packed.append(tensor.detach().numpy().copy())
        return len(self.packed) - 1

    def unpack(self, number: int) -> Any:
        self.unpacked.append(number)
        return ag.tensor(self.packed[number])


class Cube(ag.Function):
    """Saves its argument and its output."""

    inline = True

    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        out = a * a * a
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        a, out = ctx.saved_tensors
        assert ctx.saved_tensors[0] is a  # asking again unpacks nothing
        return g * 3 * out / a


async def test_values_are_packed_when_saved_and_unpacked_once_per_use() -> None:
    x = leaf([2.0, 3.0])
    tally = Tally()
    with saved_tensors_hooks(tally.pack, tally.unpack):
        y = x * x
        assert [p.tolist() for p in tally.packed] == [[2.0, 3.0], [2.0, 3.0]]
    assert tally.unpacked == []
    await y.sum().backward(retain_graph=True)
    assert sorted(tally.unpacked) == [0, 1]
    await y.sum().backward()
    assert len(tally.unpacked) == 4
    same(x.grad, [8.0, 12.0])


async def test_outputs_are_packed_as_well() -> None:
    x = leaf([0.0, 1.0])
    tally = Tally()
    with saved_tensors_hooks(tally.pack, tally.unpack):
        y = np.exp(x)
    assert len(tally.packed) == 1
    np.testing.assert_array_equal(tally.packed[0], y.detach().numpy())
    await y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.exp([0.0, 1.0]))


async def test_what_saves_no_tensor_packs_nothing() -> None:
    x = leaf([1.0, 2.0])
    tally = Tally()
    with saved_tensors_hooks(tally.pack, tally.unpack):
        y = (x + 1).reshape(2, 1).sum()
    assert tally.packed == []
    await y.backward()
    same(x.grad, [1.0, 1.0])


async def test_a_changed_value_changes_the_gradient() -> None:
    x = leaf([2.0])
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t * 100):
        y = x * x
    await y.sum().backward()
    same(x.grad, [400.0])


async def test_functions_pack_inputs_and_outputs() -> None:
    x = leaf([2.0])
    tally = Tally()
    with saved_tensors_hooks(tally.pack, tally.unpack):
        y = Cube.apply(x)
    assert [p.tolist() for p in tally.packed] == [[2.0], [8.0]]
    await y.sum().backward()
    assert tally.unpacked == [0, 1]
    same(x.grad, [12.0])


@pytest.mark.parametrize("function", [Cube.apply, lambda a: a * a * a, lambda a: np.power(a, 3)], ids=["Function", "rows", "power"])
async def test_unpacked_values_are_in_the_graph_of_a_second_derivative(function: Any) -> None:
    x = leaf([2.0])
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), lambda array: ag.tensor(array)):
        y = function(x)
    (first,) = await ag.grad(y.sum(), x, create_graph=True)
    (second,) = await ag.grad(first.sum(), x)
    same(first, [12.0])
    same(second, [12.0])


async def test_several_saved_operands_are_packed_each() -> None:
    a, b, c = (leaf(np.full((2, 2), v)) for v in (1.0, 2.0, 3.0))
    tally = Tally()
    with saved_tensors_hooks(tally.pack, tally.unpack):
        y = np.einsum("ij,jk,kl->il", a, b, c)
    assert len(tally.packed) >= 3
    await y.sum().backward()
    expected = np.ones((2, 2)) @ (np.full((2, 2), 2.0) @ np.full((2, 2), 3.0)).T
    np.testing.assert_allclose(a.grad.numpy(), expected)


async def test_the_innermost_hooks_win() -> None:
    x = leaf([2.0])
    inner, outer = Tally(), Tally()
    with saved_tensors_hooks(outer.pack, outer.unpack):
        with saved_tensors_hooks(inner.pack, inner.unpack):
            y = x * x
        z = y * y
    assert len(inner.packed) == 2 and len(outer.packed) == 2
    await z.sum().backward()
    same(x.grad, [32.0])


async def test_unpack_may_be_a_coroutine() -> None:
    x = leaf([2.0, 3.0])

    async def fetch(array: Any) -> Any:
        await asyncio.sleep(0)
        return ag.tensor(array)

    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), fetch):
        y = np.sin(x) * Cube.apply(x)
    await y.sum().backward()
    v = np.array([2.0, 3.0])
    np.testing.assert_allclose(x.grad.numpy(), np.cos(v) * v**3 + np.sin(v) * 3 * v**2)


async def test_hooks_decorate_functions() -> None:
    x = leaf([2.0])
    tally = Tally()

    @saved_tensors_hooks(tally.pack, tally.unpack)
    def square() -> Any:
        return x * x

    y = square()
    _ = x * x
    assert len(tally.packed) == 2
    await y.sum().backward()
    same(x.grad, [4.0])


def test_a_pack_hook_records_nothing_and_is_not_packed_itself() -> None:
    x = leaf([2.0])
    calls: list[int] = []

    def pack(tensor: Any) -> Any:
        calls.append(1)
        doubled = tensor * tensor
        assert not doubled.requires_grad
        return doubled

    with saved_tensors_hooks(pack, lambda packed: packed):
        _ = x * 3.0 * x
    assert 0 < len(calls) <= 4


@pytest.mark.parametrize("function", [lambda a: a * a, Cube.apply], ids=["row", "Function"])
def test_a_pack_hook_must_not_modify_what_it_is_given(function: Any) -> None:
    def pack(tensor: Any) -> Any:
        tensor *= 2
        return tensor

    y = leaf([2.0]) * 1
    with pytest.raises(ArgumentError, match="modified its input in place"), saved_tensors_hooks(pack, lambda packed: packed):
        function(y)


async def test_errors_of_hooks_keep_their_type() -> None:
    class Mine(Exception):
        pass

    def fail(value: Any) -> Any:
        raise Mine("no")

    x = leaf([2.0])
    with pytest.raises(Mine), saved_tensors_hooks(fail, lambda packed: packed):
        _ = x * x
    with saved_tensors_hooks(lambda t: t, fail):
        y = x * x
    caught = await assert_awaiting_raises(Mine, None, y.sum().backward())
    assert any("MulBackward" in note for note in caught.__notes__)
    assert x.grad is None


@pytest.mark.parametrize("function", [lambda a: a * a, Cube.apply], ids=["row", "Function"])
async def test_an_unpack_hook_returns_a_tensor(function: Any) -> None:
    x = leaf([2.0])
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), lambda array: array):
        y = function(x)
    await assert_awaiting_raises(HookTypeError, "returned ndarray; expected the Tensor that was packed", y.sum().backward())
    assert x.grad is None


async def test_packed_values_are_not_watched_for_modification() -> None:
    x = leaf([2.0])
    y = x * 1
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), lambda array: ag.tensor(array)):
        z = y * y
    y.fill_(100.0)
    await z.sum().backward()
    same(x.grad, [4.0])


async def test_packed_values_go_when_the_pass_has_run() -> None:
    class Token:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor.detach()
            alive.add(self)

    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    x = leaf([2.0])
    with saved_tensors_hooks(Token, lambda token: token.tensor):
        y = x * x
        z = Cube.apply(y)
    assert len(alive) == 4
    await z.sum().backward()
    assert len(alive) == 0
    await assert_awaiting_raises(ag.errors.GraphFreedError, None, z.sum().backward())


def test_hooks_are_callables() -> None:
    with pytest.raises(ArgumentTypeError, match=r"saved_tensors_hooks\(unpack=...\): expected a callable, found NoneType"):
        saved_tensors_hooks(lambda t: t, None)  # type: ignore[arg-type]


def test_hooks_can_be_disabled() -> None:
    x = leaf([2.0])
    with disable_saved_tensors_hooks("not here"):
        _ = x * x
        with pytest.raises(GraphError, match="not here"), saved_tensors_hooks(lambda t: t, lambda t: t):
            pass

        @saved_tensors_hooks(lambda t: t, lambda t: t)
        def decorated() -> None:
            pass

        assert_raises(GraphError, "not here", decorated)
        with disable_saved_tensors_hooks("nor here"):
            with pytest.raises(GraphError, match="nor here"), saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
        with pytest.raises(GraphError, match="not here"), saved_tensors_hooks(lambda t: t, lambda t: t):
            pass
    with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(GraphError, match="already on"), disable_saved_tensors_hooks("already on"):
        pass


# -------------------------------------------------------------------- versions of what was saved


async def test_a_modified_saved_value_is_an_error_that_names_both_versions() -> None:
    x = leaf([2.0])
    y = x * 1
    z = y * y
    y += 1
    y += 1
    with pytest.raises(ModifiedError, match=r"modified by an inplace operation.*mul.*is at version 2; expected version 0 instead") as caught:
        await z.sum().backward()
    assert any("MulBackward" in note for note in caught.value.__notes__)
    assert x.grad is None


async def test_a_value_modified_before_it_was_saved_is_fine() -> None:
    x = leaf([2.0])
    y = x * 1
    y += 1
    z = y * y
    await z.sum().backward()
    same(x.grad, [6.0])


async def test_modification_of_what_was_not_saved_is_fine() -> None:
    x = leaf([2.0])
    y = x * 1
    z = y + 5
    y += 1
    await (z + y).sum().backward()
    same(x.grad, [2.0])


async def test_modification_without_recording_is_noticed_all_the_same() -> None:
    x = leaf([2.0])
    y = x * 3.0 * x
    with ag.no_grad():
        x += 1
    await assert_awaiting_raises(ModifiedError, "is at version 1; expected version 0", y.sum().backward())


async def test_modification_through_a_view_or_an_alias_is_noticed() -> None:
    for modify in (lambda y: y[0:1].fill_(3.0), lambda y: y.detach().fill_(3.0), lambda y: y.reshape(2, 1).zero_()):
        x = leaf([2.0, 3.0])
        y = x * 1
        z = y * y
        with ag.no_grad():
            modify(y)
        await assert_awaiting_raises(ModifiedError, None, z.sum().backward())


async def test_a_modified_output_is_noticed() -> None:
    x = leaf([2.0])
    y = np.exp(x)
    y *= 2
    await assert_awaiting_raises(ModifiedError, r"out of exp.*version 1; expected version 0", y.sum().backward())


async def test_a_modified_argument_or_output_of_a_function_is_noticed() -> None:
    x = leaf([2.0])
    y = x * 1
    z = Cube.apply(y)
    y += 1
    await assert_awaiting_raises(ModifiedError, r"saved by Cube, with shape \[1\], is at version 1; expected version 0", z.sum().backward())
    w = Cube.apply(x)
    w += 1
    await assert_awaiting_raises(ModifiedError, "saved by Cube", w.sum().backward())


def test_versions_count_modifications_and_are_shared_by_views() -> None:
    y = ag.tensor([1.0, 2.0, 3.0])
    view, alias = y[1:], y.detach()
    assert y.version == view.version == alias.version == 0
    y += 1
    view[0] = 7.0
    alias.zero_()
    assert y.version == view.version == alias.version == 3
    assert (y + 1).version == 0 and y.clone().version == 0
