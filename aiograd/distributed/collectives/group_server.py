"""GroupServer: the groups of one worker, and the requests of their other members. How groups are formed is in `forming`.

Requests of members that are ahead of this worker wait here for their time: pieces until it has begun the operation. Each sender has few under way
(`WINDOW` in `running`), and its deadline ends the waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.distributed.collectives.agreement import GroupAgreements
from aiograd.distributed.collectives.forming import NONCE, GroupForming
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import CollectiveError, DistributedError, ProtocolError, WorkerLostError

#: groups whose last decision is remembered
REMEMBERED = 256


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
        self.forming = GroupForming(self)
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

    def named(self, principal: str, name: str) -> list[Group]:
        """The groups of a name that this worker is in."""
        return [group for group in self._groups.values() if (group.principal, group.name) == (principal, name)]

    async def form(self, names: Sequence[str], name: str, timeout: float | None) -> Group:
        """See `join_group`."""
        return await self.forming.form(names, name, timeout)

    def open(self, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> Group:
        """A new group; the arguments are those of `Group`."""
        group = Group(self, name, names, key, principal, nonces)
        self._groups[principal, key] = group
        self._agreements[principal, key] = group.agreements
        if len(self._agreements) > REMEMBERED:
            del self._agreements[next(iter(self._agreements))]
        return group

    # ---------------------------------------------------------------- requests of other members

    async def _serve(self, caller: PeerIdentity, value: Any, timeout: float) -> Any:
        match value:
            case ("join", str(name), list(names), bytes(nonce)) if len(nonce) == NONCE:
                return await self.forming.on_join(caller, name, names, nonce)
            case ("withdraw", str(name), bytes(nonce), error):
                self.forming.on_withdraw(caller, name, nonce, error)
                return True
            case ("piece", bytes(key), str(name), int(number), *message):
                group = await self._find(caller, key, name)
                return await group.operations.piece(group.names.index(caller.name), number, tuple(message))
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
        if group is None:
            await self.forming.formed(caller, name)
            group = self._group_of(caller, key)
        if group is None:
            over = self._agreements.get((caller.principal, key))
            if over is not None and over.error is not None and caller.name in over.names:
                raise over.error.with_traceback(None)
            raise CollectiveError(f"worker {self.core.name} is not in group {name!r} as {caller.name} knows it: it has left it, or joined it again")
        return group

    def _lost(self, identity: PeerIdentity, error: WorkerLostError) -> None:
        self.forming.lost(identity, error)
        for group in list(self._groups.values()):
            if group.principal == identity.principal and identity.name in group.names:
                text = f"group {group.name!r}: {error}"
                found = WorkerLostError(text, worker=identity.name, stage=error.stage or "collective", is_gone=error.is_gone)
                group.fail(found, lost=identity.name)


async def join_group(worker: Any, names: Sequence[str], *, name: str = "default", timeout: float | None = None) -> Group:
    """Join a group of workers; returns when all of them have joined.

    ::

        group = await dist.join_group(dist.current_worker(), ["w0", "w1", "w2"])      # on each of them
        total, = await group.all_reduce([gradient])

    Every member calls it with the same names in the same order, and knows the URLs of the others or is known to them. Members have the same
    `Limits.message_bytes` and `bytes_per_peer` where one of these is below 5 MiB on any of them.

    Args:
        worker: this worker.
        names: of the members; the place of a name is its rank.
        name: of the group, by which groups of the same worker are told apart.
        timeout: seconds until all have joined; None: `Limits.default_deadline`.

    Returns:
        The group; ``await group.aclose()`` leaves it.

    Raises:
        ArgumentError, ArgumentTypeError: the names cannot be used, or the worker is in a group of this name. CollectiveError: another member gave
        other names, or has given up joining for a reason of its own. DeadlineError: a member did not join in time, or has not started.
        WorkerLostError, UnknownPeerError: one was lost, or is not known.

    Cancelling withdraws this worker, and the others raise `CollectiveError`.
    """
    groups: GroupServer = worker.groups
    return await groups.form(names, name, timeout)
