"""Programs for processes of this machine run on Ray's nodes, to the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.distributed as dist
from aiograd.distributed import moe
from aiograd.errors import ArgumentError
from aiograd.pipeline import Pipeline, make_schedule
from tests.pipeline.models import blocks, data, mean_square, serial, values
from tests.pipeline.remote import place
from tests.ray.conftest import Start, left_behind
from tests.ray.nodes import HEAD, ROOT, Nodes
from tests.ray.service import EXPERTS
from tests.ray.tables import of_ray, spellings
from tests.ray.training import SERVICE, train

pytestmark = pytest.mark.proc


async def test_calls_and_training_across_nodes_give_the_bits_of_local_processes(start: Start) -> None:
    async with dist.LocalCluster(2, service=SERVICE) as cluster:
        expected = await train(cluster, 3)
    async with start(2) as cluster:
        assert isinstance(cluster, dist.Cluster) and cluster.workers == ("worker0", "worker1")
        assert cluster.node_of("worker0") != cluster.node_of("worker1")
        assert cluster.pids == {name: await cluster.driver.call(name, "process") for name in cluster.workers}
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with cluster.driver.context() as ctx:
            await ctx.backward((await cluster.driver.call("worker0", "double_at", "worker1", x)).sum())
            assert ctx.grads[x].tolist() == [2.0, 2.0]
        assert await train(cluster, 3) == expected


async def test_a_pipeline_across_nodes_has_the_bits_of_a_serial_run(start: Start) -> None:
    x, target = data(12)
    alone = blocks(3)
    losses = await serial(alone, 6, x, target)
    bits = [b"".join(p.grad.numpy().tobytes() for p in module.parameters()) for module in alone]
    async with start(3, service="tests.pipeline.remote:service") as cluster:
        modules = await place(cluster.driver, cluster.workers)
        async with Pipeline(modules, make_schedule("ZB-H1", 3, 6), loss_fn=mean_square) as pipe:
            assert values(await pipe.step(x, target)) == losses
        assert [await module.ref.call("gradient") for module in modules] == bits


async def test_experts_across_nodes_learn_the_same_as_in_local_processes(start: Start) -> None:
    async def learn(cluster: dist.Cluster) -> list[bytes]:
        seen: list[Any] = []
        x = ag.asarray(np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32))
        for _ in range(2):
            for name, uid in zip(cluster.workers, EXPERTS, strict=True):
                given = x.detach().requires_grad_()
                y = await moe.RemoteExpert(cluster.driver, name, uid)(given)
                await (y * y).sum().backward()
                seen += [y, given.grad]
        return [value.numpy().tobytes() for value in seen]

    async with dist.LocalCluster(2, service=SERVICE) as local:
        expected = await learn(local)
    async with start(2) as cluster:
        assert await learn(cluster) == expected
    assert len(set(expected)) == len(expected)


async def test_variables_reach_the_workers_and_the_key_is_not_among_them(start: Start) -> None:
    async with start(1, runtime_env={"env_vars": {"GREETING": "hello"}}) as cluster:
        assert await cluster.driver.call("worker0", "variable", "GREETING") == "hello"
        environment = Path(f"/proc/{cluster.pids['worker0']}/environ").read_bytes()
        for where, value in {"its environment": environment, **of_ray()}.items():
            assert not any(spelling in value for spelling in spellings(cluster._secret)), f"the key is in {where}"
    await left_behind()


async def test_a_folder_is_refused_where_ray_cannot_take_it_in_any_more(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"working_dir.*ray\.init\(\)"):
        async with start(1, runtime_env={"working_dir": str(tmp_path)}):
            pass
    await left_behind()


def test_a_folder_brings_the_service_to_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "shipped.py").write_text(SHIPPED)
    command = [sys.executable, "-c", DRIVER, nodes.address, HEAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["hello", "you"], done


DRIVER = """
import asyncio, functools, sys
import ray
import aiograd.distributed as dist

async def main():
    runtime_env = {"working_dir": sys.argv[3], "env_vars": {"GREETING": "hello"}}
    async with dist.RayCluster(1, service="shipped:service", address=sys.argv[1], runtime_env=runtime_env, start_timeout=300.0) as cluster:
        print(await cluster.driver.call("worker0", "greet", "you"))

ray.init = functools.partial(ray.init, _node_ip_address=sys.argv[2], log_to_driver=False)
asyncio.run(main())
"""

SHIPPED = """
import os
import aiograd.distributed as dist

service = dist.Service()

@service.function
async def greet(name: str) -> str:
    return f"{os.environ['GREETING']} {name}"
"""
