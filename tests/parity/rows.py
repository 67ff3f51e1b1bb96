"""Compares rows of the op tables with their torch counterparts: values, gradients, gradients of gradients.

For drawn arguments x, cotangents c and weights w: the values ``y = f(x)``, the gradients g of ``<c, y>`` by x, and the gradients of ``<w, g>`` by x
and by c. All in float64, and in complex128 where the domain allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import aiograd as ag
from aiograd.ops import ROWS
from tests.ops import domains_core, domains_nn
from tests.ops.domain import Domain
from tests.parity.counterparts import COUNTERPARTS

DOMAINS: dict[str, Domain] = {**domains_core.DOMAINS, **domains_nn.DOMAINS}
#: largest difference allowed, relative to the largest number of the result where that is above 1
VALUE, GRADIENT, SECOND = 1e-10, 1e-9, 1e-8
#: times that, where torch itself is less accurate: its derivatives of sinc cancel near 0 (aiograd's agree with 50 digits to 3e-14),
#: and its Bessel functions have single precision in places (aiograd's agree with SciPy's to 1e-15)
LOOSER = {"sinc": 1000.0, **dict.fromkeys(("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"), 1e4)}

Arrays = list[Any]


@dataclass(slots=True)
class Comparison:
    """Largest differences over the cases of one row."""

    name: str
    counterpart: str
    cases: int = 0
    value: float = 0.0
    gradient: float = 0.0
    second: float | None = 0.0
    #: what went wrong, one line per case
    errors: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """True if all differences are within the limits."""
        slack = LOOSER.get(self.name, 1.0)
        return not self.errors and self.value <= VALUE * slack and self.gradient <= GRADIENT * slack and (self.second or 0.0) <= SECOND * slack


async def compare_row(name: str) -> Comparison:
    """Compare one row over every variety of its domain."""
    domain = DOMAINS[name]
    label, function = COUNTERPARTS[name]
    comparison = Comparison(name, label, second=0.0 if domain.second_order else None)
    for imaginary in (False, True) if domain.complex else (False,):
        for variety in range(domain.varieties):
            rng = np.random.default_rng([variety, imaginary])
            args, kwargs = domain.draw(rng, variety)
            if imaginary:
                args = tuple(np.asarray(a + 1j * rng.uniform(0.1, 0.4, a.shape)) if _floating(a) else a for a in args)
            comparison.cases += 1
            try:
                await _compare_case(comparison, domain, function, args, kwargs, rng)
            except Exception as error:
                case = f"case {variety}{' complex' if imaginary else ''}"
                comparison.errors.append(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return comparison


async def _compare_case(
    comparison: Comparison, domain: Domain, function: Any, args: Sequence[Any], kwargs: dict[str, Any], rng: np.random.Generator
) -> None:
    keys = [i for i, a in enumerate(args) if _floating(a)]
    ours: Arrays = [ag.tensor(a, requires_grad=True) if i in keys else a for i, a in enumerate(args)]
    theirs: Arrays = [torch.tensor(a, requires_grad=True) if i in keys else _torch(a) for i, a in enumerate(args)]
    our_all = _floats(domain.call(ROWS[comparison.name], ours, kwargs))
    their_all = _floats(function(*theirs, **{name: _torch(value) for name, value in kwargs.items()}))
    if len(our_all) != len(their_all):
        raise ValueError(f"{len(our_all)} results, torch has {len(their_all)}")
    comparison.value = max(comparison.value, *[_difference(_numpy(mine), _numpy(other)) for mine, other in zip(our_all, their_all, strict=True)])

    pairs = [(mine, other) for mine, other in zip(our_all, their_all, strict=True) if mine.requires_grad]
    seeds = [_like(rng, mine) for mine, _ in pairs]
    our_leaves, their_leaves = [ours[i] for i in keys], [theirs[i] for i in keys]
    our_seeds = [ag.tensor(seed, requires_grad=True) for seed in seeds]
    their_seeds = [torch.tensor(seed, requires_grad=True) for seed in seeds]
    our_grads = await ag.grad([mine for mine, _ in pairs], our_leaves, our_seeds, create_graph=True, allow_unused=True)
    their_grads = _torch_grad([other for _, other in pairs], their_leaves, their_seeds)
    comparison.gradient = max(comparison.gradient, *_differences(our_grads, their_grads, our_leaves))
    if comparison.second is None:
        return

    weights = [_like(rng, leaf) for leaf in our_leaves]
    our_second = [grad for grad in our_grads if grad is not None and grad.requires_grad]
    our_weights = [ag.tensor(w) for w, grad in zip(weights, our_grads, strict=True) if grad is not None and grad.requires_grad]
    if not our_second:
        return
    again = await ag.grad(our_second, [*our_leaves, *our_seeds], our_weights, allow_unused=True)
    their_pairs = [(grad, torch.tensor(w)) for w, grad in zip(weights, their_grads, strict=True) if grad is not None and grad.requires_grad]
    expected = _torch_grad([grad for grad, _ in their_pairs], [*their_leaves, *their_seeds], [w for _, w in their_pairs])
    comparison.second = max(comparison.second, *_differences(again, expected, [*our_leaves, *our_seeds]))


def _torch_grad(outputs: list[Any], inputs: list[Any], seeds: list[Any]) -> Sequence[Any]:
    live = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
    if not live:
        return [None] * len(inputs)
    return torch.autograd.grad([output for output, _ in live], inputs, [seed for _, seed in live], create_graph=True, allow_unused=True)


def _differences(ours: Sequence[Any], theirs: Sequence[Any], leaves: Sequence[Any]) -> list[float]:
    """None counts as zeros: "no gradient" and "a gradient of zero" are the same to whoever adds it up."""
    found = []
    for mine, other, leaf in zip(ours, theirs, leaves, strict=True):
        zeros = np.zeros(leaf.shape, leaf.dtype)
        found.append(_difference(zeros if mine is None else _numpy(mine), zeros if other is None else _numpy(other)))
    return found


def _difference(mine: Any, other: Any) -> float:
    if mine.shape != other.shape:
        raise ValueError(f"shape {mine.shape}, torch has {other.shape}")
    if mine.dtype != other.dtype:
        raise ValueError(f"dtype {mine.dtype}, torch has {other.dtype}")
    if not mine.size:
        return 0.0
    difference = float(np.max(np.abs(mine - other))) / max(1.0, float(np.max(np.abs(other))))
    return difference if np.isfinite(difference) else float("inf")


def _floating(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fc"


def _floats(result: Any) -> list[Any]:
    several = result if isinstance(result, (tuple, list)) else (result,)
    return [r for r in several if (r.dtype.is_floating_point or r.dtype.is_complex if isinstance(r, torch.Tensor) else r.dtype.kind in "fc")]


def _numpy(value: Any) -> Any:
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value.detach().numpy()


def _torch(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    if isinstance(value, tuple):
        return tuple(map(_torch, value))
    return value


def _like(rng: np.random.Generator, tensor: Any) -> Any:
    seed = np.asarray(rng.normal(size=tensor.shape))
    return seed + 1j * rng.normal(size=tensor.shape) if tensor.dtype.kind == "c" else seed
