"""ExponentialMovingAverage: a model with the smoothed weights of another.

Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992); the first update copies, as in
``torch.optim.swa_utils.AveragedModel``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.optim.loading import count, saved_number
from aiograd.running.modes import current_mode
from aiograd.tensors.inplace import write


class ExponentialMovingAverage:
    """A copy of a model; each `update_parameters` moves its weights: ``average = decay * average + (1 - decay) * weight``.

    Call it as the model itself. It takes no gradients.

    Args:
        model: a module; it is copied.
        decay: in [0, 1).
        use_buffers: True to average floating buffers (running statistics) as well; otherwise buffers are copied.

    Raises:
        ArgumentError: no such `decay`.
        ArgumentTypeError: `model` is no module.

    >>> model = ag.nn.Linear(1, 1, bias=False)
    >>> average = ag.optim.ExponentialMovingAverage(model, decay=0.9)
    >>> average.update_parameters(model)
    >>> (average.module.weight == model.weight).item()
    True
    """

    def __init__(self, model: Any, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ArgumentError(f"ExponentialMovingAverage(decay={decay}): expected a number from 0 to below 1")
        if not all(hasattr(model, name) for name in ("named_parameters", "named_buffers", "state_dict")):
            raise ArgumentTypeError(f"ExponentialMovingAverage: expected a module, found {type(model).__name__}")
        self.decay = decay
        self.use_buffers = use_buffers
        #: updates so far
        self.n_averaged: int = 0
        self.module: Any = copy.deepcopy(model).requires_grad_(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def update_parameters(self, model: Any) -> None:
        """Move towards the weights of `model`; call it after the optimizer's step.

        Args:
            model: the model that is averaged.

        Raises:
            ArgumentError: it has other parameters or buffers than the model that was copied; nothing has changed.
        """
        trace = current_mode().trace
        if trace is not None:
            trace.acts("update_parameters", type(self).update_parameters, self, model)
            return
        pairs = [(*each, True) for each in self._paired("parameters", model)]
        pairs += [(*each, self.use_buffers and each[0].dtype.kind in "fc") for each in self._paired("buffers", model)]
        for average, source, moves in pairs:
            value = source.detach()._data
            if moves and self.n_averaged:
                value = average._data + (1.0 - self.decay) * (value - average._data)
            write(average, value)
        self.n_averaged += 1

    def _paired(self, kind: str, model: Any) -> list[tuple[Any, Any]]:
        own, other = dict(getattr(self.module, f"named_{kind}")()), dict(getattr(model, f"named_{kind}")())
        if own.keys() != other.keys() or any(own[name].shape != other[name].shape for name in own):
            raise ArgumentError(f"ExponentialMovingAverage: the model has {kind} {sorted(other)}, expected {sorted(own)}, of the same shapes")
        return [(own[name], other[name]) for name in own]

    def state_dict(self) -> dict[str, Any]:
        """The averaged state of the model and the number of updates.

        Returns:
            A dict for `load_state_dict`.
        """
        return {"module": self.module.state_dict(), "n_averaged": self.n_averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Args:
            state: the state.

        Raises:
            ArgumentError: it does not fit; nothing has changed.
        """
        if not isinstance(state, Mapping) or state.keys() != {"module", "n_averaged"}:
            raise ArgumentError("ExponentialMovingAverage.load_state_dict: expected 'module' and 'n_averaged', as state_dict() returns them")
        updates = saved_number("ExponentialMovingAverage.load_state_dict", "n_averaged", count, state["n_averaged"])
        self.module.load_state_dict(state["module"])
        self.n_averaged = updates
