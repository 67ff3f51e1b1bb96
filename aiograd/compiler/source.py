"""Text to functions: the only place of the compiler that calls ``compile``.

The text is registered with `linecache`, so that tracebacks, debuggers and profilers show it. It consists of names made here and of rows' names.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

_numbers = itertools.count(1)


def load(text: str, name: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The function `name` that `text` defines, with `namespace` for its globals."""
    file = f"<aiograd program {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), namespace)  # noqa: S102 - see the module
    function: Callable[..., Any] = namespace[name]
    return function


class Names:
    """Names for the objects that a program's text refers to."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self._known: dict[tuple[str, int], str] = {}

    def of(self, prefix: str, thing: Any) -> str:
        """The name of an object, the same each time: `prefix`, with a number where the prefix is taken."""
        key = (prefix, id(thing))
        name = self._known.get(key)
        if name is None:
            count = itertools.count(2)
            name = prefix
            while name in self.namespace:
                name = f"{prefix}_{next(count)}"
            self.namespace[name] = thing
            self._known[key] = name
        return name
