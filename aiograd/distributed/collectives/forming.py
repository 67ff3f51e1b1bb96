"""GroupForming: how the groups of one worker are formed.

Note [Forming a group]
    Each member that calls `join_group` draws a nonce, and asks every other member to join with it; the answer, given as soon as that one has called
    `join_group` as well, is that member's nonce. The group's key is a hash of its names and all nonces: a member that failed and joins again
    makes another group, and messages of the previous one find nothing. Requests of members that are ahead of this worker wait until it joins.

    Members of a large group (see `ring`) ask rank 0 alone, which answers with the nonces of all once it has them. A member without an answer after a
    while asks others too, so that a loss that it cannot see itself is noticed: rank 0 asks the missing members, the others their neighbour.

Note [A member that has not started]
    Processes of one program start at different times. So a member without a listening process at its URL is waited for, if it was never there; one
    that was there is lost, which is an error at once.

Note [A member that gives up joining]
    A member gives up when its time is over, when it is cancelled, and when one that it has met is lost or has given up. It tells the members that it
    has met, and they give up for the same reason, which their error names; in a large group, rank 0 tells the members that wait for its answer.
    Members that it has not met may come later, and are told when they ask it to join: each once, until the time of the attempt is over, unless this
    worker joins again before that.

    A group can fail on a member that has formed it before another one has: that one is told when it has formed the group, or when its own question
    comes, whichever is first. So the groups of this worker are remembered for a while when they are over.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiograd.coordination.malformed import malformed
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.collectives.ring import is_large
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.messages.groups import GIVEN_UP, NONCE, GroupJoin, GroupWithdraw, JoinRefused
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import check_name, check_names
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, CollectiveError, DeadlineError, DistributedError, WorkerLostError

#: attempts to form a group that were given up and are remembered
REMEMBERED = 64
#: seconds between two attempts to reach a member that has not started
LOOK_AGAIN = 0.1
#: errors of joining that others raise as they are
_TYPED = (CollectiveError, DeadlineError, WorkerLostError)


class FormedGroups(Protocol):
    """The groups of a worker, as the forming of a group sees them."""

    core: WorkerCore

    def open(self, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> Group:
        """A new group."""

    def named(self, principal: str, name: str) -> list[Group]:
        """The groups of a name that this worker is in."""

    def recent(self, principal: str, name: str) -> list[Group]:
        """This worker's groups of a name: present ones, and recently ended ones."""


class _Joining:
    """A call of `join_group` that waits for the other members."""

    __slots__ = ("names", "nonces", "unanswered", "due", "formed", "complete", "withdrawn", "over")

    def __init__(self, names: tuple[str, ...], own: str, nonce: bytes, due: float, loop: asyncio.AbstractEventLoop) -> None:
        self.names = names
        #: of the members that this one has met
        self.nonces: dict[str, bytes] = {}
        #: members that this one asks
        self.unanswered: dict[str, None] = {}
        self.due = due
        #: done when the group is there, or cannot be formed
        self.formed: asyncio.Future[Group] = loop.create_future()
        #: done when all nonces are known
        self.complete: asyncio.Future[None] = loop.create_future()
        #: members that have given up, with the nonces that they had, and why
        self.withdrawn: dict[str, tuple[bytes, DistributedError]] = {}
        #: the error for other members, when this one has given up
        self.over: asyncio.Future[Any] = loop.create_future()
        self.add({own: nonce})

    def add(self, nonces: Mapping[str, bytes]) -> None:
        """Take note of nonces."""
        self.nonces.update(nonces)
        for name, (nonce, error) in self.withdrawn.items():
            if self.nonces.get(name) == nonce:
                self.fail(error)
        if len(self.nonces) == len(self.names) and not self.complete.done():
            self.complete.set_result(None)

    def withdraw(self, name: str, nonce: bytes, error: DistributedError) -> None:
        """A member that had this nonce has given up; that may be known before the nonce is."""
        self.withdrawn[name] = nonce, error
        self.add({})

    def fail(self, error: DistributedError) -> None:
        """The group cannot be formed."""
        if not self.formed.done():
            self.formed.set_exception(error)


class _GivenUp(NamedTuple):
    """An attempt that this worker has given up; see Note [A member that gives up joining]."""

    names: tuple[str, ...]
    #: the time until which it would have gone on
    due: float
    #: the error for the wire
    error: Any
    #: members that know
    told: set[str]


class GroupForming:
    """Forms the groups of one worker.

    Args:
        owner: the worker's groups.
    """

    def __init__(self, owner: FormedGroups) -> None:
        self._owner = owner
        self._core = owner.core
        #: by principal and name of the group
        self._joining: dict[tuple[str, str], _Joining] = {}
        self._given_up: dict[tuple[str, str], _GivenUp] = {}
        #: set and replaced when this worker begins to join a group
        self._changed = asyncio.Event()

    async def form(self, names: Sequence[str], name: str, timeout: float | None) -> Group:
        """See `join_group`."""
        core = self._core
        core.check_open()
        seconds = core.time_for(timeout)
        members = self._check_names(names, name)
        principal = core.acting_principal()
        where = principal, name
        if where in self._joining or self._owner.named(principal, name):
            raise ArgumentError(f"join_group: worker {core.name} is in a group {name!r} already, or joins it; close that one, or take another name")
        joining = _Joining(members, core.name, core.entropy(NONCE), core.now() + seconds, core.loop)
        self._joining[where] = joining
        self._given_up.pop(where, None)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        large = is_large(len(members))
        asked = [self._ask(joining, name, other, seconds, principal) for other in (members[:1] if large else members) if other != core.name]
        if large:
            asked.append(self._ask_later(joining, name, seconds, principal))
        asking = [core.loop.create_task(each, name=f"aiograd:{core.name}:join {name}") for each in asked]
        try:
            async with asyncio.timeout_at(joining.due):
                await self._meet(joining, asking)
            group = self._formed(joining, name, principal)
            joining.formed.set_result(group)
            return group
        except BaseException as error:
            is_told = joining.formed.done() and not joining.formed.cancelled() and joining.formed.exception() is error
            if isinstance(error, (TimeoutError, DeadlineError)) and not is_told:
                late = DeadlineError(f"join_group: {self._missing(joining)} did not join group {name!r} within {seconds:g} s")
                self._give_up(where, joining, late)
                raise late from None
            self._give_up(where, joining, error)
            raise
        finally:
            del self._joining[where]
            if not joining.formed.cancel() and not joining.formed.cancelled():
                joining.formed.exception()  # raised here already, or another error was
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _check_names(self, names: Any, name: Any) -> tuple[str, ...]:
        check_name("join_group: group name", name)
        members = check_names("join_group", names)
        if self._core.name not in members:
            raise ArgumentError(f"join_group: worker {self._core.name} is not among the names {', '.join(members) or '(none)'}")
        return members

    async def _meet(self, joining: _Joining, asking: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all members have come. Raises where one of them cannot."""
        waiting: set[asyncio.Future[Any]] = {joining.formed, joining.complete, *asking}
        while not joining.complete.done() or not (is_large(len(joining.names)) or all(task.done() for task in asking)):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        if joining.formed.done():
            joining.formed.result()

    async def _ask(self, joining: _Joining, name: str, other: str, seconds: float, principal: str) -> None:
        core = self._core
        message = GroupJoin(name, list(joining.names), joining.nonces[core.name])
        joining.unanswered[other] = None
        began: float | None = core.now()
        while True:
            try:
                answer: bytes | list[bytes] | JoinRefused = await core.ask(other, message, seconds, principal)
                break
            except WorkerLostError as error:  # see Note [A member that has not started]
                is_new = error.is_gone and not core.endpoint.was_there(PeerId(principal, other))
                # dialled before it was asked: in its place there may be another one by now, which is asked once
                was_dialled = not error.is_gone and began is not None and core.now() - began < core.limits.silence
                if not is_new and not was_dialled:
                    raise
            began = None
            await asyncio.sleep(LOOK_AGAIN)
        joining.unanswered.pop(other, None)
        if isinstance(answer, JoinRefused):
            joining.fail(self._told(name, other, answer.error))
            return
        of = joining.names if is_large(len(joining.names)) else (other,)
        nonces = answer if isinstance(answer, list) else [answer]
        if len(nonces) != len(of):
            raise malformed(GroupJoin.form, f"{len(nonces)} nonces", f"{len(of)}", peer=other, is_answer=True)
        joining.add(dict(zip(of, nonces, strict=True)))

    async def _ask_later(self, joining: _Joining, name: str, seconds: float, principal: str) -> None:
        """In a large group: ask the members that this one has not asked before; see Note [Forming a group]."""
        await asyncio.sleep(self._core.limits.silence)
        rank = joining.names.index(self._core.name)
        others = [other for other in joining.names if other not in joining.nonces]
        if rank:
            others = [joining.names[rank + 1 if rank + 1 < len(joining.names) else rank - 1]]
        await together([self._ask(joining, name, other, seconds, principal) for other in others])

    def _formed(self, joining: _Joining, name: str, principal: str) -> Group:
        key = hashlib.sha256("\n".join((name, *joining.names, "")).encode())  # names have no line breaks
        for each in joining.names:
            key.update(joining.nonces[each])
        return self._owner.open(name, joining.names, key.digest()[:NONCE], principal, joining.nonces)

    # ---------------------------------------------------------------- giving up

    def _missing(self, joining: _Joining) -> str:
        first = joining.names[0]
        if is_large(len(joining.names)) and self._core.name != first:
            return f"{first}, or a worker that it waits for,"
        return ", ".join(other for other in joining.names if other in joining.unanswered or other not in joining.nonces)

    def _give_up(self, where: tuple[str, str], joining: _Joining, error: BaseException) -> None:
        """Tell the members that wait for this one; see Note [A member that gives up joining]."""
        core, (principal, name) = self._core, where
        if not isinstance(error, _TYPED):
            why = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"failed: {type(error).__name__}: {error}"
            error = CollectiveError(f"join_group: joining group {name!r} {why} on {core.name}", worker=core.name)
        told = to_wire(error, core.name, "join_group", "")
        joining.over.set_result(told)
        if core.now() < joining.due:
            self._given_up[where] = _GivenUp(joining.names, joining.due, told, set(joining.nonces))
            if len(self._given_up) > REMEMBERED:
                del self._given_up[next(iter(self._given_up))]
        if core.is_closing or not core.endpoint.is_open:
            return
        met: Sequence[str] = list(joining.nonces)
        if is_large(len(joining.names)):
            met = () if core.name == joining.names[0] else joining.names[:1]
        for other in met:
            if other != core.name and core.endpoint.is_connected(PeerId(principal, other)):
                core.spawn(self._tell(other, GroupWithdraw(name, joining.nonces[core.name], told), principal), f"join {name}")

    async def _tell(self, other: str, message: GroupWithdraw, principal: str) -> None:
        try:
            await self._core.ask(other, message, self._core.limits.silence, principal)
        except DistributedError:
            return  # lost as well, or it knows

    def _told(self, name: str, other: str, value: Any) -> DistributedError:
        """The error of a member that has given up, as an error of a member that it tells."""
        error = from_wire(value, other)
        if isinstance(error, _TYPED):
            return error
        return CollectiveError(f"join_group: {other} has given up joining group {name!r}: {error}", worker=other)

    def lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        """A worker is lost.

        Args:
            identity: the worker.
            error: its loss.
        """
        for (principal, name), joining in self._joining.items():
            if principal == identity.principal and identity.name in joining.nonces:
                text = f"join_group: {error}, while group {name!r} was formed"
                joining.fail(WorkerLostError(text, worker=identity.name, stage=error.stage or "collective", is_gone=error.is_gone))

    # ---------------------------------------------------------------- requests of other members

    async def on_join(self, caller: PeerIdentity, join: GroupJoin, timeout: float) -> bytes | list[bytes] | JoinRefused:
        """A member joins as well. Cancelling changes nothing.

        Args:
            caller: the member.
            join: its request.
            timeout: seconds that are left.

        Returns:
            The answer; see `GroupJoin`.

        Raises:
            CollectiveError: it has given other names than this worker.
        """
        name, names, nonce = join.name, join.names, join.nonce
        where = caller.principal, name
        for group in self._owner.recent(*where):
            if group.nonces.get(caller.name) == nonce:  # this worker had its answer before it was asked
                if group.error is not None:
                    return JoinRefused(GIVEN_UP, to_wire(group.error, self._core.name, "join_group", ""))
                return self._known(group.nonces, group.names)
        for group in self._owner.named(*where):
            if caller.name in group.names:
                group.fail(CollectiveError(f"group {name!r}: {caller.name} joins it again, so it has left it", worker=caller.name))
        while (joining := self._joining.get(where)) is None:
            over = self._given_up.get(where)
            if over is not None and list(over.names) == names and caller.name not in over.told and self._core.now() < over.due:
                over.told.add(caller.name)
                return JoinRefused(GIVEN_UP, over.error)
            await self._changed.wait()
        if list(joining.names) != names:
            theirs = ", ".join(map(str, names[:64]))
            error = CollectiveError(
                f"join_group: {caller.name} joins group {name!r} of {theirs}, and {self._core.name} one of {', '.join(joining.names)}; every member "
                "has to give the same names in the same order"
            )
            joining.fail(error)
            raise error
        joining.add({caller.name: nonce})
        if is_large(len(names)):
            either: list[asyncio.Future[Any]] = [joining.complete, joining.over]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not joining.complete.done():
                return JoinRefused(GIVEN_UP, joining.over.result())
        return self._known(joining.nonces, names)

    def _known(self, nonces: Mapping[str, bytes], names: Sequence[str]) -> bytes | list[bytes]:
        """The answer to a member that joins as well: this worker's nonce; of a large group all nonces, by rank."""
        return [nonces[each] for each in names] if is_large(len(names)) else nonces[self._core.name]

    async def on_withdraw(self, caller: PeerIdentity, withdrawal: GroupWithdraw, timeout: float) -> bool:
        """A member has withdrawn from forming a group.

        Args:
            caller: the member.
            withdrawal: its message.
            timeout: seconds that are left.

        Returns:
            True.
        """
        name, nonce = withdrawal.name, withdrawal.nonce
        where = caller.principal, name
        error = self._told(name, caller.name, withdrawal.error)
        joining = self._joining.get(where)
        if joining is not None and caller.name in joining.names:
            joining.withdraw(caller.name, nonce, error)
        for group in self._owner.named(*where):
            if group.nonces.get(caller.name) == nonce:
                group.fail(error)
        return True

    async def formed(self, caller: PeerIdentity, name: str) -> None:
        """Wait until a group that is being formed is there, or cannot be. Returns at once if there is none that the caller joins as well.

        Args:
            caller: the member that asks.
            name: of the group.

        Cancelling changes nothing.
        """
        joining = self._joining.get((caller.principal, name))
        if joining is not None and caller.name in joining.names:
            await asyncio.wait([joining.formed])
