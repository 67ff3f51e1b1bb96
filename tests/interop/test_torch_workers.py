"""Wrapped torch modules on workers: references, experts, a worker that is killed, and the examples."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import WorkerLostError
from tests.distributed.workers import workers
from tests.interop.torch_support import draw
from tests.support import assert_awaiting_raises

torch: Any = pytest.importorskip("torch", reason="it comes with the extra `torch`")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.proc
async def test_a_worker_that_serves_a_torch_module_is_killed_and_goes_on_with_the_same_bits() -> None:
    from tests.interop.torch_service import Served

    xs = [draw(8, 4, at=step) for step in range(4)]
    alone = Served()
    optimizer = torch.optim.SGD(alone.layers.module.parameters(), lr=0.1)
    expected = []
    for number, array in enumerate(xs):
        optimizer.zero_grad()
        x = ag.asarray(array.copy()).requires_grad_()
        y = alone(x, number)
        await (y * y).sum().backward()
        optimizer.step()
        expected.append(x.grad.numpy())
    async with dist.LocalCluster(1, names=["served"], service="tests.interop.torch_service:service") as cluster:
        driver = cluster.driver
        remote = await driver.remote_module("served", Served)

        async def step(number: int, kill: bool = False) -> Any:
            x = ag.asarray(xs[number].copy()).requires_grad_()
            async with driver.context() as ctx:
                y = await remote(x, number)
                loss = (y * y).sum()
                if kill:
                    os.kill(cluster.pids["served"], signal.SIGKILL)
                await ctx.backward(loss)
                await remote.ref.call("learn")
                return ctx.grads[x].numpy().copy()

        found = [await step(0), await step(1)]
        state = await remote.state_dict()
        await assert_awaiting_raises(WorkerLostError, "served", step(2, kill=True))
        await cluster.wait_lost("served")
        await cluster.restart("served")
        remote = await driver.remote_module("served", Served)
        await remote.load_state_dict(state)
        found += [await step(2), await step(3)]
        state = await remote.state_dict()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, theirs in alone.state_dict().items():
        np.testing.assert_array_equal(state[name].numpy(), theirs.numpy(), err_msg=name)


async def test_a_wrapped_module_is_an_expert() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    twin.load_state_dict(module.state_dict())
    layer = ag.interop.torch.wrap(module)
    expert = dist.moe.ExpertBackend(layer, ag.optim.SGD(layer.parameters(), lr=0.1))
    x, g = draw(3, 4), draw(3, 4, at=1)
    given = torch.from_numpy(x.copy()).requires_grad_()
    out = twin(given)
    out.backward(torch.from_numpy(g))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    (y,) = _several(await expert.forward(ag.asarray(x)))
    np.testing.assert_array_equal(y.numpy(), out.detach().numpy())
    (dx,) = _several(await expert.backward([ag.asarray(x)], [ag.asarray(g)]))
    np.testing.assert_array_equal(dx.numpy(), given.grad.numpy())
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=1e-6)


def _several(result: Any) -> Any:
    return result if isinstance(result, (tuple, list)) else (result,)


service = dist.Service()


@service.reference
class Hosted(ag.nn.Module):
    """A frozen layer whose owner lets calls and passes wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ag.interop.torch.wrap(frozen())
        self.gate = asyncio.Event()
        self.waiting = 0

    async def forward(self, x: Any, down: Any, up: Any) -> Any:
        await self._wait()
        y = await ag.offload(self.layer, x, down, up)
        y.register_hook(self._wait)
        return y

    async def _wait(self, grad: Any = None) -> None:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1


class Adapted(torch.nn.Linear):
    def forward(self, x: Any, down: Any, up: Any) -> Any:
        return super().forward(x) + x @ down @ up


def frozen() -> Any:
    torch.manual_seed(0)
    return Adapted(8, 8).requires_grad_(False)


async def test_a_paused_host_keeps_clients_waiting_in_forward_and_backward_and_their_gradients_apart() -> None:
    given = [(draw(5, 8, at=client), draw(8, 2, at=10 + client), draw(2, 8, at=20 + client)) for client in range(2)]
    expected = []
    for x, *adapter in given:
        tensors = [torch.from_numpy(each.copy()).requires_grad_() for each in adapter]
        frozen()(torch.from_numpy(x), *tensors).square().sum().backward()
        expected.append([tensor.grad.numpy() for tensor in tensors])
    async with workers("client", "host", service=service) as (client, host):
        remote = await client.remote_module("host", Hosted)
        hosted = host._objects.table._held[remote.ref.key].value
        stages: list[list[str]] = [[], []]

        async def step(number: int) -> Any:
            x, *adapter = (ag.asarray(each) for each in given[number])
            adapter = [each.requires_grad_() for each in adapter]
            async with client.context() as ctx:
                y = await remote(x, *adapter)
                stages[number].append("forward")
                if number:
                    hosted.gate.clear()  # between the forward of this client and its backward
                await ctx.backward((y * y).sum())
                stages[number].append("backward")
                assert not [context for context in host._contexts if context.grads]
                return [ctx.grads[each].numpy() for each in adapter]

        async def until_waiting(count: int, *running: asyncio.Future[Any]) -> None:
            while hosted.waiting < count:
                assert not any(each.done() for each in running)
                await asyncio.sleep(0)

        first = asyncio.ensure_future(step(0))
        await until_waiting(1, first)
        assert stages == [[], []]
        hosted.gate.set()
        await first
        second = asyncio.ensure_future(step(1))
        while stages[1] != ["forward"]:
            await asyncio.sleep(0)
        again = asyncio.ensure_future(step(0))
        await until_waiting(2, second, again)  # a call of one client, and a pass of the other
        assert stages == [["forward", "backward"], ["forward"]]
        hosted.gate.set()
        found = [await again, await second]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    for name, value in frozen().state_dict().items():
        np.testing.assert_array_equal(hosted.layer.module.state_dict()[name].numpy(), value.numpy())


@pytest.mark.proc
def test_the_ported_parameter_server_has_the_losses_of_torch_rpc(tmp_path: Path) -> None:
    from examples.parameter_server import ParameterServer, alone

    trainers, steps = 2, 6
    weights = tmp_path / "weights.npz"
    np.savez(weights, **{name: value.detach().numpy() for name, value in ParameterServer(trainers).state_dict().items()})
    command = [sys.executable, str(Path(__file__).parent / "rpc_parameter_server.py"), str(weights), str(trainers), str(steps)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), ag.run(alone(trainers, steps)), rtol=1e-5)


@pytest.mark.proc
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["torch_pipeline.py", "--steps", "4"], "differ by at most"),
        (["torch_split_learning.py"], "of the diagnoses right"),
        (["torch_lora_hosted_layers.py", "--steps", "4"], "none lost; the frozen weights are as they were"),
    ],
)
def test_an_example_runs(words: list[str], expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::RuntimeWarning"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT / "examples", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
