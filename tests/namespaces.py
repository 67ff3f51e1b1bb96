"""Hosts: network namespaces on one bridge, as machines of a network with links that can be slowed and cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

#: bytes that a slow link lets through at once, and that wait for it at most
BURST, WAITING = 10_000, 400_000
#: the name of a host's interface, inside of its namespace
INTERFACE = "wan"


class Hosts:
    """Network namespaces with an address each, and a link from each to a bridge of this machine.

    In a namespace the name of this machine leads to the namespace's address, as on a machine of its own.
    """

    def __init__(self) -> None:
        self._label = f"agw{os.getpid()}"
        self._network = f"10.213.{os.getpid() % 256}"
        self._made: list[int] = []

    @staticmethod
    def is_permitted() -> bool:
        """True if this process may make namespaces, join them by a bridge, and shape what passes between them."""
        hosts = Hosts()
        try:
            hosts.open(0)
            hosts.limit(0, 1e6)
        except (OSError, subprocess.CalledProcessError):
            return False
        finally:
            hosts.close()
        return True

    @property
    def here(self) -> str:
        """The address of this process's own namespace on the bridge."""
        return f"{self._network}.1"

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"{self._network}.{number + 2}"

    def command(self, number: int) -> list[str]:
        """Words to put before the command of a process of a host."""
        return ["ip", "netns", "exec", self._namespace(number)]

    def counters(self, number: int) -> Path:
        """The folder of the counters of a host's link, as this process sees it: ``rx_bytes`` are the ones that the host has sent."""
        return Path("/sys/class/net", self._port(number), "statistics")

    def open(self, number: int) -> None:
        """Make a host, from 0 to 200, with a link that carries what comes.

        Raises:
            OSError, subprocess.CalledProcessError: there is no `ip`, or it is not permitted.
        """
        bridge, port, namespace = f"{self._label}b", self._port(number), self._namespace(number)
        if not self._made:
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.here}/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
        _run("ip", "netns", "add", namespace)
        self._made.append(number)
        names = self._folder(number) / "hosts"
        names.parent.mkdir(parents=True)
        names.write_text(f"127.0.0.1 localhost\n{self.address(number)} {socket.gethostname()}\n")
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _run("ip", "link", "set", port, "master", bridge, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run("ip", "-n", namespace, "link", "set", interface, "up")

    def limit(self, number: int, rate: float | None) -> None:
        """Let the link of a host carry so many bytes a second, each way; 0 cuts it, None lets it carry what comes.

        It is cut at the bridge. An interface that is set down and up again carries nothing for a second at least.
        """
        ends = (("tc", "qdisc", self._port(number)), ("tc", "-n", self._namespace(number), "qdisc", INTERFACE))
        for *words, interface in ends:
            with contextlib.suppress(subprocess.CalledProcessError):  # it may have no limit
                _run(*words, "del", "dev", interface, "root")
            if rate:
                shape = ("tbf", "rate", f"{8 * rate:.0f}bit", "burst", str(BURST), "limit", str(WAITING))
                _run(*words, "add", "dev", interface, "root", *shape)
        _run("bridge", "link", "set", "dev", self._port(number), "state", "disabled" if rate == 0 else "forwarding")

    def close(self) -> None:
        """Remove all hosts; processes in them go on without a network."""
        for number in self._made:
            shutil.rmtree(self._folder(number), ignore_errors=True)
            for words in (("link", "del", self._port(number)), ("netns", "del", self._namespace(number))):
                with contextlib.suppress(OSError, subprocess.CalledProcessError):
                    _run("ip", *words)
        self._made = []
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _run("ip", "link", "del", f"{self._label}b")

    def _namespace(self, number: int) -> str:
        return f"{self._label}n{number}"

    def _port(self, number: int) -> str:
        return f"{self._label}v{number}"

    def _folder(self, number: int) -> Path:
        """The files that stand in the place of those of /etc in a namespace."""
        return Path("/etc/netns", self._namespace(number))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
