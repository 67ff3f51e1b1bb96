"""The version of the library: one place, which workers compare and packaging reads."""

from __future__ import annotations

__version__ = "0.1.0rc1"
