"""Everything dies by reference count: with the garbage collector off, nothing is left when the last name is gone."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.support import leaf


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


class Witness:
    """Something that can be watched dying."""

    def __init__(self) -> None:
        self.payload = np.zeros(4)


class Keeps(ag.Function):
    """Saves its argument and output, and a witness on its context."""

    inline = True

    @staticmethod
    def forward(ctx: Any, a: Any, witness: Any) -> Any:
        out = a * a
        ctx.save_for_backward(a, out)
        ctx.witness = witness
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        a, _ = ctx.saved_tensors
        assert ctx.witness is not None
        return 2 * a * g, None


class Threaded(Keeps):
    inline = False


class Awaited(Keeps):
    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        a, _ = ctx.saved_tensors
        return 2 * a * g, None


def watched() -> tuple[Any, weakref.ref[Any]]:
    witness = Witness()
    return witness, weakref.ref(witness)


async def settle() -> None:
    """Let finished tasks and threads drop what they held."""
    for _ in range(5):
        await asyncio.sleep(0)


# -------------------------------------------------------------------- graphs


@pytest.mark.parametrize("function", [Keeps, Threaded, Awaited])
@pytest.mark.parametrize("run", ["nothing", "backward", "kept", "grad", "second order", "inputs"])
async def test_a_graph_dies_with_its_output(function: Any, run: str) -> None:
    x = leaf([1.0, 2.0])
    witness, alive = watched()
    y = function.apply(x * 1, witness) * 3
    node = weakref.ref(y.grad_fn)
    del witness
    loss = y.sum()
    if run == "backward":
        await loss.backward()
    elif run == "kept":
        await loss.backward(retain_graph=True)
        await loss.backward(retain_graph=True)
    elif run == "grad":
        await ag.grad(loss, [x, y])
    elif run == "second order":
        (g,) = await ag.grad(loss, x, create_graph=True)
        await ag.grad(g.sum(), x)
        del g
    elif run == "inputs":
        await loss.backward(inputs=[x, y])
    await settle()
    assert alive() is not None
    del y, loss
    assert alive() is None and node() is None


async def test_a_saved_value_dies_when_its_node_has_run() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    z = y * y
    alive = weakref.ref(y)
    loss = z.sum()
    del y, z
    assert alive() is not None
    await loss.backward()
    assert alive() is None
    assert loss.grad_fn is not None


async def test_tensors_that_nobody_needs_die_during_the_forward_pass() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2
    z = y + 1  # needs no value of y
    alive = weakref.ref(y)
    del y
    assert alive() is None
    await z.sum().backward()


async def test_a_loop_that_trains_keeps_nothing_from_step_to_step() -> None:
    w = leaf(np.ones(4))
    graphs: list[weakref.ref[Any]] = []
    for _ in range(20):
        loss = (w * w * 0.5).sum()
        graphs.append(weakref.ref(loss.grad_fn))
        await loss.backward()
        with ag.no_grad():
            w -= w.grad * 0.1
        w.grad = None
    del loss
    assert [g() for g in graphs] == [None] * 20


async def test_outputs_saved_by_rows_make_no_cycle() -> None:
    x = leaf([1.0, 2.0])
    for function in (np.exp, np.tanh, lambda a: np.linalg.inv(a * np.eye(2) + 1), lambda a: np.linalg.qr(np.eye(2) * a)[0]):
        y = function(x)
        node, tensor = weakref.ref(y.grad_fn), weakref.ref(y)
        del y
        assert node() is None and tensor() is None


async def test_in_place_operations_make_no_cycle() -> None:
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    y = x * 1
    view = y[0:1]
    y *= w
    y *= y
    view += 1
    y[1] = y[0] * 2
    np.split(y, 2)[0].mul_(3.0)
    y.retain_grad()
    refs = [weakref.ref(y), weakref.ref(view), weakref.ref(y.grad_fn), weakref.ref(view.grad_fn)]
    await y.sum().backward()
    del y, view
    assert [r() for r in refs] == [None] * 4


async def test_views_and_aliases_die() -> None:
    x = leaf(np.arange(6.0))
    y = x * 1
    view = y.reshape(2, 3)[1].reshape(3)
    ref, base = weakref.ref(view), weakref.ref(y)
    del y
    assert base() is not None  # a view may have to be brought up to date
    del view
    assert ref() is None and base() is None


# -------------------------------------------------------------------- hooks


async def test_hooks_die_with_the_graph() -> None:
    x = leaf([1.0])
    witness, alive = watched()
    y = x * 2
    y.register_hook(lambda g, w=witness: None)
    y.grad_fn.register_prehook(lambda g, w=witness: None)
    y.grad_fn.register_hook(lambda i, o, w=witness: None)
    y.retain_grad()
    z = y * 3
    ag.graph.register_multi_grad_hook([y, z], lambda grads, w=witness: None)
    del witness
    await z.sum().backward()
    assert alive() is not None
    del y, z
    assert alive() is None


async def test_a_hook_that_refers_to_its_own_node_is_a_cycle_of_the_users_and_the_handle_breaks_it() -> None:
    x = leaf([1.0])
    y = x * 2
    node = weakref.ref(y.grad_fn)
    handle = y.register_hook(lambda g, y=y: None)
    handle.remove()
    del y
    assert node() is None


async def test_hooks_on_leaves_die_with_the_leaf() -> None:
    x = leaf([1.0])
    witness, alive = watched()
    x.register_hook(lambda g, w=witness: None)
    x.register_post_accumulate_grad_hook(lambda t, w=witness: None)
    del witness
    await (x * 2).sum().backward()
    node = weakref.ref(x._node)
    del x
    assert alive() is None and node() is None


async def test_a_handle_keeps_nothing_alive() -> None:
    x = leaf([1.0])
    y = x * 2
    handle = y.register_hook(lambda g: None)
    node = weakref.ref(y.grad_fn)
    del y
    assert node() is None
    handle.remove()


async def test_callbacks_and_shared_state_die_with_the_pass() -> None:
    x = leaf([1.0])
    witness, alive = watched()
    tasks: list[weakref.ref[Any]] = []

    def hook(g: Any, w: Any = witness) -> None:
        tasks.append(weakref.ref(ag.graph.current.CURRENT.get().task))
        ag.graph.queue_callback(lambda w=w: None)

    y = x * 2
    y.register_hook(hook)
    del witness, hook
    await y.sum().backward()
    del y
    assert alive() is None and tasks[0]() is None


async def test_a_graph_task_that_is_over_keeps_no_graph() -> None:
    x = leaf([1.0])
    y = (x * x).sum()
    tasks: list[Any] = []
    y.register_hook(lambda g: tasks.append(ag.graph.current.CURRENT.get().task))
    node = weakref.ref(y.grad_fn)
    await y.backward()
    ref = weakref.ref(tasks.pop())
    assert ref() is None
    del y
    assert node() is None


# -------------------------------------------------------------------- gradients


async def test_gradients_die_when_they_are_cleared() -> None:
    x = leaf([1.0, 2.0])
    await (x * 2).sum().backward()
    grad = weakref.ref(x.grad)
    x.grad = None
    assert grad() is None


async def test_the_cycle_of_create_graph_is_broken_by_clearing_the_gradient() -> None:
    x = leaf([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await (x * x * x).sum().backward(create_graph=True)
    node, graph = weakref.ref(x._node), weakref.ref(x.grad.grad_fn)
    x.grad = None
    assert graph() is None
    del x
    assert node() is None


async def test_grad_with_create_graph_makes_no_cycle() -> None:
    x = leaf([1.0, 2.0])
    y = (x * x * x).sum()
    (g,) = await ag.grad(y, x, create_graph=True)
    refs = [weakref.ref(x._node), weakref.ref(y.grad_fn), weakref.ref(g.grad_fn)]
    del x, y, g
    assert [r() for r in refs] == [None] * 3


async def test_a_leaf_and_its_node_are_no_cycle() -> None:
    x = leaf([1.0])
    tensor, node = weakref.ref(x), weakref.ref(x._node)
    y = x * 2
    del x
    assert tensor() is None and node() is not None
    del y
    assert node() is None


# -------------------------------------------------------------------- errors and coroutines


class Fails(ag.Function):
    inline = True

    @staticmethod
    def forward(ctx: Any, a: Any, witness: Any) -> Any:
        ctx.witness = witness
        return a * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise ZeroDivisionError


class FailsElsewhere(Fails):
    inline = False


class FailsLater(Fails):
    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        raise ZeroDivisionError


def modified(x: Any, witness: Any) -> Any:
    y = x * 1
    z = y * y
    z.grad_fn.metadata["witness"] = witness
    y += 1
    return z


@pytest.mark.parametrize("function", [modified, Fails.apply, FailsElsewhere.apply, FailsLater.apply], ids=["row", "inline", "executor", "coroutine"])
async def test_a_failed_pass_dies_with_its_error(function: Any) -> None:
    witness, alive = watched()
    loss = function(leaf([1.0]) * 1, witness).sum()
    node = weakref.ref(loss.grad_fn)
    del witness
    try:
        await loss.backward()
    except (ZeroDivisionError, ag.errors.ModifiedError):
        pass
    else:
        pytest.fail("it should have failed")
    del loss
    await settle()
    assert node() is None and alive() is None


async def test_a_coroutine_that_is_never_awaited_lets_go_of_the_graph_and_warns() -> None:
    x = leaf([1.0])
    y = (x * x).sum()
    node = weakref.ref(y.grad_fn)
    with pytest.warns(RuntimeWarning, match=r"coroutine 'Tensor.backward, called at .*' was never awaited"):
        y.backward()  # type: ignore[unused-coroutine]
    assert x.grad is None
    await y.backward()
    del y
    assert node() is None


async def test_packed_values_make_no_cycle() -> None:
    x = leaf([1.0, 2.0])
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = np.exp(x * x)
        z = Keeps.apply(y, "nothing")
    refs = [weakref.ref(y.grad_fn), weakref.ref(z.grad_fn), weakref.ref(y), weakref.ref(z)]
    await z.sum().backward(retain_graph=True)
    del y, z
    assert [r() for r in refs] == [None] * 4


async def test_a_mutation_context_keeps_nothing() -> None:
    x = leaf([1.0, 2.0])
    with ag.graph.allow_mutation_on_saved_tensors() as saved:
        y = x * 1
        z = y * y
        y += 1
        array = weakref.ref(y)
        node = weakref.ref(z.grad_fn)
        await z.sum().backward()
        del y, z
        assert node() is None and array() is None
        assert not saved._kept
