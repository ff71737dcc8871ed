"""How Sphinx makes the site of the documentation: `make docs` writes build/docs from this folder."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import sdpa  # noqa: E402

project = "sdpa"
author = "The sdpa authors"
copyright = f"2026, {author}"
version = release = sdpa.__version__

extensions = [
    "sphinx.ext.autodoc",
    "numpydoc",
    "myst_nb",
    "sphinx_design",
    "extensions.adapters",
    "extensions.generated",
    "extensions.pictures",
    "extensions.repository",
]
exclude_patterns = ["charts", "extensions"]

# Pages are Markdown, as GitHub shows it too; notebooks are executed.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "repository"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# The reference is made from docstrings, in which a name in backticks is a link where it is one of the names described.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

highlight_language = "none"  # of blocks that do not say: drawings, masks, commands
toc_object_entries_show_parents = "hide"


def setup(app):
    """The fields of a named tuple are in the section Attributes of its docstring, and not members once more."""
    field = type(sdpa.Gradients.query)
    app.connect("autodoc-skip-member", lambda app, what, name, found, skip, options: isinstance(found, field) or None)


html_theme = "pydata_sphinx_theme"
html_title = f"sdpa {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["speed.html", "speed.json", "../build/lab.html"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}
