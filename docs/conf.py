"""How Sphinx builds the documentation from these pages and the docstrings of the packages (`make docs`)."""

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pygments.lexers.special import TextLexer
from rollyard_process.version import installed_version
from sphinx.application import Sphinx

project = "Rollyard"
author = "The Rollyard authors"
release = version = installed_version()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = f"Rollyard {release}"

# Pages name the headings of other pages, down to the third level.
myst_heading_anchors = 3

# A word in single backticks of a docstring is code, as it is in Markdown.
default_role = "code"
autodoc_class_signature = "separated"
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "member-order": "bysource",
    "exclude-members": "model_config",
}
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88


def point_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Make downloads of links to Markdown files outside of this folder; MyST takes them for pages."""
    folder = Path(app.srcdir, page).parent

    def target(match: re.Match[str]) -> str:
        inside = (folder / match[1]).resolve().is_relative_to(app.srcdir)
        return match[0] if inside else f"](path:{match[1]})"

    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)", target, source[0])


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep colons in the docstrings of attributes: napoleon takes what stands before one for a type.

    It looks at the first line only, which an empty comment becomes.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def show_defaults(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add the default to the docstring of a model's field, because autodoc does not see it.

    Nobody sets the fields of a status.
    """
    owner, _, field_name = name.rpartition(".")
    is_said = re.search(r"\bdefault\b", " ".join(lines), re.IGNORECASE)
    if what != "attribute" or is_said or owner.endswith(("Status", "Counts")):
        return
    model = pkgutil.resolve_name(owner)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return
    default = model.model_fields[field_name].default if field_name in model.model_fields else None
    if isinstance(default, (bool, int, float)) or (isinstance(default, str) and default):
        lines += ["", f"Default: ``{json.dumps(default)}``.", ""]


def setup(app: Sphinx) -> None:
    """Connect the functions above; Sphinx calls this."""
    # GitHub draws diagrams in Mermaid's language. They are shown as text here.
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", point_outside)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-process-docstring", show_defaults, priority=600)
