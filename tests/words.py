"""Words that the code has given up as identifiers, and the word that stands in the place of each.

``python -m tests.words`` prints every identifier that still has one, with its place.

Note [What is looked at]
    Names of modules, classes, functions, parameters, variables and attributes, and names of keywords and imports. A name is split at ``_`` and
    at capitals; its words count in the singular and in the plural. "heartbeat" has no "beat" in it, "HostWorker" has a "host".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.layering import package_sources


@dataclass(frozen=True)
class Rename:
    """A word and the one in its place.

    Attributes:
        instead: the field's term, or the name of the class.
        within: where the word is given up, as paths relative to the package; everywhere if there are none.
        outside: paths where it keeps another meaning.
        but: identifiers that keep it.
    """

    instead: str
    within: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    but: frozenset[str] = frozenset()

    def covers(self, path: str) -> bool:
        """True if the word is given up in the module at `path`."""
        return (not self.within or path.startswith(self.within)) and not path.startswith(self.outside)


#: memory of the CPU, and the address of a computer
_OTHER_HOSTS = frozenset(
    "from_host to_host on_host host_array trusted_hosts trusted_host _trusted_hosts local_host split_host HostAllowList HostRefusedError".split()
)

RENAMES: Mapping[str, Rename] = {
    "conversation": Rename("session"),
    "greeting": Rename("handshake"),
    "heading": Rename("header", within=("distributed/",)),
    "trail": Rename("the path that a call took"),
    "foresight": Rename("prediction"),
    "hearsay": Rename("report"),
    "heir": Rename("successor"),
    "former": Rename("previous, earlier"),
    "beat": Rename("heartbeat; of a bar or of a wheel, tick"),
    "errand": Rename("callback, request"),
    "quietly": Rename("what is kept silent: ignore_errors, suppress_warnings"),
    "gave_up": Rename("timed_out, cancelled, abandoned"),
    "leaves_loop": Rename("suspends"),
    "going_on": Rename("running, unfinished"),
    "face": Rename("monitor", but=frozenset({"register_face"})),
    "part": Rename("participant", within=("distributed/autograd/",)),
    "link": Rename("channel", within=("distributed/rpc/",), but=frozenset({"is_link_local"})),
    "row": Rename("request", within=("distributed/rpc/",)),
    # the `driver` of a cluster, and of create() of DataParallel and LocalSteps, is a public name
    "driver": Rename(
        "coordinator; of the loop of a pass, runner",
        outside=(
            "cuda/",
            "distributed/cluster/",
            "distributed/data_parallel/controller",
            "distributed/local_steps/controller",
            "running/",
        ),
    ),
    "host": Rename(
        "member, participant",
        within=("steps/", "coordination/", "pipeline/", "distributed/data_parallel/", "distributed/collectives/"),
        but=_OTHER_HOSTS,
    ),
    "walk": Rename("discovery", within=("distributed/autograd/",)),
}


@dataclass(frozen=True)
class Use:
    """An identifier with a word that was given up."""

    path: str
    line: int
    identifier: str
    word: str

    @property
    def part(self) -> str:
        """The folder of the package it is in; of `distributed`, the folder below; or the module."""
        names = self.path.removesuffix(".py").split("/")
        return "/".join(names[: 2 if names[0] == "distributed" else 1])


def uses(sources: Mapping[str, str]) -> Iterator[Use]:
    """The identifiers that break `RENAMES`, by sources with paths relative to the package."""
    for path, source in sources.items():
        words = [word for word, rename in RENAMES.items() if rename.covers(path)]
        pattern = re.compile(rf"_({'|'.join(words)})s?_")
        for line, identifier in _identifiers(path, source):
            found = pattern.search(_spelled(identifier))
            if found and identifier not in RENAMES[found[1]].but:
                yield Use(path, line, identifier, found[1])


@cache
def _spelled(identifier: str) -> str:
    return f"_{'_'.join(re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+', identifier)).lower()}_"


def _identifiers(path: str, source: str) -> Iterator[tuple[int, str]]:
    for name in path.removesuffix(".py").split("/"):
        yield 1, name
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=other):
                for each in (other or name).split("."):
                    yield node.lineno, each
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


def main() -> None:
    for use in uses(package_sources(Path("aiograd"))):
        print(f"aiograd/{use.path}:{use.line}: {use.identifier}: say {RENAMES[use.word].instead}, not {use.word}")


if __name__ == "__main__":
    main()
