"""LoRA through layers that others host: two clients train adapters of one frozen PyTorch transformer at the same time, and have none of its layers.

    pip install '.[torch]'
    python examples/torch_lora_hosted_layers.py       # two hosts and two clients, processes of this machine, half a minute

Each host has half of the blocks, six million numbers together, which never change. A client has adapters of rank 4 for every block and its own output
layer. The adapters travel with each call, and their gradients come back, in the client's own context: hosts keep nothing of a client. One host pauses
when its owner needs the machine; the clients wait, in forward or in backward, and nothing is lost. In the end each client has what torch makes of its
task with everything in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # five processes share the cores

import numpy as np

try:
    import torch
except ImportError:
    sys.exit("this example needs PyTorch: pip install '.[torch]'")

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

HOSTS, CLIENTS = ("north", "south"), ("ada", "ben")
WIDTH, BLOCKS, RANK, LETTERS, BATCH, LENGTH = 256, 4, 4, 26, 4, 16

# -------------------------------------------------------------------- the torch model


class Block(torch.nn.Module):
    """A block of a transformer; an adapter adds a matrix of rank 4 to the weights of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        parts = (self.attention(y) + y @ down @ up).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.layers(self.second(x))


class Half(torch.nn.Module):
    """The frozen blocks of a host. Calling it changes nothing in it, so any number of calls may run at the same time."""

    def __init__(self, host: int) -> None:
        super().__init__()
        torch.manual_seed(host)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS)).requires_grad_(False)

    def forward(self, x: torch.Tensor, adapters: list[torch.Tensor]) -> torch.Tensor:
        for block, down, up in zip(self.blocks, adapters[::2], adapters[1::2], strict=True):
            x = block(x, down, up)
        return x


class Mine(torch.nn.Module):
    """The trained part of a client: adapters of both halves, and the output layer."""

    def __init__(self, client: int) -> None:
        super().__init__()
        torch.manual_seed(10 + client)
        pairs = [(torch.randn(WIDTH, RANK) / 16, torch.zeros(RANK, 3 * WIDTH)) for _ in range(2 * BLOCKS)]
        self.adapters = torch.nn.ParameterList(each for pair in pairs for each in pair)
        self.output = torch.nn.Linear(WIDTH, LETTERS)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.output(x).flatten(0, 1), wanted.flatten())


def batches(client: int, steps: int) -> list[tuple[Any, Any]]:
    """Vectors of letters, and the letters that the client wants: the next of the alphabet, or the one as far from its other end."""
    rng = np.random.default_rng(client)
    vectors = np.random.default_rng(99).normal(size=(LETTERS, WIDTH)).astype(np.float32)
    letters = [rng.integers(0, LETTERS, (BATCH, LENGTH)) for _ in range(steps)]
    return [(vectors[each], (each + 1) % LETTERS if client == 0 else LETTERS - 1 - each) for each in letters]


# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Host(nn.Module):
    """Half of the blocks, which the owner of the machine may pause.

    Args:
        host: which.
    """

    def __init__(self, host: int) -> None:
        super().__init__()
        self.half = ag.interop.torch.wrap(Half(host))
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._arrived = self._passed = 0

    async def forward(self, x: Any, adapters: list[Any]) -> Any:
        """The blocks, computed beside the loop. The pass comes through the gate as well."""
        await self._gate()
        y = await ag.offload(self.half, x, adapters)
        y.register_hook(self._gate)
        return y

    async def _gate(self, grad: Any = None) -> None:
        self._arrived += 1
        await self._is_open.wait()
        self._passed += 1

    async def pause(self, is_paused: bool) -> None:
        """Let calls and passes wait from now on, or go on."""
        (self._is_open.clear if is_paused else self._is_open.set)()

    async def counts(self) -> list[int]:
        """How many calls and passes wait, and how many have come through."""
        return [self._arrived - self._passed, self._passed]


@service.function
async def train(client: int, hosts: list, steps: int) -> list:
    """The program of a client; returns its losses and what it has learnt."""
    mine, losses = ag.interop.torch.wrap(Mine(client)), []
    north, south = (dist.RemoteModule(dist.current_worker(), ref.owner, ref) for ref in hosts)
    adapters = [p for name, p in mine.named_parameters() if "adapters" in name]
    optimizer = ag.optim.AdamW(mine.parameters(), lr=3e-3)
    for vectors, wanted in batches(client, steps):
        async with dist.current_worker().context() as ctx:
            y = await south(await north(ag.asarray(vectors), adapters[: 2 * BLOCKS]), adapters[2 * BLOCKS :])
            loss = mine(y, ag.asarray(wanted))
            await ctx.backward(loss)
            optimizer.step(ctx.grads)
        losses.append(loss.item())
    return [losses, [p.detach() for p in mine.parameters()]]


# -------------------------------------------------------------------- what runs here


def alone(client: int, steps: int) -> tuple[list[float], list[Any]]:
    """The same for one client by torch in one process."""
    north, south, mine, losses = Half(0), Half(1), Mine(client), []
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
    for vectors, wanted in batches(client, steps):
        optimizer.zero_grad()
        y = south(north(torch.from_numpy(vectors), mine.adapters[: 2 * BLOCKS]), mine.adapters[2 * BLOCKS :])
        loss = mine(y, torch.from_numpy(wanted))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().numpy() for p in mine.parameters()]


async def main(steps: int) -> None:
    """Train both clients at once, with a pause, and compare each with torch alone."""
    async with dist.LocalCluster(4, names=[*HOSTS, *CLIENTS], service="torch_lora_hosted_layers:service") as cluster:
        driver = cluster.driver
        north, south = [await driver.remote_module(name, Host, number) for number, name in enumerate(HOSTS)]
        calls = [driver.call(name, "train", number, [north.ref, south.ref], steps, timeout=3600.0) for number, name in enumerate(CLIENTS)]
        training = asyncio.gather(*calls)

        async def until(waiting: int, passed: int) -> int:
            while (counts := await south.ref.call("counts"))[0] < waiting or counts[1] < passed:
                await asyncio.wait([training], timeout=0.01)
                assert not training.done(), training.exception()
            return int(counts[1])

        await until(waiting=0, passed=2 * steps)
        await south.ref.call("pause", True)
        before = await until(waiting=len(CLIENTS), passed=0)
        await south.state_dict()  # the owner of the machine does something else
        after = await until(waiting=len(CLIENTS), passed=0)
        print(f"south pauses: both clients wait, after {before} calls and passes; {after - before} have come through meanwhile", flush=True)
        await south.ref.call("pause", False)
        found = await training
        passed = [(await host.ref.call("counts"))[1] for host in (north, south)]
        states = [await host.state_dict() for host in (north, south)]
    kept = True
    for number, state in enumerate(states):
        kept = kept and all(np.array_equal(state[f"half.{name}"].numpy(), value.numpy()) for name, value in Half(number).state_dict().items())
    for number, (losses, learnt) in enumerate(found):
        theirs, parameters = alone(number, steps)
        furthest = max(float(abs(a.numpy() - b).max()) for a, b in zip(learnt, parameters, strict=True))
        print(f"{CLIENTS[number]}: loss {losses[0]:.3f}, then {losses[-1]:.3f}; what was learnt differs by {furthest:.1e} from torch in one process")
        assert furthest < 1e-5 and max(abs(a - b) for a, b in zip(losses, theirs, strict=True)) < 1e-5 and losses[-1] < losses[0]
    print(f"each host had {passed[0]} calls and passes, none lost; the frozen weights {'are as they were' if kept else 'HAVE CHANGED'}")
    assert kept and before == after and passed == [2 * len(CLIENTS) * steps] * 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    ag.run(main(parser.parse_args().steps))
