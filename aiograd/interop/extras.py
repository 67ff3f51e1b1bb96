"""Libraries that come with an extra: imported on first use, and named in one line where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from aiograd.errors import MissingExtraError
from aiograd.running.late import LateModule


def from_extra(module: str, extra: str) -> Any:
    """Stands for a module that an extra brings, until something of it is asked for::

        if TYPE_CHECKING:
            import torch
        else:
            torch = from_extra("torch", "torch")

    Args:
        module: its name.
        extra: name of the extra.

    Returns:
        An object with the attributes of the module; the first access raises `MissingExtraError` where it is not installed.
    """
    package = module.partition(".")[0]

    def load(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            raise MissingExtraError(f"aiograd.interop.{extra} needs {package}, which is not installed: pip install 'aiograd[{extra}]'") from None

    return LateModule(module, load)
