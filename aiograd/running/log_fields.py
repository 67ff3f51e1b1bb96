"""Fields of log records, for programs that log as JSON: `worker`, `context`, `pass` and `peer`.

Every record of the package's loggers has all four; one that is not known is None. `LogFields` gives them to records of other loggers as well::

    handler.addFilter(ag.log_fields.LogFields())
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

FIELDS = ("worker", "context", "pass", "peer")


def _nothing_known() -> Mapping[str, Any]:
    return {}


#: give the fields of the running code; the distributed part and the engine add theirs
_sources: list[Callable[[], Mapping[str, Any]]] = [_nothing_known]


def add_source(source: Callable[[], Mapping[str, Any]]) -> None:
    """Take fields of the running code from `source`."""
    _sources.append(source)


def running_fields() -> dict[str, Any]:
    """The fields of the running code; unknown ones are None."""
    fields: dict[str, Any] = dict.fromkeys(FIELDS)
    for source in _sources:
        fields.update(source())
    return fields


class LogFields(logging.Filter):
    """A filter for handlers and loggers that lets every record pass, and gives it the fields of the running code where it has none of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Complete a record; always True."""
        for name, value in running_fields().items():
            if getattr(record, name, None) is None:
                setattr(record, name, value)
        return True


class StructuredLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds the fields of the running code to its records, beside the `extra` of the call."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields to a record."""
        kwargs["extra"] = {**running_fields(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def structured_logger(name: str) -> StructuredLogger:
    """The logger of a module of the package."""
    return StructuredLogger(logging.getLogger(name))
