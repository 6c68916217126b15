"""Sphinx: the site is docs/, the docstrings of public names, and the command line as it is defined."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project, release = PROJECT["name"], metadata.version(PROJECT["name"])
author = copyright = PROJECT["authors"][0]["name"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_pages"]
exclude_patterns: list[str] = []
nitpicky = False

html_theme = "furo"
html_title = f"pipec {release}"
html_baseurl = PROJECT["urls"]["Documentation"] + "/en/latest"
html_theme_options = {
    "source_repository": PROJECT["urls"]["Homepage"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_output_stderr = "remove"  # the lines of a compilation that takes long

autodoc_typehints = "none"  # docstrings say what an argument may be
autodoc_member_order = "bysource"
