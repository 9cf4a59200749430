"""Documents that are written from the code: `python -m harness.cli.generated` brings them up to date.

Parts between two marks are generated, and all else is written by hand. The first mark names the part. Parts are
commands, forms of files and lists (`reference`), the vocabulary of a policy (`vocabulary`), exit codes, and the modules
of harness/ with the first lines of their docstrings. The parts on systems come from their docstrings,
systems/cards.toml and systems/tuned.toml.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.cli import reference, vocabulary
from harness.cli.codes import MEANS
from harness.cli.lists import summary
from harness.cli.reference import table
from harness.loop import system
from harness.policy.fields import domains

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m harness.cli.generated"
DOCUMENTS = (
    "docs/exit-codes.md",
    *(f"docs/reference/{name}.md" for name in ("commands", "files", "gpus", "systems")),
    "docs/vocabulary.md",
    "harness/README.md",
    "systems/README.md",
)
MARKS = re.compile(rf"(<!-- Written by `{COMMAND}`: ([^\n]+) -->\n\n).*?(<!-- to here -->\n)", re.DOTALL)
# Folders of harness/ by layer, the lowest first: each imports only itself and folders that stand before it here.
FOLDERS = (
    "policy", "loop", "rows", "client", "engines/costs", "engines", "engines/torch", "engines/sim",
    "engines/sim/kernel", "engines/servers", "calibrate", "run", "study", "answers", "validate", "check", "suite",
    "cli",
)  # fmt: skip
PAPER = re.compile(r'([A-Z][\w, ]+ et al\.), "([^"]+)", (arXiv \d+\.\d+|[A-Z][A-Za-z ]+ 20\d\d)')
RELEASE = re.compile(r"(?<![\w/])(?<!fork )([\w-]+/(?!\S+\.(?:go|h|yaml) )[\w.-]+) [0-9a-f]{7}\b")  # not a file in one


def documents() -> dict[str, str]:
    """Return the text of every document with generated parts, keyed by its path in the repository."""
    parts = {
        **reference.parts(),
        **vocabulary.parts(),
        "exit codes": table("code,when", ((str(code.value), when) for code, when in MEANS.items())),
        "modules": _modules(),
        "sources of systems": _systems(),
        "cards of systems": _cards(),
    }
    texts = {name: "".join(f"{line}\n" for line in lines) for name, lines in parts.items()}
    return {path: filled(path, texts) for path in DOCUMENTS}


def filled(path: str, parts: Mapping[str, str]) -> str:
    """Return the text of a file with each part inserted between the two marks that have the part's name.

    Raises ValueError if the file has no marks.
    """
    text, count = MARKS.subn(lambda at: f"{at[1]}{parts[at[2]]}{at[3]}", (ROOT / path).read_text("utf-8"))
    if not count:
        raise ValueError(f"{path}: no lines <!-- Written by `{COMMAND}`: PART --> and <!-- to here -->")
    return text


# ------------------------------------------------------------------ modules


def _modules() -> Iterator[str]:
    harness = ROOT / "harness"
    for folder in ("", *FOLDERS):
        files = sorted(path for path in (harness / folder).glob("*.py") if path.stem != "__init__")
        yield f"### `{folder or 'harness'}/`\n"
        yield f"{summary(harness / folder / '__init__.py')}\n"
        yield from table("file,what it is", ((f"`{path.name}`", summary(path)) for path in files))


# ------------------------------------------------------------------ systems


def _systems() -> Iterator[str]:
    rows = (
        (f"[`{name}`](#{name})", sentence, source)
        for name in system.names()
        for sentence, source in [described(ast.get_docstring(ast.parse(system.path(name).read_text("utf-8"))) or "")]
    )
    yield from table("system,how it shares GPUs,source", rows)


def _cards() -> Iterator[str]:
    cards, tuned = (
        tomllib.loads((ROOT / "systems" / name).read_text("utf-8")) for name in ("cards.toml", "tuned.toml")
    )
    if bare := sorted({*system.names()} - cards.keys()):
        raise SystemExit(f"systems/cards.toml has no [{bare[0]}]")
    yield from table(
        "system,best form here,departs from its source,regret,where it wins",
        (
            (f"`{name}`", card["best"], card["departs"], regret(name, tuned.get(name)), card["wins"])
            for name in system.names()
            for card in [cards[name]]
        ),
    )


def regret(name: str, record: Mapping[str, Any] | None) -> str:
    """Return the regret of a system's defaults as text, in percentage points.

    A cell is a (world, rate, seed). A draw of settings passes a cell if 99 % of requests meet both SLOs in it. The
    regret is the share of cells that the best draw passes, minus the share that the defaults pass. If no draw passes a
    cell, or the defaults were not drawn, the text says so. It is "" if there is no record.
    """
    if record is None:
        return ""
    defaults = {field: domain.default for field, domain in domains(system.find(name)).items() if domain.tuned}
    of_default = [draw["held"] for draw in record["draw"] if draw["fields"] == defaults]
    most = max(draw["held"] for draw in record["draw"])
    return "no draw holds any" if not most else f"{100 * (most - of_default[0]):.1f}" if of_default else "not drawn"


def described(docstring: str) -> tuple[str, str]:
    """Return the first sentence of a system's docstring, and its source.

    The source is the paper, else the releases that the system follows, else "none".
    """
    sentence = re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0]
    text = " ".join(docstring.split())
    if paper := PAPER.search(text):
        authors, title, venue = paper.groups()
        return sentence, f"{authors}, *{title}*, {venue}"
    return sentence, ", ".join(dict.fromkeys(match[1] for match in RELEASE.finditer(text))) or "none"


def main() -> None:
    """Write the documents that differ."""
    for name, text in documents().items():
        if (ROOT / name).read_text("utf-8") != text:
            (ROOT / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
