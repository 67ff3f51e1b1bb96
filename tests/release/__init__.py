"""Builds a release and checks it: ``make release``.

========================  ===========================================================================
``surface``               the public names as text, and what a later surface breaks of an earlier one
``fragments``             the fragments of the changelog, one for each change
``sbom``                  the bill of materials that goes into the wheel
``building``              sdist and wheel from a copy of the commit, twice; what is in them
``installing``            an environment with the wheel alone, and the tests in it
``checks``                the checks of ``make release``, each with its row of the table
========================  ===========================================================================
"""
