"""Optimizers, gradient clipping and learning rate schedules; semantics are those of ``torch.optim``.

``optimizer.step()`` is synchronous; ``await optimizer.astep()`` runs it on the engine's executor.
"""

from __future__ import annotations

from aiograd.optim.adam import Adam, AdamW
from aiograd.optim.clipping import clip_grad_norm_, clip_grad_value_
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.schedules import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)
from aiograd.optim.sgd import SGD

__all__ = [
    "Optimizer", "SGD", "Adam", "AdamW",
    "clip_grad_norm_", "clip_grad_value_",
    "LRScheduler", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "LambdaLR", "SequentialLR",
]  # fmt: skip
