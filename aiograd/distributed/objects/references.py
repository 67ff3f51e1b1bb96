"""RemoteRef: an object that lives on another worker.

A reference is an unguessable name of an object in the memory of one process: it carries the owner's incarnation (`epoch`), so that a
reference to an object of a process that has been restarted is an error and never another object.

Source: PyTorch ``rref_impl``; the epoch as in actor handles of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from aiograd.distributed.rpc.codec import WireReference
from aiograd.running.caller import called


class Contact(NamedTuple):
    """The connection to the owner of an object: whether there is one now, and the seconds in which the owner may still be heard."""

    is_connected: bool
    silence_left: float


class RemoteRef:
    """An object on the worker `owner`. Made by `Worker.remote`; may be sent in calls.

    Args:
        wire: the reference as it came.
        request: makes the requests to the owner.
        local: finds the object on the worker that has it.
        contact: says if the owner can be reached.

    Attributes:
        owner: name of the worker that has the object.
        type_name: name of the object's class.

    >>> ref = await driver.remote("left", "Linear", 2, 1)
    >>> ref.owner, ref.type_name
    ('left', 'Linear')
    >>> await ref.call("forward", ag.ones(1, 2))
    tensor([[2.]])
    """

    __slots__ = ("owner", "key", "epoch", "type_name", "_request", "_local", "_contact")

    def __init__(
        self,
        wire: WireReference,
        request: Callable[[RemoteRef, str, tuple[Any, ...], float | None], Coroutine[Any, Any, Any]],
        local: Callable[[RemoteRef], Any],
        contact: Callable[[RemoteRef], Contact],
    ) -> None:
        self.owner: str = wire.owner
        self.key: bytes = wire.id
        self.epoch: bytes = wire.epoch
        self.type_name: str = wire.type_name
        self._request = request
        self._local = local
        self._contact = contact

    def __repr__(self) -> str:
        return f"<RemoteRef to {self.type_name} {self.key.hex()[:8]} on {self.owner}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteRef) and (self.owner, self.key, self.epoch) == (other.owner, other.key, other.epoch)

    def __hash__(self) -> int:
        return hash((self.owner, self.key))

    @property
    def is_connected(self) -> bool:
        """True if there is a connection to the owner now. Where there is none the owner may be lost; a request would try to connect."""
        return self._contact(self).is_connected

    @property
    def silence_left(self) -> float:
        """Seconds in which the owner may still be heard, before it is lost; 0: it is. It is dialled again by a request."""
        return self._contact(self).silence_left

    def to_wire(self) -> WireReference:
        """The reference in the form that the codec takes.

        Returns:
            The values that a message carries.
        """
        return WireReference(self.owner, self.key, self.epoch, self.type_name)

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a public method of the object; differentiable like `Worker.call`, and cancelled like it.

        Args:
            method: name of the method.
            *args: arguments that can be sent.
            timeout: seconds; None: the worker's default.
            **kwargs: arguments by name.

        Returns:
            A coroutine of its result.

        Raises:
            ReferenceLostError: the object is gone. Otherwise as `Worker.call`.
        """
        return called(self._request(self, "call", (method, list(args), kwargs), timeout), "RemoteRef.call")

    def post(self, values: list[Any], *, waits: bool = True, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """Give values to an object of the library that takes them as they come, in order. Nothing is recorded.

        Args:
            values: of types that can be sent.
            waits: False if the result is not awaited now: the answer may then take some milliseconds more.
            timeout: seconds; None: the worker's default.

        Returns:
            A coroutine that ends when all have been taken. Cancelled, some may have been taken.

        Raises:
            As `call`, where a value is not taken; those before it have been.
        """
        return called(self._request(self, "post", (values, waits), timeout), "RemoteRef.post")

    def call_all(self, refs: Sequence[RemoteRef], method: str, /, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, list[Any]]:
        """Call a method of many objects, on a worker each, which pass the call on to one another: see `aiograd.distributed.multicast`.

        For methods that may be called twice and have the same effect for every caller. Nothing is recorded. Cancelling stops the waiting.

        Args:
            refs: the objects, this one among them or not.
            method: name of the method.
            *args: arguments that can be sent.
            timeout: seconds; None: the worker's default.

        Returns:
            A coroutine of the results in the order of `refs`: the exception where there was one, None where the object was not reached, as far as
            is known.
        """
        return called(self._request(self, "call_all", (refs, method, list(args)), timeout), "RemoteRef.call_all")

    def adapt(self, name: str, others: list[RemoteRef], options: dict[str, Any], *, timeout: float | None = None) -> Coroutine[Any, Any, RemoteRef]:
        """Make one of the library's own objects around this one, where it lives, for instance the member of a pipeline.

        Args:
            name: of the kind of object, as registered with `register_adapter`.
            others: further objects of the same worker that it is made around.
            options: plain values.
            timeout: seconds; None: the worker's default.

        Returns:
            A reference to the new object.

        Cancelled, the object may have been made.
        """
        return called(self._request(self, "adapt", (name, others, options), timeout), "RemoteRef.adapt")

    def get(self, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """The object itself, where it can be sent (a Tensor, for instance). Inside a context gradients flow back to it.

        Args:
            timeout: seconds; None: the worker's default.

        Returns:
            A coroutine of the object. Cancelling it changes nothing.
        """
        return called(self._request(self, "get", (), timeout), "RemoteRef.get")

    def delete(self, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """Let the owner forget the object. Deleting it again does nothing.

        Args:
            timeout: seconds; None: the worker's default.

        Returns:
            A coroutine. Cancelled, the object may have been deleted.
        """
        return called(self._request(self, "delete", (), timeout), "RemoteRef.delete")

    def local_value(self) -> Any:
        """The object, on the worker that has it.

        Returns:
            The object.

        Raises:
            ReferenceLostError: it is elsewhere, or gone.
        """
        return self._local(self)
