"""Optimizers' steps as native functions: the bits of the eager step, all of it or nothing, and numpy's calls where anything is otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler import updates
from aiograd.compiler.native import tiers
from tests.compiler.native.codes import needs_native, plain_bits
from tests.compiler.test_updates import OPTIMIZERS, Case, inputs

pytestmark = needs_native


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each use of a native function, True if numpy's calls had to follow."""
    found: list[bool] = []
    before = updates.NativeUpdate.__call__

    def noted(update: Any, numbers: Any, *arrays: Any) -> bool:
        done = before(update, numbers, *arrays)
        found.append(not done)
        return done

    monkeypatch.setattr(updates.NativeUpdate, "__call__", noted)
    return found


async def both(make: Callable[[Any], Any], disturb: dict[int, Callable[[Case], Any]], steps: int = 10) -> None:
    """Some steps, eager and native, with the same bits; `disturb` is carried out before some."""
    results = []
    for compiled in (False, True):
        case, found = Case(make), []
        run: Any = ag.compile(case.step, tier="native") if compiled else case.step
        for n, x in enumerate(inputs(steps)):
            if n in disturb:
                disturb[n](case)
            await run(x)
            found.append([plain_bits(np.frombuffer(each, np.float32)) if each.__class__ is bytes else each for each in flat(case.state())])
        results.append(found)
    assert results[0] == results[1]


def flat(state: list[Any]) -> list[Any]:
    return [part for each in state for part in (each if each.__class__ is tuple else (each,))]


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_steps_are_native(name: str, checked: str, refused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", checked)

    def slower(case: Case) -> None:
        for group in case.optimizer.param_groups:
            group["lr"] *= 0.5
            if "betas" in group:
                group["betas"] = (0.8, 0.99)

    await both(OPTIMIZERS[name], {4: slower})
    assert len(refused) >= 9 and not any(refused)


def with_rate(rate: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.optimizer.param_groups[0]["lr"] = rate

    return change


def decays(case: Case) -> None:
    case.optimizer.param_groups[0]["weight_decay"] = 0.1


@pytest.mark.parametrize("rate", [np.float64(0.02), 1e-40, 1e35, np.float32(0.01)], ids=repr)
async def test_numbers_that_become_others_are_left_to_numpy(rate: Any, refused: list[bool]) -> None:
    with np.errstate(all="ignore"):
        await both(OPTIMIZERS["adam"], {3: with_rate(rate), 5: with_rate(0.01)})
    assert refused == [n in (2, 3) for n in range(9)]


async def test_other_operations_are_left_to_numpy(refused: list[bool]) -> None:
    await both(OPTIMIZERS["adam"], {5: decays})
    assert refused == [n >= 4 for n in range(9)]


LAYOUTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a view": (lambda g: np.concatenate([g] * 2)[: len(g)], False),
    "a view of memory of another kind": (lambda g: np.frombuffer(bytearray(g.tobytes()), g.dtype).reshape(g.shape), True),
    "columns first": (np.asfortranarray, True),
    "unaligned": (lambda g: np.frombuffer(bytearray(b"." + g.tobytes()), g.dtype, offset=1).reshape(g.shape), True),
    "every other one": (lambda g: np.repeat(g, 2, 0)[::2], True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_gradients_of_another_layout(layout: str, refused: list[bool]) -> None:
    change, is_refused = LAYOUTS[layout]

    def hooked(case: Case) -> None:
        def set_other(leaf: Any) -> None:
            leaf.grad = ag.asarray(change(leaf.grad.numpy()))

        case.params[0].register_post_accumulate_grad_hook(set_other)

    await both(OPTIMIZERS["sgd"], {4: hooked})
    assert refused == [n >= 3 and is_refused for n in range(9)]


async def test_one_array_twice(refused: list[bool]) -> None:
    """A gradient that is the array of a parameter: the order of the writes shows."""
    results = []
    for compiled in (False, True):
        one, other = (ag.tensor(np.full(20, number, np.float32), requires_grad=True) for number in (1.0, 2.0))
        optimizer = ag.optim.SGD([one, other], 0.1)

        async def step(x: Any, one: Any = one, other: Any = other, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = ((one * x + other) ** 2).mean()
            await loss.backward()
            optimizer.step()
            return loss

        def alias(leaf: Any, one: Any = one) -> None:
            leaf.grad = ag.asarray(one._data)

        run: Any = ag.compile(step, tier="native") if compiled else step
        for n in range(6):
            if n == 3:
                other.register_post_accumulate_grad_hook(alias)
            await run(np.full(20, n, np.float32))
        results.append([p.detach().numpy().tobytes() for p in (one, other)])
    assert results[0] == results[1]
    assert refused == [False, False, True, True, True]


@pytest.mark.parametrize("way", ["raise", "warn", "ignore"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
async def test_a_floating_point_error(name: str, way: Any) -> None:
    """It is told as the eager step tells it, and leaves the same behind."""
    results = []
    for compiled in (False, True):
        case, said = Case(OPTIMIZERS[name]), []
        run: Any = ag.compile(case.step, tier="native") if compiled else case.step
        xs = inputs(4)
        for x in xs:
            await run(x)
        case.params[2].register_hook(lambda grad: grad * np.float32(1e30))
        with warnings.catch_warnings(record=True) as caught, np.errstate(all=way):
            warnings.simplefilter("always")
            case.optimizer.param_groups[0]["lr"] = 1e20
            try:
                await run(xs[0])
            except FloatingPointError as error:
                said.append(str(error))
        said += [str(warning.message) for warning in caught]
        results.append((said, case.state()))
    assert results[0] == results[1]
    assert bool(results[0][0]) is (way != "ignore")


@pytest.mark.parametrize("values", [np.nan, np.inf, -0.0, 1e-42], ids=str)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam with decay"])
async def test_special_numbers(name: str, values: float) -> None:
    def set_some(case: Case) -> None:
        case.params[0].detach().numpy()[:2] = values
        case.params[3].detach().numpy()[0] = values

    with np.errstate(all="ignore"):
        await both(OPTIMIZERS[name], {3: set_some})


NETWORKS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)),
    "normalized": lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)),
    "convolution": lambda: nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 5)),
    "deep": lambda: nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(6, 6), nn.Sigmoid())], nn.Linear(6, 5)),
}


@pytest.mark.one_loop
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
async def test_a_hundred_steps(network: str, optimizer: str, refused: list[bool]) -> None:
    results = []
    for compiled in (False, True):
        ag.seed(1)
        model = NETWORKS[network]()
        chosen = OPTIMIZERS[optimizer]([*model.parameters()])
        schedule = ag.optim.StepLR(chosen, 7)

        async def step(x: Any, y: Any, model: Any = model, chosen: Any = chosen, schedule: Any = schedule) -> Any:
            chosen.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            await loss.backward()
            chosen.step()
            schedule.step()
            return loss

        run = ag.compile(step, tier="native") if compiled else step
        rng, found = np.random.default_rng(0), []
        for n in range(100):
            labels = rng.integers(0, 5, 4)
            if n % 10 == 9:
                labels[0] = -100
            loss = await run(rng.standard_normal((4, 6)).astype(np.float32), ag.tensor(labels))
            found.append(loss.numpy().tobytes())
        results.append((found, [p.detach().numpy().tobytes() for p in model.parameters()]))
    assert results[0] == results[1]
    assert len(refused) == 99 and not any(refused)
    text = str(run.programs[0])
    assert any([line.split()[:2] == ["step", "fused"] for line in text.splitlines()]), text


@pytest.mark.one_loop
async def test_a_step_becomes_native_by_itself(refused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many runs as a program, on the thread; with the numpy tier never."""
    jobs: list[Any] = []
    monkeypatch.setattr(updates.compiler, "submit", jobs.append)
    monkeypatch.setattr(updates, "is_simulated", lambda: False)
    for tier in ("numpy", "auto"):
        case = Case(OPTIMIZERS["adam"])
        run: Any = ag.compile(case.step, tier=tier)
        refused.clear()
        for n, x in enumerate(inputs(tiers.HOT + 6)):
            await run(x)
            if n == tiers.HOT + 3:
                for job in jobs:
                    job()
        assert refused == [True] * (tiers.HOT + 3) + [tier == "numpy"] * 2
    assert run.statistics().compile_seconds > 0
