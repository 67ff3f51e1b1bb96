"""aiograd's functions in torch's graph: local ones, workers, failures, threads, and who waits for whom."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import (
    ArgumentTypeError,
    GraphFreedError,
    InPlaceError,
    LoopError,
    ModifiedError,
    OnceDifferentiableError,
    RemoteError,
    WorkerLostError,
)
from aiograd.interop import BackgroundLoop
from tests.support import assert_raises, custom_function
from tests.tolerance import assert_close, tolerance

torch: Any = pytest.importorskip("torch")
from aiograd.interop.torch import function  # noqa: E402 - torch first

RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(np.float32)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as background:
        yield background


@pytest.fixture
def _shared_loop_ends() -> Iterator[None]:
    yield
    gc.collect()  # what refers to it is in cycles, some of them


class Layer(ag.nn.Module):
    """A layer of aiograd with a parameter; its forward waits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ag.nn.Parameter(draw(4, 3))

    async def forward(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return (x @ self.weight).tanh()


# -------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("is_async", [True, False])
def test_values_and_gradients_are_those_of_aiograd_alone(loop: BackgroundLoop, is_async: bool) -> None:
    layer = Layer()
    called = layer if is_async else (lambda x: (x @ layer.weight).tanh())
    array, seed = draw(5, 4), draw(5, 3)
    x = torch.tensor(array, requires_grad=True)
    y = function(called, loop=loop)(x)
    y.backward(torch.tensor(seed))
    found = layer.weight.grad
    layer.weight.grad = None

    async def alone() -> Any:
        tensor = ag.tensor(array, requires_grad=True)
        value = await layer(tensor)
        await ag.backward(value, ag.tensor(seed))
        return value, tensor.grad

    value, grad = loop.run(alone())
    np.testing.assert_array_equal(y.detach().numpy(), value.detach().numpy())
    np.testing.assert_array_equal(x.grad.numpy(), grad.numpy())
    np.testing.assert_array_equal(found.numpy(), layer.weight.grad.numpy())


def test_a_torch_model_with_a_layer_of_aiograd_trains_as_torch_alone(loop: BackgroundLoop) -> None:
    x, y, layer = torch.tensor(draw(16, 5)), torch.tensor(draw(16, 1)), Layer()
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(3, 1)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    weight = torch.tensor(layer.weight.detach().numpy().copy(), requires_grad=True)
    step, optimizer = ag.optim.SGD([layer.weight], lr=0.1), torch.optim.SGD([*theirs.parameters(), weight], lr=0.1)
    sgd, bridged = torch.optim.SGD(ours.parameters(), lr=0.1), function(layer, loop=loop)
    for _ in range(10):
        losses = []
        for model, middle in ((ours, bridged), (theirs, lambda h: torch.tanh(h @ weight))):
            loss = ((model[1](middle(model[0](x))) - y) ** 2).mean()
            loss.backward()
            losses.append(loss.item())
        for each in (sgd, step, optimizer):
            each.step()
            each.zero_grad()
        assert abs(losses[0] - losses[1]) < 10 * tolerance(np.float32) * losses[1]
    assert_close(layer.weight.detach().numpy(), weight.detach().numpy(), 300)


def test_nested_arguments_and_results(loop: BackgroundLoop) -> None:
    async def model(inputs: Any, *, scale: Any, label: str) -> Any:
        assert label == "text" and inputs[2] is None
        return {"sum": inputs[0] + inputs[1]["b"] * scale, "label": label, "largest": [inputs[0].argmax()], "plain": ag.ones(2)}

    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    found = function(model, loop=loop)((a, {"b": b}, None), scale=torch.tensor(2.0), label="text")
    assert found["sum"].tolist() == [7.0, 10.0] and found["label"] == "text" and found["largest"][0].item() == 1
    assert found["sum"].requires_grad and not found["largest"][0].requires_grad and not found["plain"].requires_grad
    found["sum"].sum().backward()
    assert a.grad.tolist() == [1.0, 1.0] and b.grad.tolist() == [2.0, 2.0]


def test_gradients_of_two_arguments_have_memory_of_their_own(loop: BackgroundLoop) -> None:
    add = function(lambda a, b: a + b, loop=loop)
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for _ in range(2):  # torch adds to a gradient in place
        add(a, b).sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [2.0] * 3


def test_arguments_without_gradients_and_no_grad(loop: BackgroundLoop) -> None:
    layer = Layer()
    bridged = function(layer, loop=loop)
    x = torch.tensor(draw(2, 4))
    y = bridged(x)
    y.sum().backward()
    assert x.grad is None and layer.weight.grad is not None
    with torch.no_grad():
        assert not bridged(x).requires_grad
    assert function(lambda x: x * 2, loop=loop)(x).requires_grad is False
    complex_ = torch.tensor([1 + 2j], requires_grad=True)
    function(lambda z: z * z, loop=loop)(complex_).real.sum().backward()
    assert complex_.grad.tolist() == [2 - 4j]


def test_passes_over_certain_inputs_and_kept_graphs(loop: BackgroundLoop) -> None:
    layer = Layer()
    x = torch.tensor(draw(2, 4), requires_grad=True)
    y = function(layer, loop=loop)(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    assert layer.weight.grad is None, "autograd.grad accumulates nothing"
    y.backward(retain_graph=True)
    once = layer.weight.grad.numpy().copy()
    y.backward()
    np.testing.assert_array_equal(layer.weight.grad.numpy(), once * 2)
    assert torch.equal(x.grad, first * 2)
    assert_raises(GraphFreedError, None, y.backward)
    z = function(layer, loop=loop)(x).sum()
    (recorded,) = torch.autograd.grad(z, x, create_graph=True)
    assert torch.equal(recorded, first)
    assert_raises(OnceDifferentiableError, "Layer of aiograd.*interop.torch.wrap", lambda: (recorded.sum() + x.sum()).backward())


def test_a_checkpointed_part_calls_it_again(loop: BackgroundLoop) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, calls = Layer(), 0

    async def counted(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return await layer(x)

    bridged = function(counted, loop=loop)
    x = torch.tensor(draw(2, 4), requires_grad=True)
    checkpoint(lambda x: bridged(x) ** 2, x, use_reentrant=False).sum().backward()
    again = x.grad.clone()
    x.grad = None
    (bridged(x) ** 2).sum().backward()
    assert calls == 3 and torch.equal(x.grad, again)


# -------------------------------------------------------------------- memory


def test_results_may_be_overwritten_and_arguments_may_not(loop: BackgroundLoop) -> None:
    x = torch.tensor([0.5, -0.5], requires_grad=True)
    y = function(lambda x: x.tanh(), loop=loop)(x)
    y.relu_()
    y.sum().backward()
    assert x.grad[1] == 0 and abs(x.grad[0] - (1 - np.tanh(0.5) ** 2)) < 1e-6
    middle = x * 1
    z = function(lambda x: x * x, loop=loop)(middle)
    with torch.no_grad():
        middle += 1
    assert_raises(ModifiedError, None, lambda: z.sum().backward())

    def overwrite(x: Any) -> Any:
        x += 1
        return x * 2

    assert_raises(InPlaceError, "modified argument 0", lambda: function(overwrite, loop=loop)(torch.ones(2)))


# -------------------------------------------------------------------- failures


@custom_function()
def Failing(ctx: Any, grad: Any) -> Any:
    raise ZeroDivisionError("in a rule")


class TorchFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise ZeroDivisionError("in torch")


def test_a_pass_of_torch_that_fails_changes_no_gradient_of_aiograd(loop: BackgroundLoop) -> None:
    layer, x = Layer(), torch.tensor(draw(2, 4), requires_grad=True)
    bridged = function(layer, loop=loop)
    assert_raises(ZeroDivisionError, "in torch", lambda: bridged(TorchFails.apply(x)).sum().backward())
    assert layer.weight.grad is None and x.grad is None
    assert_raises(ZeroDivisionError, "in a rule", lambda: function(lambda x: Failing.apply(x @ layer.weight), loop=loop)(x).sum().backward())
    assert layer.weight.grad is None and x.grad is None
    bridged(x).sum().backward()
    assert layer.weight.grad is not None


def test_calls_in_one_pass_of_torch_commit_together(loop: BackgroundLoop) -> None:
    """Two layers, and one called twice: all gradients or none, and one pass of aiograd at the end."""
    first, second, x = Layer(), Layer(), torch.tensor(draw(2, 4), requires_grad=True)
    bridged, other = function(first, loop=loop), function(second, loop=loop)

    def loss(x: Any) -> Any:
        return bridged(x).sum() + (bridged(2 * x) ** 2).sum() + other(x).prod()

    committed = []
    first.weight.register_post_accumulate_grad_hook(lambda w: committed.append(("first", second.weight.grad is not None)))
    second.weight.register_post_accumulate_grad_hook(lambda w: committed.append(("second", first.weight.grad is not None)))
    loss(x).backward()
    assert sorted(committed) == [("first", True), ("second", True)]

    async def alone() -> tuple[Any, ...]:
        y = ag.tensor(x.detach().numpy())
        value = (await first(y)).sum() + ((await first(2 * y)) ** 2).sum() + (await second(y)).prod()
        return await ag.grad(value, (first.weight, second.weight))

    for layer, expected in zip((first, second), loop.run(alone()), strict=True):
        assert_close(layer.weight.grad.numpy(), expected.numpy(), 100)

    before = [layer.weight.grad.numpy().copy() for layer in (first, second)]

    def fails(w: Any) -> None:
        raise ZeroDivisionError("in a hook")

    second.weight.register_hook(fails)
    assert_raises(ZeroDivisionError, "in a hook", lambda: loss(x).backward())
    for layer, was in zip((first, second), before, strict=True):
        assert np.array_equal(layer.weight.grad.numpy(), was)


async def _nothing(x: Any) -> None:
    return None


def test_bad_input(loop: BackgroundLoop) -> None:
    async def fail(x: Any) -> Any:
        raise KeyError("forward")

    x = torch.ones(2, requires_grad=True)
    assert_raises(KeyError, "forward", lambda: function(fail, loop=loop)(x))
    assert_raises(ArgumentTypeError, r"_nothing.*NoneType.*expected a Tensor", lambda: function(_nothing, loop=loop)(x))
    assert_raises(ArgumentTypeError, "bfloat16", lambda: function(lambda x: x, loop=loop)(x.bfloat16()))
    assert_raises(ArgumentTypeError, "found int", function, 3)
    assert_raises(ArgumentTypeError, "BackgroundLoop or an event loop", function, fail, loop="main")


# -------------------------------------------------------------------- loops and threads


def test_without_a_loop_of_its_own_it_runs_in_the_background() -> None:
    threads: list[threading.Thread] = []

    async def model(x: Any) -> Any:
        threads.append(threading.current_thread())
        return x * 2

    bridged = function(model)
    x = torch.ones(2, requires_grad=True)
    bridged(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and threads[0] is not threading.current_thread()
    del bridged
    gc.collect()
    threads[0].join(60)
    assert not threads[0].is_alive()


@pytest.mark.usefixtures("_shared_loop_ends")
async def test_made_on_a_loop_it_runs_there_unless_that_waits() -> None:
    loops: list[Any] = []

    async def model(x: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        return x * 2

    def train() -> Any:
        x = torch.ones(2, requires_grad=True)
        bridged(x).sum().backward()
        return x.grad.tolist()

    here, bridged = asyncio.get_running_loop(), function(model)
    assert await asyncio.to_thread(train) == [2.0, 2.0] and loops.pop() is here
    assert train() == [2.0, 2.0] and loops.pop() is not here
    named = function(model, loop=here)
    assert_raises(LoopError, "another thread", lambda: named(torch.ones(2)))
    y = await asyncio.to_thread(named, torch.ones(2, requires_grad=True))
    assert_raises(LoopError, "another thread", lambda: y.sum().backward())


def test_many_threads_of_torch_call_at_once(loop: BackgroundLoop) -> None:
    together = threading.Barrier(8)
    layer = Layer()
    bridged = function(layer, loop=loop)
    arrays = [draw(3, 4) for _ in range(8)]

    def one(array: Any) -> Any:
        x = torch.tensor(array, requires_grad=True)
        together.wait(60)
        for _ in range(5):
            bridged(x).sum().backward()
        return x.grad

    def alone(array: Any) -> Any:
        x = torch.tensor(array, requires_grad=True)
        (5 * torch.tanh(x @ torch.tensor(layer.weight.detach().numpy())).sum()).backward()
        return x.grad

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found, array in zip(pool.map(one, arrays), arrays, strict=True):
            assert_close(found.numpy(), alone(array).numpy())


class ThroughTorch(ag.Function):
    """A node whose rule differentiates a torch model that calls aiograd: it waits on the executor."""

    bridged: Any = None

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x = torch.tensor(ctx.saved_tensors[0].detach().numpy(), requires_grad=True)
        ThroughTorch.bridged(x).backward(torch.tensor(grad.numpy()))
        return x.grad.numpy()


@pytest.mark.usefixtures("_shared_loop_ends")
async def test_a_rule_on_the_only_thread_may_call_torch_that_calls_aiograd() -> None:
    """The rule holds the engine's only thread while the inner forward and pass, on the same loop, need one."""
    x = ag.tensor([3.0], requires_grad=True)
    async with ag.Engine(threads=1):
        ThroughTorch.bridged = function(lambda x: Slow.apply(x))
        try:
            await ThroughTorch.apply(x).sum().backward()
        finally:
            ThroughTorch.bridged = None
    assert x.grad is not None and x.grad.tolist() == [6.0]


@custom_function(lambda x: x * x, saves=True)
def Slow(ctx: Any, grad: Any) -> Any:
    """Its rule runs on the executor."""
    return grad * 2 * ctx.saved_tensors[0]


def test_a_loop_that_is_closed_in_mid_call() -> None:
    background, waiting = BackgroundLoop(), threading.Event()

    async def wait(x: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function(wait, loop=background), torch.ones(2))
        waiting.wait(60)
        background.close()
        assert_raises(LoopError, "closed", future.result)
    y = torch.ones(2, requires_grad=True)
    with BackgroundLoop() as other:
        z = function(lambda x: x * 2, loop=other)(y)
    assert_raises(LoopError, "closed", lambda: z.sum().backward())


# -------------------------------------------------------------------- other workers

service = dist.Service()


@service.reference
class RemoteLayer(ag.nn.Module):
    """A layer that lives on a worker."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        self.weight = ag.nn.Parameter(np.array(weight, np.float32))

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        return (x @ self.weight).tanh()


@service.function
async def fail(x: ag.Tensor) -> ag.Tensor:
    return Failing.apply(x)  # type: ignore[no-any-return]


async def test_a_training_loop_of_torch_with_one_remote_layer() -> None:
    weight = draw(4, 3)
    x, y = torch.tensor(draw(16, 5)), torch.tensor(draw(16, 1))
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(3, 1)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())

    def losses(model: Any, middle: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = ((model[1](middle(model[0](x))) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    found = []
    async with dist.Worker("far", service=service) as far, dist.Worker("near", peers={"far": far.url}) as near:
        remote = await near.remote_module("far", RemoteLayer, weight.tolist())
        optimizer = dist.DistributedOptimizer(near, ag.optim.SGD, [remote], lr=0.1)
        layer, sgd = function(remote), torch.optim.SGD(ours.parameters(), lr=0.1)
        for _ in range(5):
            async with near.context() as ctx:
                found.append(await asyncio.to_thread(losses, ours, layer, sgd))
                await optimizer.step(ctx)
        final = (await remote.state_dict())["weight"].numpy()
    parameter = torch.tensor(weight, requires_grad=True)
    alone = torch.optim.SGD([*theirs.parameters(), parameter], lr=0.1)
    wanted = [losses(theirs, lambda h: torch.tanh(h @ parameter), alone) for _ in range(5)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6 * 10)
    assert_close(final, parameter.detach().numpy(), 300)
    assert wanted[-1] < wanted[0]


def test_a_synchronous_script_with_a_remote_layer(loop: BackgroundLoop) -> None:
    weight = draw(4, 3)
    x = torch.tensor(draw(2, 4), requires_grad=True)
    with loop.entered(dist.Worker("far", service=service)) as far, loop.entered(dist.Worker("near", peers={"far": far.url})) as near:
        remote = loop.run(near.remote_module("far", RemoteLayer, weight.tolist()))
        layer = function(remote, loop=loop)
        optimizer = dist.DistributedOptimizer(near, ag.optim.SGD, [remote], lr=1.0)
        with loop.entered(near.context()) as ctx, near.within(ctx):
            y = layer(x)
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            y.sum().backward()
            loop.run(optimizer.step(ctx))
        moved = loop.run(remote.state_dict())["weight"].numpy()
        with loop.entered(near.context()) as ctx, near.within(ctx):
            broken = function(lambda x: near.call("far", "fail", x), loop=loop)(x)
            assert_raises(RemoteError, "in a rule", lambda: broken.sum().backward())
    parameter, other = torch.tensor(weight, requires_grad=True), torch.tensor(x.detach().numpy(), requires_grad=True)
    torch.tanh(other @ parameter).sum().backward()
    assert_close(x.grad.numpy(), other.grad.numpy())
    assert torch.equal(grad, x.grad)
    assert_close(moved, weight - parameter.grad.numpy(), 100)


def test_a_worker_that_is_lost(loop: BackgroundLoop) -> None:
    x = torch.tensor(draw(2, 4), requires_grad=True)
    with loop.entered(dist.Worker("near")) as near:
        far = dist.Worker("far", service=service)
        with loop.entered(far):
            near.add_peer("far", far.url)
            remote = loop.run(near.remote_module("far", RemoteLayer, draw(4, 3).tolist()))
            context = loop.entered(near.context())
            ctx = context.__enter__()
            with near.within(ctx):
                y = function(remote, loop=loop)(x)
        assert_raises(WorkerLostError, None, lambda: y.sum().backward())
        assert x.grad is None
        context.__exit__(None, None, None)
