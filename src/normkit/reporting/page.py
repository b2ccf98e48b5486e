"""A page as one file: template, style sheet and scripts together."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit.core.optional_dependencies import require
from normkit.reporting import text

TEMPLATES = Path(__file__).parent / "templates"
NOTHING = "'none'"  # in a policy


def render(
    template: str,
    folder: Path,
    *,
    what: str,
    extra: str = "report",
    scripts: Sequence[str] = (),
    **values: Any,
) -> str:
    """A page from a template of ``folder``, which extends page.html and uses components.html.

    ``what`` and ``extra`` say who asks and what to install where jinja2 is missing; torch needs
    it too, so that it is rarely missing.
    """
    page = template_environment(folder, what=what, extra=extra).get_template(template)
    style_sheet = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return page.render(
        style_sheet=style_sheet, scripts=scripts, policy=_policy(scripts), text=text, **values
    )


def template_environment(*folders: Path, what: str = "A page", extra: str = "report") -> Any:
    """jinja2 with our templates, and those of the folders."""
    jinja = require("jinja2", extra, what)
    environment = jinja.Environment(
        loader=jinja.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,  # whatever a user typed stays text
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compact = {"separators": (",", ":"), "allow_nan": False, "sort_keys": False}
    environment.policies["json.dumps_kwargs"] = compact
    return environment


def plotly_script(what: str, extra: str) -> str:
    """The library, with the line ends by whose hash a browser knows it."""
    library: str = require("plotly.offline", extra, what).get_plotlyjs()
    return library.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Sequence[str]) -> str:
    """What a browser may do with the page: run these scripts, and load nothing at all."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; script-src {' '.join(hashes) or NOTHING}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
