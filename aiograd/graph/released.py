"""The marker of saved values that a pass has released."""

from __future__ import annotations

from aiograd.errors import GraphFreedError


class ReleasedVariables:
    """The marker that replaces a node's saved values when they are released, with the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        self.reason: str = reason

    def error(self, name: str) -> GraphFreedError:
        """The error for a second use of the saved values of node `name`."""
        because = f" The first pass ended with: {self.reason}." if self.reason else ""
        return GraphFreedError(
            f"Trying to backward through the graph a second time: {name} has already released the values it saved in forward.{because} "
            "Specify retain_graph=True in the first backward or grad call if you need to go through the graph again, or record forward anew."
        )
