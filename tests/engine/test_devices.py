"""The device seam, proven with the toy device: the same graphs on the host, on a device and across both, to the bit; slow and broken devices."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import DeviceError, DeviceMismatchError, GradientError, NaNGradientError, NotReadyError
from aiograd.ops import ROWS
from aiograd.ops import nn as rows
from aiograd.ops.op import Fused
from aiograd.testing import simulated_run
from tests.cuda.programs import DOMAINS, differentiate, wave
from tests.support import assert_awaiting_raises, assert_raises, bits, cancel, custom_function
from tests.sweeps import swept
from tests.tolerance import assert_close
from tests.toy_device import ToyArray, ToyDevice, ToyError


@pytest.fixture
def plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs the plain rules too: fused kernels agree with them to a tolerance only."""
    for op in ROWS.values():
        if op.fused is not None:
            monkeypatch.setattr(op, "fused", None)
            monkeypatch.setattr(op, "lean", {})
            monkeypatch.setattr(op, "recorder", None)


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    with ToyDevice() as device:
        yield device


async def turns_until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until something has happened."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never happened")


# -------------------------------------------------------------------- every row, every rule


async def differentiated(name: str, variety: int, device: str) -> list[Any]:
    """Bits of a row's outputs, gradients and second gradients on a device."""
    tensors = await differentiate(name, variety, device)
    assert {tensor.device for tensor in tensors if tensor is not None} == {device}
    return bits(*tensors)


@pytest.mark.one_loop
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", swept(sorted(DOMAINS), keep=80))
async def test_every_row_gives_the_same_bits_on_a_device(name: str, plain_rows: None, toy: ToyDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        expected = await differentiated(name, variety, "cpu")
        found = await differentiated(name, variety, toy.name)
        assert found == expected, (name, variety)


# -------------------------------------------------------------------- graphs across devices

Stage = Callable[..., Any]
TARGET = np.array([0, 2, 1, 2])


def graph(*stages: Stage, x: tuple[int, ...], **shapes: tuple[int, ...]) -> tuple[dict[str, tuple[int, ...]], tuple[Stage, ...]]:
    return {"x": x, **shapes}, stages


#: each stage maps what came before and the parameters to what comes next
GRAPHS = {
    "elementwise": graph(
        lambda h, p: np.tanh(h * p["a"] + 1.5),
        lambda h, p: np.exp(-h) / (1 + h * h),
        lambda h, p: np.maximum(h, p["a"]) ** 2,
        lambda h, p: np.sqrt(h + 3).sum(),
        x=(3, 4), a=(4,),
    ),
    "matmul": graph(
        lambda h, p: h @ p["a"],
        lambda h, p: p["b"] @ h,
        lambda h, p: np.einsum("ij,kj->ik", h, h),
        lambda h, p: h.sum(),
        x=(3, 4), a=(4, 5), b=(2, 3),
    ),
    "softmax": graph(
        lambda h, p: rows.softmax(h + p["a"], axis=1),
        lambda h, p: rows.log_softmax(h, axis=0),
        lambda h, p: h * p["a"],
        lambda h, p: h.mean(),
        x=(4, 3), a=(3,),
    ),
    "layer_norm": graph(
        lambda h, p: rows.layer_norm(h, p["w"], p["b"]),
        lambda h, p: h.relu(),
        lambda h, p: rows.layer_norm(h, p["w"], p["b"]),
        lambda h, p: (h * h).mean(),
        x=(4, 6), w=(6,), b=(6,),
    ),
    "conv2d": graph(
        lambda h, p: rows.conv2d(h, p["w"], p["b"], padding=1),
        lambda h, p: h.relu(),
        lambda h, p: rows.conv2d(h, p["v"], stride=2),
        lambda h, p: h.sum(),
        x=(2, 2, 5, 5), w=(3, 2, 3, 3), b=(3,), v=(2, 3, 2, 2),
    ),
    "cross_entropy": graph(
        lambda h, p: h @ p["w"],
        lambda h, p: h + p["b"],
        lambda h, p: h * 0.5,
        lambda h, p: rows.cross_entropy(h, TARGET, label_smoothing=0.1),
        x=(4, 5), w=(5, 3), b=(3,),
    ),
    "indexing": graph(
        lambda h, p: h[1:, ::2],
        lambda h, p: h[np.array([0, 2, 2, 1])] * p["a"],
        lambda h, p: np.concatenate([h, h[::-1]], axis=0),
        lambda h, p: h[h.shape[0] // 2].sum() + h[0, 0],
        x=(4, 6), a=(3,),
    ),
    "mlp": graph(
        lambda h, p: np.tanh(rows.linear(h, p["w1"], p["b1"])),
        lambda h, p: h + np.tanh(h @ p["r"]),
        lambda h, p: rows.linear(h, p["w2"], p["b2"]),
        lambda h, p: rows.cross_entropy(h, TARGET),
        x=(4, 5), w1=(6, 5), b1=(6,), r=(6, 6), w2=(3, 6), b2=(3,),
    ),
}
PLACES = {
    "host": ("cpu",) * 4,
    "device": ("toy:0",) * 4,
    "mixed": ("cpu", "toy:0", "cpu", "toy:0"),
    "mixed the other way": ("toy:0", "cpu", "toy:0", "cpu"),
    "two devices": ("toy:0", "toy:1", "cpu", "toy:1"),
}


def leaves_of(name: str, device: str = "cpu") -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {key: ag.tensor(rng.normal(size=shape).astype(np.float32), device=device, requires_grad=True) for key, shape in GRAPHS[name][0].items()}


async def forward(name: str, leaves: dict[str, Any], places: tuple[str, ...]) -> Any:
    """Run the graph's stages, each on its device, with the parameters moved there."""
    h = leaves["x"]
    for stage, place in zip(GRAPHS[name][1], places, strict=True):
        await h
        h = stage(h.to(place), {key: leaf.to(place) for key, leaf in leaves.items() if key != "x"})
    return await h


async def outcome(name: str, places: tuple[str, ...], device: str = "cpu") -> list[Any]:
    leaves = leaves_of(name, device)
    loss = await forward(name, leaves, places)
    await loss.backward()
    assert all(leaf.grad is None or leaf.grad.device == leaf.device for leaf in leaves.values())
    return bits(loss, *(leaf.grad for leaf in leaves.values()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", GRAPHS)
async def test_a_graph_gives_the_same_bits_wherever_it_runs(name: str, place: str, plain_rows: None, toy: ToyDevice) -> None:
    with ToyDevice("toy:1"):
        assert await outcome(name, PLACES[place]) == await outcome(name, PLACES["host"])


@pytest.mark.parametrize("name", GRAPHS)
async def test_leaves_on_the_device_get_their_gradients_there(name: str, plain_rows: None, toy: ToyDevice) -> None:
    assert await outcome(name, PLACES["device"], "toy:0") == await outcome(name, PLACES["host"])


async def test_fused_kernels_of_the_host_agree_with_the_device(toy: ToyDevice) -> None:
    for name in ("softmax", "layer_norm", "cross_entropy", "mlp"):
        host, device = leaves_of(name), leaves_of(name, "toy:0")
        for leaves, place in ((host, "host"), (device, "device")):
            await (await forward(name, leaves, PLACES[place])).backward()
        for key in host:
            np.testing.assert_allclose(host[key].grad.numpy(), device[key].grad.numpy(), rtol=1e-5, atol=1e-6)


async def test_training_on_the_device_follows_training_on_the_host_to_the_bit(plain_rows: None, toy: ToyDevice) -> None:
    trained = []
    for device, place in (("cpu", "host"), ("toy:0", "device")):
        leaves = leaves_of("mlp", device)
        momentum = {key: np.zeros_like(leaf.detach()) for key, leaf in leaves.items()}
        for _ in range(5):
            loss = await forward("mlp", leaves, PLACES[place])
            await loss.backward()
            with ag.no_grad():
                for key, leaf in leaves.items():
                    momentum[key] *= 0.9
                    momentum[key] += leaf.grad
                    leaf -= 0.1 * momentum[key]
                    leaf.grad = None
        assert all(leaf.device == device and leaf.version == 5 for leaf in leaves.values())
        for leaf in leaves.values():
            await leaf
        trained.append(bits(loss, *leaves.values()))
    assert trained[0] == trained[1]


async def test_second_derivatives_accumulate_on_the_device(plain_rows: None, toy: ToyDevice) -> None:
    found = []
    for device, places in (("cpu", PLACES["host"]), ("toy:0", PLACES["device"]), ("cpu", PLACES["mixed"])):
        leaves = leaves_of("elementwise", device)
        loss = await forward("elementwise", leaves, places)
        first = await ag.grad(loss, list(leaves.values()), create_graph=True)
        await (first[0].sum() + (first[1] ** 2).sum()).backward()
        found.append(bits(*first, *(leaf.grad for leaf in leaves.values())))
    assert found[0] == found[1]
    for host, mixed in zip(found[0], found[2], strict=True):  # sums meet at other nodes there, so they associate differently
        assert_close(np.frombuffer(mixed[2], np.float32), np.frombuffer(host[2], np.float32))


async def test_modules_and_optimizers_train_on_the_device(toy: ToyDevice) -> None:
    trained = []
    for device in ("cpu", "toy:0"):
        rng = np.random.default_rng(0)
        model = ag.nn.Sequential(ag.nn.Linear(4, 8), ag.nn.LayerNorm(8), ag.nn.GELU(), ag.nn.Linear(8, 3))
        with ag.no_grad():
            for parameter in model.parameters():
                parameter.copy_(ag.tensor(rng.normal(size=parameter.shape).astype(np.float32)))
        model.to(device)
        optimizers = (ag.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9), ag.optim.AdamW(list(model.parameters()), lr=0.01))
        x = ag.tensor(rng.normal(size=(4, 4)).astype(np.float32), device=device)
        for optimizer in optimizers * 2:
            await ag.nn.functional.cross_entropy(model(x), TARGET).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(list(model.parameters()))
    for host, device in zip(*trained, strict=True):
        assert device.device == "toy:0"
        np.testing.assert_allclose((await device).detach().numpy(), host.detach().numpy(), rtol=1e-4, atol=1e-5)


async def test_a_device_brings_fused_kernels_of_its_own() -> None:
    kept: list[Any] = []

    def forward(x: Any, axis: int) -> tuple[Any, Any]:
        e = np.exp(x)
        return e / np.sum(e, axis=axis, keepdims=True), e

    def rule(g: Any, out: Any, powers: Any, axis: int) -> Any:
        kept.append(powers)
        return out * (g - np.sum(g * out, axis=axis, keepdims=True))

    async def gradients(device: str) -> list[Any]:
        x = ag.tensor(np.array([[0.1, 0.7, -0.4], [1.0, 0.0, 0.3]]), device=device, requires_grad=True)
        y = rows.softmax(x)
        first = await ag.grad((y * y).sum(), x, retain_graph=True)
        again = await ag.grad((y * y).sum(), x, create_graph=True)
        second = await ag.grad((again[0] ** 2).sum(), x)
        return [tensor.detach().numpy() for tensor in (*first, *again, *second)]

    with ToyDevice(fused={"softmax": Fused(forward, ("powers",), {"x": rule})}):
        found = await gradients("toy:0")
        assert len(kept) == 2, "it ran in the two of the three passes that recorded no graph"
        assert all(isinstance(powers, ToyArray) and powers.shape == (2, 3) for powers in kept)
        for mine, host in zip(found, await gradients("cpu"), strict=True):
            np.testing.assert_allclose(mine, host, rtol=1e-12)
    with ToyDevice(fused={"softmax": Fused(forward, ("powers",), {"x": lambda g, power: g})}):
        await assert_awaiting_raises(TypeError, r"softmax.*names \['power'\]", gradients("toy:0"))


# -------------------------------------------------------------------- where things run


class Whereabouts(ag.Function):
    """Multiplies by 2 and notes the thread of its backward."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        Whereabouts.seen.append(threading.current_thread().name)
        return g * 2


async def test_rules_of_device_nodes_run_on_the_devices_thread(toy: ToyDevice) -> None:
    Whereabouts.seen.clear()
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    hooked: list[str] = []
    y = Whereabouts.apply(x)
    y.register_hook(lambda g: hooked.append(threading.current_thread().name))
    await (y * y).sum().backward()
    assert Whereabouts.seen == ["aiograd-toy:0"]
    assert toy.statistics().threads == ("aiograd-toy:0",)
    assert hooked == [threading.current_thread().name], "hooks run on the loop"
    assert x.grad.numpy().tolist() == [8.0, 16.0]


async def test_a_host_node_made_ready_by_a_device_runs_off_the_devices_thread(toy: ToyDevice) -> None:
    Whereabouts.seen.clear()
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    await Whereabouts.apply(x).to("toy:0").exp().sum().backward()
    assert len(Whereabouts.seen) == 1 and "toy" not in Whereabouts.seen[0]


async def test_the_loop_turns_while_the_device_is_busy(toy: ToyDevice) -> None:
    leaves = leaves_of("mlp", "toy:0")
    loss = await forward("mlp", leaves, PLACES["device"])
    toy.hold()
    backward = asyncio.ensure_future(loss.backward())
    for _ in range(200):
        await asyncio.sleep(0)
    assert not backward.done()
    kernels = toy.statistics().kernels
    host = ag.tensor([2.0], requires_grad=True)
    await (host * host).sum().backward()  # another pass is not held up
    assert host.grad.item() == 4.0
    assert toy.statistics().kernels == kernels
    toy.release()
    await backward
    assert all(leaf.grad is not None for key, leaf in leaves.items())


async def test_devices_work_at_the_same_time(toy: ToyDevice) -> None:
    with ToyDevice("toy:1") as other:
        a = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
        b = ag.tensor([3.0, 4.0], device="toy:1", requires_grad=True)
        seen: list[str] = []
        a.register_post_accumulate_grad_hook(lambda leaf: seen.append("a"), eager=True)
        b.register_post_accumulate_grad_hook(lambda leaf: seen.append("b"), eager=True)
        y, z = a.exp().sum(), b.exp().sum()
        await y
        await z
        loss = y.to("cpu") + z.to("cpu")
        other.hold()
        backward = asyncio.ensure_future(loss.backward())
        await turns_until(lambda: bool(seen))
        assert seen == ["a"] and not backward.done()
        other.release()
        await backward
        assert seen == ["a", "b"]


@pytest.mark.parametrize("place", ["device", "mixed", "two devices"])
@pytest.mark.parametrize("name", GRAPHS)
async def test_a_device_that_launches_ahead_gives_the_same_bits(name: str, place: str, plain_rows: None) -> None:
    with ToyDevice(launches_ahead=True) as toy, ToyDevice("toy:1", launches_ahead=True):
        assert await outcome(name, PLACES[place]) == await outcome(name, PLACES["host"])
        assert toy.statistics().threads == ("aiograd-toy:0",)
        assert await outcome(name, PLACES["device"], "toy:0") == await outcome(name, PLACES["host"])


async def test_the_loop_runs_ahead_of_a_device_that_allows_it() -> None:
    with ToyDevice(launches_ahead=True) as toy:
        leaves = leaves_of("mlp", "toy:0")
        Whereabouts.seen.clear()
        loss = await Whereabouts.apply(await forward("mlp", leaves, PLACES["device"]))
        ran: list[str] = []
        for leaf in leaves.values():
            leaf.register_hook(lambda g: ran.append(repr(g)))
        toy.hold()
        backward = asyncio.ensure_future(loss.backward())
        toy.release(1 + 2)  # the seed, the rule of the custom function (whose cost nobody knows, so it went by submit) and a multiplication
        await turns_until(lambda: len(ran) == len(leaves))
        assert all("pending" in gradient for gradient in ran), "the last node has been run"
        assert not backward.done() and toy.statistics().kernels < 30
        toy.release()
        await backward
        assert Whereabouts.seen == ["aiograd-toy:0"]
        assert all(leaf.grad.numpy() is not None for leaf in leaves.values())


async def test_contextvars_reach_rules_on_a_device(toy: ToyDevice) -> None:
    seen: list[tuple[int, bool]] = []

    @custom_function()
    def Look(ctx: Any, g: Any) -> Any:
        seen.append((ag.graph.current_graph_task_id(), ag.is_grad_enabled()))
        return g

    x = ag.tensor([1.0], device="toy:0", requires_grad=True)
    await Look.apply(x).sum().backward()
    assert seen[0][0] >= 0 and seen[0][1] is False


# -------------------------------------------------------------------- values that are not there yet


async def test_reading_pending_data_is_refused_inside_a_loop(toy: ToyDevice) -> None:
    x = ag.tensor([4.0], device="toy:0", requires_grad=True)
    with toy.held():
        y = x.sqrt()
        assert "pending" in repr(y)
        for read in (y.item, y.numpy, y.tolist, lambda: bool(y), lambda: float(y), lambda: y.to("cpu"), lambda: f"{y:.1f}"):
            assert_raises(NotReadyError, "await", read)
        assert y.shape == (1,) and y.dtype == np.float32 and y.requires_grad
    assert (await y) is y
    assert y.item() == 2.0 and bool(y) and y.numpy().tolist() == [2.0]


def test_reading_pending_data_waits_outside_a_loop(toy: ToyDevice) -> None:
    x = ag.tensor([4.0], device="toy:0")
    toy.hold()
    y = x.sqrt()
    threading.Timer(0.0, toy.release).start()
    assert y.item() == 2.0
    assert x.sqrt().to("cpu").numpy().tolist() == [2.0]


async def test_cancelling_a_wait_cancels_nothing_else(toy: ToyDevice) -> None:
    with toy.held():
        y = ag.tensor([4.0], device="toy:0").sqrt()

        async def wait() -> None:
            await y

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        await cancel(task)
    await y
    assert y.item() == 2.0


async def test_results_of_a_pass_are_there_when_it_is_over(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    y = x * 3 + x * 4  # the sum of the two is made by the input buffer
    (g,) = await ag.grad(y.sum(), x)
    assert g.numpy().tolist() == [7.0, 7.0]
    y = x * 3 + x * 4
    await y.sum().backward()
    assert x.grad.numpy().tolist() == [7.0, 7.0]


# -------------------------------------------------------------------- mixing devices


async def test_tensors_of_two_devices_do_not_mix(toy: ToyDevice) -> None:
    host = ag.tensor([1.0, 2.0], requires_grad=True)
    here = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    with ToyDevice("toy:1"):
        there = ag.tensor([1.0, 2.0], device="toy:1")
        joined = lambda: np.concatenate([host, here])  # noqa: E731
        mixes = (lambda: host + here, lambda: here * there, lambda: here @ host, joined, lambda: rows.linear(here, host))
        for mix in mixes:
            assert_raises(DeviceMismatchError, r"toy:0.*\.to\(\)", mix)
    assert_raises(DeviceMismatchError, "cpu", lambda: (here * 2).backward(host.detach()))
    with pytest.raises(DeviceMismatchError, match=r"\.to\(\)"):
        here.grad = ag.tensor([1.0, 1.0])
    assert_raises(DeviceError, "known are", host.to, "tpu:0")


async def test_arrays_and_numbers_go_along(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    y = (x * np.array([3.0, 4.0], np.float32) + 1 - [1.0, 1.0]) / 2
    assert y.device == "toy:0"
    await y.sum().backward()
    assert x.grad.numpy().tolist() == [1.5, 2.0]


async def test_the_gradient_of_a_host_scalar_comes_back_to_the_host(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    scale = ag.tensor(3.0, requires_grad=True)
    await (x * scale + scale).sum().backward()
    assert scale.grad.device == "cpu" and scale.grad.item() == 5.0
    assert x.grad.numpy().tolist() == [3.0, 3.0]


async def test_a_rule_or_hook_that_moves_a_gradient_is_refused(toy: ToyDevice) -> None:
    @custom_function()
    def Astray(ctx: Any, g: Any) -> Any:
        return ag.tensor(np.ones(g.shape, np.float32))

    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    await assert_awaiting_raises(DeviceMismatchError, r"AstrayBackward.*cpu.*toy:0", Astray.apply(x).sum().backward())
    y = x * 2
    y.register_hook(lambda g: ag.tensor([1.0, 1.0]))
    await assert_awaiting_raises(DeviceMismatchError, "moved the gradient to cpu", y.sum().backward())
    assert x.grad is None


async def test_unused_outputs_of_a_custom_function_get_zeros_on_their_device(toy: ToyDevice) -> None:
    devices: list[str] = []

    @custom_function(lambda x: (x * 1, x * 2))
    def Pair(ctx: Any, g: Any, h: Any) -> Any:
        devices.extend([g.device, h.device])
        return g + 2 * h

    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    await Pair.apply(x)[1].sum().backward()
    assert devices == ["toy:0", "toy:0"] and x.grad.numpy().tolist() == [2.0, 2.0]


# -------------------------------------------------------------------- state on the device


async def test_gradients_share_memory_with_nothing(toy: ToyDevice) -> None:
    a = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    b = ag.tensor([3.0, 4.0], device="toy:0", requires_grad=True)
    seed = ag.tensor([5.0, 6.0], device="toy:0")
    await (a + b.reshape(2, 1).reshape(2)).backward(seed)
    a.grad.zero_()
    await b.grad
    assert b.grad.numpy().tolist() == [5.0, 6.0] and seed.numpy().tolist() == [5.0, 6.0]
    await (a * 1).backward(seed)
    await a.grad
    assert a.grad.numpy().tolist() == [5.0, 6.0]
    await a.backward(seed)  # the root is the leaf itself
    assert a.grad.numpy().tolist() == [10.0, 12.0] and seed.numpy().tolist() == [5.0, 6.0]


async def test_views_and_writes_to_them(toy: ToyDevice) -> None:
    for device in ("cpu", "toy:0"):
        x = ag.tensor(np.arange(6.0, dtype=np.float32).reshape(2, 3), device=device, requires_grad=True)
        y = x * 2
        row = y[1]
        flat = y.reshape(-1)
        column = y.T[0]
        row *= 10
        flat[0] = 7.0
        assert y.version == 2
        assert (await row).numpy().tolist() == [60.0, 80.0, 100.0]
        assert (await y).numpy().tolist() == [[7.0, 2.0, 4.0], [60.0, 80.0, 100.0]]
        assert (await column).numpy().tolist() == [7.0, 60.0]
        await (y * y).sum().backward()
        assert x.grad.numpy().tolist() == [[0.0, 8.0, 16.0], [2400.0, 3200.0, 4000.0]]
        with pytest.raises(ag.errors.InPlaceError):
            x[0] = 1.0
        y = x * 2
        z = y * y
        y += 1
        await assert_awaiting_raises(ag.errors.ModifiedError, None, z.sum().backward())


async def test_copies(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    await (x * x).sum().backward()
    twin = copy.deepcopy(x)
    other = ag.tensor(x)
    wide = ag.tensor(x, dtype=np.float64, requires_grad=True)
    host = ag.tensor([9.0, 9.0])
    await twin
    with ag.no_grad():
        x.zero_()
        x.grad.zero_()
        host.copy_(twin.detach())
        other[0] = ag.tensor([8.0])[0]
    for tensor in (x, twin, twin.grad, other, wide, host):
        await tensor
    assert twin.device == other.device == wide.device == "toy:0" and wide.dtype == np.float64
    assert twin.numpy().tolist() == wide.numpy().tolist() == host.numpy().tolist() == [1.0, 2.0]
    assert twin.grad.numpy().tolist() == [2.0, 4.0] and x.numpy().tolist() == [0.0, 0.0] and other.numpy().tolist() == [8.0, 2.0]


async def test_hooks_and_retained_gradients_on_a_device(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    y = x * 2
    y.retain_grad()

    async def double(g: Any) -> Any:
        await g
        return g * 2

    y.register_hook(double)
    await (y * y).sum().backward()
    await y.grad
    assert y.grad.device == "toy:0" and y.grad.numpy().tolist() == [8.0, 16.0] and x.grad.numpy().tolist() == [16.0, 32.0]
    edge = ag.graph.get_gradient_edge((x * x).sum())
    (g,) = await ag.grad(edge, x)
    assert g.device == "toy:0" and g.numpy().tolist() == [2.0, 4.0]


async def test_saved_values_can_be_kept_on_the_host(toy: ToyDevice) -> None:
    async def unpack(packed: Any) -> Any:
        return packed[0].to(packed[1])

    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    await x
    with ag.graph.saved_tensors_hooks(lambda t: (ag.tensor(t.detach().numpy()), t.device), unpack):
        y = (x * x).sum()
    downloads = toy.statistics().downloads
    assert downloads >= 1
    await y.backward()
    assert x.grad.numpy().tolist() == [2.0, 4.0]


async def test_anomaly_mode_looks_at_device_gradients(toy: ToyDevice) -> None:
    x = ag.tensor([0.0, 1.0], device="toy:0", requires_grad=True)
    with ag.detect_anomaly(), np.errstate(all="ignore"):
        await assert_awaiting_raises(NaNGradientError, r"(Sqrt|Mul)Backward", (x.sqrt() * 0).sum().backward())
        await (x * x).sum().backward()
    assert x.grad.numpy().tolist() == [0.0, 2.0]


# -------------------------------------------------------------------- failures


async def test_a_failure_in_forward_surfaces_where_the_data_is_wanted(toy: ToyDevice) -> None:
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    await x
    toy.fail("tanh")
    y = x.tanh()
    await assert_awaiting_raises(ToyError, r"kernel tanh on toy:0", y)
    loss = (y * y).sum()
    caught = await assert_awaiting_raises(DeviceError, r"toy:0.*kernel tanh", loss.backward())
    assert any("Backward" in note for note in caught.__notes__)
    assert x.grad is None
    await (x * x).sum().backward()  # the device is fine, and so is the leaf
    assert x.grad.numpy().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("ahead", [False, True], ids=["by submit", "launched ahead"])
@pytest.mark.parametrize("place", ["device", "mixed"])
@pytest.mark.parametrize("kind", ["error", "memory", "dead"])
async def test_whichever_kernel_of_a_pass_fails_no_gradient_changes(kind: Any, place: str, ahead: bool) -> None:
    named: set[str] = set()
    for number in itertools.count(1):
        with ToyDevice(launches_ahead=ahead) as toy:
            leaves = leaves_of("mlp", "toy:0" if place == "device" else "cpu")
            for leaf in leaves.values():
                leaf.grad = wave(leaf)
                await leaf.grad
            before = {key: (leaf.grad, bits(leaf.grad)) for key, leaf in leaves.items()}
            loss = await forward("mlp", leaves, PLACES[place])
            toy.fail(number, kind)
            try:
                await loss.backward()
            except DeviceError as error:
                assert "toy:0" in str(error) and "kernel" in str(error)
                named.update(re.findall(r"for (\w+Backward)", str(error)))
                assert any("in the backward of" in note for note in error.__notes__), "the node is named"
                assert error.committed is False
                for key, (grad, values) in before.items():
                    assert leaves[key].grad is grad
                    assert toy.is_dead or bits(grad) == values
                await assert_awaiting_raises(ag.errors.GraphFreedError, None, loss.backward())
                del error
            else:
                assert number > 10, "the pass had kernels to fail"
                assert {"CrossEntropyBackward", "TanhBackward"} <= named
                assert all(leaf.grad is not before[key][0] for key, leaf in leaves.items())
                return


async def test_a_failure_between_nodes_is_noticed_before_the_commit(toy: ToyDevice) -> None:
    """The sum of a leaf's two gradients is work of the engine's own, started on the loop and done when everything else is."""
    x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
    host = ag.tensor([5.0, 5.0], requires_grad=True)
    y = x * 2 * host.to("toy:0") + x * 3
    await y
    toy.fail("add")
    caught = await assert_awaiting_raises(ToyError, r"kernel add on toy:0", y.sum().backward())
    assert any("AccumulateGrad" in note for note in caught.__notes__)
    assert x.grad is None and host.grad is None
    with pytest.raises(ToyError, match="kernel add"):
        y = x * 2 + x * 3
        await y
        toy.fail("add")
        await ag.grad(y.sum(), x)


async def test_a_result_of_the_wrong_shape_is_noticed(toy: ToyDevice) -> None:
    x = ag.tensor(np.ones((3, 4), np.float32), device="toy:0", requires_grad=True)
    w = ag.tensor(np.ones((4, 5), np.float32), device="toy:0", requires_grad=True)
    y = x @ w
    await y
    toy.fail("matmul", "shape")
    await assert_awaiting_raises(GradientError, r"MatmulBackward.*expected shape compatible with \[3, 4\]", y.sum().backward())
    assert x.grad is None and w.grad is None
    toy.fail("tanh", "shape")
    await assert_awaiting_raises(DeviceError, r"tanh on toy:0 returned \[3, 4, 2\]", x.tanh())


async def test_a_device_that_is_closed_fails_what_waits_for_it() -> None:
    with ToyDevice() as toy:
        x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
        y = await x.exp().sum()
        toy.hold()
        z = x.sin()
        backward = asyncio.ensure_future(y.backward())
        for _ in range(5):
            await asyncio.sleep(0)
        toy.close()
        await assert_awaiting_raises(DeviceError, "closed", backward)
        await assert_awaiting_raises(DeviceError, "closed", z)
        assert x.grad is None
        assert_raises(DeviceError, "closed", x.cos)


async def test_cancelling_a_pass_while_the_device_works() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(x: Any, axis: int) -> Any:
        entered.set()
        leave.wait()
        return ROWS["softmax"].forward(x, axis)

    with ToyDevice(kernels={"softmax": slow}) as toy:
        leaves = leaves_of("mlp", "toy:0")
        loss = await forward("mlp", leaves, PLACES["device"])
        try:
            backward = asyncio.ensure_future(loss.backward())
            await turns_until(entered.is_set)
            await cancel(backward)
            assert toy.history[-1] == "softmax"
            done = len(toy.history)
        finally:
            leave.set()
        await ag.tensor([1.0], device="toy:0")  # in order, so whatever was queued has been passed by
        assert list(toy.history)[done:] == ["multiply", "subtract", "multiply", "from_host"], "the rule that was running ends, no other begins"
        assert all(leaf.grad is None for leaf in leaves.values())
        await assert_awaiting_raises(ag.errors.GraphFreedError, "Cancelled", loss.backward())


async def test_a_timeout_ends_a_pass_on_a_device_that_hangs(toy: ToyDevice) -> None:
    x = ag.tensor([1.0], device="toy:0", requires_grad=True)
    y = await x.exp().sum()
    with toy.held():
        await assert_awaiting_raises(TimeoutError, None, asyncio.wait_for(y.backward(), 0.01))
    assert x.grad is None


async def test_nothing_is_left_on_the_device(toy: ToyDevice) -> None:
    async def work(fault: str | None) -> None:
        leaves = leaves_of("mlp", "toy:0")
        loss = await forward("mlp", leaves, PLACES["device"])
        if fault is not None:
            toy.fail(fault)
        try:
            await loss.backward()
        except DeviceError as error:
            assert fault is not None
            error.__traceback__ = None

    for fault in (None, "multiply", "matmul", "sum", "transpose"):
        await work(fault)
    await ag.tensor([1.0], device="toy:0")
    gc.collect()
    assert toy.statistics().allocations == 0, [array for array in gc.get_objects() if isinstance(array, ToyArray)]
    assert toy.statistics().bytes == 0


# -------------------------------------------------------------------- simulated devices


async def simulated(seed: int, fault: int | None = None, ahead: bool = False) -> list[Any]:
    """A graph over two simulated devices whose jobs take drawn times; returns the bits of every gradient."""
    loop: Any = asyncio.get_running_loop()
    delays = {"delay": lambda random: random.expovariate(1000.0), "loop": loop, "seed": seed, "launches_ahead": ahead}
    with ToyDevice(**delays) as toy, ToyDevice("toy:1", **delays):
        leaves = leaves_of("mlp")
        loss = await forward("mlp", leaves, PLACES["two devices"])
        if fault is not None:
            toy.fail(fault)
        try:
            await loss.backward()
        except (DeviceError, asyncio.CancelledError):
            assert all(leaf.grad is None for leaf in leaves.values())
            raise
        return bits(*(leaf.grad for leaf in leaves.values()))


def test_simulated_devices_repeat_to_the_step_and_never_change_a_bit(plain_rows: None) -> None:
    first, again = (simulated_run(simulated, 3, seed=3, order="permuted") for _ in range(2))
    assert first.trace_hash == again.trace_hash and first.time == again.time > 0
    for seed in range(20):
        run = simulated_run(simulated, seed, None, bool(seed % 2), seed=seed, order="permuted")
        assert run.value == first.value
        assert not run.leftover_tasks


def test_a_pass_over_devices_can_be_cancelled_at_every_step(plain_rows: None) -> None:
    for ahead in (False, True):
        steps = simulated_run(simulated, 1, None, ahead, seed=1).steps
        cancelled = 0
        for step in range(1, steps + 1, 2):
            try:
                simulated_run(simulated, 1, None, ahead, seed=1, cancel_at=step)
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled > 10


def test_a_simulated_device_fails_like_any_other() -> None:
    failed = 0
    for kernel in range(1, 12):
        try:
            simulated_run(simulated, 2, kernel, bool(kernel % 2), seed=2)
        except DeviceError:
            failed += 1
    assert failed > 5


def test_a_device_thread_on_a_simulated_loop() -> None:
    async def main() -> list[float]:
        with ToyDevice():
            x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
            y = (x * x).sum()
            await y
            await asyncio.sleep(3600.0)
            await y.backward()
            return x.grad.numpy().tolist()  # type: ignore[no-any-return]

    run = simulated_run(main)
    assert run.value == [2.0, 4.0] and run.time == 3600.0
