"""GroupServer: the groups of one worker, and the requests of their other members. How groups are formed is in `forming`.

Requests of members that are ahead of this worker wait here for their time: pieces until it has begun the operation. Each sender has few under way
(`WINDOW` in `running`), and its deadline ends the waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiograd.distributed.collectives.agreement import GroupAgreements
from aiograd.distributed.collectives.forming import GroupForming
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.error_wire import from_wire
from aiograd.distributed.messages.groups import (
    Decision,
    GroupFail,
    GroupJoin,
    GroupLeave,
    GroupLeft,
    GroupOutcome,
    GroupPiece,
    GroupWithdraw,
    PieceContent,
    Vote,
)
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.wait_tables import WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentTypeError, CollectiveError, DistributedError, ProtocolError, WorkerLostError

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
        #: those and recently ended ones: members may still ask for their decisions, or be about to form one of them
        self._recent: dict[tuple[str, bytes], Group] = {}
        self.forming: GroupForming = GroupForming(self)
        core.serve(
            {
                GroupJoin: self.forming.on_join,
                GroupWithdraw: self.forming.on_withdraw,
                GroupPiece: self._on_piece,
                Vote: self._on_vote,
                GroupOutcome: self._on_outcome,
                GroupLeave: self._on_news,
                GroupLeft: self._on_news,
                GroupFail: self._on_news,
            }
        )
        core.on_lost.append(self._lost)
        core.wait_tables.append(self.waits)

    def waits(self) -> Iterator[WaitEntry]:
        """The operations and decisions that are under way, for a report of what waits."""
        for group in self._groups.values():
            yield from group.operations.waits()
            yield from group.agreements.waits()

    def forget(self, group: Group) -> None:
        """The group is over."""
        self._groups.pop((group.principal, group.key), None)

    def named(self, principal: str, name: str) -> list[Group]:
        """The groups of a name that this worker is in."""
        return [group for group in self._groups.values() if (group.principal, group.name) == (principal, name)]

    def recent(self, principal: str, name: str) -> list[Group]:
        """This worker's groups of a name: present ones, and recently ended ones."""
        return [group for (whose, _), group in self._recent.items() if (whose, group.name) == (principal, name)]

    async def form(self, names: Sequence[str], name: str, timeout: float | None) -> Group:
        """See `join_group`."""
        return await self.forming.form(names, name, timeout)

    def open(self, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> Group:
        """A new group, with the arguments of `Group`."""
        group = Group(self, name, names, key, principal, nonces)
        self._groups[principal, key] = group
        self._recent[principal, key] = group
        if len(self._recent) > REMEMBERED:
            del self._recent[next(iter(self._recent))]
        return group

    # ---------------------------------------------------------------- requests of other members

    async def _on_piece(self, caller: PeerIdentity, piece: GroupPiece, timeout: float) -> PieceContent | None:
        group = await self._find(caller, piece.key, piece.name)
        return await group.operations.piece(group.names.index(caller.name), piece.number, piece.content)

    async def _on_vote(self, caller: PeerIdentity, vote: Vote, timeout: float) -> Decision:
        await self._await(caller, vote.key, vote.name)
        return await self._agreements_of(caller, vote.key).vote(caller.name, vote.number)

    async def _on_outcome(self, caller: PeerIdentity, question: GroupOutcome, timeout: float) -> str:
        return self._agreements_of(caller, question.key).outcome(question.number).value

    async def _on_news(self, caller: PeerIdentity, news: GroupLeave | GroupLeft | GroupFail, timeout: float) -> bool:
        """Serve the news of a member about a group; see Note [News of a large group] in `group`."""
        group, sender = await self._await(caller, news.key, news.name), caller.name
        if group is None:
            return True
        if isinstance(news, GroupFail):
            found = from_wire(news.error, sender)
            group.fail(found if isinstance(found, DistributedError) else CollectiveError(str(found)), tell=group.passes_on)
        elif isinstance(news, GroupLeave):
            group.left(group.names.index(sender), news.number)
        else:
            if sender != group.names[0]:
                raise ProtocolError(f"{sender} tells which members have left group {group.name!r}; only {group.names[0]} does", code="collective")
            for leaver in news.leavers:
                if leaver.rank < group.size:
                    group.left(leaver.rank, leaver.number)
        return True

    def _group_of(self, caller: PeerIdentity, key: bytes) -> Group | None:
        group = self._groups.get((caller.principal, key))
        return group if group is not None and caller.name in group.names else None

    def _agreements_of(self, caller: PeerIdentity, key: bytes) -> GroupAgreements:
        group = self._recent.get((caller.principal, key))
        if group is None or caller.name not in group.names:
            raise CollectiveError(f"worker {self.core.name} knows nothing of what that group has agreed on")
        return group.agreements

    async def _await(self, caller: PeerIdentity, key: bytes, name: str) -> Group | None:
        """The group with a key; one that is being formed here is awaited. None: there is no such group."""
        if (caller.principal, key) not in self._recent:
            await self.forming.formed(caller, name)
        return self._group_of(caller, key)

    async def _find(self, caller: PeerIdentity, key: bytes, name: str) -> Group:
        """As `_await`; raises where there is no such group."""
        group = await self._await(caller, key, name)
        if group is None:
            over = self._recent.get((caller.principal, key))
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
        ArgumentError, ArgumentTypeError: the names cannot be used, `worker` is none, or it is in a group of this name. CollectiveError: another
        member gave other names, or has given up joining for a reason of its own. DeadlineError: a member did not join in time, or has not started.
        WorkerLostError, UnknownPeerError: one was lost, or is not known.

    Cancelling withdraws this worker, and the others raise `CollectiveError`.

    >>> await asyncio.gather(*(dist.join_group(worker, ["left", "right"]) for worker in (left, right)))
    [<Group default: rank 0 of left, right>, <Group default: rank 1 of left, right>]
    """
    groups = getattr(worker, "groups", None)
    if not isinstance(groups, GroupServer):
        raise ArgumentTypeError(f"join_group: expected this process's dist.Worker and a list of names of workers, found {type(worker).__name__}")
    return await groups.form(names, name, timeout)
