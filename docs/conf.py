"""How Sphinx builds these pages (`make docs`): warnings are errors, and no page loads anything from elsewhere."""

from __future__ import annotations

import re
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

project = "llm-sharing-bench"
author = "The llm-sharing-bench contributors"
project_copyright = author
release = version = installed("llm-sharing-bench")
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
exclude_patterns = ["README.md"]
smartquotes = False  # --option is no dash
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_theme_options = {"footer_icons": []}
nitpicky = True
suppress_warnings = ["myst.strikethrough"]
LISTED = re.compile(r"^- \[[^\]]+\]\(([\w/-]+)\.md\)", re.MULTILINE)  # a page that an index lists
INCLUDED = re.compile(r"^From \[[^\]]+\]\([^)]+\):\n\n(?=```\{include\})", re.MULTILINE)
FOREIGN = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']+""")


def only_ours(app: Any, failed: Exception | None) -> None:
    """Refuse a page that loads a script, a font, a style or an image from elsewhere."""
    if failed is None:
        for page in Path(app.outdir).rglob("*.html"):
            if found := FOREIGN.search(page.read_text("utf-8")):
                raise ValueError(f"{page.name} loads from elsewhere: {found[0]}")


def adapted(app: Any, page: str, source: list[str]) -> None:  # noqa: ARG001
    """Take what is there for readers without Sphinx: an index's lists become its contents, links to includes go."""
    source[0] = INCLUDED.sub("", source[0])
    if page.endswith("index"):
        parts = ((part.partition("\n")[0], LISTED.findall(part)) for part in re.split(r"^##? ", source[0], flags=re.M))
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "".join(f"{link}\n" for link in links) + "```\n"
            for title, links in parts
            if links
        )


def setup(app: Any) -> None:
    """Adapt pages as they are read, and look at what was built once it is there."""
    app.connect("source-read", adapted)
    app.connect("build-finished", only_ours)
