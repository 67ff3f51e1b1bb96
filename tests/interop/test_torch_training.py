"""Parameters, gradients and state of wrapped modules in both libraries at once: training loops, transactions, versions, halves, bad input."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import pipeline
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DeviceMismatchError,
    GraphError,
    GraphFreedError,
    InPlaceError,
    ModifiedError,
)
from tests.interop.torch_support import draw, pair_of, same
from tests.support import assert_awaiting_raises, assert_raises, cancel
from tests.tolerance import assert_close

torch: Any = pytest.importorskip("torch", reason="it comes with the extra `torch`")
interop: Any = ag.interop.torch
nn = torch.nn
files: Any = pytest.importorskip("safetensors.torch")


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def functional(module: Any) -> Any:
    """A torch module whose forward is a function."""

    class Functional(nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any) -> Any:
            return module(*args)

    return Functional()


# -------------------------------------------------------------------- one memory


async def test_parameters_gradients_and_buffers_are_one_memory() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    layer = interop.wrap(module)
    assert layer.module is module and list(layer.state_dict()) == list(module.state_dict())
    await layer(ag.asarray(draw(5, 4))).sum().backward()
    for (path, ours), (name, theirs) in zip(layer.named_parameters(), module.named_parameters(), strict=True):
        assert path == name and ours.numpy().ctypes.data == theirs.data_ptr() and ours.grad.numpy().ctypes.data == theirs.grad.data_ptr()
        assert interop.to_torch(ours) is theirs
    assert dict(layer.named_buffers())["1.running_mean"].numpy().ctypes.data == module[1].running_mean.data_ptr()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    same(next(layer.parameters()).grad, module[0].weight.grad)


@pytest.mark.parametrize("clears", ["torch", "torch, to zeros", "aiograd", "torch's module", "aiograd's optimizer"])
async def test_clearing_gradients_on_one_side_between_forward_and_backward_clears_both(clears: str) -> None:
    module, layer = pair_of(net)
    x = draw(5, 4)
    theirs, ours = torch.optim.SGD(layer.module.parameters(), lr=0.1), ag.optim.SGD(layer.parameters(), lr=0.1)
    await layer(ag.asarray(x)).sum().backward()
    loss = layer(ag.asarray(x)).sum()
    clear = {
        "torch": theirs.zero_grad,
        "torch, to zeros": lambda: theirs.zero_grad(set_to_none=False),
        "aiograd": layer.zero_grad,
        "torch's module": layer.module.zero_grad,
        "aiograd's optimizer": ours.zero_grad,
    }[clears]
    clear()
    assert all(p.grad is None or not p.grad.numpy().any() for p in layer.parameters())
    assert all(p.grad is None or not p.grad.any() for p in layer.module.parameters())
    await loss.backward()
    module(torch.from_numpy(x)).sum().backward()
    for ours_p, other in zip(layer.parameters(), module.parameters(), strict=True):
        same(ours_p.grad, other.grad)


@pytest.mark.parametrize("optimizer", ["torch", "aiograd"])
@pytest.mark.parametrize("loss_of", ["torch", "aiograd"])
async def test_a_training_loop_mixed_of_both_is_that_of_torch(optimizer: str, loss_of: str) -> None:
    module, layer = pair_of(net)
    x, y = draw(32, 4), draw(32, 2, at=1)
    reference = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if optimizer == "torch":
        mixed: Any = torch.optim.SGD(layer.module.parameters(), lr=0.1, momentum=0.9)
    else:
        mixed = ag.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    measure = interop.wrap(nn.MSELoss()) if loss_of == "torch" else ag.nn.MSELoss()
    for _ in range(20):
        reference.zero_grad()
        expected = nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y))
        expected.backward()
        reference.step()
        mixed.zero_grad()
        loss = measure(layer(ag.asarray(x)), ag.asarray(y))
        await loss.backward()
        mixed.step()
        np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        if (optimizer, loss_of) == ("torch", "torch"):
            same(ours, other)
        else:
            np.testing.assert_allclose(ours.detach().numpy(), other.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["both", "aiograd", "torch"])
async def test_gradients_arrive_on_the_chosen_side(side: str) -> None:
    layer = interop.wrap(net(), keep_grad=side)
    optimizer = ag.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.module[0].weight.detach().clone()
    for _ in range(2):
        await layer(ag.ones((3, 4))).sum().backward()
    ours, theirs = [p.grad for p in layer.parameters()], [p.grad for p in layer.module.parameters()]
    assert all((grad is not None) == (side != "torch") for grad in ours) and all((grad is not None) == (side != "aiograd") for grad in theirs)
    kept = ours[-1].numpy() if side != "torch" else theirs[-1].numpy()
    np.testing.assert_array_equal(kept, [6, 6])
    if side == "torch":
        with pytest.warns(UserWarning, match="gradient"):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(before, layer.module[0].weight) == (side == "torch")


async def test_one_parameter_in_two_wrapped_modules_gets_the_sum() -> None:
    shared = nn.Linear(3, 3)
    first, second = interop.wrap(shared), interop.wrap(nn.Sequential(shared, nn.Tanh()))
    assert next(first.parameters()) is next(second.parameters())
    x = draw(4, 3)
    await second(first(ag.asarray(x))).sum().backward()
    found = shared.weight.grad.clone()
    shared.zero_grad()
    shared(shared(torch.from_numpy(x))).tanh().sum().backward()
    assert_close(found.numpy(), shared.weight.grad.numpy())
    assert_raises(ArgumentError, "keep_grad='both'", interop.wrap, shared, keep_grad="torch")


async def test_what_torch_changes_later_is_seen() -> None:
    layer = interop.wrap(net())
    first = next(layer.parameters())
    layer.module.double()
    assert first.dtype == np.float64
    await layer(ag.ones((2, 4), dtype=np.float64)).sum().backward()
    assert first.grad.dtype == np.float64 and layer.module[0].weight.grad.dtype == torch.float64
    layer.module[0].weight.requires_grad_(False)
    assert not first.requires_grad
    first.requires_grad_()
    assert layer.module[0].weight.requires_grad
    layer.module[2] = nn.Linear(16, 5).double()
    assert layer(ag.ones((2, 4), dtype=np.float64)).shape == (2, 5) and list(layer.parameters())[-1].shape == (5,)


async def test_a_module_of_aiograd_that_is_cast_casts_the_torch_module() -> None:
    outer = ag.nn.Sequential(interop.wrap(nn.BatchNorm1d(3)))
    outer.double()
    (layer,) = outer.children()
    assert layer.module.weight.dtype == torch.float64
    twin = copy.deepcopy(outer)
    with ag.no_grad():
        next(twin.parameters())[...] = 7.0
    assert next(iter(twin.children())).module.weight.tolist() == [7, 7, 7] and layer.module.weight.tolist() == [1, 1, 1]


async def test_training_and_evaluation_reach_the_torch_module_from_outside() -> None:
    outer = ag.nn.Sequential(ag.nn.Linear(3, 3), interop.wrap(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))))
    layer = list(outer.children())[1]
    outer.eval()
    assert not layer.training and not layer.module.training and not layer.module[0].training
    x = ag.ones((2, 3))
    assert layer(x).tolist() == layer(x).tolist()
    outer.train()
    assert layer.module[1].training


def test_checkpoints_of_each_are_read_by_the_other(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    layer, other = interop.wrap(copy.deepcopy(module)), interop.wrap(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    ag.save(layer.state_dict(), tmp_path / "ours.safetensors")
    fresh = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fresh.load_state_dict(files.load_file(tmp_path / "ours.safetensors"))
    files.save_file(module.state_dict(), tmp_path / "theirs.safetensors")
    other.load_state_dict(ag.load(tmp_path / "theirs.safetensors"))
    for path, value in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[path], value) and torch.equal(other.module.state_dict()[path], value)


# -------------------------------------------------------------------- all or nothing


async def test_a_failed_pass_leaves_the_gradients_of_torch_as_they_were() -> None:
    layer = interop.wrap(net())
    x = ag.tensor(draw(5, 4), requires_grad=True)
    await layer(x).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in layer.module.parameters()]

    async def fails(grad: Any) -> None:
        raise LookupError("no gradient")

    y = x * 2.0
    y.register_hook(fails)
    await assert_awaiting_raises(LookupError, None, layer(y).sum().backward())
    assert all(p.grad is grad and torch.equal(grad, value) for p, (grad, value) in zip(layer.module.parameters(), before, strict=True))


async def test_a_cancelled_pass_leaves_the_gradients_of_torch_as_they_were() -> None:
    layer = interop.wrap(net())
    reached = asyncio.Event()

    async def waits(grad: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    y = ag.tensor(draw(5, 4), requires_grad=True) * 2.0
    y.register_hook(waits)
    running = asyncio.create_task(layer(y).sum().backward())
    await reached.wait()
    await cancel(running)
    assert all(p.grad is None for p in layer.module.parameters())


async def test_an_expensive_backward_runs_on_the_executor_and_the_loop_goes_on() -> None:
    threads = []
    held, go = threading.Event(), threading.Event()

    class Held(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            held.wait(0.002)  # longer than what may stay on the loop
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            threads.append(threading.current_thread())
            assert go.wait(30)
            return g * 2

    x = ag.ones(3).requires_grad_()
    running = asyncio.create_task(interop.wrap(functional(Held.apply))(x).sum().backward())
    while not threads:
        await asyncio.sleep(0)
    go.set()
    await running
    assert threads[0] is not threading.current_thread() and x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("how", ["backward", "second backward", "on the executor", "aiograd's as well", "pipeline"])
async def test_post_accumulate_hooks_of_torch_are_called_once_the_gradient_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "on the executor":
        monkeypatch.setattr("aiograd.interop.torch.node.backward_ns", lambda elapsed: 10**9)
    module = net()
    layer, calls = interop.wrap(module), []

    def noted(parameter: Any) -> None:
        assert not torch.is_grad_enabled() and parameter.grad is not None
        calls.append((id(parameter), parameter.grad.clone()))

    handles = [parameter.register_post_accumulate_grad_hook(noted) for parameter in module.parameters()]
    if how == "aiograd's as well":
        next(layer.parameters()).register_post_accumulate_grad_hook(lambda parameter: calls.append(None))
    x, y = ag.asarray(draw(8, 4)), ag.asarray(draw(8, 2, at=1))
    if how == "pipeline":
        pipe = pipeline.Pipeline([layer, ag.nn.Identity()], pipeline.make_schedule("ZB-H1", 2, 4), loss_fn=ag.nn.functional.mse_loss)
        await pipe.step(x, y)
    else:
        for _ in range(1 + (how == "second backward")):
            calls.clear()
            await layer(x).sum().backward()
    if how == "aiograd's as well":
        assert calls.pop(0) is None
    assert sorted(number for number, _ in calls) == sorted(map(id, module.parameters()))
    grads = dict(calls)
    assert all(torch.equal(grads[id(parameter)], parameter.grad) for parameter in module.parameters())
    for handle in handles:
        handle.remove()
    calls.clear()
    await layer(x).sum().backward()
    assert [call for call in calls if call is not None] == []


async def test_a_post_accumulate_hook_of_torch_steps_an_optimizer_in_backward() -> None:
    module, layer = pair_of(net)
    x = draw(5, 4)
    for each in (module, layer.module):
        for parameter in each.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())[2:] or None)
    for _ in range(3):
        module(torch.from_numpy(x)).sum().backward()
        await layer(ag.asarray(x)).sum().backward()
    for ours, other in zip(layer.module.parameters(), module.parameters(), strict=True):
        same(ours, other)
        assert ours.grad is None


async def test_a_hook_of_torch_that_fails_raises_after_the_commit() -> None:
    layer = interop.wrap(net())

    def fails(parameter: Any) -> None:
        raise LookupError("no optimizer")

    layer.module[2].bias.register_post_accumulate_grad_hook(fails)
    caught = await assert_awaiting_raises(LookupError, None, layer(ag.asarray(draw(5, 4))).sum().backward())
    assert caught.committed and all(parameter.grad is not None for parameter in layer.module.parameters())  # type: ignore[attr-defined]


# -------------------------------------------------------------------- changed unnoticed


@pytest.mark.parametrize("writer", ["torch's optimizer", "aiograd's optimizer", "load_state_dict", "no_grad"])
async def test_a_parameter_that_changes_between_forward_and_backward_is_noticed(writer: str) -> None:
    layer = interop.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    x = ag.ones((2, 3))
    await layer(x).sum().backward()
    loss = layer(x).sum()
    if writer == "torch's optimizer":
        torch.optim.SGD(layer.module.parameters(), lr=0.1).step()
    elif writer == "aiograd's optimizer":
        ag.optim.SGD(layer.parameters(), lr=0.1).step()
    elif writer == "load_state_dict":
        layer.load_state_dict({path: value.numpy() + 1 for path, value in layer.state_dict().items()})
    else:
        with ag.no_grad():
            for parameter in layer.parameters():
                parameter += 1.0
    before = [p.grad.clone() for p in layer.module.parameters()]
    await assert_awaiting_raises(ModifiedError, "modified by an inplace operation", loss.backward())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.module.parameters(), before, strict=True))


async def test_a_parameter_that_torch_writes_is_noticed_by_rows_that_have_saved_it() -> None:
    layer = interop.wrap(nn.Linear(3, 3))
    weight = next(layer.parameters())
    loss = (weight * weight).sum()
    weight.grad = ag.ones((3, 3))
    torch.optim.SGD(layer.module.parameters(), lr=0.1).step()
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


@pytest.mark.parametrize("which", ["input", "output"])
async def test_inputs_and_outputs_that_change_are_noticed_where_they_are_saved(which: str) -> None:
    layer = interop.wrap(nn.Linear(3, 3) if which == "input" else nn.Tanh())
    x = ag.ones((2, 3))
    y = layer(x if which == "input" else x.requires_grad_())
    loss = y.sum()
    with ag.no_grad():
        changed = x if which == "input" else y.detach()
        changed += 1.0
    await assert_awaiting_raises(ModifiedError, None, loss.backward())
    fine = interop.wrap(functional(lambda t: t + 1.0))
    x = ag.ones(3).requires_grad_()
    y = fine(x * 1.0)
    with ag.no_grad():
        detached = y.detach()
        detached += 1.0  # nobody has saved it
    await y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_writes_through_converted_tensors_are_counted_by_both() -> None:
    ours = ag.ones(3)
    theirs = interop.to_torch(ours)
    theirs += 1
    assert ours.tolist() == [2, 2, 2] and ours.version == 1
    ours += 1.0
    assert theirs.tolist() == [3, 3, 3] and theirs._version == 2
    back = interop.from_torch(theirs)
    back *= 2.0
    assert theirs._version == 3 and interop.to_torch(back).data_ptr() == theirs.data_ptr()


def test_memory_that_torch_cannot_share_is_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert interop.to_torch(ag.asarray(array[::-1])).tolist() == array[::-1].tolist()
    array.flags.writeable = False
    copied = interop.to_torch(ag.asarray(array))
    copied += 1
    assert array[0, 0] == 0 and interop.to_torch(ag.asarray(array.astype(">f8"))).tolist() == array.tolist()


# -------------------------------------------------------------------- graphs kept, spent, recomputed


async def test_a_graph_is_spent_unless_it_is_kept() -> None:
    layer = interop.wrap(net())
    loss = layer(ag.ones((2, 4))).sum()
    await loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.module.parameters()]
    await loss.backward()
    assert all(torch.equal(p.grad, 2 * grad) for p, grad in zip(layer.module.parameters(), once, strict=True))
    await assert_awaiting_raises(GraphFreedError, "second time", loss.backward())


@pytest.mark.parametrize("slow", [False, True], ids=["on the loop", "on the executor"])
async def test_torchs_graph_is_kept_exactly_where_it_is_needed_again(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.interop.torch.node.backward_ns", lambda elapsed: 10**9 if slow else 1)
    engine, kept = torch.autograd.graph._engine_run_backward, []

    def noted(outputs: Any, grads: Any, keep: bool, *args: Any, **kwargs: Any) -> Any:
        kept.append(keep)
        return engine(outputs, grads, keep, *args, **kwargs)

    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", noted)
    module, layer = pair_of(net)

    async def penalized() -> tuple[Any, Any]:
        x = ag.asarray(draw(5, 4)).requires_grad_()
        loss = layer(x).sum()
        (g,) = await ag.grad(loss, [x], create_graph=True)
        return loss, (g * g).sum()

    await layer(ag.asarray(draw(5, 4))).sum().backward(retain_graph=True)
    await layer(ag.asarray(draw(5, 4))).sum().backward()
    loss, penalty = await penalized()
    layer.zero_grad()
    await (loss + penalty).backward()
    assert kept[:4] == [True, False, True, True]
    assert slow or kept[4:] == [False]  # the two run beside each other on the executor
    given = torch.from_numpy(draw(5, 4)).requires_grad_()
    expected = module(given).sum()
    (g,) = torch.autograd.grad(expected, given, create_graph=True)
    (expected + (g * g).sum()).backward()
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())

    loss, penalty = await penalized()
    kept.clear()
    await penalty.backward()
    await loss.backward()
    loss, penalty = await penalized()
    del loss
    await penalty.backward()
    assert kept == [True, False, True, False]


async def test_a_checkpoint_repeats_masks_and_leaves_running_statistics_alone() -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 2))

    module, layer = pair_of(make)
    x = draw(6, 4)
    torch.manual_seed(3)
    module(torch.from_numpy(x)).square().sum().backward()
    torch.manual_seed(3)
    loss = ag.checkpoint(lambda t: (layer(t) ** 2).sum(), ag.asarray(x))
    torch.rand(5)  # the state has moved on before backward
    await loss.backward()
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())
    for ours, other in zip(layer.module.buffers(), module.buffers(), strict=True):
        assert torch.equal(ours, other)


async def test_a_recomputation_with_other_parameters_is_refused() -> None:
    layer = interop.wrap(net())
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = layer(ag.ones((2, 4))).sum()
    await loss.backward(retain_graph=True)
    torch.optim.SGD(layer.module.parameters(), lr=0.1).step()
    await assert_awaiting_raises(ModifiedError, "computed again", loss.backward())


# -------------------------------------------------------------------- modes of torch, which belong to a thread


class Seen(nn.Module):  # type: ignore[misc,name-defined]
    """Notes the modes in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.modes = nn.Linear(4, 4), []

    def forward(self, x: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.modes.append((dtype, torch.is_inference_mode_enabled(), torch.is_grad_enabled(), threading.current_thread().name))
        return self.linear(x).float()


MODES = {
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.float16), (torch.float16, False, True)),
    "no_grad": (torch.no_grad, (None, False, False)),
    "inference_mode": (torch.inference_mode, (None, True, False)),
    "none": (contextlib.nullcontext, (None, False, True)),
}


@pytest.mark.parametrize("name", MODES)
async def test_offloaded_work_runs_in_the_modes_of_its_call(name: str) -> None:
    module = Seen()
    layer, (enter, expected) = interop.wrap(module), MODES[name]
    with enter():
        y = await ag.offload(layer, ag.ones((2, 4)))
        begun = ag.offload(layer, ag.ones((2, 4)))
    await begun  # the modes are those of the call
    assert [modes[:3] for modes in module.modes] == [expected] * 2 and threading.current_thread().name not in {modes[3] for modes in module.modes}
    assert y.requires_grad == expected[2]
    with torch.no_grad():
        begun = ag.offload(layer, ag.ones((2, 4)))
    with enter():
        assert not (await begun).requires_grad
    await ag.offload(layer, ag.ones((2, 4)))
    assert module.modes[-1][:3] == MODES["none"][1]


@pytest.mark.parametrize("where", ["executor", "loop"])
async def test_stages_run_in_the_modes_of_the_step(where: Any) -> None:
    stages = [Seen(), Seen()]
    placed = [pipeline.Stage(interop.wrap(stage), where=where) for stage in stages]
    pipe = pipeline.Pipeline(placed, pipeline.make_schedule("1F1B", 2, 4), loss_fn=ag.nn.functional.mse_loss)
    with torch.autocast("cpu", dtype=torch.float16):
        await pipe.step(ag.asarray(draw(8, 4)), ag.asarray(draw(8, 4, at=1)))
    assert {modes[:3] for stage in stages for modes in stage.modes} == {(torch.float16, False, True)}
    for stage in stages:
        stage.modes.clear()
    with torch.inference_mode():
        await pipe.eval(ag.asarray(draw(8, 4)))
    assert {modes[:3] for stage in stages for modes in stage.modes} == {(None, True, False)}


@pytest.mark.parametrize("how", ["checkpoint", "hooks"])
async def test_a_recomputation_runs_in_the_modes_of_the_forward(how: str) -> None:
    module = Seen()
    layer = interop.wrap(module)
    with torch.autocast("cpu", dtype=torch.float16):
        if how == "checkpoint":
            y = ag.checkpoint(lambda x: layer(x).sin(), ag.ones((2, 4)))
        else:
            with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                y = layer(ag.ones((2, 4)))
    await y.sum().backward()
    assert len(module.modes) >= 2 and {modes[:3] for modes in module.modes} == {(torch.float16, False, True)}


# -------------------------------------------------------------------- two halves


class Products(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*args, **(kwargs or {}))


async def halves(layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """The gradient of the input, and how many products of matrices each half makes; gradients of parameters accumulate."""
    counts = []
    engine = torch.autograd.graph._engine_run_backward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Products() as products:
            result = engine(*args, **kwargs)
        counts[-1] += products.count
        return result

    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", counted)
    x = ag.asarray(x).requires_grad_()
    y = layer(x)
    weights = list(layer.parameters())
    counts.append(0)
    (dx,), groups = await pipeline.stage_backward_input([y], [ag.ones(y.shape)], [x], weights)
    assert all(p.grad is None for p in weights)
    counts.append(0)
    await pipeline.stage_backward_weight(weights, groups)
    return dx, counts


@pytest.mark.parametrize("slow", [False, True], ids=["on the loop", "on the executor"])
async def test_the_halves_of_a_backward_make_no_product_twice(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if slow:
        monkeypatch.setattr("aiograd.interop.torch.node.backward_ns", lambda elapsed: 10**9)
    module, layer = pair_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    x = draw(5, 4)
    given = torch.from_numpy(x.copy()).requires_grad_()
    module(given).sum().backward()
    dx, counts = await halves(layer, x, monkeypatch)
    assert counts == [3, 3]
    same(dx, given.grad)
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        same(ours.grad, other.grad)


class Twice(nn.Module):  # type: ignore[misc,name-defined]
    """A weight on one path twice, once by way of a function of it, and a bias that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Any) -> Any:
        scaled = self.weight.tanh()
        return (x @ scaled).relu() @ scaled + self.bias.exp() + x @ self.weight


@pytest.mark.parametrize(
    "make",
    [
        Twice,
        lambda: nn.LSTM(4, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 2)),
        lambda: functional(lambda x: (x @ x.mT @ x).square()),
    ],
    ids=["twice", "lstm", "transformer", "conv", "no parameters"],
)
async def test_halves_have_the_gradients_of_the_whole(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = pair_of(lambda: nn.Sequential(make(), First()))
    x = draw(5, 6, 4)
    given = torch.from_numpy(x.copy()).requires_grad_()
    module(given).sum().backward()
    dx, _ = await halves(layer, x, monkeypatch)
    assert_close(dx.numpy(), given.grad.numpy())
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())


class Hooked(nn.Module):  # type: ignore[misc,name-defined]
    """Hooks that change gradients: of parameters, of activations, of what is computed from parameters, and before and after a node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3))
        self.calls: list[str] = []
        for name, parameter in self.named_parameters():
            parameter.register_hook(self.hook(name))

    def hook(self, name: str) -> Any:
        def changed(*grads: Any) -> Any:
            self.calls.append(name)
            grad = grads[0]
            return tuple(each * each.abs() for each in grad) if isinstance(grad, tuple) else grad * grad.abs()  # not linear: not to be split

        return changed

    def forward(self, x: Any) -> Any:
        gate = self.scale.tanh()
        if gate.requires_grad:
            gate.register_hook(self.hook("gate"))
        y = self.norm(self.first(x)) * gate
        if y.requires_grad:
            y.register_hook(self.hook("activation"))
        z = Product.apply(self.last(y).tanh(), self.shift + gate[:3])
        if z.requires_grad:
            z.grad_fn.register_prehook(self.hook("before the product"))
        return z * self.shift


class Product(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """A function in Python, which makes its gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return g * y, (g * x).sum(0)


class OnlyRows(Hooked):
    """Hooks without a function that makes its gradients at once."""

    def forward(self, x: Any) -> Any:
        gate = self.scale.tanh()
        if gate.requires_grad:
            gate.register_hook(self.hook("gate"))
        y = self.norm(self.first(x)) * gate
        if y.requires_grad:
            y.register_hook(self.hook("activation"))
        z = self.last(y).tanh()
        if z.requires_grad:
            z.grad_fn.register_prehook(self.hook("before tanh"))
        return z * self.shift + self.shift * gate[:3]


@pytest.mark.parametrize("make", [Hooked, OnlyRows])
async def test_hooks_of_torch_run_once_in_halves_on_what_they_get_in_the_whole(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make()
    twin = make()
    twin.load_state_dict(module.state_dict())
    layer = interop.wrap(twin)
    x = draw(5, 4)
    given = torch.from_numpy(x.copy()).requires_grad_()
    module(given).sum().backward()
    dx, _ = await halves(layer, x, monkeypatch)
    assert sorted(twin.calls) == sorted(module.calls)
    assert_close(dx.numpy(), given.grad.numpy())
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())


class First(nn.Module):  # type: ignore[misc,name-defined]
    """The first of several results."""

    def forward(self, x: Any) -> Any:
        return x[0] if isinstance(x, tuple) else x


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
async def test_wrapped_stages_train_under_any_schedule_as_in_torch(schedule: str) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3)]
    twins = [copy.deepcopy(stage) for stage in stages]
    calls = []
    for stage in (*stages, *twins):
        for parameter in stage.parameters():
            parameter.register_hook(lambda grad: [calls.append(1), grad * 2][1])
    x, y = draw(8, 6), draw(8, 6, at=1)
    pipe = pipeline.Pipeline([interop.wrap(stage) for stage in stages], pipeline.make_schedule(schedule, 3, 4), loss_fn=ag.nn.functional.mse_loss)
    losses = await pipe.step(ag.asarray(x), ag.asarray(y))
    expected = []
    for part in range(4):
        z = torch.from_numpy(x[2 * part : 2 * part + 2])
        for twin in twins:
            z = twin(z)
        loss = nn.functional.mse_loss(z, torch.from_numpy(y[2 * part : 2 * part + 2]))
        (loss / 4).backward()
        expected.append(loss.item())
    assert len(calls) == 2 * 4 * 3 * 4  # in both models, by microbatch, stage and parameter
    np.testing.assert_allclose([loss.item() for loss in losses], expected, rtol=1e-6)
    for stage, twin in zip(stages, twins, strict=True):
        for ours, other in zip(stage.parameters(), twin.parameters(), strict=True):
            assert_close(ours.grad.numpy(), other.grad.numpy())


async def test_masks_in_a_pipeline_are_the_same_whatever_the_schedule() -> None:
    found = []
    for schedule in ("GPipe", "ZB-H1"):
        torch.manual_seed(0)
        ag.seed(5)
        stages = [interop.wrap(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))) for _ in range(2)]
        torch.manual_seed(len(found))  # torch's own state does not matter
        pipe = pipeline.Pipeline(stages, pipeline.make_schedule(schedule, 2, 4), loss_fn=ag.nn.functional.mse_loss)
        await pipe.step(ag.asarray(draw(8, 6)), ag.asarray(draw(8, 6, at=1)))
        found.append([p.grad.numpy().copy() for stage in stages for p in stage.parameters()])
    for some, others in zip(*found, strict=True):
        np.testing.assert_array_equal(some, others)


# -------------------------------------------------------------------- compiled


async def test_a_compiled_function_calls_it() -> None:
    layer = interop.wrap(net())

    @ag.compile
    def f(x: Any) -> Any:
        return (layer(x * 2.0) ** 2).sum()

    for _ in range(3):
        layer.zero_grad()
        await f(ag.asarray(draw(5, 4))).backward()
        found = [p.grad.numpy().copy() for p in layer.parameters()]
    layer.zero_grad()
    await (layer(ag.asarray(draw(5, 4)) * 2.0) ** 2).sum().backward()
    for ours, wanted in zip(layer.parameters(), found, strict=True):
        np.testing.assert_array_equal(ours.grad.numpy(), wanted)


# -------------------------------------------------------------------- bad input


def in_place(x: Any) -> Any:
    x.mul_(2)
    return x + 1


class Writing(torch.nn.Module):  # type: ignore[misc]
    """A layer with a buffer, and something that writes."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.write = write

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.write(self, y)
        return self.layer(y) * 1.0


def add_with_graph(module: Any, y: Any) -> None:
    module.total.add_(y.sum(0))


def keep_with_graph(module: Any, y: Any) -> None:
    module.total = y.sum(0)


def scale_parameter(module: Any, y: Any) -> None:
    module.layer.weight.mul_(0.5)


def add_detached(module: Any, y: Any) -> None:
    module.total.add_(y.detach().sum(0))


@pytest.mark.parametrize("write", [add_with_graph, keep_with_graph])
async def test_a_module_that_keeps_its_graph_in_a_buffer_is_refused(write: Any) -> None:
    """Its next call would use the graph of this one, and gradients of this one's input would be lost."""
    layer = interop.wrap(Writing(write))
    assert_raises(GraphError, "Writing has put a tensor with a graph into its buffer 'total'.*detach", lambda: layer(ag.ones(2, 3)))
    layer.module.total.detach_()
    with ag.no_grad():
        assert layer(ag.ones(2, 3)).shape == (2, 3)
    layer.module.write = add_detached
    await layer(ag.ones(2, 3)).sum().backward()
    assert layer.module.layer.weight.grad is not None and layer.module.total.grad_fn is None


@pytest.mark.parametrize("needs", [False, True])
def test_a_module_that_writes_to_its_parameters_is_told_so(needs: bool) -> None:
    layer = interop.wrap(Writing(scale_parameter))
    x = ag.ones(2, 3, requires_grad=needs)
    assert_raises(InPlaceError, "a parameter that needs a gradient" if needs else "writes to a parameter in place.*no_grad", lambda: layer(x))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's, about torch
@pytest.mark.parametrize("make", [ag.tensor, ag.asarray])
def test_torch_tensors_that_numpy_cannot_read(make: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    for data in (leaf, leaf * 2, [leaf, leaf], [torch.ones(3), leaf], torch.nn.Parameter(torch.ones(3))):
        assert_raises(GraphError, r"making a tensor of a torch\..*requires grad.*detach\(\)", make, data)
    assert_raises(GraphError, "requires grad", lambda: ag.add(ag.ones(2, 3), [leaf, leaf]))
    for data in (torch.ones(3, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.ones(3, device="meta"), [torch.ones(3, dtype=torch.bfloat16)]):
        assert_raises(ArgumentTypeError, "making a tensor of a torch.Tensor: expected an array of numbers that numpy can read", make, data)
    assert make(leaf.detach()).tolist() == [1.0, 1.0, 1.0] and make([leaf.detach()]).shape == (1, 3)


@pytest.mark.parametrize("needs", [False, True])
def test_a_module_that_modifies_its_input_is_refused(needs: bool) -> None:
    x = ag.ones(3)
    if needs:
        x.requires_grad_()
    assert_raises(InPlaceError, r"modifies its input in place.*clone", lambda: interop.wrap(functional(in_place))(x))
    assert x.tolist() == ([1, 1, 1] if needs else [2, 2, 2]) and x.version == (0 if needs else 1)


@pytest.mark.parametrize("view", [lambda x: x[:1], lambda x: x.view(-1), lambda x: {"a": x.detach()}])
def test_a_module_that_returns_a_view_is_refused(view: Any) -> None:
    assert_raises(InPlaceError, r"returns a view of its input.*clone", lambda: interop.wrap(functional(view))(ag.ones((2, 3))))
    x = ag.ones(3).requires_grad_()
    assert interop.wrap(nn.Identity())(x) is x


def test_devices_that_do_not_fit() -> None:
    assert_raises(DeviceError, "device meta", lambda: interop.wrap(nn.Linear(3, 3, device="meta")))
    assert_raises(DeviceError, "device meta", lambda: interop.wrap(functional(lambda x: x.to("meta")))(ag.ones(3)))
    assert_raises(DeviceMismatchError, r"cpu.*meta", lambda: interop.wrap(nn.Linear(3, 3))(torch.ones(3, device="meta")))


def test_torch_tensors_that_require_grad_are_refused() -> None:
    tensor = torch.ones(3, requires_grad=True)
    for call in (interop.from_torch, interop.wrap(nn.Tanh())):
        assert_raises(GraphError, r"gradients would stop here.*detach", call, tensor)
    assert_raises(GraphError, "detach", lambda: interop.to_torch(ag.ones(3).requires_grad_()))
    assert interop.wrap(nn.Tanh())(tensor.detach()).shape == (3,)


def test_what_is_no_module_or_tensor() -> None:
    assert_raises(ArgumentTypeError, "expected a torch.nn.Module, found Linear", lambda: interop.wrap(ag.nn.Linear(2, 2)))
    assert_raises(ArgumentError, "keep_grad='none'", lambda: interop.wrap(net(), keep_grad="none"))
    assert_raises(ArgumentError, "no shape yet", lambda: interop.wrap(nn.LazyLinear(3)))
    assert_raises(ArgumentTypeError, "bfloat16", lambda: interop.wrap(nn.Linear(3, 3).bfloat16()))
    assert_raises(ArgumentTypeError, "expected a Tensor", lambda: interop.to_torch(np.ones(3)))
    assert_raises(ArgumentTypeError, r"expected a torch\.Tensor", lambda: interop.from_torch(np.ones(3)))
    assert_raises(ValueError, "of the module", lambda: interop.wrap(functional(raises))(ag.ones(3)))


@pytest.mark.parametrize("saves", [False, True])
async def test_functional_call_of_a_wrapped_module(saves: bool) -> None:
    """Other Tensors in the place of parameters, with gradients to where they come from."""
    module, layer = pair_of(net)
    x = draw(5, 4)
    outer = ag.nn.Sequential(layer, ag.nn.Identity())
    scale = ag.tensor(2.0, requires_grad=True)
    given = {path: parameter.detach() * scale for path, parameter in outer.named_parameters() if path.endswith("weight")}
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if saves else contextlib.nullcontext():
        result = ag.functional_call(outer, given, (ag.asarray(x),))
    await result.sum().backward()

    factor = torch.tensor(2.0, requires_grad=True)
    theirs = {path: p.detach() * factor for path, p in module.named_parameters() if path.endswith("weight")}
    expected = torch.func.functional_call(module, theirs, (torch.from_numpy(x),))
    expected.sum().backward()
    same(result, expected)
    assert_close(scale.grad.numpy(), factor.grad.numpy(), 100)
    assert [path for path, p in layer.named_parameters() if p.grad is None] == [path for path, p in module.named_parameters() if p.grad is None]
    same(layer(ag.asarray(x)), module(torch.from_numpy(x)))  # the module is as it was

    assert_raises(ArgumentError, "shape", lambda: ag.functional_call(outer, {next(iter(given)): ag.ones(7)}, (ag.asarray(x),)))


async def test_a_wrapped_module_within_functional_call_of_torch() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.wrapped = [interop.wrap(self.linear)]

        def forward(self, x: Any) -> Any:
            return self.wrapped[0](x)

    module = Calls()
    x = draw(5, 4)
    plain = {path: p.detach() * 2 for path, p in module.named_parameters()}
    same(torch.func.functional_call(module, plain, (ag.asarray(x),)), torch.func.functional_call(module.linear, {
        path.removeprefix("linear."): p for path, p in plain.items()
    }, (torch.from_numpy(x),)))
    with pytest.raises(GraphError, match="functional_call: the tensor in the place of parameter weight requires grad"):
        torch.func.functional_call(module, {path: p * 2 for path, p in module.named_parameters()}, (ag.asarray(x),))
    same(module.wrapped[0](ag.asarray(x)), module.linear(torch.from_numpy(x)))


def raises(x: Any) -> Any:
    raise ValueError("an error of the module")


# -------------------------------------------------------------------- values without axes


class Scaled(nn.Module):  # type: ignore[misc,name-defined]
    """A loss, times a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return (x * x).mean() * self.scale


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
async def test_a_module_returns_its_loss_and_trains_a_scalar_parameter(kind: str) -> None:
    module, layer = pair_of(Scaled)
    x, y = torch.ones(3, requires_grad=True), ag.ones(3).requires_grad_()
    theirs, ours = getattr(torch.optim, kind)(module.parameters(), lr=0.1), getattr(ag.optim, kind)(layer.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        ours.zero_grad()
        for _ in range(2):  # the second accumulates
            (module(x) / 4).backward()
            await (layer(y) / 4).backward()
        theirs.step()
        ours.step()
    assert_close(layer.module.scale.detach().numpy(), module.scale.detach().numpy())
    assert_close(y.grad.numpy(), x.grad.numpy())


async def test_numbers_without_axes_are_arguments_and_seeds() -> None:
    layer = interop.wrap(Scaled())
    x = ag.tensor(3.0, requires_grad=True)
    (first,) = await ag.grad(layer(x * 2) / 4, [x], create_graph=True)  # 2 (2 x)^2 / 4
    assert first.item() == 12
    await (first / 2).backward()
    assert x.grad.item() == 2 and layer.module.scale.grad == 3
    number = ag.tensor(2.0) * 3
    shared = interop.to_torch(number)
    shared.add_(1)
    number += 1
    assert number.item() == shared.item() == 8 and number.version == shared._version == 2


@pytest.mark.parametrize("kind", ["array", "read-only array", "read-only Tensor", "keyword"])
def test_a_module_that_modifies_a_plain_array_is_refused(kind: str) -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = not kind.startswith("read-only")
    layer = interop.wrap(functional(in_place))
    if kind == "keyword":
        layer.module.forward = lambda *, x: in_place(x)
        assert_raises(InPlaceError, r"modifies its input in place.*clone", lambda: layer(x=array))
        return
    assert_raises(InPlaceError, r"modifies its input in place.*clone", lambda: layer(ag.asarray(array) if "Tensor" in kind else array))
    assert array.tolist() == ([2, 2, 2] if kind == "array" else [1, 1, 1])


def test_a_module_that_returns_a_view_of_a_plain_array_is_refused() -> None:
    array = np.ones((2, 3), np.float32)
    assert_raises(InPlaceError, r"returns a view of its input.*clone", lambda: interop.wrap(functional(lambda x: x[1:]))(array))
    assert interop.wrap(nn.Identity())(array).tolist() == array.tolist()
