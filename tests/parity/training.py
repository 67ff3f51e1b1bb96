"""Compares layers and optimizers with torch's: the same values to start from, outputs, gradients, and where several steps lead.

Everything in float64. A layer's state dict goes from torch to aiograd, so names and layouts are compared as well; afterwards buffers (running
statistics) are compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import aiograd as ag
from aiograd import nn, optim
from aiograd.running.trees import map_tree
from tests.parity.layers import MORE_LAYERS

#: largest difference allowed, relative to the largest number of the result where that is above 1
LIMIT = 1e-9
#: times that, where torch itself is less accurate: its sixth and 1 / alpha are float32 numbers
LOOSER = {"Hardsigmoid()": 10.0, "CELU(0.7)": 100.0}
STEPS = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest difference between two things called the same."""

    name: str
    value: float
    error: str = ""

    @property
    def agrees(self) -> bool:
        """True if it is within the limit."""
        return not self.error and self.value <= LIMIT * LOOSER.get(self.name, 1.0)


def _difference(mine: Any, other: Any) -> float:
    a = mine.detach().numpy() if isinstance(mine, ag.Tensor) else np.asarray(mine)
    b = other.numpy(force=True)
    if a.shape != b.shape:
        raise ValueError(f"shape {a.shape}, torch has {b.shape}")
    found = float(np.max(np.abs(a - b), initial=0.0)) / max(1.0, float(np.max(np.abs(b), initial=0.0)))
    return found if np.isfinite(found) else float("inf")


# -------------------------------------------------------------------- layers

_D: dict[str, Any] = {"dtype": np.float64}
_T: dict[str, Any] = {"dtype": torch.float64}

#: name, aiograd's layer, torch's layer, shapes of the inputs (or how to draw them)
LAYERS: list[tuple[str, Callable[[], Any], Callable[[], Any], Sequence[Any]]] = [
    ("Linear(5, 3)", lambda: nn.Linear(5, 3, **_D), lambda: torch.nn.Linear(5, 3, **_T), [(2, 4, 5)]),
    ("Linear(5, 3, bias=False)", lambda: nn.Linear(5, 3, bias=False, **_D), lambda: torch.nn.Linear(5, 3, bias=False, **_T), [(4, 5)]),
    (
        "Embedding(7, 3, padding_idx=2)",
        lambda: nn.Embedding(7, 3, 2, **_D),
        lambda: torch.nn.Embedding(7, 3, 2, **_T),
        [np.array([[0, 2, 6], [2, 1, 1]])],
    ),
    (
        "Conv2d(4, 6, 3, groups=2)",
        lambda: nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1, groups=2, **_D),
        lambda: torch.nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1, groups=2, **_T),
        [(2, 4, 7, 6)],
    ),
    (
        "Conv2d(2, 3, (2, 3), 'same')",
        lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=2, **_D),
        lambda: torch.nn.Conv2d(2, 3, (2, 3), padding="same", dilation=2, **_T),
        [(2, 2, 7, 6)],
    ),
    ("MaxPool2d(3, 2, 1)", lambda: nn.MaxPool2d(3, 2, 1), lambda: torch.nn.MaxPool2d(3, 2, 1), [(2, 3, 7, 8)]),
    ("AvgPool2d(2)", lambda: nn.AvgPool2d(2), lambda: torch.nn.AvgPool2d(2), [(2, 3, 7, 8)]),
    ("LayerNorm((3, 4))", lambda: nn.LayerNorm((3, 4), **_D), lambda: torch.nn.LayerNorm((3, 4), **_T), [(2, 3, 4)]),
    ("RMSNorm(4)", lambda: nn.RMSNorm(4, **_D), lambda: torch.nn.RMSNorm(4, **_T), [(2, 3, 4)]),
    ("GroupNorm(2, 4)", lambda: nn.GroupNorm(2, 4, **_D), lambda: torch.nn.GroupNorm(2, 4, **_T), [(2, 4, 5)]),
    ("BatchNorm1d(4)", lambda: nn.BatchNorm1d(4, **_D), lambda: torch.nn.BatchNorm1d(4, **_T), [(6, 4)]),
    ("BatchNorm2d(3)", lambda: nn.BatchNorm2d(3, **_D), lambda: torch.nn.BatchNorm2d(3, **_T), [(2, 3, 4, 5)]),
    *(
        (f"{name}()", lambda name=name: getattr(nn, name)(), lambda name=name: getattr(torch.nn, name)(), [(3, 4)])
        for name in ("ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Softplus", "Tanh", "Sigmoid")
    ),
    ("Softmax(1)", lambda: nn.Softmax(1), lambda: torch.nn.Softmax(1), [(3, 4, 2)]),
    ("LogSoftmax(-1)", lambda: nn.LogSoftmax(-1), lambda: torch.nn.LogSoftmax(-1), [(3, 4)]),
    (
        "LSTM(3, 4, 2, bidirectional)",
        lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, **_D),
        lambda: torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, **_T),
        [(2, 5, 3)],
    ),
    ("LSTM(3, 4, bias=False)", lambda: nn.LSTM(3, 4, bias=False, **_D), lambda: torch.nn.LSTM(3, 4, bias=False, **_T), [(5, 2, 3)]),
    (
        "MultiheadAttention(8, 2)",
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, **_D),
        lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True, **_T),
        [(2, 3, 8), (2, 5, 8), (2, 5, 8)],
    ),
    (
        "TransformerEncoderLayer(8, 2)",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", norm_first=True, batch_first=True, **_D),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", norm_first=True, batch_first=True, **_T),
        [(2, 5, 8)],
    ),
    ("CrossEntropyLoss()", nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss, [(4, 3), np.array([0, 2, 1, 1])]),
    ("NLLLoss()", nn.NLLLoss, torch.nn.NLLLoss, [(4, 3), np.array([0, 2, 1, 1])]),
    *(
        (f"{name}()", getattr(nn, name), getattr(torch.nn, name), [(4, 3), (4, 3)])
        for name in ("MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "BCEWithLogitsLoss")
    ),
]


async def compare_layers() -> list[Difference]:
    """Outputs, gradients of inputs and parameters, and buffers of every layer."""
    found = []
    layers = [*LAYERS, *((name, _bound(make, nn, _D), _bound(make, torch.nn, _T), inputs) for name, make, inputs in MORE_LAYERS)]
    for name, ours, theirs, inputs in layers:
        try:
            found.append(Difference(name, await _compare_layer(ours(), theirs(), inputs)))
        except Exception as error:
            found.append(Difference(name, float("nan"), f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"))
    return found


def _bound(make: Any, package: Any, options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: make(package, options)


async def _compare_layer(ours: Any, theirs: Any, inputs: Sequence[Any]) -> float:
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.tensor(rng.normal(size=tuple(parameter.shape))))
        if isinstance(theirs, torch.nn.Embedding) and theirs.padding_idx is not None:
            theirs.weight[theirs.padding_idx] = 0
    ours.load_state_dict({path: value.numpy(force=True) for path, value in theirs.state_dict().items()})
    arrays = [_drawn(shape, rng) for shape in inputs]
    mine = map_tree(lambda array: ag.tensor(array, requires_grad=array.dtype.kind == "f"), arrays, np.ndarray)
    other = map_tree(lambda array: torch.tensor(array, requires_grad=array.dtype.kind == "f"), arrays, np.ndarray)
    our_outputs, their_outputs = _flat(ours(*mine)), _flat(theirs(*other))
    if len(our_outputs) != len(their_outputs):
        raise ValueError(f"{len(our_outputs)} outputs, torch has {len(their_outputs)}")
    differences = [_difference(a, b) for a, b in zip(our_outputs, their_outputs, strict=True)]
    seeds = [np.asarray(rng.normal(size=tuple(b.shape))) for b in their_outputs]
    await ag.backward(our_outputs, [ag.tensor(seed) for seed in seeds])
    torch.autograd.backward(their_outputs, [torch.tensor(seed) for seed in seeds])
    for a, b in [*zip(_flat(mine), _flat(other), strict=True), *_paired(ours.named_parameters(), theirs.named_parameters())]:
        if b.grad is not None:
            differences.append(_difference(a.grad, b.grad))
    differences += [_difference(a, b) for a, b in _paired(ours.state_dict().items(), theirs.state_dict().items())]
    return max(differences)


def _drawn(shape: Any, rng: np.random.Generator) -> Any:
    """An array of a shape, a tuple of them for a tuple of shapes; arrays as they are."""
    if isinstance(shape, np.ndarray):
        return shape
    if any(isinstance(each, tuple) for each in shape):
        return tuple(_drawn(each, rng) for each in shape)
    return np.asarray(rng.uniform(0.1, 0.9, shape))


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in _flat(item)]
    return [] if result is None else [result]


def _paired(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    mine, other = dict(ours), dict(theirs)
    if mine.keys() != other.keys():
        raise ValueError(f"aiograd names {sorted(mine)}, torch {sorted(other)}")
    return [(mine[name], other[name]) for name in mine]


# -------------------------------------------------------------------- optimizers

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.001, "momentum": 0.8, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.05}),
    ("Adam", {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.05}),
    ("RMSprop", {"lr": 0.05, "alpha": 0.9, "momentum": 0.8, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"lr": 0.05, "momentum": 0.5, "centered": True}),
    ("RMSprop", {"lr": 0.05, "centered": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("Adadelta", {"lr": 0.5}),
    ("Adadelta", {"lr": 1.0, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    ("NAdam", {"lr": 0.05}),
    ("NAdam", {"lr": 0.05, "weight_decay": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("RAdam", {"lr": 0.05}),
    ("RAdam", {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("RAdam", {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.05, "weight_decay": 0.2, "amsgrad": True, "maximize": True}),
]
LBFGS: list[dict[str, Any]] = [
    {"lr": 0.1, "max_iter": 7},
    {"lr": 0.05, "max_iter": 12, "history_size": 3},
    {"line_search_fn": "strong_wolfe", "max_iter": 5},
    {"line_search_fn": "strong_wolfe", "lr": 30.0, "max_iter": 9, "history_size": 2},
    {"line_search_fn": "strong_wolfe", "max_iter": 100},
]
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.3}),
    ("ExponentialLR", {"gamma": 0.8}),
    ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.01}),
    ("LinearLR", {"start_factor": 0.2, "total_iters": 4}),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 2, "eta_min": 0.01}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    ("OneCycleLR", {"max_lr": 0.2, "total_steps": 9, "cycle_momentum": False}),
    ("OneCycleLR", {"max_lr": 0.2, "epochs": 2, "steps_per_epoch": 5, "three_phase": True, "anneal_strategy": "linear", "pct_start": 0.4}),
    ("ReduceLROnPlateau", {"factor": 0.5, "patience": 1, "threshold": 0.05, "cooldown": 1}),
    ("LambdaLR", {"lr_lambda": lambda step: 1.0 / (1 + step)}),
]


async def compare_optimizers() -> list[Difference]:
    """Where a few steps on a network lead, with clipped gradients, and with learning rate schedules."""
    found = []
    runs: list[tuple[str, str, dict[str, Any], Any, float | None]] = [(name, name, options, None, None) for name, options in OPTIMIZERS]
    runs.append(("SGD", "clip_grad_norm_", {"lr": 0.1}, None, 0.1))
    runs += [("SGD", name, {"lr": 0.1, "momentum": 0.5}, (name, options), None) for name, options in SCHEDULES]
    for options in LBFGS:
        name = f"LBFGS({', '.join(f'{key}={value}' for key, value in options.items())})"
        try:
            found.append(Difference(name, await _compare_lbfgs(options)))
        except Exception as error:
            found.append(Difference(name, float("nan"), f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"))
    for optimizer, title, options, schedule, clip in runs:
        shown = options if schedule is None else schedule[1]
        name = f"{title}({', '.join(f'{key}={value}' for key, value in shown.items())})"
        try:
            found.append(Difference(name, await _compare_optimizer(optimizer, options, schedule, clip)))
        except Exception as error:
            found.append(Difference(name, float("nan"), f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"))
    return found


async def _compare_lbfgs(options: dict[str, Any]) -> float:
    """Where two steps of LBFGS lead on a function with a curved valley, and how often they evaluated it."""
    start = [np.array([-1.2, 1.0, 0.5]), np.array([[0.3]])]
    mine, other = [ag.tensor(value, requires_grad=True) for value in start], [torch.tensor(value, requires_grad=True) for value in start]
    ours, theirs = optim.LBFGS(mine, **options), torch.optim.LBFGS(other, **options)
    counts = [0, 0]

    def valley(x: Any, y: Any) -> Any:
        return (1.0 - x[0]) ** 2 + 10.0 * (x[1] - x[0] * x[0]) ** 2 + ((x[2] - x[1]) ** 4 + (y - x[2]) ** 2).sum()

    async def closure() -> Any:
        ours.zero_grad()
        counts[0] += 1
        loss = valley(*mine)
        await loss.backward()
        return loss

    def their_closure() -> Any:
        theirs.zero_grad()
        counts[1] += 1
        loss = valley(*other)
        loss.backward()
        return loss

    differences = []
    for _ in range(2):
        differences.append(_difference(await ours.step(closure), theirs.step(their_closure)))
    if counts[0] != counts[1]:
        raise ValueError(f"{counts[0]} evaluations, torch takes {counts[1]}")
    return max(*differences, *(_difference(a, b) for a, b in zip(mine, other, strict=True)))


async def _compare_optimizer(name: str, options: dict[str, Any], schedule: Any, clip: float | None) -> float:
    rng = np.random.default_rng(1)
    values = [rng.normal(size=shape) for shape in ((4, 3), (4,), (2, 4), ())]
    data = rng.normal(size=(5, 3))
    mine = [ag.tensor(value, requires_grad=True) for value in values]
    other = [torch.tensor(value, requires_grad=True) for value in values]
    ours, theirs = getattr(optim, name)(mine, **options), getattr(torch.optim, name)(other, **options)
    our_schedule = their_schedule = None
    if schedule is not None:
        our_schedule = getattr(optim, schedule[0])(ours, **schedule[1])
        their_schedule = getattr(torch.optim.lr_scheduler, schedule[0])(theirs, **schedule[1])
    x, y = ag.tensor(data), torch.tensor(data)
    measures = iter([3.0, 2.0, 2.0, 1.99, 1.98, 1.97, 1.0, 1.0])
    for _ in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        await (((x @ mine[0].T + mine[1]).tanh() @ mine[2].T * mine[3]) ** 2).mean().backward()
        (((y @ other[0].T + other[1]).tanh() @ other[2].T * other[3]) ** 2).mean().backward()
        if clip is not None:
            optim.clip_grad_norm_(mine, clip)
            torch.nn.utils.clip_grad_norm_(other, clip)
        ours.step()
        theirs.step()
        if our_schedule is not None and their_schedule is not None:
            measure = [next(measures)] if schedule[0] == "ReduceLROnPlateau" else []
            our_schedule.step(*measure)
            their_schedule.step(*measure)
    return max(_difference(a, b) for a, b in zip(mine, other, strict=True))
