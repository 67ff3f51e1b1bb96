"""OneCycleLR: a rate that rises and falls once, while momentum falls and rises.

Source: Smith and Topin, Super-convergence (2018); arguments and phases as in ``torch.optim.lr_scheduler``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.optim.schedule_arguments import check_numbers, checked_groups, one_for_each
from aiograd.optim.schedules import LRScheduler
from aiograd.running.modes import current_mode


class CyclePhase(NamedTuple):
    """A part of the cycle: the step it ends at, and the factors of rate and momentum between which it goes, by name."""

    end: float
    rates: tuple[str, str]
    momenta: tuple[str, str]


class OneCycleLR(LRScheduler):
    """From ``max_lr / div_factor`` up to `max_lr`, down again, and on to a `final_div_factor`-th of the start, within `total_steps` steps.

    Args:
        optimizer: the optimizer; of each group the ``lr`` is set, and ``momentum`` or the first of ``betas``.
        max_lr: the highest rate; one for all groups, or one each.
        total_steps: how many steps the cycle takes; or `epochs` times `steps_per_epoch`.
        pct_start: the part of it in which the rate rises.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: True to let momentum fall and rise.
        base_momentum, max_momentum: its ends; one for all groups, or one each.
        div_factor, final_div_factor: see above.
        three_phase: True to come down to the start as long as it went up, and then to the end.
        epochs, steps_per_epoch: their product is the number of steps where `total_steps` is not given.

    Raises:
        ArgumentError, ArgumentTypeError: an argument that makes no sense, or no momentum to cycle.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0, momentum=0.9)
    >>> scheduler = ag.optim.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.9505, 0.6113, 0.1883, 0.0001]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:
        groups = checked_groups("OneCycleLR", optimizer)
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ArgumentError("OneCycleLR: expected total_steps, or epochs and steps_per_epoch")
            check_numbers("OneCycleLR", epochs=epochs, steps_per_epoch=steps_per_epoch)
            total_steps = epochs * steps_per_epoch
        check_numbers("OneCycleLR", total_steps=total_steps, pct_start=pct_start, div_factor=div_factor, final_div_factor=final_div_factor)
        if not div_factor > 0 or not final_div_factor > 0:
            raise ArgumentError(f"OneCycleLR(div_factor={div_factor}, final_div_factor={final_div_factor}): expected numbers above 0")
        if total_steps < 1 or not 0 <= pct_start <= 1 or anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(
                f"OneCycleLR(total_steps={total_steps}, pct_start={pct_start}, anneal_strategy={anneal_strategy!r}): expected steps, a part from 0 "
                "to 1, 'cos' or 'linear'"
            )
        if cycle_momentum and not all("momentum" in group or "betas" in group for group in groups):
            raise ArgumentError("OneCycleLR(cycle_momentum=True): the optimizer has neither momentum nor betas; pass cycle_momentum=False")
        self.total_steps = total_steps
        self.anneal_strategy = anneal_strategy
        self.cycle_momentum = cycle_momentum
        self.max_lrs: list[float] = one_for_each("OneCycleLR", "max_lr", max_lr, len(groups))
        named = {"base_momentum": base_momentum, "max_momentum": max_momentum}
        ends = [one_for_each("OneCycleLR", name, value, len(groups)) for name, value in named.items()]
        self.momenta: list[tuple[float, float]] = list(zip(*ends, strict=True))
        self.div_factor = div_factor
        self.final_div_factor = final_div_factor
        up, down = ("initial", "max"), ("high", "low")
        top = pct_start * total_steps - 1
        if three_phase:
            back = CyclePhase(2 * top, ("max", "initial"), ("low", "high"))
            self.phases: list[CyclePhase] = [CyclePhase(top, up, down), back, CyclePhase(total_steps - 1, ("initial", "min"), ("high", "high"))]
        else:
            self.phases = [CyclePhase(top, up, down), CyclePhase(total_steps - 1, ("max", "min"), ("low", "high"))]
        for group, highest in zip(groups, self.max_lrs, strict=True):
            group["initial_lr"] = highest / div_factor
        super().__init__(optimizer)

    def step(self) -> None:
        """Go on by one.

        Raises:
            ArgumentError: the cycle has ended.
        """
        trace = current_mode().trace
        if trace is not None:
            trace.acts("step of a schedule", OneCycleLR.step, self)
            return
        if self.last_epoch + 1 > self.total_steps:
            raise ArgumentError(f"OneCycleLR.step: the cycle has {self.total_steps} steps, and this is one more")
        super().step()

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        values = {"initial": base_lr, "max": self.max_lrs[group], "min": base_lr / self.final_div_factor}
        phase, part = self._place(epoch)
        return self._between(values[phase.rates[0]], values[phase.rates[1]], part)

    def _set(self) -> None:
        super()._set()
        if self.cycle_momentum:
            phase, part = self._place(self.last_epoch)
            for group, (low, high) in zip(self.optimizer.param_groups, self.momenta, strict=True):
                values = {"low": low, "high": high}
                _set_momentum(group, self._between(values[phase.momenta[0]], values[phase.momenta[1]], part))

    def _place(self, epoch: int) -> tuple[CyclePhase, float]:
        """The phase of a step, and the part of it that has passed."""
        start = 0.0
        for phase in self.phases:
            if epoch <= phase.end or phase is self.phases[-1]:
                return phase, (epoch - start) / (phase.end - start) if phase.end != start else 1.0
            start = phase.end
        raise ArgumentError(f"OneCycleLR: step {epoch} of {self.total_steps}")

    def _between(self, first: float, last: float, part: float) -> float:
        if self.anneal_strategy == "linear":
            return (last - first) * part + first
        return last + (first - last) / 2.0 * (math.cos(math.pi * part) + 1.0)


def _set_momentum(group: Group, momentum: Any) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum
