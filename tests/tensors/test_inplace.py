"""In-place modification: values, versions, and a graph that stays right through views of views."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, InPlaceError, ModifiedError, NoRuleError, ShapeError
from tests.support import assert_awaiting_raises, assert_raises, constant, custom_function, leaf, same


async def gradients_agree(function: Callable[..., Any], *arrays: Any) -> None:
    """The gradients of ``function(*tensors)`` (any shape) against central differences of ``function`` on plain tensors."""
    rng = np.random.default_rng(0)
    arrays = tuple(np.asarray(a, dtype=np.float64) for a in arrays)
    leaves = [leaf(a) for a in arrays]
    out = function(*[x * 1 for x in leaves])
    weights = rng.normal(size=out.shape)
    grads = await ag.grad((out * constant(weights)).sum(), leaves, materialize_grads=True)

    def value(*values: Any) -> float:
        return float((function(*[constant(v) for v in values]) * constant(weights)).sum().item())

    for i, (array, grad) in enumerate(zip(arrays, grads, strict=True)):
        numeric = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[index] = 1e-6
            up = [a + step if k == i else a for k, a in enumerate(arrays)]
            down = [a - step if k == i else a for k, a in enumerate(arrays)]
            numeric[index] = (value(*up) - value(*down)) / 2e-6
        np.testing.assert_allclose(grad.numpy(), numeric, rtol=1e-6, atol=1e-7)


# -------------------------------------------------------------------- values and identity


@pytest.mark.parametrize(
    ("modify", "expected"),
    [
        (lambda t: t.__iadd__(1), [2.0, 3.0]), (lambda t: t.__isub__(1), [0.0, 1.0]), (lambda t: t.__imul__(3), [3.0, 6.0]),
        (lambda t: t.__itruediv__(2), [0.5, 1.0]), (lambda t: t.__ipow__(2), [1.0, 4.0]), (lambda t: t.add_(1), [2.0, 3.0]),
        (lambda t: t.sub_(1), [0.0, 1.0]), (lambda t: t.mul_(3), [3.0, 6.0]), (lambda t: t.div_(2), [0.5, 1.0]),
        (lambda t: t.copy_([5, 6]), [5.0, 6.0]), (lambda t: t.fill_(7), [7.0, 7.0]), (lambda t: t.zero_(), [0.0, 0.0]),
        (lambda t: t.__iadd__(np.array([1, 10])), [2.0, 12.0]), (lambda t: t.__imul__(ag.tensor([2.0, 3.0])), [2.0, 6.0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("graph", [False, True])
async def test_the_same_object_and_memory_are_modified(modify: Any, expected: Any, graph: bool) -> None:
    t = (leaf if graph else constant)([1.0, 2.0]) * 1
    array = t.detach().numpy()
    result = modify(t)
    assert result is t
    same(t.detach(), expected)
    assert array.tolist() == expected
    assert t.version == 1
    assert t.requires_grad is graph


def test_every_augmented_assignment_writes_in_place() -> None:
    matrix = np.array([[1.0, 2.0], [3.0, 4.0]])
    rounds: list[tuple[Any, str, Any]] = [
        *((matrix, name, 2) for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")),
        (matrix, "imatmul", matrix),
        *((matrix.astype(np.int64), name, 2) for name in ("ifloordiv", "imod", "iand", "ior", "ixor", "ilshift", "irshift")),
        *((matrix > 2, name, True) for name in ("iand", "ior", "ixor")),
    ]
    for array, name, other in rounds:
        modify = getattr(operator, name)
        expected = modify(array.copy(), other)
        for given in (other, ag.tensor(other, dtype=array.dtype)):
            t = alias = ag.tensor(array)
            memory = t.numpy()
            t = modify(t, given)
            assert t is alias and t.version == 1, name
            np.testing.assert_allclose(memory, expected, rtol=1e-15)


async def test_integer_division_in_place_passes_no_gradient_and_the_remainder_does() -> None:
    for modify, expected in ((operator.ifloordiv, [0.0, 0.0]), (operator.imod, [10.0, 10.0])):
        x = leaf([5.5, 7.5])
        y = alias = x * 10
        y = modify(y, 4)
        assert y is alias and y.requires_grad
        await y.sum().backward()
        same(x.grad, expected)
    saved = leaf([5.0, 7.0]) * 1
    out = saved * saved
    saved //= 2
    await assert_awaiting_raises(ModifiedError, None, out.sum().backward())
    assert_raises(InPlaceError, None, lambda: operator.ifloordiv(leaf([1.0]), 2))


async def test_a_matrix_product_in_place() -> None:
    await gradients_agree(lambda x, w: x.__imatmul__(w), [[1.5, 2.5], [0.5, -1.0]], [[0.7, 1.3], [0.2, 0.4]])
    for graph in (False, True):
        for shape, other in (((2, 2), (2,)), ((2,), (2,)), ((2, 2), (3, 2, 2)), ((2, 3), (3, 2))):
            x = (leaf if graph else constant)(np.ones(shape)) * 1
            with pytest.raises(ShapeError, match="in-place matmul"):
                operator.imatmul(x, np.ones(other))
            same(x.detach(), np.ones(shape))
            assert x.version == 0


async def test_augmented_assignment_keeps_the_name() -> None:
    x = leaf([1.0, 2.0])
    y = alias = x * 1
    y += 1
    y *= 2
    assert y is alias
    await y.sum().backward()
    same(x.grad, [2.0, 2.0])


# -------------------------------------------------------------------- gradients without views


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.__imul__(w), lambda x, w: x.__iadd__(w), lambda x, w: x.__isub__(w), lambda x, w: x.__itruediv__(w),
        lambda x, w: x.__ipow__(w), lambda x, w: x.__imul__(x), lambda x, w: x.__imul__(x).__iadd__(w).__imul__(w), lambda x, w: x.copy_(w * w),
        lambda x, w: x.__imul__(w[0:1]),
    ],
)  # fmt: skip
async def test_gradients_of_in_place_operations(function: Any) -> None:
    await gradients_agree(function, [1.5, 2.5], [0.7, 1.3])


async def test_a_tensor_without_gradient_takes_part_from_the_modification_on() -> None:
    w = leaf([3.0, 4.0])
    y = constant([1.0, 2.0])
    before = y * 5
    y *= w
    assert y.requires_grad and not before.requires_grad and not y.is_leaf
    await y.sum().backward()
    same(w.grad, [1.0, 2.0])


async def test_an_overwritten_value_passes_no_gradient_back() -> None:
    x = leaf([1.0, 2.0])
    for overwrite in (lambda y: y.zero_(), lambda y: y.fill_(3), lambda y: y.copy_(constant([1.0, 1.0]))):
        x.grad = None
        y = x * 5
        overwrite(y)
        assert y.requires_grad
        await (y * 2).sum().backward()
        same(x.grad, [0.0, 0.0])


async def test_what_was_computed_before_keeps_its_gradient() -> None:
    x = leaf([2.0])
    y = x * 3
    z = y + 1
    y.zero_()
    await (z * 10 + y).sum().backward()
    same(x.grad, [30.0])


async def test_second_derivatives_through_in_place_operations() -> None:
    x = leaf([1.5])
    y = x * 1
    y *= y
    y *= x
    (first,) = await ag.grad(y.sum(), x, create_graph=True)
    (second,) = await ag.grad(first.sum(), x)
    np.testing.assert_allclose(first.detach().numpy(), [3 * 1.5**2])
    np.testing.assert_allclose(second.numpy(), [6 * 1.5])


# -------------------------------------------------------------------- assignment to parts


async def test_setitem_zeroes_the_gradient_of_what_it_overwrites() -> None:
    x, w = leaf([1.0, 2.0, 3.0]), leaf([5.0])
    y = x * 2
    y[1] = w[0] * 3
    same(y.detach(), [2.0, 15.0, 6.0])
    await (y * constant([1.0, 10.0, 100.0])).sum().backward()
    same(x.grad, [2.0, 0.0, 200.0])
    same(w.grad, [30.0])


@pytest.mark.parametrize(
    "index",
    [
        0, -1, slice(1, None), slice(None, None, -2), (slice(None), 1), (0, 2), ..., (..., 0), (None, 1), np.array([2, 0]), [1, 2],
        (np.array([0, 1]), np.array([1, 2])), ag.tensor([0, 2]), np.array([True, False, True]), ag.tensor(np.eye(3, dtype=bool)),
        (slice(1, 3), np.array([0, 0, 2])), slice(3, 3),
    ],
    ids=repr,
)  # fmt: skip
async def test_setitem_with_every_kind_of_index(index: Any) -> None:
    values = np.arange(9.0).reshape(3, 3)
    plain = index.numpy() if isinstance(index, ag.Tensor) else index
    part = values[plain]

    def assign(x: Any, v: Any) -> Any:
        x[index] = v * 2
        return x

    await gradients_agree(assign, values, np.arange(part.size).reshape(part.shape) + 0.5)
    # broadcasting the value
    await gradients_agree(assign, values, 3.0)
    expected = values.copy()
    expected[plain] = 7.0
    t = constant(values)
    t[index] = 7
    same(t, expected)


async def test_setitem_of_an_element_named_twice_keeps_the_last() -> None:
    x, v = leaf([1.0, 2.0]), leaf([10.0, 20.0, 30.0])
    y = x * 1
    y[np.array([0, 0, 1])] = v
    same(y.detach(), [20.0, 30.0])
    await y.sum().backward()
    same(v.grad, [0.0, 1.0, 1.0])
    same(x.grad, [0.0, 0.0])


async def test_setitem_of_itself() -> None:
    def shift(x: Any, w: Any) -> Any:
        x[1:] = x[:-1] + w
        return x * x

    await gradients_agree(shift, [1.0, 2.0, 3.0], [0.5, 1.5])

    def reverse(x: Any) -> Any:
        x[:] = x[::-1]
        return x * x

    await gradients_agree(reverse, [1.0, 2.0, 3.0])


async def test_a_saved_part_that_an_assignment_overwrites_is_noticed() -> None:
    x, w = leaf([1.0, 2.0, 3.0]), leaf([0.5, 1.5])
    y = x * 1
    y[1:] = y[:-1] * w
    await assert_awaiting_raises(ag.errors.ModifiedError, r"of mul.*version 1; expected version 0", y.sum().backward())


async def test_setitem_into_a_buffer_without_gradient() -> None:
    def collect(x: Any) -> Any:
        buffer = ag.tensor(np.zeros((3, 2)))
        for i in range(3):
            buffer[i] = x * float(i + 1)
        return buffer

    await gradients_agree(collect, [1.0, 2.0])


# -------------------------------------------------------------------- views

VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda t: t[1:], "row": lambda t: t[1], "column": lambda t: t[:, 2], "step": lambda t: t[::2, ::-1], "element": lambda t: t[1, 2],
    "newaxis": lambda t: t[None, 1:], "reshape": lambda t: t.reshape(2, 6), "flat": lambda t: t.reshape(-1), "transpose": lambda t: t.T,
    "swapaxes": lambda t: t.swapaxes(0, 1), "permute": lambda t: np.moveaxis(t, 0, 1), "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[1:2].squeeze(0), "flip": lambda t: np.flip(t, 0), "turned corner": lambda t: t[:3, :3].T[0:2],
    "split": lambda t: np.split(t, 3)[1], "unstack": lambda t: tuple(t)[2], "chain": lambda t: t[1:].reshape(8)[2:7],
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
async def test_modifying_a_view_modifies_the_base(name: str) -> None:
    take = VIEWS[name]

    def function(x: Any, w: Any) -> Any:
        view = take(x)
        assert np.shares_memory(view.detach().numpy(), x.detach().numpy())
        view *= w
        view += 1
        return x * x

    await gradients_agree(function, np.arange(12.0).reshape(3, 4) + 0.5, 1.7)


@pytest.mark.parametrize("name", VIEWS)
async def test_modifying_the_base_modifies_views(name: str) -> None:
    take = VIEWS[name]

    def function(x: Any, w: Any) -> Any:
        view = take(x)
        x *= w
        x[1] = x[0] * 2
        return view * view

    await gradients_agree(function, np.arange(12.0).reshape(3, 4) + 0.5, 1.7)


@pytest.mark.parametrize(("first", "second"), [pair for pair in itertools.product(VIEWS, VIEWS) if pair[0] < pair[1]])
async def test_siblings_see_what_is_done_to_each_other(first: str, second: str) -> None:
    def function(x: Any, w: Any) -> Any:
        one, other = VIEWS[first](x), VIEWS[second](x)
        one *= w
        other += 2.0
        one -= w
        return (one.sum() * 2.0 + (other * other).sum()) + (x * x * 0.5).sum()

    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(3, 4)) + 2, 1.3

    leaves = leaf(x), leaf(w)
    out = function(leaves[0] * 1, leaves[1] * 1)
    grads = await ag.grad(out, leaves)

    def value(a: Any, b: Any) -> float:
        return float(function(constant(a), constant(b)).item())

    direction = rng.normal(size=(3, 4))
    numeric = (value(x + 1e-6 * direction, w) - value(x - 1e-6 * direction, w)) / 2e-6
    np.testing.assert_allclose((grads[0].numpy() * direction).sum(), numeric, rtol=1e-6)
    np.testing.assert_allclose(grads[1].item(), (value(x, w + 1e-6) - value(x, w - 1e-6)) / 2e-6, rtol=1e-6)


async def test_a_view_of_a_view_of_a_view() -> None:
    def function(x: Any, w: Any) -> Any:
        a = x.reshape(2, 3, 2)
        b = a[1]
        c = b.T
        d = c[0]
        d[1:] = w
        b *= 3
        return x * x + d.sum() + a[0, 0, 0] * c[1, 1]

    await gradients_agree(function, np.arange(12.0) / 7, [0.3, 0.4])


async def test_a_long_chain_of_views_needs_no_recursion() -> None:
    x = leaf(np.arange(4.0))
    y = x * 1
    view = y
    for _ in range(3000):
        view = view.reshape(2, 2).reshape(4)
    view += 5
    stale = view.reshape(2, 2)
    y *= 2
    await (y.sum() + stale.sum()).backward()
    same(x.grad, [4.0, 4.0, 4.0, 4.0])


async def test_a_view_of_a_tensor_without_gradient_follows_when_it_gets_one() -> None:
    w = leaf([2.0, 3.0])
    buffer = constant([0.0, 0.0, 0.0])
    view, other = buffer[1:], buffer[:2]
    view[...] = w
    assert buffer.requires_grad and view.requires_grad and other.requires_grad and not other.is_leaf
    await (other * 10).sum().backward()
    same(w.grad, [10.0, 0.0])


async def test_a_stale_view_is_used_as_what_it_has_become() -> None:
    def stale() -> Any:
        buffer = constant([0.0, 0.0])
        view = buffer[0:1]
        buffer[...] = w * 3
        return view

    def added(view: Any) -> Any:
        total = constant([1.0])
        total += view
        return total

    def assigned(view: Any) -> Any:
        total = constant([1.0, 2.0])
        total[1:] = view
        return total

    def copied(view: Any) -> Any:
        return constant([1.0]).copy_(view)

    @custom_function(lambda a: a * 2, inline=True)
    def Twice(ctx: Any, g: Any) -> Any:
        return g * 2

    w = leaf([1.0, 2.0])
    joined, custom = (lambda v: np.concatenate([v, v]) / 2), (lambda v: Twice.apply(v) / 2)
    for use in (added, assigned, copied, joined, custom, lambda v: v, lambda v: v * 1, lambda v: v[0]):
        w.grad = None
        await use(stale()).sum().backward()
        same(w.grad, [3.0, 0.0])
    for convert in (np.asarray, np.from_dlpack):
        with pytest.raises(ag.errors.GraphError):
            convert(stale())
    assert not stale().numpy().flags.writeable


async def test_hooks_and_grad_fn_of_a_stale_view_are_those_of_the_new_values() -> None:
    x = leaf([1.0, 2.0])
    y = x * 1
    view = y[0:1]
    old = view.grad_fn
    y *= 3
    assert view.grad_fn is not old
    seen: list[float] = []
    view.register_hook(lambda g: seen.append(g.item()))
    await (view * 7).sum().backward()
    assert seen == [7.0]
    same(x.grad, [21.0, 0.0])


async def test_a_stale_view_is_brought_up_to_date_without_recording_too() -> None:
    x = leaf([1.0, 2.0])
    y = x * 1
    view = y[0:1]
    y *= 3
    with ag.no_grad():
        _ = view * 2
        assert view.requires_grad
    await view.sum().backward()
    same(x.grad, [3.0, 0.0])


async def test_a_view_that_is_a_leaf_stays_one() -> None:
    base = constant([1.0, 2.0])
    view = base[0:1]
    view.requires_grad_()
    with ag.no_grad():
        base += 1
    assert view.is_leaf and view.requires_grad
    await (view * 3).sum().backward()
    same(view.grad, [3.0])


# -------------------------------------------------------------------- retain_grad


async def test_a_retained_gradient_follows_the_latest_version() -> None:
    x = leaf([1.0])
    y = x * 2
    y.retain_grad()
    y *= 3
    z = y * 5
    await z.sum().backward()
    same(y.grad, [5.0])
    same(x.grad, [30.0])


async def test_a_retained_gradient_follows_when_the_value_is_overwritten() -> None:
    x = leaf([1.0])
    y = x * 2
    y.retain_grad()
    y.fill_(4.0)
    await (y * y).sum().backward()
    same(y.grad, [8.0])
    same(x.grad, [0.0])


async def test_retained_gradients_of_base_and_views_follow_each_others_modification() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    view, sibling = y[0:1], y[1:]
    for tensor in (y, view, sibling):
        tensor.retain_grad()
    view *= 3
    assert sibling.requires_grad  # brings the sibling up to date
    out = (y * constant([1.0, 10.0])).sum() + (view * 100).sum() + (sibling * 1000).sum()
    await out.backward()
    same(view.grad, [100.0])
    same(sibling.grad, [1000.0])
    same(y.grad, [101.0, 1010.0])
    same(x.grad, [606.0, 2020.0])


# -------------------------------------------------------------------- what cannot be modified


@pytest.mark.parametrize(
    "modify",
    [
        lambda t: t.__iadd__(1),
        lambda t: t.__imul__(t),
        lambda t: t.__setitem__(0, 3.0),
        lambda t: t.zero_(),
        lambda t: t.copy_(constant([1.0, 1.0])),
    ],
)
def test_a_leaf_that_requires_grad_and_views_of_it_cannot_be_modified(modify: Any) -> None:
    x = leaf([1.0, 2.0])
    assert_raises(InPlaceError, "a leaf Variable that requires grad is being used in an in-place operation", modify, x)
    for view in (x[:], x.reshape(2, 1).reshape(2), np.split(x, 1)[0]):
        assert_raises(InPlaceError, "a view of a leaf Variable that requires grad is being used in an in-place operation", modify, view)
    same(x.detach(), [1.0, 2.0])
    assert x.version == 0 and x.is_leaf
    with ag.no_grad():
        modify(x)
    assert x.version == 1 and x.is_leaf and x.requires_grad


async def test_a_view_taken_without_recording_stays_outside_of_the_graph() -> None:
    x = leaf([1.0, 2.0])
    y = x * 1
    with ag.no_grad():
        view = y[0:1]
    assert not view.requires_grad
    y *= 3
    assert not (view * 2).requires_grad
    with pytest.raises(InPlaceError, match="a view that was taken of a tensor that requires grad while no graph was recorded"):
        view *= 2
    with pytest.raises(InPlaceError, match="no graph was recorded"):
        view[0] = 1.0
    with ag.no_grad():
        view *= 2
    same(y.detach(), [6.0, 6.0])


def test_elements_that_share_a_place_cannot_be_modified() -> None:
    for t in (leaf([1.0, 2.0]) * 1, constant([1.0, 2.0])):
        wide = t.expand(3, 2)
        with pytest.raises(InPlaceError, match=r"the tensor's memory is read-only.*share one place since it was broadcast. Use clone"):
            wide += 1
        with pytest.raises(InPlaceError, match="read-only"):
            wide[0] = 1.0
        node = wide.grad_fn
        assert t.version == 0 and wide.grad_fn is node


WINDOWS: dict[str, Callable[[Any], Any]] = {
    "unfold": lambda t: t.unfold(0, 2, 1), "steps": lambda t: t.unfold(1, 2, 2), "of a part": lambda t: t[1:].T.unfold(0, 3, 1),
    "two axes": lambda t: ag.sliding_window_view(t, (2, 3)), "numpy": lambda t: np.lib.stride_tricks.sliding_window_view(t, 2, 0),
    "part": lambda t: t.unfold(0, 2, 1)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
async def test_windows_follow_what_is_written_into_the_tensor_they_are_taken_of(name: str) -> None:
    def function(x: Any, w: Any) -> Any:
        x = x * 1
        windows = WINDOWS[name](x)
        before = (windows * 3).sum()
        x *= w
        x[1] = x[0] * 2
        return before + windows * windows

    await gradients_agree(function, np.arange(12.0).reshape(3, 4) + 0.5, 1.7)
    x = np.arange(12.0).reshape(3, 4) + 0.5
    batch = np.stack([x, x + 1])
    for transformed in (ag.compile(function), lambda x, w: ag.vmap(function, (0, None))(ag.tensor(batch), w)[0]):
        for _ in range(3):
            same(transformed(constant(x), constant(1.7)), function(constant(x), constant(1.7)).numpy())
    _, tangent = await ag.jvp(lambda w: function(constant(x) * w, w), constant(1.7), constant(1.0))
    ends = [function(constant(x) * w, constant(w)).numpy() for w in (1.7 - 1e-5, 1.7 + 1e-5)]
    np.testing.assert_allclose(tangent.numpy(), (ends[1] - ends[0]) / 2e-5, rtol=1e-6)


async def test_windows_that_were_saved_and_overwritten_are_noticed() -> None:
    x = leaf([1.0, 2.0, 3.0]) * 1
    squares = x.unfold(0, 2, 1) ** 2
    x += 1
    await assert_awaiting_raises(ModifiedError, "modified by an inplace operation", squares.sum().backward())


@pytest.mark.parametrize("take", [lambda t: t.unfold(0, 2, 1), lambda t: t.expand(2, 3)], ids=["windows", "expand"])
async def test_elements_that_share_a_place_are_refused_in_transforms_too(take: Any) -> None:
    def function(x: Any) -> Any:
        y = x * 2
        part = take(y)
        part.mul_(3)
        return y

    x = constant([1.0, 2.0, 3.0])
    for run in (function, ag.compile(function), ag.vmap(lambda row: function(row * x))):
        assert_raises(InPlaceError, "several of its elements share one place since", run, x if run is not function else leaf([1.0, 2.0, 3.0]))
    await assert_awaiting_raises(InPlaceError, "several of its elements share one place since", ag.jvp(function, x, x))


def test_read_only_arrays_of_others_cannot_be_modified() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    t = ag.from_numpy(array)
    with pytest.raises(InPlaceError, match="read-only, because whoever owns the array said so"):
        t += 1
    assert t.version == 0


def test_a_diagonal_cannot_be_modified_and_says_so() -> None:
    for t in (leaf(np.eye(3)) * 1, constant(np.eye(3))):
        for diagonal in (ag.diagonal(t), np.diagonal(t)[1:]):
            with pytest.raises(InPlaceError, match=r"no writing through diagonal\(\).*x\[i, i\] with i = arange\(n\)"):
                diagonal += 1
    t = constant(np.eye(3))
    i = ag.arange(3)
    t[i, i] += 1
    same(t, 2 * np.eye(3))


@pytest.mark.parametrize("part", ["real", "imag"])
async def test_parts_of_complex_numbers_are_views_that_the_graph_cannot_follow(part: str) -> None:
    z = ag.tensor([1 + 2j, 3 + 4j], requires_grad=True)
    w = z * 1
    view = getattr(np, part)(w)
    with pytest.raises(InPlaceError, match=f"was taken by {part}"):
        view *= 2
    view = view.clone()
    view *= 2
    await view.sum().backward()
    plain = ag.tensor([1 + 2j])
    getattr(np, part)(plain).fill_(9.0)
    assert plain.version == 1
    assert getattr(plain.item(), part) == 9.0


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("modify", "error", "words"),
    [
        (lambda t: t.__iadd__(constant([1.0, 2.0, 3.0])), ShapeError, r"\[2\]|\(2,\)"),
        (lambda t: t.__iadd__(constant([[1.0], [2.0]])), ShapeError, "in-place add"),
        (lambda t: t.__imul__(1j), ArgumentTypeError, "in-place mul"),
        (lambda t: t.__setitem__(5, 1.0), IndexRangeError, "index 5 is out of bounds"),
        (lambda t: t.__setitem__((0, 0), 1.0), IndexRangeError, "too many indices"),
        (lambda t: t.__setitem__("x", 1.0), IndexRangeError, "only integers"),
        (lambda t: t.__setitem__(slice(None), [1.0, 2.0, 3.0]), ShapeError, "item assignment"),
        (lambda t: t.__setitem__(0, 1j), ArgumentTypeError, "complex values do not fit"),
        (lambda t: t.__setitem__(0, "x"), ArgumentTypeError, "expected a Tensor, array or number"),
        (lambda t: t.copy_(constant([1.0, 2.0, 3.0])), ShapeError, "copy_"),
        (lambda t: t.fill_(None), ArgumentTypeError, "expected a Tensor, array or number"),
    ],
)
def test_what_does_not_fit_changes_nothing(modify: Any, error: type[Exception], words: str, graph: bool) -> None:
    t = (leaf if graph else constant)([1.0, 2.0]) * 1
    node = t.grad_fn
    assert_raises(error, words, modify, t)
    same(t.detach(), [1.0, 2.0])
    assert t.version == 0 and t.grad_fn is node


def test_integers_do_not_take_fractions() -> None:
    for other in (0.5, leaf([1.0, 2.0]), np.ones(2)):
        t = ag.tensor([1, 2])
        with pytest.raises(ArgumentTypeError, match="in-place add"):
            t += other
        with pytest.raises(ArgumentTypeError, match="in-place div"):
            t /= 2
        assert t.tolist() == [1, 2] and t.version == 0 and not t.requires_grad
    t += 3
    assert t.tolist() == [4, 5]


def test_modification_with_something_that_is_no_number_is_a_type_error() -> None:
    for t in (leaf([1.0]) * 1, constant([1.0])):
        with pytest.raises(TypeError):
            t += "x"  # type: ignore[operator]
        with pytest.raises(TypeError):
            t += None  # type: ignore[operator]
        assert t.version == 0


def test_a_view_cannot_be_detached_in_place() -> None:
    y = leaf([1.0, 2.0]) * 1
    assert_raises(InPlaceError, "can't detach views in-place", lambda: y[0:1].detach_())
    assert not y.detach_().requires_grad


def test_an_error_is_one_of_the_tree() -> None:
    assert issubclass(IndexRangeError, ArgumentError) and issubclass(IndexRangeError, IndexError)


# -------------------------------------------------------------------- detach and version counters


async def test_a_detached_alias_shares_memory_and_versions_but_no_graph() -> None:
    x = leaf([2.0])
    y = x * 1
    alias = y.detach()
    z = y * y
    alias += 1
    same(y.detach(), [3.0])
    assert y.version == 1
    await assert_awaiting_raises(ag.errors.ModifiedError, None, z.sum().backward())


async def test_an_in_place_operation_under_no_grad_leaves_the_graph_alone() -> None:
    x = leaf([2.0])
    y = x * 3
    node = y.grad_fn
    with ag.no_grad():
        y *= 100
    assert y.grad_fn is node
    await y.sum().backward()
    same(x.grad, [3.0])


# ---- results of numpy's ufuncs that are written into a tensor

UFUNC_TARGETS: dict[str, Any] = {
    "itself": (lambda x, y: np.multiply(x, y, out=x), lambda x, y: x * y),
    "another": (lambda x, y: np.exp(x, out=y), lambda x, y: np.exp(x)),
    "a view": (lambda x, y: (np.add(y[:1], 1.0, out=x[1:]), x)[1], lambda x, y: np.concatenate([x[:1], y[:1] + 1.0])),
    "broadcast": (lambda x, y: np.multiply(y[0], 2.0, out=x), lambda x, y: y[0] * 2.0 + 0.0 * x),
    "some": (lambda x, y: np.log(y, out=x, where=np.array([True, False])), lambda x, y: np.stack([np.log(y[0]), x[1]])),
    "some of itself": (lambda x, y: np.square(x, out=x, where=np.array([False, True])), lambda x, y: np.stack([x[0], x[1] * x[1]])),
    "a constant": (lambda x, y: np.multiply(x, y, out=ag.zeros(2, dtype=ag.float64)), lambda x, y: x * y),
}


@pytest.mark.parametrize("name", UFUNC_TARGETS)
async def test_a_ufunc_writes_its_result_into_a_tensor_and_is_recorded(name: str) -> None:
    written, plain = UFUNC_TARGETS[name]
    inputs = tuple(ag.tensor(v, dtype=ag.float64, requires_grad=True) for v in ([1.5, 0.3], [0.7, 2.0]))
    values = [x * 1.0 for x in inputs]
    found = written(*values)
    np.testing.assert_array_equal(found.detach().numpy(), plain(*inputs).detach().numpy())
    assert await ag.gradcheck(lambda x, y: written(x * 1.0, y * 1.0), inputs)
    ours = await ag.grad(found.sum(), inputs, allow_unused=True)
    theirs = await ag.grad(plain(*inputs).sum(), inputs, allow_unused=True)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.zeros(2) if our is None else our.numpy(), np.zeros(2) if their is None else their.numpy())


async def test_elements_that_where_leaves_out_have_no_part_in_gradients() -> None:
    x = ag.tensor([0.0, 2.0], dtype=ag.float64, requires_grad=True)
    out = ag.zeros(2, dtype=ag.float64)
    with np.errstate(divide="ignore"):
        np.log(x, out=out, where=np.array([False, True]))
    await out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0.5]


def test_what_a_ufunc_cannot_write_stays_as_it_is() -> None:
    x = ag.tensor([1.0, 2.0], dtype=ag.float64, requires_grad=True)
    y, whole, array = x * 1.0, ag.tensor([1, 2]), np.zeros(2)
    assert_raises(InPlaceError, r"np.add\(out=\): a leaf", np.add, x, 1.0, out=x)
    assert_raises(NoRuleError, "out=", np.add, x, 1.0, out=array)
    with pytest.raises(NoRuleError, match="out="):
        array += x
    assert_raises(ArgumentTypeError, "dtype", np.multiply, x, 2.0, out=whole)
    assert_raises(ShapeError, "shape", lambda: np.add(x, np.ones((3, 2)), out=y))
    assert array.tolist() == [0, 0] and whole.tolist() == [1, 2] and y.tolist() == [1, 2]
