"""Hooks: ordered registries and the handles that remove entries from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

Hook = Callable[..., Any]


class HookDict(dict[int, Hook]):
    """Hooks in order of registration, keyed by unique numbers."""

    __slots__ = ("__weakref__", "next_key")

    def __init__(self) -> None:
        super().__init__()
        self.next_key: int = 0

    def add(self, hook: Hook) -> RemovableHandle:
        """Append a hook and return the handle that removes it."""
        key = self.next_key
        self.next_key += 1
        self[key] = hook
        return RemovableHandle(self, key)

    def calls(self) -> Iterator[Hook]:
        """The hooks in order. A hook that is removed before its turn is left out; one added meanwhile is not called until the next pass."""
        for key, hook in list(self.items()):
            if key in self:
                yield hook


class RemovableHandle:
    """Removes a hook; also a context manager that removes it at the end of the block. Removing twice is harmless.

    Args:
        hooks: the hooks among which it is; the handle does not keep them alive.
        key: the key of the hook.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> handle = x.register_hook(lambda grad: grad * 10)
    >>> handle.remove()
    >>> await x.sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """

    __slots__ = ("_hooks", "_key")

    def __init__(self, hooks: HookDict, key: int) -> None:
        self._hooks = weakref.ref(hooks)
        self._key = key

    def remove(self) -> None:
        """Remove the hook. Allowed at any time, also from within a hook."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.pop(self._key, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class HandleGroup:
    """One handle for several registrations.

    Args:
        handles: the handles that it removes.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> handles = [x.register_hook(print), x.register_hook(print)]
    >>> ag.graph.HandleGroup(handles).remove()
    >>> await x.sum().backward()
    """

    __slots__ = ("_handles",)

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove every hook of the group."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def hook_name(hook: Hook) -> str:
    """The name of a hook in error messages."""
    return getattr(hook, "__qualname__", None) or type(hook).__name__
