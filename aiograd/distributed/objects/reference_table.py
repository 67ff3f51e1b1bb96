"""ReferenceTable: the objects of one worker that other workers hold references to. They belong to the principal that had them made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from aiograd.distributed.rpc.codec import WireReference
from aiograd.distributed.service import ExposedClass
from aiograd.errors import Overloaded, ReferenceLostError


class Held(NamedTuple):
    """An object that others hold references to."""

    value: Any
    exposed: ExposedClass | None
    principal: str
    #: name of the worker that had it made
    holder: str


class ReferenceTable:
    """The objects of one worker that references lead to.

    Args:
        owner: name of the worker. epoch: its incarnation. entropy: gives unguessable bytes. limit: objects per principal.
    """

    def __init__(self, owner: str, epoch: bytes, entropy: Callable[[int], bytes], limit: int) -> None:
        self.owner = owner
        self.epoch = epoch
        self._entropy = entropy
        self._limit = limit
        self._held: dict[bytes, Held] = {}
        self._counts: dict[str, int] = {}
        #: keys of what `share` has added, by identity and principal
        self._shared: dict[tuple[int, str], bytes] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, value: Any, exposed: ExposedClass | None, principal: str, holder: str) -> WireReference:
        """Keep an object.

        Raises:
            Overloaded: the principal has too many.
        """
        count = self._counts.get(principal, 0)
        if count >= self._limit:
            raise Overloaded(f"worker {self.owner} holds {count} objects for this principal already: delete references that are not needed any more")
        key = self._entropy(16)
        self._held[key] = Held(value, exposed, principal, holder)
        self._counts[principal] = count + 1
        return WireReference(self.owner, key, self.epoch, exposed.name if exposed is not None else type(value).__name__)

    def share(self, value: Any, principal: str, holder: str) -> WireReference:
        """As `add`, but the same object gets the same reference each time.

        Raises:
            Overloaded: the principal has too many.
        """
        key = self._shared.get((id(value), principal))
        if key is not None:
            return WireReference(self.owner, key, self.epoch, type(value).__name__)
        reference = self.add(value, None, principal, holder)
        self._shared[id(value), principal] = reference.id
        return reference

    def find(self, key: bytes, epoch: bytes, principal: str) -> Held:
        """The object behind a reference.

        Raises:
            ReferenceLostError: there is none (or it belongs to another principal, which looks the same).
        """
        if epoch != self.epoch:
            raise ReferenceLostError(f"worker {self.owner} has been restarted since this reference was made: make the object anew, restore its state")
        held = self._held.get(key)
        if held is None or held.principal != principal:
            raise ReferenceLostError(f"worker {self.owner} has no object behind this reference: it was deleted, or made for another principal")
        return held

    def principal_of(self, key: bytes) -> str | None:
        """The principal that an object belongs to; None if there is no such object."""
        held = self._held.get(key)
        return None if held is None else held.principal

    def remove(self, key: bytes, epoch: bytes, principal: str) -> bool:
        """Forget an object; returns whether there was one."""
        held = self._held.get(key)
        if epoch != self.epoch or held is None or held.principal != principal:
            return False
        del self._held[key]
        if self._shared.get((id(held.value), principal)) == key:
            del self._shared[id(held.value), principal]
        self._counts[principal] -= 1
        if not self._counts[principal]:
            del self._counts[principal]
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._counts.clear()
        self._shared.clear()
