"""Writes states of every kind that is kept: ``python -m tests.releases.states``, into ``data/<release>``, or into a folder that is named.

It runs with packages of other releases too, as a module of its own: it uses public names only, and nothing of the tests. ``told.json`` says what is
in the files; ``next`` in it has what the next step of each optimizer gave.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn

DATA = Path(__file__).with_name("data")
#: the file of each kind; ``log`` is a folder
FILES = ("values", "training", "replicas", "stages", "rounds")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 0.5},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "LBFGS": {"lr": 0.5, "max_iter": 3},
}

service = dist.Service()


@service.reference
class Net(nn.Module):
    """A network with parameters, a buffer, a loss and data."""

    def __init__(self, seed: int = 0) -> None:
        generator = ag.Generator(seed)
        self.first, self.norm, self.second = nn.Linear(3, 2, generator=generator), nn.BatchNorm1d(2), nn.Linear(2, 1, generator=generator)

    def forward(self, x: Any) -> Any:
        return self.second(ag.tanh(self.norm(self.first(x))))

    def loss(self, x: Any, target: Any) -> Any:
        return ((self(x) - target) ** 2).mean()

    def data(self) -> Any:
        return ag.data.DataLoader(examples(16), batch_size=4, shuffle=True, generator=ag.Generator(1))


def examples(count: int) -> list[Any]:
    """Rows and targets, the same every time."""
    x = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    return list(zip(x, x[:, :1], strict=True))


def batch() -> tuple[Any, Any]:
    """Eight examples."""
    x, target = zip(*examples(8), strict=True)
    return np.stack(x), np.stack(target)


def parts(seed: int) -> dict[str, Any]:
    """Everything that a training consists of, once for each optimizer; one of them with each schedule that has a state."""
    made: dict[str, Any] = {}
    for name, options in OPTIMIZERS.items():
        net = made[f"model_{name}"] = Net(seed)
        made[f"optimizer_{name}"] = getattr(ag.optim, name)(list(net.parameters()), **options)
    schedules = ag.optim.lr_scheduler
    made["step"] = schedules.StepLR(made["optimizer_SGD"], step_size=2, gamma=0.5)
    made["cosine"] = schedules.CosineAnnealingWarmRestarts(made["optimizer_AdamW"], T_0=3)
    made["one_cycle"] = schedules.OneCycleLR(made["optimizer_RMSprop"], max_lr=0.1, total_steps=10)
    made["plateau"] = schedules.ReduceLROnPlateau(made["optimizer_Adagrad"], patience=0)
    made["sequential"] = schedules.SequentialLR(
        made["optimizer_Adadelta"],
        [schedules.LinearLR(made["optimizer_Adadelta"], total_iters=2), schedules.ExponentialLR(made["optimizer_Adadelta"], 0.9)],
        milestones=[2],
    )
    made["average"] = ag.optim.ExponentialMovingAverage(made["model_SGD"], decay=0.9)
    made["loader"] = made["model_SGD"].data()
    made["generator"] = ag.Generator(seed)
    return made


async def step(made: dict[str, Any]) -> dict[str, list[Any]]:
    """A step of every part; the parameters after it, by optimizer."""
    x, target = batch()
    for name in OPTIMIZERS:
        net, optimizer = made[f"model_{name}"], made[f"optimizer_{name}"]

        async def closure(net: Any = net, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = net.loss(x, target)
            await loss.backward()
            return loss

        loss = await closure()
        if name == "LBFGS":
            await optimizer.step(closure)
        else:
            optimizer.step()
        if name == "Adagrad":
            made["plateau"].step(loss.item())
    for name in ("step", "cosine", "one_cycle", "sequential"):
        made[name].step()
    made["average"].update_parameters(made["model_SGD"])
    return {name: [p.detach().numpy().tolist() for p in made[f"model_{name}"].parameters()] for name in OPTIMIZERS}


# -------------------------------------------------------------------- writing


def write(folder: Path) -> None:
    """Write everything into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"release": ag.__version__}
    states = {"values": values()}
    states["training"], told["next"] = ag.run(_training())
    states |= ag.run(_distributed())
    for name in states:
        ag.save(states[name], folder / f"{name}.safetensors", {"wrote": ag.__version__})
        told[name] = describe(states[name])
    if hasattr(ag, "serving"):  # the oldest releases have none
        told["log"] = [[version.number, version.digest, version.parent, dict(version.metrics)] for version in ag.run(_log(folder / "log"))]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in told.items())
    (folder / "told.json").write_text(f"{{\n{lines}\n}}\n")


def values() -> dict[str, Any]:
    """Every kind of value that `save` takes."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 5, np.uint32).view(np.float32)
    dtypes = "float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64".split()
    arrays = {name: ag.tensor((rng.uniform(-9, 9, (2, 3)) if name[0] != "u" else rng.uniform(0, 9, (2, 3))).astype(name)) for name in dtypes}
    plain = [None, True, -3, 1 << 60, 0.1, "text \u00e9", (1, (2.5,)), {"nested": [{}]}]
    tensors = {"arrays": arrays, "bits": ag.from_numpy(bits), "empty": ag.zeros(0, 4), "scalar": ag.tensor(-0.0)}
    return {**tensors, "plain": plain, "infinite": float("inf")}


async def _training() -> tuple[dict[str, Any], dict[str, list[Any]]]:
    ag.seed(3)
    made = parts(0)
    for _ in range(3):
        await step(made)
    state = ag.TrainingState(**made)
    async for _ in made["loader"]:
        break  # in the midst of an epoch
    return copied(state.state_dict()), await step(made)


async def _distributed() -> dict[str, Any]:
    """Checkpoints of replicas, of stages on workers and of local steps."""
    x, target = batch()
    shards = list(zip(np.split(x, 2), np.split(target, 2), strict=True))
    states: dict[str, Any] = {}
    async with dist.LocalCluster(2, service=f"{__spec__.name if __spec__ else 'states'}:service") as cluster:
        driver, (one, two) = cluster.driver, cluster.workers
        options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.01}}
        async with await dist.DataParallel.create(driver, [one, two], Net, **options) as replicas:
            for _ in range(2):
                await replicas.step(shards)
            states["replicas"] = {"module": await replicas.state_dict(), "optimizer": await replicas.optimizer_state_dict()}
        stages = [await driver.remote_module(name, Net, number) for number, name in enumerate((one, two))]
        optimizer = dist.DistributedOptimizer(driver, ag.optim.Adam, stages, lr=0.01)
        async with driver.context() as ctx:
            for stage in stages:
                await ctx.backward(await stage.ref.call("loss", ag.tensor(x), ag.tensor(target)))
            await optimizer.step(ctx)
        states["stages"] = {"modules": [await stage.state_dict() for stage in stages], "optimizer": await optimizer.state_dict()}
        await optimizer.delete()
        if hasattr(dist, "LocalSteps"):  # the oldest releases have none
            async with await dist.LocalSteps.create(driver, [one, two], Net, steps=1, **options) as rounds:
                async for _ in rounds.rounds(epochs=1):
                    pass
                states["rounds"] = await rounds.checkpoint(members=True)
    return states


async def _log(folder: Path) -> list[Any]:
    log = ag.serving.VersionLog(folder)
    async with ag.serving.Server(Net(0), log=log) as server:
        for number in range(2):
            await server.publish(Net(number + 1).state_dict(), metrics={"loss": 0.5 / (number + 1)})
    (folder / "lock").unlink(missing_ok=True)
    return [log.load(number) for number in log.numbers()]


# -------------------------------------------------------------------- telling


def copied(tree: Any) -> Any:
    """The same tree; its tensors are copies."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree.detach().clone() if isinstance(tree, ag.Tensor) else tree


def describe(tree: Any) -> Any:
    """A state as JSON: dtype, shape and bytes of tensors, the kind of every collection; numbers keep their bits."""
    if isinstance(tree, dict):
        return {"dict": [[describe(key), describe(value)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [describe(value) for value in tree]}
    if isinstance(tree, ag.Tensor):
        array = np.ascontiguousarray(tree.detach().numpy())
        return {"tensor": [array.dtype.name, list(array.shape), array.tobytes().hex()]}
    return {type(tree).__name__: repr(tree)}


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where a described state is not the expected one. Dicts may have more: a later release may keep more, and has a default for what is missing."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys() == {"dict"}:
        have = {json.dumps(key): value for key, value in found["dict"]}
        for key, value in expected["dict"]:
            name = f"{path}.{next(iter(key.values()))}"
            if json.dumps(key) in have:
                yield from differences(value, have[json.dumps(key)], name)
            else:
                yield f"{name} is missing"
    elif isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys() and expected.keys() <= {"list", "tuple"}:
        (kind,) = expected
        if len(expected[kind]) != len(found[kind]):
            yield f"{path} has {len(found[kind])} items, expected {len(expected[kind])}"
        for number, pair in enumerate(zip(expected[kind], found[kind], strict=False)):
            yield from differences(*pair, f"{path}[{number}]")
    elif expected != found:
        yield f"{path} is {json.dumps(found)[:90]}, expected {json.dumps(expected)[:90]}"


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / ag.__version__)
