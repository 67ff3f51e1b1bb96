"""The systems: how each is installed and started, and which faults it is shown with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: seconds that installing a system may take
INSTALL_SECONDS = 900


@dataclass(frozen=True)
class Place:
    """The place of one process in a run: its interpreter, rank, addresses and arguments.

    Attributes:
        python: the interpreter of the system.
        replicas, rank: how many there are, and which of them this one is.
        host: its address.
        meet: host and port at which replicas find each other.
        arguments: of every script.
    """

    python: str
    replicas: int
    rank: int
    host: str
    meet: str
    arguments: tuple[str, ...] = ()


Command = Callable[[Place], list[str]]


def script(module: str, *arguments: str) -> Command:
    """The command that runs a script."""
    return lambda place: [place.python, "-m", *script_words(place, module, *arguments)]


def script_words(place: Place, module: str, *arguments: str) -> list[str]:
    """A script of `tests.faults.peers` and its command line."""
    ours = ["--replicas", str(place.replicas), "--rank", str(place.rank), "--host", place.host, "--meet", place.meet]
    return [f"tests.faults.peers.{module}", *ours, *arguments, *place.arguments]


@dataclass(frozen=True)
class System:
    """A system.

    Attributes:
        name: of the system.
        command: that starts it, or one of its replicas.
        requirements: what pip installs into its environment; empty: it runs in this process's.
        has_ranks: True: the command is started once for each replica, by the supervisor, and again when its process has ended.
        meeting: the command of the process where replicas find each other; None: there is none.
        no_join: the reason for which no replica can join; "": one can.
        apart: the system as it runs where each replica has a host of its own; None: the reason for which it does not is `no_hosts`.
    """

    name: str
    command: Command
    requirements: tuple[str, ...] = ()
    has_ranks: bool = False
    meeting: Command | None = None
    no_join: str = ""
    apart: System | None = None
    no_hosts: str = ""

    def python(self) -> str:
        """The interpreter of its environment.

        Raises:
            UnavailableError: it cannot be installed.
        """
        if not self.requirements:
            return sys.executable
        folder = ROOT / f".venv-faults-{self.name}"
        python, stamp = folder / "bin" / "python", folder / ".installed"
        wanted = "\n".join(self.requirements)
        if not (stamp.exists() and stamp.read_text() == wanted):
            _install(self, folder, [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *self.requirements])
            stamp.write_text(wanted)
        return str(python)


class UnavailableError(Exception):
    """A system cannot be installed here; the text is the reason."""


def free_port(host: str) -> int:
    """A port that is free now at an address of this machine."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _install(system: System, folder: Path, command: list[str]) -> None:
    try:
        for words in ([sys.executable, "-m", "venv", "--without-pip", str(folder)], command):
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS, cwd=ROOT)
    except subprocess.CalledProcessError as error:
        said = [line for line in (error.stderr or error.stdout or "").splitlines() if line.strip()]
        raise UnavailableError(f"{system.name} is not installed: {said[-1] if said else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{system.name} is not installed: {error}") from error


# ---- commands


def _torchrun(place: Place) -> list[str]:
    return [*_elastic(place), "--standalone", f"--nproc-per-node={place.replicas}", "-m", *script_words(place, "ddp")]


def _torchrun_of_a_host(place: Place) -> list[str]:
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={place.meet}", "--rdzv-conf=is_host=0", f"--local-addr={place.host}")
    each_its_store = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]  # hosts count their starts by themselves: a prefix would not be the same on all
    return [*each_its_store, *_elastic(place), f"--nnodes={place.replicas}", "--nproc-per-node=1", *meet, "-m", *script_words(place, "ddp")]


def _elastic(place: Place) -> list[str]:
    return [place.python, "-m", "torch.distributed.run", "--max-restarts=1000", "--monitor-interval=0.1"]


def _store(place: Place) -> list[str]:
    host, _, port = place.meet.partition(":")
    program = f"store = TCPStore({host!r}, {port}, is_master=True, wait_for_workers=False); signal.pause()"
    return [place.python, "-c", f"import signal; from torch.distributed import TCPStore; {program}"]


def _lighthouse(place: Place) -> list[str]:
    return [str(Path(place.python).parent / "torchft_lighthouse"), "--bind", place.meet, "--min_replicas", "1", "--join_timeout_ms", "1000"]


def _joining_worker(place: Place) -> list[str]:
    words = ["--name", f"replica{place.rank}", "--service", "tests.faults.peers.aiograd_data_parallel:service", "--log-level", "warning"]
    return [place.python, "-m", "aiograd", "worker", "--join", f"http://{place.meet}", "--allow-plaintext", *words]


FIXED = "the number of its processes is fixed"
ALONE = "its peers draw their samples by themselves: one more would read samples of another one"
NODES = "Ray's nodes are no processes of the table's own, so they stay in one network namespace"

TORCHFT = System(
    "torchft", script("torchft_replicas"), ("torch==2.13.0", "torchft==0.2.0", "numpy"), has_ranks=True, meeting=_lighthouse,
)  # fmt: skip
HIVEMIND = System(
    "hivemind", script("hivemind_peers"), ("torch==2.13.0", "hivemind==1.1.12", "setuptools<81"), has_ranks=True, no_join=ALONE,
)  # fmt: skip
DDP = System("ddp", _torchrun, ("torch==2.13.0", "numpy"), no_join=FIXED)
AIOGRAD = System("aiograd", script("aiograd_data_parallel"))
SYSTEMS = {
    system.name: system
    for system in (
        replace(AIOGRAD, apart=replace(AIOGRAD, command=_joining_worker, has_ranks=True, meeting=script("aiograd_data_parallel", "--on", "join"))),
        System("aiograd-ray", script("aiograd_data_parallel", "--on", "ray"), (f"{ROOT}[ray]",), no_hosts=NODES),
        replace(TORCHFT, apart=TORCHFT),
        replace(HIVEMIND, apart=HIVEMIND),
        replace(DDP, apart=replace(DDP, command=_torchrun_of_a_host, has_ranks=True, meeting=_store)),
        System("ray-train", script("ray_train"), ("torch==2.13.0", "ray[train]==2.60.0", "numpy"), no_join=FIXED, no_hosts=NODES),
    )
}


def environment() -> dict[str, str]:
    """The variables of all scripts: one thread of BLAS for each process, and this project's folder on the path."""
    threads = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")}
    return {**os.environ, **threads, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
