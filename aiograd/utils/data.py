"""PyTorch's name for `aiograd.data`: ``from aiograd.utils.data import DataLoader``."""

from __future__ import annotations

from aiograd.data import DataLoader, Dataset, TensorDataset, collate

default_collate = collate

__all__ = ["DataLoader", "Dataset", "TensorDataset", "collate", "default_collate"]
