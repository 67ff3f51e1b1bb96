"""PyTorch's module of schedules: ``optim.lr_scheduler.StepLR`` is ``optim.StepLR``."""

from __future__ import annotations

from aiograd.optim.one_cycle import OneCycleLR
from aiograd.optim.plateau import ReduceLROnPlateau
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

__all__ = [
    "LRScheduler", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "LambdaLR", "SequentialLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau",
]  # fmt: skip
