"""aiohttp: which of its undocumented names are used, that the installed release has them, and that no others are."""

from __future__ import annotations

import ast
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

import aiograd.distributed.rpc.http
from aiograd.distributed.rpc.http import aiohttp_internals
from aiograd.distributed.rpc.http.aiohttp_internals import REQUIRED, missing, refuse_unfit
from aiograd.distributed.rpc.http.connection import HttpConnection

FOLDER = Path(aiograd.distributed.rpc.http.__file__).parent
NAMES = [(owner, name) for owner, names in REQUIRED.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[f"{owner.__name__}.{name}" for owner, name in NAMES])
def test_the_installed_release_has_what_is_needed(owner: type, name: str) -> None:
    assert hasattr(owner, name), f"aiohttp {aiohttp.__version__} lacks {owner.__name__}.{name}, see aiograd/distributed/rpc/http/aiohttp_internals.py"
    assert not name.startswith("_")


def test_old_releases_are_refused() -> None:
    for version in ("3.14.0", "3.9.5", "2.0", "3.13.99"):
        with pytest.raises(ImportError, match=r"3\.14\.1"):
            refuse_unfit(version)
    for version in ("3.14.1", "3.14.5", "3.15", "4.0.0a1", "3.14.2.dev0"):
        refuse_unfit(version)


def test_a_release_that_lacks_something_is_refused_and_told_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp_internals, "REQUIRED", {web.RequestHandler: ("transport", "gone"), web.BaseRequest: ("lost",)})
    assert list(missing()) == ["aiohttp.web_protocol.RequestHandler.gone", "aiohttp.web_request.BaseRequest.lost"]
    with pytest.raises(ImportError, match=r"RequestHandler\.gone, aiohttp\.web_request\.BaseRequest\.lost, which aiohttp 3\.14\.1 lacks"):
        refuse_unfit("3.14.1")


def test_what_the_protocol_takes_from_the_library_is_on_the_list() -> None:
    own, theirs = set(vars(HttpConnection)), set(dir(web.RequestHandler)) - set(dir(object))
    assert {name for name in own & theirs if not name.startswith("__")} <= set(REQUIRED[web.RequestHandler])
    assert not {name for name in own & theirs if name.startswith("_") and not name.startswith("__")}, "a name of ours hides one of the library"
    tree = ast.parse((FOLDER / "connection.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"}
    assert "transport" in used and used - own <= set(REQUIRED[web.RequestHandler])


def test_nothing_private_of_the_library_is_touched() -> None:
    """Where the library is used, an attribute with an underscore belongs to `self`; undocumented modules are imported in one place."""
    paths = [path for path in FOLDER.glob("*.py") if "aiohttp import" in path.read_text() or "import aiohttp" in path.read_text()]
    assert {"aiohttp_internals", "client", "connection", "responses", "server"} <= {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name) and node.value.id == "self", f"{path.name}:{node.lineno}: {node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiohttp."):
                allowed = {"aiohttp.client_proto", "aiohttp.connector"} if path.stem == "aiohttp_internals" else {"aiohttp.abc"}
                assert node.module in allowed, f"{path.name}:{node.lineno}: {node.module}"
