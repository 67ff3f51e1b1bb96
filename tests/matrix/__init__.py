"""The matrix: tests in other environments than `make test` has, and workers of other releases beside those of this checkout; ``make matrix``.

`bounds`         the lowest versions that ``pyproject.toml`` allows
`rows`           what is run: Pythons, versions, what is left out, and variables of the environment
`environments`   an environment for each, under ``out/matrix``
`releases`       the rows of other releases
"""
