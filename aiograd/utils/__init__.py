"""PyTorch's ``torch.utils``: `data`, under the name that ported scripts import it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use
from aiograd.utils import data as data

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["data"]
