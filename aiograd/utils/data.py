"""PyTorch's name for `aiograd.data`: ``from aiograd.utils.data import DataLoader``."""

from __future__ import annotations

from aiograd.data import DataLoader, Dataset, Subset, TensorDataset, collate, random_split

default_collate = collate

__all__ = ["DataLoader", "Dataset", "Subset", "TensorDataset", "collate", "default_collate", "random_split"]
