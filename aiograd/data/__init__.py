"""Batches for training loops: an asynchronous, prefetching loader over any source of examples.

`loader` has the `DataLoader`, `datasets` a base class and tensors side by side, `reading` how batches are read ahead, `process_source`
sources in processes of their own, `ledger` which batches are handed out and read.
``ag.progress(loader)`` shows a bar.
Data sets are left to others: anything with ``__getitem__`` and ``__len__``, any iterable and any asynchronous iterable will do.
"""

from __future__ import annotations

from aiograd.data.collation import collate
from aiograd.data.datasets import Dataset, TensorDataset
from aiograd.data.loader import DataLoader
from aiograd.data.process_source import ProcessSource

__all__ = ["DataLoader", "Dataset", "ProcessSource", "TensorDataset", "collate"]
