"""The asyncio side of mixtures of experts: many calls with a few allowed to fail, batches across callers, experts that learn."""

from __future__ import annotations
