"""Types as users of the package see them; see `tests.types.__main__`."""
