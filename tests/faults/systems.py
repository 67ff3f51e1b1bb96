"""The systems: how each is installed and started, and which faults it is shown with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: seconds that installing a system may take
INSTALL_SECONDS = 900


@dataclass(frozen=True)
class System:
    """A system.

    Attributes:
        name: of the system.
        script: its module in `tests.faults.peers`.
        requirements: what pip installs into its environment; empty: it runs in this process's.
        arguments: of the script, beside the ones of every script.
        has_ranks: True: the script is started once for each replica, by the supervisor, and again when its process has ended.
        launcher: words before the script's path, from the interpreter's path and the number of replicas.
        meeting: words that start the process where replicas find each other, from the interpreter's folder and a port; None: there is none.
        no_join: the reason for which no replica can join; "": one can.
    """

    name: str
    script: str
    requirements: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    has_ranks: bool = False
    launcher: Callable[[str, int], list[str]] = lambda python, replicas: [python, "-m"]
    meeting: Callable[[Path, int], list[str]] | None = None
    no_join: str = ""

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

    def command(self, replicas: int, arguments: Sequence[str]) -> list[str]:
        """The words that start its script."""
        script = f"tests.faults.peers.{self.script}"
        return [*self.launcher(self.python(), replicas), script, "--replicas", str(replicas), *self.arguments, *arguments]

    @contextmanager
    def met(self) -> Iterator[str]:
        """Run the process where replicas find each other, if it has one; the address."""
        if self.meeting is None:
            yield ""
            return
        port = free_port()
        process = subprocess.Popen(self.meeting(Path(self.python()).parent, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


class UnavailableError(Exception):
    """A system cannot be installed here; the text is the reason."""


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
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


def _torchrun(python: str, replicas: int) -> list[str]:
    options = ["--standalone", f"--nproc-per-node={replicas}", "--max-restarts=1000", "--monitor-interval=0.1"]
    return [python, "-m", "torch.distributed.run", *options, "-m"]


def _lighthouse(folder: Path, port: int) -> list[str]:
    return [str(folder / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms", "1000"]


FIXED = "the number of its processes is fixed"
ALONE = "its peers draw their samples by themselves: one more would read samples of another one"

SYSTEMS = {
    system.name: system
    for system in (
        System("aiograd", "aiograd_data_parallel"),
        System("aiograd-ray", "aiograd_data_parallel", (f"{ROOT}[ray]",), ("--on", "ray")),
        System("torchft", "torchft_replicas", ("torch==2.13.0", "torchft==0.2.0", "numpy"), has_ranks=True, meeting=_lighthouse),
        System("hivemind", "hivemind_peers", ("torch==2.13.0", "hivemind==1.1.12", "setuptools<81"), has_ranks=True, no_join=ALONE),
        System("ddp", "ddp", ("torch==2.13.0", "numpy"), launcher=_torchrun, no_join=FIXED),
        System("ray-train", "ray_train", ("torch==2.13.0", "ray[train]==2.60.0", "numpy"), no_join=FIXED),
    )
}


def environment() -> dict[str, str]:
    """The variables of all scripts: one thread of BLAS for each process, and this project's folder on the path."""
    threads = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")}
    return {**os.environ, **threads, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
