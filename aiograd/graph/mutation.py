"""allow_mutation_on_saved_tensors: modify saved tensors in place and still get the gradients of the old values.

Note [Copied when written to]
    Within the context every value saved for backward is kept as an alias of the tensor, registered under the tensor's version counter,
    which all views of the same memory share. Just before that memory is written to, each alias gets a copy of its values. So
    only modified memory is copied, and only once even if many nodes saved it.

Rejected: copying on save (as ``saved_tensors_hooks`` with ``clone`` would do), which copies every value and not just the modified ones.
"""

from __future__ import annotations

import weakref
from typing import Any

from aiograd.errors import GraphError
from aiograd.graph.saved import SavedTensorHooks
from aiograd.running.modes import ModeScope, current_mode


class _Kept:
    """A saved value: an alias of the tensor, a copy once the tensor was modified, None once the context is over."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor: Any) -> None:
        self.tensor: Any = tensor


class SavedValues:
    """The saved values of one `allow_mutation_on_saved_tensors` context."""

    __slots__ = ("_kept", "_aliases")

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        #: id of a version counter -> saved values of the memory that it counts writes to
        self._aliases: dict[int, weakref.WeakSet[_Kept]] = {}

    def pack(self, tensor: Any) -> _Kept:
        """Keep an alias."""
        kept = _Kept(tensor.detach())
        self._kept.add(kept)
        self._aliases.setdefault(id(kept.tensor._vc), weakref.WeakSet()).add(kept)
        return kept

    def unpack(self, kept: _Kept) -> Any:
        """The value as it was when it was saved."""
        if kept.tensor is None:
            raise GraphError(
                "Trying to backward outside of the 'allow_mutation_on_saved_tensors' context in which the graph was originally recorded. "
                "Await the pass within the block."
            )
        return kept.tensor

    def before_write(self, tensor: Any) -> None:
        """Copy the saved values in memory that is about to be modified."""
        counter = tensor._vc
        if counter is None:
            return
        copies: dict[int, Any] = {}
        for kept in self._aliases.pop(id(counter), ()):
            if kept.tensor._vc is counter:
                key = id(kept.tensor._data)
                if key not in copies:
                    with ModeScope(grad=False, saved_hooks=None):
                        copies[key] = kept.tensor.clone()
                kept.tensor = copies[key]

    def clear(self) -> None:
        """Drop everything saved so far, as leaving the context does; passes over the graph recorded so far then raise."""
        self._aliases.clear()
        for kept in self._kept:
            kept.tensor = None
        self._kept.clear()


class allow_mutation_on_saved_tensors(ModeScope):
    """Allow to modify tensors in place that are saved for backward: in the block their old values are copied just before.

    ``with allow_mutation_on_saved_tensors() as saved:`` gives the `SavedValues`. Passes through the graph have to run within the block.
    Belongs to the asyncio task. Values saved under other saved-tensor hooks inside the block belong to those hooks.

    Raises:
        GraphError: on entering, within another such block or where saved-tensor hooks have been disabled.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.graph.allow_mutation_on_saved_tensors():
    ...     y = x * 1
    ...     z = y * y
    ...     _ = y.zero_()
    ...     await z.sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(self) -> None:
        self._values = SavedValues()
        super().__init__(saved_hooks=SavedTensorHooks(self._values.pack, self._values.unpack), mutation=self._values)

    def _check_entry(self) -> None:
        mode = current_mode()
        if mode.mutation is not None:
            raise GraphError("allow_mutation_on_saved_tensors contexts cannot be nested: leave the outer one first")
        if mode.saved_hooks_disabled is not None:
            raise GraphError(mode.saved_hooks_disabled)

    def __enter__(self) -> SavedValues:  # type: ignore[override]
        super().__enter__()
        return self._values

    def __exit__(self, *exception: Any) -> None:
        self._values.clear()
        super().__exit__(*exception)
