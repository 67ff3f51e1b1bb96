"""The documentation: ``make docs`` builds it into ``out/docs``, warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import aiograd  # noqa: E402 - from this checkout

project = "aiograd"
author = "The aiograd authors"
copyright = author
version = release = aiograd.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "public_names",
    "fault_table",
    "raises_entries",
    "room",
    "rooms",
    "signatures",
    "sequence_diagram",
    "stepped",
]
exclude_patterns = ["changes/*.*.md", "extensions"]  # fragments become part of the changelog

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
#: a name in single backticks in a docstring is code
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes are documented where they are assigned as well
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "Axis": "Axis"}
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"aiograd {release}"
html_static_path = ["static"]
html_css_files = ["aiograd.css"]
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "native"
