"""RayWorker: the actor in which a worker of a `RayCluster` lives. This module is imported on every node, and outside of an actor, needs no Ray.

Ray makes the actor, and makes it again where it has died; either way it begins as an empty shell. The coordinator asks it for a public key, then
starts the worker with the sealed secret. An actor that was made again has another key, so it cannot be taken for its predecessor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from typing import Any

from aiograd.distributed.cluster.loading import load_service, make_tls
from aiograd.distributed.cluster.sealed import Recipient
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError
from aiograd.running.version import __version__


@dataclasses.dataclass(frozen=True)
class WorkerHandshake:
    """The answer of a new actor to `RayWorker.greet`."""

    version: str
    public: bytes
    pid: int
    #: of its node, as other nodes reach it
    address: str
    node: str
    #: where the worker in it listens, and its incarnation; empty if it has none yet
    url: str
    incarnation: bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a worker at its start. Nothing here is secret: Ray shows arguments to all its users."""

    name: str
    leader: str
    service: str
    host: str | None
    allow_plaintext: bool
    certificates: tuple[str | None, str | None, str | None]
    limits: dict[str, Any]
    encoding: str
    gradient_encoding: str
    log_level: str


class RayWorker:
    """The shell of a worker.

    Args:
        name: of the worker; what Ray puts before each line that it prints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._recipient = Recipient()
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        return self._name

    async def greet(self) -> WorkerHandshake:
        """Version, public key, process, node and, if it has been started, URL and incarnation of the worker."""
        found = ("", b"") if self._worker is None else (self._worker.url, self._worker.endpoint.incarnation)
        return WorkerHandshake(__version__, self._recipient.public, os.getpid(), *_whereabouts(), *found)

    async def start(self, settings: Settings, sealed: bytes) -> WorkerHandshake:
        """Open the worker; returns as `greet`.

        Raises:
            ArgumentError: it has one already, or a setting cannot be used. AuthenticationError: the secret is not for this actor.
        """
        if self._worker is not None:
            raise ArgumentError(f"worker {self._name} has been started before")
        secret = self._recipient.open(sealed)
        logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        service = load_service(settings.service)
        server, client = make_tls(*settings.certificates)
        host = settings.host or _whereabouts()[0]
        worker = Worker(
            self._name, service=service, host=host, secret=secret, ssl=server, client_ssl=client, allow_plaintext=settings.allow_plaintext,
            limits=Limits(**settings.limits), encoding=Encoding[settings.encoding], gradient_encoding=Encoding[settings.gradient_encoding],
        )  # fmt: skip
        await worker.__aenter__()
        worker.membership.leader = settings.leader
        self._worker = worker
        return await self.greet()

    async def lifetime(self) -> None:
        """Does not return; Ray raises when the actor has died."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the worker in order."""
        if self._worker is not None:
            await self._worker.aclose()


def _whereabouts() -> tuple[str, str]:
    """Address and id of the node of this process, as Ray has them."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address, ray.get_runtime_context().get_node_id()
