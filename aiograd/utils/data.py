"""PyTorch's name for `aiograd.data`: ``from aiograd.utils.data import DataLoader``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.data import DataLoader, Dataset, Subset, TensorDataset, collate, random_split
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

default_collate = collate

__all__ = ["DataLoader", "Dataset", "Subset", "TensorDataset", "collate", "default_collate", "random_split"]
