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

#: groups that are remembered, with their last decision
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
        #: those and the last that are over: members may still ask what they decided, or be about to form one of them
        self._former: dict[tuple[str, bytes], Group] = {}
        self.forming = GroupForming(self)
        core.handlers[Kind.COLLECTIVE] = self._serve
        core.on_lost.append(self._lost)

    def request(self, peer: str, value: Any, timeout: float, principal: str) -> Any:
        """Send a request about groups to another worker."""
        if value[0] == "fail":
            value = (*value[:-1], to_wire(value[-1], self.core.name, "collective", ""))
        return self.core.request(peer, Kind.COLLECTIVE, value, timeout, principal)

    def forget(self, group: Group) -> None:
        """The group is over."""
        self._groups.pop((group.principal, group.key), None)

    def named(self, principal: str, name: str) -> list[Group]:
        """The groups of a name that this worker is in."""
        return [group for group in self._groups.values() if (group.principal, group.name) == (principal, name)]

    def former(self, principal: str, name: str) -> list[Group]:
        """This worker's groups of a name: present ones, and those that ended lately."""
        return [group for (whose, _), group in self._former.items() if (whose, group.name) == (principal, name)]

    async def form(self, names: Sequence[str], name: str, timeout: float | None) -> Group:
        """See `join_group`."""
        return await self.forming.form(names, name, timeout)

    def open(self, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> Group:
        """A new group; the arguments are those of `Group`."""
        group = Group(self, name, names, key, principal, nonces)
        self._groups[principal, key] = group
        self._former[principal, key] = group
        if len(self._former) > REMEMBERED:
            del self._former[next(iter(self._former))]
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
                await self._await(caller, key, name)
                return await self._agreements_of(caller, key).vote(caller.name, number)
            case ("outcome", bytes(key), int(number)):
                return self._agreements_of(caller, key).outcome(number).value
            case ("leave" | "left" | "fail", bytes(key), str(name), news):
                if (known := await self._await(caller, key, name)) is not None:
                    self._hear(known, caller.name, value[0], news)
                return True
        raise ProtocolError("a malformed request about a group", code="collective")

    def _group_of(self, caller: PeerIdentity, key: bytes) -> Group | None:
        group = self._groups.get((caller.principal, key))
        return group if group is not None and caller.name in group.names else None

    def _agreements_of(self, caller: PeerIdentity, key: bytes) -> GroupAgreements:
        group = self._former.get((caller.principal, key))
        if group is None or caller.name not in group.names:
            raise CollectiveError(f"worker {self.core.name} knows nothing of what that group has agreed on")
        return group.agreements

    @staticmethod
    def _hear(group: Group, sender: str, what: str, news: Any) -> None:
        """A member has news about a group; see Note [News of a large group] in `group`."""
        match what, news:
            case "fail", _:
                found = from_wire(news, sender)
                group.fail(found if isinstance(found, DistributedError) else CollectiveError(str(found)), tell=group.passes_on)
            case "leave", int(number):
                group.left(group.names.index(sender), number)
            case "left", list(leavers) if sender == group.names[0]:
                for leaver in leavers:
                    match leaver:
                        case [int(rank), int(number)] if 0 <= rank < group.size:
                            group.left(rank, number)
            case _:
                raise ProtocolError("malformed news about a group", code="collective")

    async def _await(self, caller: PeerIdentity, key: bytes, name: str) -> Group | None:
        """The group with a key; one that is being formed here is awaited. None: there is no such group."""
        if (caller.principal, key) not in self._former:
            await self.forming.formed(caller, name)
        return self._group_of(caller, key)

    async def _find(self, caller: PeerIdentity, key: bytes, name: str) -> Group:
        """As `_await`; raises where there is no such group."""
        group = await self._await(caller, key, name)
        if group is None:
            over = self._former.get((caller.principal, key))
            error = None if over is None or caller.name not in over.names else over.agreements.error
            if error is not None:
                raise error.with_traceback(None)
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
