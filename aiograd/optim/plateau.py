"""ReduceLROnPlateau: a rate that falls when a measure stops getting better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.optim.loading import count, saved_number
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.schedule_arguments import as_number, check_numbers, checked_groups, one_for_each
from aiograd.running.modes import current_mode


class ReduceLROnPlateau:
    """Multiply the rates by `factor` when the measure given to `step` has not got better for more than `patience` steps.

    It depends on measurements, not on the number of steps alone: so it is no `LRScheduler`, and no part of a `SequentialLR`.

    Args:
        optimizer: the optimizer; the ``lr`` of its groups is reduced.
        mode: "min" where less is better, "max" where more is.
        factor: below 1.
        patience: how many steps without improvement are tolerated.
        threshold: how much better is better.
        threshold_mode: "rel" for a part of the best, "abs" for a difference.
        cooldown: how many steps are waited after a reduction.
        min_lr: the lowest rate; one for all groups, or one each.
        eps: changes smaller than this are not made.

    Raises:
        ArgumentError, ArgumentTypeError: an argument that makes no sense.

    >>> optimizer = ag.optim.SGD([ag.zeros(2, requires_grad=True)], lr=1.0)
    >>> scheduler = ag.optim.ReduceLROnPlateau(optimizer, patience=1)
    >>> for loss in (3.0, 3.0, 3.0):
    ...     scheduler.step(loss)
    >>> scheduler.get_last_lr()
    [0.1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        groups = len(checked_groups("ReduceLROnPlateau", optimizer))
        check_numbers("ReduceLROnPlateau", factor=factor, patience=patience, threshold=threshold, cooldown=cooldown, eps=eps)
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or not factor < 1.0:
            raise ArgumentError(
                f"ReduceLROnPlateau(mode={mode!r}, threshold_mode={threshold_mode!r}, factor={factor}): expected 'min' or 'max', 'rel' or 'abs', "
                "a factor below 1"
            )
        self.min_lrs: list[float] = one_for_each("ReduceLROnPlateau", "min_lr", min_lr, groups)
        self.optimizer = optimizer
        self.mode = mode
        self.factor = factor
        self.patience = patience
        self.threshold = threshold
        self.threshold_mode = threshold_mode
        self.cooldown = cooldown
        self.eps = eps
        self.best: float = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs: int = 0
        self.cooldown_counter: int = 0
        self.last_epoch: int = 0

    def step(self, metrics: Any) -> None:
        """Take the measure of one more step, a number or a Tensor of one.

        Args:
            metrics: the measure.

        Raises:
            ArgumentTypeError: no number.
        """
        trace = current_mode().trace
        if trace is not None:
            trace.acts("step of a schedule", ReduceLROnPlateau.step, self, metrics)
            return
        measure = as_number("ReduceLROnPlateau.step", metrics)
        self.last_epoch += 1
        if self.is_better(measure):
            self.best, self.num_bad_epochs = measure, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            for group, lowest in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                lr = max(group["lr"] * self.factor, lowest)
                if group["lr"] - lr > self.eps:
                    group["lr"] = lr
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def is_better(self, measure: float) -> bool:
        """True if a measure is better than the best so far by more than the threshold.

        Args:
            measure: the measure.

        Returns:
            True or False.
        """
        sign = 1.0 if self.mode == "max" else -1.0
        if self.threshold_mode == "rel":
            return sign * measure > sign * self.best * (1.0 + sign * self.threshold)
        return sign * measure > sign * self.best + self.threshold

    def get_last_lr(self) -> list[float]:
        """The rates of the groups now.

        Returns:
            The rates.
        """
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps and the best measure; the arguments are not part of it, nor are the rates, which the optimizer's state has.

        Returns:
            A dict for `load_state_dict`.
        """
        return {name: getattr(self, name) for name in ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Args:
            state: the state.

        Raises:
            ArgumentError: no such state; nothing has changed.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or not own.keys() <= state.keys():
            raise ArgumentError(f"ReduceLROnPlateau.load_state_dict: expected {', '.join(own)}")
        what = "ReduceLROnPlateau.load_state_dict"
        found = {name: saved_number(what, name, float if name == "best" else count, state[name]) for name in own}
        for name, value in found.items():
            setattr(self, name, value)
