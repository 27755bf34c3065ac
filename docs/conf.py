"""Settings of the documentation site: ``python -m sphinx -W docs build/site``."""

import re
from pathlib import Path

project = "cs336sys"
html_title = "cs336sys"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# Links to a heading of another page, as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
# Docstrings say types and shapes in their own words.
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def setup(app):
    app.connect("source-read", _read_for_site)


def _read_for_site(app, name, source):
    """Begin the first page with the README, and leave only the text of links to files that the site does not have."""
    if name == "index":
        readme = (Path(app.srcdir).parent / "README.md").read_text()
        source[0] = re.sub(r"(?<=\]\()(?!docs/|https?:)", "../", readme) + source[0]
        # A folder's page has its name.
        source[0] = re.sub(r"(?<=\]\()docs/(results|decisions)(?=\))", r"\1.md", source[0])
        source[0] = re.sub(r'(?<=\]\()docs/|(?<=src=")docs/', "", source[0])
    out = re.escape("../" * (name.count("/") + 1))
    source[0] = re.sub(rf"\[([^\]]+)\]\({out}[^)\s]*\)", r"\1", source[0])
