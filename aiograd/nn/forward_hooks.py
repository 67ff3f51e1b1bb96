"""The call of a module's forward: hooks before and after it, and the argument that is missing.

Hooks may be ``def`` or ``async def``, like ``forward`` itself. As long as neither returns a coroutine, nothing is awaited and the call is a plain
one; from the first coroutine on, the call is a coroutine itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from aiograd.graph.hooks import HookDict, RemovableHandle
from aiograd.running.exceptions import text_of


class ForwardHook(NamedTuple):
    """A hook and the way it is called."""

    function: Callable[..., Any]
    with_kwargs: bool
    #: it runs before the forward
    before: bool

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        return self.function(module, args, kwargs, *output) if self.with_kwargs else self.function(module, args, *output)


def register(hooks: HookDict, hook: Any, prepend: bool) -> RemovableHandle:
    """Add a hook at the end, or in front of all others."""
    handle = hooks.add(hook)
    if prepend:
        others = [(key, other) for key, other in hooks.items() if other is not hook]
        hooks.clear()
        hooks[handle._key] = hook
        hooks.update(others)
    return handle


def call_with_hooks(module: Any, forward: Callable[..., Any], hooks: HookDict, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward between its hooks; a coroutine from the first coroutine on."""
    steps = _steps(module, forward, hooks, args, kwargs)
    try:
        pending = next(steps)
    except StopIteration as done:
        return done.value
    return _awaited(steps, pending)


async def _awaited(steps: Any, pending: Any) -> Any:
    while True:
        try:
            result = await pending
        except BaseException as error:
            try:
                pending = steps.throw(error)
            except StopIteration as done:
                return done.value
            continue
        try:
            pending = steps.send(result)
        except StopIteration as done:
            return done.value


def _steps(module: Any, forward: Callable[..., Any], hooks: HookDict, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[Any, Any, Any]:
    """Hooks and forward in order; yields every coroutine and is sent its result."""
    hook: Any
    for hook in hooks.calls():
        if not hook.before:
            continue
        changed = hook(module, args, kwargs)
        if inspect.iscoroutine(changed):
            changed = yield changed
        if changed is None:
            continue
        if hook.with_kwargs:
            args, kwargs = changed
        else:
            args = changed if isinstance(changed, tuple) else (changed,)
    output = forward(*args, **kwargs)
    if inspect.iscoroutine(output):
        output = yield output
    for hook in hooks.calls():
        if hook.before:
            continue
        changed = hook(module, args, kwargs, output)
        if inspect.iscoroutine(changed):
            changed = yield changed
        if changed is not None:
            output = changed
    return output


def missing_argument(error: Exception, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The first argument that is None, though the function has no default for it; None if there is none, or the error says nothing about None."""
    if "None" not in text_of(error):
        return None
    try:
        signature = inspect.signature(forward)
        given = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    required = (name for name, each in signature.parameters.items() if each.default is each.empty)
    return next((name for name in required if name in given and given[name] is None), None)
