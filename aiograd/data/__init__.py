"""Batches for training loops: an asynchronous, prefetching loader over any source of examples.

`loader` has the `DataLoader`, `leases` batches that count once, `datasets` a base class, tensors side by side and parts, `process_source` sources in
processes of their own, `sampling` batches that differ in length. Below them: `epoch` an epoch that has begun, `ledger` which batches are handed out
and read, `batch_reader` how examples become a batch, `reading` how batches are read ahead.
``ag.progress(loader)`` shows a bar.
Data sets are left to others: anything with ``__getitem__`` and ``__len__``, any iterable and any asynchronous iterable will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.data.collation import collate
from aiograd.data.datasets import Dataset, Subset, TensorDataset, random_split
from aiograd.data.leases import BatchLease, BatchLeases
from aiograd.data.loader import DataLoader
from aiograd.data.process_source import ProcessSource
from aiograd.data.sampling import PoissonSampler
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "BatchLease", "BatchLeases", "DataLoader", "Dataset", "PoissonSampler", "ProcessSource", "Subset", "TensorDataset", "collate", "random_split",
]  # fmt: skip
