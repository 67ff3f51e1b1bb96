"""PyTorch's ``torch.utils``: `data`, under the name that ported scripts import it by."""

from __future__ import annotations

from aiograd.utils import data as data

__all__ = ["data"]
