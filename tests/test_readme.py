"""The things that README and ``docs`` name exist: tests, files, commands, names, limits. The code in them is run by ``test_recipes.py``."""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import re
from pathlib import Path

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.rpc import encodings
from aiograd.distributed.rpc.keyring import SECRET_BYTES
from aiograd.running import cli
from tests.documentation import PAGES, README, ROOT, TEXT, TEXTS
from tests.support import assert_raises

#: in one line each, since a span of code may be broken
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", TEXT, flags=re.MULTILINE | re.DOTALL))]
UNITS = {"MiB": 1 << 20, "s": 1.0, "": 1}


def functions(path: Path) -> set[str]:
    """Names of the functions of a module."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_test_that_is_named_exists() -> None:
    path, count = ROOT / "none", 0
    for span in SPANS:
        found = re.fullmatch(r"(tests/[\w/]+\.py)?(?:::(test_\w+))?", span)
        if not found or not span:
            continue
        if found[1]:
            path = ROOT / found[1]
        assert path.is_file(), f"`{span}`: there is no {path.name}"
        if found[2]:
            assert found[2] in functions(path), f"{path.name} has no {found[2]}"
        count += 1
    assert count > 40


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        assert (path.parent / link.partition("#")[0]).exists(), link


def test_the_readme_is_short() -> None:
    assert README.read_text().count("\n") <= 200


def test_the_package_is_installed_from_a_checkout() -> None:
    """It is on no index: a page that says so by name sends readers to what others may have put there."""
    named = re.findall(r"pip install ([^`\n]+)", TEXT)
    assert len(named) > 5 and not [argument for argument in named if re.match(r"""['"]?aiograd""", argument)]
    assert "pip install /path/to/the/checkout" in README.read_text()


def test_every_target_of_make_exists() -> None:
    targets = re.findall(r"^([a-z| -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"demo", "test", "examples", "bench"} <= named <= set(targets)


def test_every_name_of_the_package_exists() -> None:
    roots = {"ag": ag, "dist": dist, "aiograd": ag, "Limits": dist.Limits, "RemoteError": ag.errors.RemoteError("")}
    now = "".join(text for page, text in TEXTS.items() if page != "docs/changelog.md")  # which also names what is gone
    names = set(re.findall(r"\b(ag|dist|aiograd|Limits|RemoteError)\.([A-Za-z_][\w.]*\w)", now))
    assert len(names) > 30
    for root, path in names - {("aiograd", "testing"), ("aiograd", "loop")}:  # not imported by itself; a logger
        operator.attrgetter(path)(roots[root])


def test_every_error_exists() -> None:
    named = {word for word in re.findall(r"\b[A-Z]\w+Error\b|\bCommitUnknown\b|\bOverloaded\b", TEXT)}
    assert len(named) > 6
    others = {name.strip() for names in re.findall(r"^from (?!aiograd\b)\S+ import (.+)$", TEXT, re.MULTILINE) for name in names.split(",")}
    for name in named - others:
        assert hasattr(ag.errors, name) or hasattr(builtins, name), name


def test_every_option_of_a_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, set[str]] = {}
    for command in ("worker", "why", "trace", "wan"):
        assert_raises(SystemExit, None, cli.main, [command, "--help"])
        known[command] = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        shown = {option for line in TEXT.splitlines() if line.startswith(f"$ aiograd {command}") for option in re.findall(r"--[a-z-]+", line)}
        assert shown <= known[command]
    known["faults"] = {option for option in re.findall(r'"(--[a-z-]+)"', (ROOT / "tests" / "faults" / "__main__.py").read_text())}
    named = {option for span in SPANS for option in re.findall(r"^--[a-z-]+", span)}
    assert len(named) > 5 and named <= set.union(*known.values())


def test_the_table_of_limits_says_what_holds() -> None:
    limits = dist.Limits()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", TEXT[TEXT.index("| `Limits` |") :].split("\n\n")[0], re.MULTILINE)
    seen = 0
    for names, values in rows:
        for name, value in zip(re.findall(r"\w+", names), values.split(", "), strict=True):
            if name != "Limits":
                number, _, unit = value.strip().partition(" ")
                assert getattr(limits, name) == float(number) * UNITS[unit], name
                seen += 1
    assert seen > 10
    assert f"{limits.silence:g} s of silence" in TEXT and f"share {SECRET_BYTES} secret bytes" in TEXT


def test_the_table_of_encodings_says_what_they_take() -> None:
    size = 1_000_000
    rows = re.findall(r"^\| `([A-Z0-9]+)`.*?\| ([\d.]+) MB \|", TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == [encoding.name for encoding in dist.Encoding]
    packed_size = functools.partial(encodings.packed_size, size=size)
    for name, megabytes in rows:
        assert round(packed_size(dist.Encoding[name]) / 1e6, 2) == float(megabytes), name
