"""An actor that does nothing."""


class Bare:
    """Its start is what Ray itself takes."""

    async def hi(self) -> int:
        return 1
