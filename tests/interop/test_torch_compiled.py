"""Torch modules that torch compiles, and torch models that call aiograd and are compiled."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import aiograd as ag
from aiograd import pipeline
from tests.interop.torch_support import draw
from tests.tolerance import assert_close

torch: Any = pytest.importorskip("torch", reason="it comes with the extra `torch`")
interop: Any = ag.interop.torch
nn = torch.nn

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch asks for it itself


@pytest.fixture(autouse=True)
def torch_forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave nothing of torch's compiler behind, nor the thread of a progress bar that it makes."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    yield
    torch._dynamo.reset()
    gc.collect()


class Net(nn.Module):  # type: ignore[misc,name-defined]
    """A module that torch compiles in place too, as it does not with a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_compiled_module_gives_its_memory_away_in_every_backward(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was compiled for that in the first, and refuses to keep torch's graph in another, wherever that runs."""
    module, twin = Net(), Net()
    layer = interop.wrap(module if in_place else torch.compile(module, backend="aot_eager"))
    if in_place:
        module.compile(backend="aot_eager")
    for estimate in (10**9, 1, 10**9, 1):  # on the executor, on the loop
        monkeypatch.setattr("aiograd.interop.torch.node.backward_ns", lambda elapsed, found=estimate: found)
        y = layer(ag.asarray(draw(5, 4)))
        assert y._node._graph.outputs[0].grad_fn.name() == "CompiledFunctionBackward"
        await y.sum().backward()
        twin(torch.from_numpy(draw(5, 4))).sum().backward()
    for ours, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())


async def test_a_compiled_part_of_a_stage_runs_in_the_first_half() -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Net())
    parts = [copy.deepcopy(first), copy.deepcopy(second)]
    parts[1][1] = torch.compile(parts[1][1], backend="aot_eager")
    x, y = draw(8, 4), draw(8, 2, at=1)
    schedule = pipeline.make_schedule("ZB-H1", 2, 2)
    parts[1](torch.from_numpy(x[:4]).requires_grad_()).sum().backward()
    for part in parts:
        part.zero_grad()
    await pipeline.Pipeline(list(map(interop.wrap, parts)), schedule, loss_fn=ag.nn.functional.mse_loss).step(ag.asarray(x), ag.asarray(y))
    nn.functional.mse_loss(second(first(torch.from_numpy(x))), torch.from_numpy(y)).backward()
    theirs = [p for part in (first, second) for p in part.parameters()]
    for ours, other in zip([p for part in parts for p in part.parameters()], theirs, strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy(), 100)


async def test_a_compiled_model_calls_aiograd_between_its_graphs() -> None:
    class Model(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.first, self.function, self.last = nn.Linear(4, 4), function, nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.function(self.first(x).relu(), factor=3.0)).tanh()

    scale = ag.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)

    async def scaled(x: Any, factor: float) -> Any:
        return x * scale * factor

    model = Model(interop.function(scaled))
    compiled = torch.compile(model, backend="aot_eager")

    def train(model_or_compiled: Any) -> list[Any]:
        model.zero_grad()
        scale.grad = None
        model_or_compiled(torch.from_numpy(draw(5, 4))).sum().backward()
        assert scale.grad is not None
        return [scale.grad.numpy().copy(), *[p.grad.numpy().copy() for p in model.parameters()]]

    expected = await asyncio.to_thread(train, model)
    for _ in range(2):
        for ours, other in zip(await asyncio.to_thread(train, compiled), expected, strict=True):
            assert_close(ours, other)
