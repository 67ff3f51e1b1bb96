"""Compiled methods of objects."""

from __future__ import annotations

import functools
from typing import Any

from aiograd.compiler.warming import warm_up


class BoundCompiledFunction(functools.partial):  # type: ignore[type-arg]
    """A compiled method of an object. Other attributes are the compiled function's: `programs`, `statistics`, `clear`."""

    __slots__ = ()

    @property
    def __self__(self) -> Any:
        return self.args[0]

    async def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """As `CompiledFunction.warm_up`, for a call of the method."""
        await warm_up(self.func, (*self.args, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)
