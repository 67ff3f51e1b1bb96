"""Optimizers, gradient clipping, averages of weights and learning rate schedules; semantics as in ``torch.optim``.

``optimizer.step()`` is synchronous; ``await optimizer.astep()`` runs it on the engine's executor. `LBFGS` takes a closure that it awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.optim import lr_scheduler as lr_scheduler
from aiograd.optim.accountant import rdp_epsilon
from aiograd.optim.adam import Adam, AdamW
from aiograd.optim.adaptive import Adadelta, Adagrad, NAdam, RAdam, RMSprop
from aiograd.optim.averaging import ExponentialMovingAverage
from aiograd.optim.lbfgs import LBFGS
from aiograd.optim.one_cycle import OneCycleLR
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.plateau import ReduceLROnPlateau
from aiograd.optim.private import Private
from aiograd.optim.schedules import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)
from aiograd.optim.sgd import SGD
from aiograd.running.lazy import on_first_use
from aiograd.tensors.clipping import clip_grad_norm_, clip_grad_value_

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "lr_scheduler", "Optimizer", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "LBFGS", "ExponentialMovingAverage",
    "clip_grad_norm_", "clip_grad_value_", "Private", "rdp_epsilon",
    "LRScheduler", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "LambdaLR", "SequentialLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau",
]  # fmt: skip
