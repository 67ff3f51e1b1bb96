"""Modules of other packages that are imported on first use, for what few programs need: a message, a picture in a notebook."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class LateModule:
    """Stands for a module until something of it is asked for::

        if TYPE_CHECKING:
            import difflib
        else:
            difflib = LateModule("difflib")

    Args:
        name: the module.
        load: imports it.
    """

    def __init__(self, name: str, load: Callable[[str], Any] = importlib.import_module) -> None:
        self._name = name
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._load(self._name), attribute)
        setattr(self, attribute, value)
        return value
