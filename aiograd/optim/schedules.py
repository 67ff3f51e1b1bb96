"""Learning rates over time.

Note [Closed forms]
    A schedule is a function of the base rate and the number of steps taken, so any step can be computed from nothing, and schedules
    can follow each other (`SequentialLR`) without undoing the work of the one before. A rate that was changed by hand in between is
    overwritten at the next step; to change it for good, change ``base_lrs``.

Source: names and arguments as in ``torch.optim.lr_scheduler``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.optim.loading import count, saved_number
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.schedule_arguments import as_number, check_numbers, checked_groups, checked_milestones
from aiograd.running.modes import current_mode


class LRScheduler:
    """Base of schedules: sets the rate of every group when made and at each `step`.

    Args:
        optimizer: the optimizer; the present ``lr`` of each group is its base rate.

    Raises:
        ArgumentTypeError: no optimizer.

    >>> class HalfTheRate(ag.optim.LRScheduler):
    ...     def lr_at(self, base_lr, epoch, group):
    ...         return base_lr if epoch < 2 else base_lr / 2
    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = HalfTheRate(optimizer)
    >>> scheduler.step()
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.5]
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = checked_groups(type(self).__name__, optimizer)
        self.optimizer = optimizer
        #: steps taken
        self.last_epoch: int = 0
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [group["initial_lr"] for group in groups]
        self._set()

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        """The rate of a group after `epoch` steps.

        Args:
            base_lr: the rate of the group when the schedule was made.
            epoch: number of steps.
            group: index of the group.

        Returns:
            The rate.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Go on by one; call it after the optimizer's step."""
        trace = current_mode().trace
        if trace is not None:
            trace.acts("step of a schedule", LRScheduler.step, self)
            return
        self.last_epoch += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The rates set last, one per group.

        Returns:
            The rates.
        """
        return [self.lr_at(base, self.last_epoch, i) for i, base in enumerate(self.base_lrs)]

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the first rates; the options of the schedule are not part of it.

        Returns:
            A dict for `load_state_dict`.
        """
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Args:
            state: the state.

        Raises:
            ArgumentError: no such state, or of another number of groups; nothing has changed.
        """
        what, lrs = f"{type(self).__name__}.load_state_dict", state.get("base_lrs") if isinstance(state, Mapping) else None
        if not isinstance(lrs, (list, tuple)) or len(lrs) != len(self.base_lrs) or "last_epoch" not in state:
            raise ArgumentError(f"{what}: expected 'last_epoch' and 'base_lrs' for {len(self.base_lrs)} groups, as state_dict() returns them")
        last_epoch, base_lrs = saved_number(what, "last_epoch", count, state["last_epoch"]), [saved_number(what, "base_lrs", float, lr) for lr in lrs]
        self.last_epoch, self.base_lrs = last_epoch, base_lrs
        self._set()


class StepLR(LRScheduler):
    """Multiply the rates by `gamma` every `step_size` steps.

    Args:
        optimizer: the optimizer.
        step_size: steps, at least 1.
        gamma: the factor.

    Raises:
        ArgumentError, ArgumentTypeError: `step_size` is below 1, or arguments of other types.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.StepLR(optimizer, step_size=2)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        check_numbers("StepLR", step_size=step_size, gamma=gamma)
        if step_size < 1:
            raise ArgumentError(f"StepLR(step_size={step_size}): expected at least 1")
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return base_lr * self.gamma ** (epoch // self.step_size)


class MultiStepLR(LRScheduler):
    """Multiply the rates by `gamma` at each of the `milestones`.

    Args:
        optimizer: the optimizer.
        milestones: numbers of steps.
        gamma: the factor.

    Raises:
        ArgumentTypeError: something that is no optimizer or no number.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.MultiStepLR(optimizer, milestones=[1, 3])
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.1, 0.1, 0.01, 0.01]
    """

    def __init__(self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1) -> None:
        check_numbers("MultiStepLR", gamma=gamma)
        self.milestones: list[int] = sorted(checked_milestones("MultiStepLR", milestones))
        self.gamma = gamma
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return base_lr * self.gamma ** bisect.bisect_right(self.milestones, epoch)


class ExponentialLR(LRScheduler):
    """Multiply the rates by `gamma` at every step.

    Args:
        optimizer: the optimizer.
        gamma: the factor.

    Raises:
        ArgumentTypeError: something that is no optimizer or no number.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.ExponentialLR(optimizer, gamma=0.5)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    """

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        check_numbers("ExponentialLR", gamma=gamma)
        self.gamma = gamma
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return base_lr * self.gamma**epoch


class CosineAnnealingLR(LRScheduler):
    """Down to `eta_min` within `T_max` steps along half a cosine (and up again after that).

    Args:
        optimizer: the optimizer.
        T_max: steps from the top to the bottom, at least 1.
        eta_min: the rate at the bottom.

    Raises:
        ArgumentError, ArgumentTypeError: `T_max` is below 1, or arguments of other types.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.CosineAnnealingLR(optimizer, T_max=4)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0]
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        check_numbers("CosineAnnealingLR", T_max=T_max, eta_min=eta_min)
        if T_max < 1:
            raise ArgumentError(f"CosineAnnealingLR(T_max={T_max}): expected at least 1")
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return self.eta_min + (base_lr - self.eta_min) * (1.0 + math.cos(math.pi * epoch / self.T_max)) / 2.0


class LinearLR(LRScheduler):
    """Multiply the first rates by a factor that goes from `start_factor` to `end_factor` within `total_iters` steps: a warm-up.

    Args:
        optimizer: the optimizer.
        start_factor: above 0, at most 1.
        end_factor: from 0 to 1.
        total_iters: steps from the first to the last factor.

    Raises:
        ArgumentError, ArgumentTypeError: numbers out of these ranges, or arguments of other types.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    def __init__(self, optimizer: Optimizer, start_factor: float = 1.0 / 3.0, end_factor: float = 1.0, total_iters: int = 5) -> None:
        check_numbers("LinearLR", start_factor=start_factor, end_factor=end_factor, total_iters=total_iters)
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1 or total_iters < 1:
            raise ArgumentError(f"LinearLR({start_factor}, {end_factor}, total_iters={total_iters}): expected factors up to 1, the first above 0")
        self.start_factor = start_factor
        self.end_factor = end_factor
        self.total_iters = total_iters
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * min(epoch, self.total_iters) / self.total_iters)


class LambdaLR(LRScheduler):
    """Multiply the first rates by the result of a function of the number of steps: one for all groups, or one each.

    Args:
        optimizer: the optimizer.
        lr_lambda: takes the number of steps and returns a factor.

    Raises:
        ArgumentError, ArgumentTypeError: neither one function nor one for each group; and of the steps, a factor that is no number.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.5, 0.3333, 0.25, 0.2]
    """

    def __init__(self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]]) -> None:
        groups = len(checked_groups("LambdaLR", optimizer))
        given: Any = [lr_lambda] * groups if callable(lr_lambda) else lr_lambda
        if not isinstance(given, (list, tuple)) or not all(map(callable, given)):
            raise ArgumentTypeError(f"LambdaLR(lr_lambda={lr_lambda!r}): expected a function of the number of steps, or a list of one for each group")
        self.lr_lambdas: list[Callable[[int], float]] = list(given)
        if len(self.lr_lambdas) != groups:
            raise ArgumentError(f"LambdaLR: found {len(self.lr_lambdas)} functions for {groups} groups; expected one each, or one for all")
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        return base_lr * as_number(f"LambdaLR: the factor for step {epoch} of group {group}", self.lr_lambdas[group](epoch))


class CosineAnnealingWarmRestarts(LRScheduler):
    """Down to `eta_min` along half a cosine within `T_0` steps, then again from the start, each time `T_mult` times as long.

    Source: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts (2017).

    Args:
        optimizer: the optimizer.
        T_0: steps of the first cosine, at least 1.
        T_mult: by how much each is longer than the one before, at least 1.
        eta_min: the rate at the bottom.

    Raises:
        ArgumentError, ArgumentTypeError: a number below 1, or arguments of other types.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [1.0, 0.5, 1.0, 0.5, 1.0]
    """

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:
        check_numbers("CosineAnnealingWarmRestarts", T_0=T_0, T_mult=T_mult, eta_min=eta_min)
        if T_0 < 1 or T_mult < 1:
            raise ArgumentError(f"CosineAnnealingWarmRestarts(T_0={T_0}, T_mult={T_mult}): expected at least 1")
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        length = self.T_0
        if self.T_mult == 1:
            epoch %= length
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        return self.eta_min + (base_lr - self.eta_min) * (1.0 + math.cos(math.pi * epoch / length)) / 2.0


class SequentialLR(LRScheduler):
    """One schedule after the other, each from its own start.

    Args:
        optimizer: the optimizer of all the schedules.
        schedulers: in order.
        milestones: at which step each but the first begins, ascending.

    Raises:
        ArgumentError, ArgumentTypeError: milestones that do not fit, or schedules of another optimizer, or arguments of other types.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> warmup = ag.optim.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    >>> decay = ag.optim.ExponentialLR(optimizer, gamma=0.5)
    >>> scheduler = ag.optim.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    >>> [round(scheduler.lr_at(1.0, epoch, 0), 4) for epoch in range(5)]
    [0.5, 0.75, 1.0, 0.5, 0.25]
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int]) -> None:
        if not isinstance(schedulers, (list, tuple)) or not all(isinstance(each, LRScheduler) for each in schedulers):
            kinds = ", ".join(type(each).__name__ for each in schedulers) if isinstance(schedulers, (list, tuple)) else type(schedulers).__name__
            raise ArgumentTypeError(f"SequentialLR(schedulers=): expected a list of schedules such as LinearLR, found {kinds}")
        starts = checked_milestones("SequentialLR", milestones)
        if not schedulers or len(starts) != len(schedulers) - 1 or starts != sorted(starts):
            raise ArgumentError(
                f"SequentialLR: found {len(schedulers)} schedulers and milestones {starts}; "
                "expected ascending milestones, one fewer than schedulers"
            )
        if any(scheduler.optimizer is not optimizer for scheduler in schedulers):
            raise ArgumentError("SequentialLR: expected schedulers of the optimizer it is given")
        self.schedulers: list[LRScheduler] = list(schedulers)
        self.milestones: list[int] = starts
        super().__init__(optimizer)

    def lr_at(self, base_lr: float, epoch: int, group: int) -> float:
        i = bisect.bisect_right(self.milestones, epoch)
        return self.schedulers[i].lr_at(base_lr, epoch - (self.milestones[i - 1] if i else 0), group)
