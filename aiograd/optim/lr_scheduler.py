"""PyTorch's module of schedules: ``optim.lr_scheduler.StepLR`` is ``optim.StepLR``."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "LRScheduler", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "LinearLR", "LambdaLR", "SequentialLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau",
]  # fmt: skip
