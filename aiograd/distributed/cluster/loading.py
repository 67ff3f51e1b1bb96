"""Loading: the Service that a process is told to serve, and TLS from files. Used by the command line and by actors."""

from __future__ import annotations

import importlib
import os
import ssl
import sys
import traceback
from pathlib import Path
from typing import Any

from aiograd.distributed.service import Service
from aiograd.errors import ArgumentError


def load_service(path: str) -> Service:
    """The Service that ``module:name`` names; the module is imported.

    Raises:
        ArgumentError: there is none. Errors of the module's import.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ArgumentError(f"--service {path}: expected MODULE:NAME, for example my_package.serving:service")
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            error.add_note(f"--service {path}: importing {module_name} failed{_place_of(error)}")
            raise  # it is there, and imports something that is not
        raise ArgumentError(f"--service {path}: there is no module {error.name} in {os.getcwd()} or on PYTHONPATH") from None
    except Exception as error:
        error.add_note(f"--service {path}: importing {module_name} failed{_place_of(error)}")
        raise
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"--service {path}: module {module_name} has no {name}; it has {_services_in(module) or 'no Service at all'}")
        found = getattr(found, part)
    if not isinstance(found, Service):
        raise ArgumentError(f"--service {path}: expected an aiograd.distributed.Service, found {type(found).__name__}")
    return found


def _place_of(error: Exception) -> str:
    """The last line outside of the package that led to an error, for a message."""
    places = [
        f", {frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("aiograd", "importlib")
    ]
    return places[-1] if places else ""


def _services_in(module: Any) -> str:
    return ", ".join(f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, Service))


def make_tls(
    certificate: Path | str | None, key: Path | str | None, ca: Path | str | None
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """TLS for incoming connections and TLS for connecting; None where the defaults will do.

    With `ca` both sides show certificates that it has issued.

    Raises:
        ArgumentError: files are missing or invalid.
    """
    if (certificate is None) != (key is None):
        raise ArgumentError("TLS needs both --certificate and --key")
    server = client = None
    try:
        if certificate is not None:
            server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
            server.minimum_version = ssl.TLSVersion.TLSv1_3
            server.load_cert_chain(certificate, key)
            if ca is not None:
                server.verify_mode = ssl.CERT_REQUIRED
        if ca is not None:
            client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
            client.minimum_version = ssl.TLSVersion.TLSv1_3
            if certificate is not None:
                client.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError and names no file
        files = ", ".join(str(file) for file in (certificate, key, ca) if file is not None)
        raise ArgumentError(f"TLS from {files}: {error}; expected PEM files that this user can read") from None
    return server, client
