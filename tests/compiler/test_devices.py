"""Compiled functions of tensors on a device: programs that make the device's calls, with the bits of the eager function there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import DeviceError
from aiograd.running.offloading import ready
from tests.compiler.test_rows import functions_of, other
from tests.nn.test_on_device import CASES
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE
from tests.support import assert_awaiting_raises, draw
from tests.sweeps import swept
from tests.toy_device import ToyDevice


@pytest.fixture(autouse=True)
def device() -> Iterator[ToyDevice]:
    with ToyDevice("toy:0") as device:
        yield device


async def bits(tensors: Any) -> list[Any]:
    """Shapes, dtypes and bytes of Tensors, of which all have to be on the device; None for None."""
    await ready(tensors)
    assert {x.device for x in tensors if x is not None} <= {"toy:0"}
    here = [None if x is None else x.detach().to("cpu") for x in tensors]
    await ready(here)
    return [None if x is None else (x.shape, x.dtype, x.numpy().tobytes()) for x in here]


def there(array: Any, **options: Any) -> Any:
    return ag.tensor(array, **options, device="toy:0")


# -------------------------------------------------------------------- bits


@pytest.mark.parametrize("name", CASES)
async def test_modules_have_the_bits_of_the_eager_ones(name: str) -> None:
    make, shape = CASES[name]
    model = make().to("toy:0")
    call = ag.compile(lambda x: model(x).square().sum())
    states: list[Any] = []
    for step in range(3):
        found = []
        before = {key: value.clone() for key, value in model.state_dict().items()}  # running statistics move
        for function in (call.function, call):
            model.load_state_dict(before)
            model.zero_grad()
            x = there(draw(*shape, at=step), requires_grad=True)
            loss = function(x)
            await loss.backward()
            found.append(await bits([loss, x.grad, *[p.grad for p in model.parameters()], *model.state_dict().values()]))
        assert found[0] == found[1]
        states.append(found[0])
    assert states[0] != states[1]
    statistics = call.statistics()
    assert (statistics.recordings, statistics.runs, statistics.breaks) == (1, 2, 0), statistics


@pytest.mark.one_loop
@pytest.mark.parametrize("name", swept(DIFFERENTIABLE, keep=40))
async def test_rows_have_the_bits_of_the_eager_ones(name: str) -> None:
    ran = 0
    for function, arguments, text in functions_of(name, np.float64, (4, 100)):
        compiled = ag.compile(function)
        for by in (0.0, 1e-4, 2e-4):
            values = [other(argument, by) for argument in arguments]
            found = []
            for call in (function, compiled):
                tensors = [there(value, requires_grad=True) for value in values]
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "the compiled function .* runs eagerly")
                    outputs = call(*tensors)
                given = [there(np.cos(np.arange(o.size)).reshape(o.shape).astype(o.dtype)) for o in outputs]
                wanted = [(output, grad) for output, grad in zip(outputs, given, strict=True) if output.requires_grad]
                grads = await ag.grad([o for o, _ in wanted], tensors, [g for _, g in wanted], allow_unused=True) if wanted else ()
                found.append((await bits(outputs), await bits(grads)))
            assert found[0] == found[1], f"{text} at {by}"
        ran += compiled.statistics().runs
    assert ran


async def test_labels_may_stay_on_the_host() -> None:
    call = ag.compile(lambda x, labels: nn.functional.cross_entropy(x, labels))
    for number in range(3):
        labels = ag.tensor(np.array([number, 1, 2 - number]))
        found = []
        for function in (call.function, call):
            x = there(draw(3, 4), requires_grad=True)
            loss = function(x, labels)
            await loss.backward()
            found.append(await bits([loss, x.grad]))
        assert found[0] == found[1]
    assert (call.statistics().recordings, call.statistics().breaks) == (1, 0), call.statistics()


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
async def test_a_whole_step_is_compiled(kind: Any) -> None:
    def build() -> tuple[Any, Any, Any]:
        ag.seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)).to("toy:0")
        optimizer = kind(model.parameters(), lr=0.05)

        async def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            await loss.backward()
            optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return model, optimizer, step

    found = []
    for is_compiled in (False, True):
        model, optimizer, step = build()
        call = ag.compile(step) if is_compiled else step
        ag.seed(5)
        losses = []
        for number in range(5):
            optimizer.param_groups[0]["lr"] = 0.05 / (number + 1)
            losses.append((await call(there(draw(5, 4, at=number)), there(draw(5, 2, at=9)))).detach())
        found.append(await bits([*losses, *model.state_dict().values()]))
    assert found[0] == found[1] and len(set(map(str, found[0][:5]))) == 5
    statistics = call.statistics()  # type: ignore[attr-defined]
    assert (statistics.recordings, statistics.runs, statistics.breaks) == (1, 4, 0), statistics


async def test_other_passes_of_a_program() -> None:
    """Parts of the edges, of the outputs, uses elsewhere, a second backward, a graph of the gradients."""
    w, v = there(draw(3, 3), requires_grad=True), there(draw(3, at=1), requires_grad=True)

    def pair(x: Any) -> Any:
        y = ag.tanh(x @ w) * v
        return y + v, (y * y).sum(0)

    call = ag.compile(pair)
    passes: list[Callable[[Any, Any, Any], Any]] = [
        lambda x, a, b: ag.grad(a.sum(), [w]),
        lambda x, a, b: ag.grad([a, b], [x, v], [a.detach(), b.detach()]),
        lambda x, a, b: ag.grad((a.sum() + (v * v).sum() + b.prod()), [v, w, x]),
        lambda x, a, b: ag.grad(b.sum(), [x], create_graph=True),
    ]
    for run in passes:
        for at in range(3):
            found = []
            for function in (pair, call):
                x = there(draw(2, 3, at=at), requires_grad=True)
                a, b = function(x)
                first = await run(x, a, b)
                if first[0].requires_grad:
                    first += await ag.grad(first[0].square().sum(), [w, v])
                found.append(await bits(first))
            assert found[0] == found[1]
    x = there(draw(2, 3), requires_grad=True)
    a, b = call(x)
    await a.sum().backward(retain_graph=True)
    await (a.sum() + b.sum()).backward()
    assert not call.statistics().breaks and call.statistics().recordings == 1


# -------------------------------------------------------------------- what belongs to a program


async def test_a_captured_tensor_that_moves_is_recorded_again() -> None:
    model = nn.Linear(3, 2)
    call = ag.compile(lambda x: model(x))
    here, away = ag.tensor(draw(4, 3).astype(np.float32)), there(draw(4, 3).astype(np.float32))
    expected = call(here).numpy()
    model.to("toy:0")
    for _ in range(2):
        result = call(away)
        await ready(result)
        np.testing.assert_allclose(result.to("cpu").numpy(), expected, rtol=1e-6)
    model.cpu()
    np.testing.assert_array_equal(call(here).numpy(), expected)
    assert call.statistics().breaks == 0 and call.statistics().recordings >= 2


async def test_numbers_of_the_host_are_read_at_every_run() -> None:
    scale = ag.tensor(2.0, dtype=np.float64, requires_grad=True)
    call = ag.compile(lambda x, by: (x * scale * by).sum())
    for number in range(3):
        with ag.no_grad():
            scale.fill_(number + 1.0)
        scale.grad = None
        x = there(draw(3, 4, at=number), requires_grad=True)
        loss = call(x, ag.tensor(number + 2.0, dtype=np.float64))
        await loss.backward()
        eager = (x.detach() * scale.detach() * (number + 2.0)).sum()
        assert await bits([loss]) == await bits([eager])
        assert scale.grad.device == "cpu"
        np.testing.assert_allclose(scale.grad.numpy(), draw(3, 4, at=number).sum() * (number + 2.0), rtol=1e-12)
    assert (call.statistics().recordings, call.statistics().breaks) == (1, 0)


async def test_gradients_that_index_by_tensors_of_the_device() -> None:
    call = ag.compile(lambda x, index: (x[index] * x[index + 1]).sum())
    for number in range(3):
        index = there(np.array([number, 1, 0]))
        x, y = (there(draw(5, 2), requires_grad=True) for _ in range(2))
        for function, argument in ((call, x), (call.function, y)):
            await function(argument, index).backward()
        assert await bits([x.grad]) == await bits([y.grad])
    assert (call.statistics().recordings, call.statistics().breaks) == (1, 0)


async def test_arrays_of_the_host_are_moved_at_every_run() -> None:
    weights, leaf = np.arange(3.0), ag.tensor(draw(3), requires_grad=True)
    call = ag.compile(lambda x, array, host: (x * array * weights + host.to("toy:0") * leaf.to("toy:0")).sum())
    for number in range(3):
        weights += 1
        arguments = draw(3, at=number), ag.tensor(draw(3, at=number + 1), requires_grad=True)
        found = []
        for function in (call.function, call):
            leaf.grad = arguments[1].grad = None
            x = there(draw(2, 3, at=number), requires_grad=True)
            loss = function(x, *arguments)
            await loss.backward()
            assert leaf.grad.device == arguments[1].grad.device == "cpu"
            found.append([*await bits([loss, x.grad]), leaf.grad.numpy().tobytes(), arguments[1].grad.numpy().tobytes()])
        assert found[0] == found[1]
    assert (call.statistics().recordings, call.statistics().breaks) == (1, 0), call.statistics()


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "on the host": (lambda x, host: x * (host * 2).to("toy:0"), "it computes on toy:0 and on the host"),
    "in place": (lambda x, host: (x * 1).add_(x), "it modifies a tensor on toy:0 in place"),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_the_rest_runs_eagerly(kind: str) -> None:
    function, reason = CALLS[kind]
    call = ag.compile(function)
    for number in range(3):
        x, host = there(draw(2, 3, at=number)), ag.tensor(draw(3, at=number))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the compiled function .* runs eagerly")
            result = call(x, host)
        assert await bits([result]) == await bits([function(x, host)])
    assert [found.partition(": ")[0] for found in call.statistics().reasons.values()] == [reason] and call.statistics().eager == 2


async def test_long_programs_are_cut() -> None:
    def chain(x: Any) -> Any:
        for _ in range(200):
            x = x * 0.99 + 0.5
        return x

    call = ag.compile(chain)
    for number in range(2):
        x, y = (there(draw(3, at=number), requires_grad=True) for _ in range(2))
        await call(x).sum().backward()
        await chain(y).sum().backward()
        assert await bits([x.grad]) == await bits([y.grad])
    result, nodes = call(there(draw(3), requires_grad=True)), 0
    node = result.grad_fn
    while node.is_program:
        nodes += 1
        node = node.next_nodes[0]
        if node.is_leaf:
            break
    assert 4 <= nodes <= 20
    assert call.programs[0].device == "toy:0"


async def test_a_failure_on_the_device_is_one_of_the_pass(device: ToyDevice) -> None:
    w = there(draw(3), requires_grad=True)
    call = ag.compile(lambda x: ag.exp(x * w).sum())
    for _ in range(2):
        await call(there(draw(3))).backward()
    before = await bits([w.grad])
    loss = call(there(draw(3)))
    await ready([loss])
    device.fail("multiply")
    await assert_awaiting_raises(DeviceError, None, loss.backward())
    assert await bits([w.grad]) == before
