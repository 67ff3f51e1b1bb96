"""GroupServer: the groups of one worker: how they are formed, and the requests of their other members.

Note [Forming a group]
    Each member that calls `join_group` draws a nonce, and asks every other member to join with it; the answer, given as soon as that one has called
    `join_group` as well, is that member's nonce. The group's key is a hash of its names and all nonces: a member that failed and joins again
    makes another group, and messages of the former one find nothing.

    Requests of members that are ahead of this worker wait here for their time: to join until this worker joins, and pieces until it has begun
    the operation. Members of a large group (see `ring`) ask rank 0 alone, which answers with the nonces of all once it has them;
    it asks those that do not come, so that one that is lost is noticed.

    Each sender has few under way (`WINDOW` in `group`), and its deadline ends the waiting.

Note [A member that has not started]
    Processes of one program start at different times. So a member at whose URL nobody listens is waited for, if it was never there; one that was
    there is lost, which is an error at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.distributed.collectives.agreement import GroupAgreements
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.collectives.ring import is_large
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.rpc.keyring import check_name
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DeadlineError, DistributedError, ProtocolError, WorkerLostError

#: groups whose last decision is remembered
REMEMBERED = 256
#: seconds between two attempts to reach a member that has not started
LOOK_AGAIN = 0.1
#: bytes of a nonce and of a group's key
NONCE = 16


class _Joining:
    """A call of `join_group` that waits for the other members."""

    __slots__ = ("names", "nonces", "formed", "complete")

    def __init__(self, names: tuple[str, ...], own: str, nonce: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.names = names
        self.nonces: dict[str, bytes] = {}
        #: done when the group is there, or cannot be formed
        self.formed: asyncio.Future[Group] = loop.create_future()
        #: done when all nonces are known
        self.complete: asyncio.Future[None] = loop.create_future()
        self.add({own: nonce})

    def add(self, nonces: Mapping[str, bytes]) -> None:
        """Take note of nonces."""
        self.nonces.update(nonces)
        if len(self.nonces) == len(self.names) and not self.complete.done():
            self.complete.set_result(None)


class GroupServer:
    """The groups of one worker.

    Args:
        core: the worker.
    """

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        #: by principal and key
        self._groups: dict[tuple[str, bytes], Group] = {}
        #: the decisions of groups, also of those that are over, by principal and key
        self._agreements: dict[tuple[str, bytes], GroupAgreements] = {}
        #: by principal and name of the group
        self._joining: dict[tuple[str, str], _Joining] = {}
        #: set and replaced when this worker begins to join a group
        self._changed = asyncio.Event()
        core.handlers[Kind.COLLECTIVE] = self._serve
        core.on_lost.append(self._lost)

    def request(self, peer: str, value: Any, timeout: float, principal: str) -> Any:
        """Send a request about groups to another worker."""
        if value[0] == "fail":
            value = (*value[:2], to_wire(value[2], self.core.name, "collective", ""))
        return self.core.request(peer, Kind.COLLECTIVE, value, timeout, principal)

    def forget(self, group: Group) -> None:
        """The group is over."""
        self._groups.pop((group.principal, group.key), None)

    # ---------------------------------------------------------------- forming

    async def form(self, names: Sequence[str], name: str, timeout: float | None) -> Group:
        """See `join_group`."""
        core = self.core
        core.check_open()
        seconds = core.time_for(timeout)
        members = self._check_names(names, name)
        principal = core.acting_principal()
        where = principal, name
        if where in self._joining or any(group.name == name and group.principal == principal for group in self._groups.values()):
            raise ArgumentError(f"join_group: worker {core.name} is in a group {name!r} already, or joins it; close that one, or take another name")
        joining = _Joining(members, core.name, core.entropy(NONCE), core.loop)
        self._joining[where] = joining
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        asking = {
            other: core.loop.create_task(self._ask(joining, name, other, seconds, principal), name=f"aiograd:{core.name}:join {name}")
            for other in (members[:1] if is_large(len(members)) else members)
            if other != core.name
        }
        large = is_large(len(members))
        if large and core.name == members[0]:
            asking[core.name] = core.loop.create_task(
                self._look_for_missing(joining, name, seconds, principal), name=f"aiograd:{core.name}:join {name}"
            )
        try:
            async with asyncio.timeout(seconds):
                waiting: set[asyncio.Future[Any]] = {joining.formed, joining.complete, *asking.values()}
                while not joining.complete.done() or not (large or all(task.done() for task in asking.values())):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        each.result()
            group = self._formed(joining, name, principal)
            joining.formed.set_result(group)
        except (TimeoutError, DeadlineError):
            missing = ", ".join(other for other in members if other not in joining.nonces)
            if large and core.name != members[0]:
                missing = f"{members[0]}, or somebody that it waits for,"
            raise DeadlineError(f"join_group: {missing} did not join group {name!r} within {seconds:g} s") from None
        finally:
            del self._joining[where]
            if not joining.formed.cancel() and not joining.formed.cancelled():
                joining.formed.exception()  # raised here already, or somebody else's error was
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
        return group

    def _check_names(self, names: Any, name: Any) -> tuple[str, ...]:
        check_name("join_group: group name", name)
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ArgumentTypeError(f"join_group: expected a list of names of workers, found {type(names).__name__}")
        for each in names:
            check_name("join_group: worker name", each)
        doubled = sorted({each for each in names if names.count(each) > 1})
        if doubled:
            raise ArgumentError(f"join_group: {', '.join(doubled)} stands twice among the names; each member has one rank")
        if self.core.name not in names:
            raise ArgumentError(f"join_group: worker {self.core.name} is not among the names {', '.join(names) or '(none)'}")
        return tuple(names)

    async def _ask(self, joining: _Joining, name: str, other: str, seconds: float, principal: str) -> None:
        value = ("join", name, list(joining.names), joining.nonces[self.core.name])
        while True:
            try:
                answer = await self.request(other, value, seconds, principal)
                break
            except WorkerLostError as error:  # see Note [A member that has not started]
                if not error.is_gone or self.core.endpoint.was_there(PeerId(principal, other)):
                    raise
            await asyncio.sleep(LOOK_AGAIN)
        of = joining.names if is_large(len(joining.names)) else (other,)
        nonces = dict(zip(of, answer if isinstance(answer, list) else [answer], strict=False))
        if other not in nonces or any(not isinstance(nonce, bytes) or len(nonce) != NONCE for nonce in nonces.values()):
            raise ProtocolError(f"worker {other} gave a malformed answer to joining a group", code="collective")
        joining.add(nonces)

    def _formed(self, joining: _Joining, name: str, principal: str) -> Group:
        key = hashlib.sha256("\n".join((name, *joining.names, "")).encode())  # names have no line breaks
        for each in joining.names:
            key.update(joining.nonces[each])
        group = Group(self, name, joining.names, key.digest()[:NONCE], principal, joining.nonces)
        self._groups[principal, group.key] = group
        self._agreements[principal, group.key] = group.agreements
        if len(self._agreements) > REMEMBERED:
            del self._agreements[next(iter(self._agreements))]
        return group

    # ---------------------------------------------------------------- requests of other members

    async def _serve(self, caller: PeerIdentity, value: Any, timeout: float) -> Any:
        match value:
            case ("join", str(name), list(names), bytes(nonce)) if len(nonce) == NONCE:
                return await self._on_join(caller, name, names, nonce)
            case ("piece", bytes(key), str(name), int(number), *message):
                group = await self._find(caller, key, name)
                return await group.piece(group.names.index(caller.name), number, tuple(message))
            case ("vote", bytes(key), str(name), int(number)):
                if (caller.principal, key) not in self._agreements:
                    await self._find(caller, key, name)  # which may be about to be formed here
                return await self._agreements_of(caller, key).vote(caller.name, number)
            case ("outcome", bytes(key), int(number)):
                return self._agreements_of(caller, key).outcome(number).value
            case ("leave", bytes(key), int(number)):
                if (known := self._group_of(caller, key)) is not None:
                    known.left(known.names.index(caller.name), number)
                return True
            case ("left", bytes(key), list(leavers)):
                if (known := self._group_of(caller, key)) is not None and caller.name == known.names[0]:
                    for leaver in leavers:
                        match leaver:
                            case [int(rank), int(number)] if 0 <= rank < known.size:
                                known.left(rank, number)
                return True
            case ("fail", bytes(key), error):
                if (known := self._group_of(caller, key)) is not None:
                    found = from_wire(error, caller.name)
                    known.fail(found if isinstance(found, DistributedError) else CollectiveError(str(found)), tell=known.passes_on)
                return True
        raise ProtocolError("a malformed request about a group", code="collective")

    async def _look_for_missing(self, joining: _Joining, name: str, seconds: float, principal: str) -> None:
        """On rank 0 of a large group: members that have not come after a while may never come, and are asked."""
        await asyncio.sleep(self.core.limits.silence)
        missing = [other for other in joining.names if other not in joining.nonces]
        await together([self._ask(joining, name, other, seconds, principal) for other in missing])

    def _known(self, nonces: Mapping[str, bytes], names: Sequence[str]) -> Any:
        """The answer to a member that joins as well: this worker's nonce; of a large group those of all, by rank."""
        return [nonces[each] for each in names] if is_large(len(names)) else nonces[self.core.name]

    async def _on_join(self, caller: PeerIdentity, name: str, names: list[Any], nonce: bytes) -> Any:
        where = caller.principal, name
        for group in list(self._groups.values()):
            if group.name == name and group.principal == caller.principal and caller.name in group.names:
                if group.nonces[caller.name] == nonce:
                    return self._known(group.nonces, group.names)  # this worker had its answer before it was asked
                group.fail(CollectiveError(f"group {name!r}: {caller.name} joins it again, so it has left it", worker=caller.name))
        while (joining := self._joining.get(where)) is None:
            await self._changed.wait()
        if list(joining.names) != names:
            theirs = ", ".join(map(str, names[:64]))
            error = CollectiveError(
                f"join_group: {caller.name} joins group {name!r} of {theirs}, and {self.core.name} one of {', '.join(joining.names)}; every member "
                "has to give the same names in the same order"
            )
            if not joining.formed.done():
                joining.formed.set_exception(error)
            raise error
        joining.add({caller.name: nonce})
        if is_large(len(names)):
            either: list[asyncio.Future[Any]] = [joining.complete, joining.formed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not joining.complete.done():
                raise CollectiveError(f"join_group: {self.core.name} has given up joining group {name!r}: not every member has come")
        return self._known(joining.nonces, names)

    def _group_of(self, caller: PeerIdentity, key: bytes) -> Group | None:
        group = self._groups.get((caller.principal, key))
        return group if group is not None and caller.name in group.names else None

    def _agreements_of(self, caller: PeerIdentity, key: bytes) -> GroupAgreements:
        agreements = self._agreements.get((caller.principal, key))
        if agreements is None or caller.name not in agreements.names:
            raise CollectiveError(f"worker {self.core.name} knows nothing of what that group has agreed on")
        return agreements

    async def _find(self, caller: PeerIdentity, key: bytes, name: str) -> Group:
        """The group with a key; one that is being formed here is awaited."""
        group = self._group_of(caller, key)
        joining = self._joining.get((caller.principal, name))
        if group is None and joining is not None and caller.name in joining.names:
            await asyncio.wait([joining.formed])
            group = self._group_of(caller, key)
        if group is None:
            over = self._agreements.get((caller.principal, key))
            if over is not None and over.error is not None and caller.name in over.names:
                raise over.error.with_traceback(None)
            raise CollectiveError(f"worker {self.core.name} is not in group {name!r} as {caller.name} knows it: it has left it, or joined it again")
        return group

    def _lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        for group in list(self._groups.values()):
            if group.principal == identity.principal and identity.name in group.names:
                text = f"group {group.name!r}: {error}"
                group.fail(WorkerLostError(text, worker=identity.name, stage=error.stage or "collective", is_gone=error.is_gone))


async def join_group(worker: Any, names: Sequence[str], *, name: str = "default", timeout: float | None = None) -> Group:
    """Join a group of workers; returns when all of them have joined.

    ::

        group = await dist.join_group(dist.current_worker(), ["w0", "w1", "w2"])      # on each of them
        total, = await group.all_reduce([gradient])

    Every member calls it with the same names in the same order, and knows the URLs of the others or is known to them.

    Args:
        worker: this worker.
        names: of the members; the place of a name is its rank.
        name: of the group, by which groups of the same worker are told apart.
        timeout: seconds until all have joined; None: `Limits.default_deadline`.

    Returns:
        The group; ``await group.aclose()`` leaves it.

    Raises:
        ArgumentError, ArgumentTypeError: the names cannot be used, or the worker is in a group of this name. CollectiveError: another member gave
        other names. DeadlineError: a member did not join in time, or has not started. WorkerLostError, UnknownPeerError: one was lost, or is
        not known. Cancelling withdraws this worker.
    """
    groups: GroupServer = worker.groups
    return await groups.form(names, name, timeout)
