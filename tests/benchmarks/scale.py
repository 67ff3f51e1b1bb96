"""Size: whether time and memory stay proportional to the graph, and what a node and a pass cost in bytes.

Every row runs in a process of its own, since memory is what is measured. Bytes per node are what the process grew by while the graph was recorded,
the nodes' 4-float results included; bytes per pass are what it grew by beyond that while the pass ran.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from tests.benchmarks.child import forget_peak, in_child, peak, resident
from tests.benchmarks.harness import OURS, DisagreementError, Settings, Table

COLUMNS = ["graph", "side", "forward µs/node", "backward µs/node", "free µs/node", "bytes/node", "pass bytes/node"]


def run(settings: Settings) -> Iterator[Table]:
    """Chains of growing length, a wide fan-in and many passes at once."""
    names = [OURS, *(name for name in ("torch",) if name in settings.peers)]
    table = Table("Size of the graph, 1 thread", COLUMNS)
    lengths = [100, 1000] if settings.tiny else [10_000, 100_000, 1_000_000]
    for shape, counts in (("chain", lengths), ("fan-in", [settings.of(100_000, 100)])):
        for count in counts:
            sums = {}
            for name in names:
                found = _measure(settings, _GRAPHS[shape, name], nodes=count)
                sums[name] = found["check"]
                per_node = [f"{found[part] / count * 1e6:.2f}" for part in ("forward", "backward", "free")]
                table.add(f"{shape} of {count:,} nodes", name, *per_node, f"{found['graph_bytes'] / count:.0f}", f"{found['pass_bytes'] / count:.0f}")
            if len(sums) == 2 and not np.isclose(sums[OURS], sums["torch"], rtol=1e-3):
                raise DisagreementError(f"{shape} of {count}: {sums}")
    yield table
    passes = settings.of(100_000, 100)
    many = Table(f"{passes:,} backward passes of two nodes at once", ["side", "total s", "µs/pass", "bytes/pass in flight"])
    found = _measure(settings, many_aiograd, passes=passes)
    many.add(f"{OURS}, all in flight", f"{found['seconds']:.2f}", f"{found['seconds'] / passes * 1e6:.1f}", f"{found['bytes'] / passes:.0f}")
    found = _measure(settings, many_aiograd, passes=passes, one_by_one=True)
    many.add(f"{OURS}, one after the other", f"{found['seconds']:.2f}", f"{found['seconds'] / passes * 1e6:.1f}", "")
    if "torch" in settings.peers:
        found = _measure(settings, many_torch, passes=passes)
        many.add("torch, one after the other", f"{found['seconds']:.2f}", f"{found['seconds'] / passes * 1e6:.1f}", "")
    yield many


def _measure(settings: Settings, function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    if settings.tiny:
        return function(**arguments)
    return in_child(function, environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, **arguments)


# -------------------------------------------------------------------- graphs


def _chain(x: Any, a: Any, b: Any, nodes: int) -> Any:
    y = x
    for _ in range(nodes // 2):
        y = y * a + b
    return y.sum()


def _fan_in(x: Any, a: Any, b: Any, nodes: int) -> Any:
    """Half of the nodes multiply the same leaf, the other half adds them up."""
    y = x * a
    for _ in range(nodes // 2 - 1):
        y = y + x * a
    return y.sum() + (b * 0).sum()


def _arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.uniform(0.5, 0.99, 4).astype(np.float32) for _ in range(3))


def chain_aiograd(nodes: int) -> dict[str, Any]:
    """A chain, on our side."""
    return dict(ag.run(_time_aiograd(_chain, nodes)))


def fan_in_aiograd(nodes: int) -> dict[str, Any]:
    """A fan-in, on our side."""
    return dict(ag.run(_time_aiograd(_fan_in, nodes)))


def chain_torch(nodes: int) -> dict[str, Any]:
    """A chain, on torch's side."""
    return _time_torch(_chain, nodes)


def fan_in_torch(nodes: int) -> dict[str, Any]:
    """A fan-in, on torch's side."""
    return _time_torch(_fan_in, nodes)


_GRAPHS = {("chain", OURS): chain_aiograd, ("chain", "torch"): chain_torch, ("fan-in", OURS): fan_in_aiograd, ("fan-in", "torch"): fan_in_torch}


async def _time_aiograd(graph: Any, nodes: int) -> dict[str, Any]:
    x, a, b = _arrays()
    leaf, factor, term = ag.tensor(x, requires_grad=True), ag.tensor(a), ag.tensor(b)
    await graph(leaf, factor, term, 10).backward()
    leaf.grad = None
    clock = time.perf_counter
    before, start = resident(), clock()
    y = graph(leaf, factor, term, nodes)
    recorded, graph_bytes = clock(), resident() - before
    forget_peak()
    before, second = resident(), clock()
    await y.backward()
    done, pass_bytes = clock(), peak() - before
    del y
    freed = clock()
    assert leaf.grad is not None
    return _times(recorded - start, done - second, freed - done, graph_bytes, pass_bytes, leaf.grad.numpy())


def _time_torch(graph: Any, nodes: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    x, a, b = _arrays()
    leaf, factor, term = torch.tensor(x, requires_grad=True), torch.tensor(a), torch.tensor(b)
    graph(leaf, factor, term, 10).backward()
    leaf.grad = None
    clock = time.perf_counter
    before, start = resident(), clock()
    y = graph(leaf, factor, term, nodes)
    recorded, graph_bytes = clock(), resident() - before
    forget_peak()
    before, second = resident(), clock()
    y.backward()
    done, pass_bytes = clock(), peak() - before
    del y
    freed = clock()
    return _times(recorded - start, done - second, freed - done, graph_bytes, pass_bytes, leaf.grad.numpy())


def _times(forward: float, backward: float, free: float, graph_bytes: int, pass_bytes: int, grad: Any) -> dict[str, Any]:
    return {"forward": forward, "backward": backward, "free": free, "graph_bytes": graph_bytes, "pass_bytes": pass_bytes, "check": float(grad.sum())}


# -------------------------------------------------------------------- many passes


def many_aiograd(passes: int, one_by_one: bool = False) -> dict[str, Any]:
    """Passes of one product and one sum, each with a leaf of its own, all at once or one after the other."""
    return dict(ag.run(_many_aiograd(passes, one_by_one)))


async def _many_aiograd(passes: int, one_by_one: bool) -> dict[str, Any]:
    x = _arrays()[0]
    leaves = [ag.tensor(x, requires_grad=True) for _ in range(passes)]
    losses = [(leaf * leaf).sum() for leaf in leaves]
    forget_peak()
    before, start = resident(), time.perf_counter()
    if one_by_one:
        for loss in losses:
            await loss.backward()
    else:
        await asyncio.gather(*[loss.backward() for loss in losses])
    seconds = time.perf_counter() - start
    if not all(leaf.grad is not None and np.allclose(leaf.grad.numpy(), 2 * x) for leaf in leaves[:: max(1, passes // 100)]):
        raise DisagreementError("a pass among many gave a wrong gradient")
    return {"seconds": seconds, "bytes": peak() - before}


def many_torch(passes: int) -> dict[str, Any]:
    """The same passes on torch, which runs one at a time."""
    import torch

    torch.set_num_threads(1)
    x = _arrays()[0]
    leaves = [torch.tensor(x, requires_grad=True) for _ in range(passes)]
    losses = [(leaf * leaf).sum() for leaf in leaves]
    start = time.perf_counter()
    for loss in losses:
        loss.backward()
    return {"seconds": time.perf_counter() - start, "bytes": 0}
