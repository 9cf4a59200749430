"""The README's first screen: what plain `make` prints in a fresh clone, and its minutes.

python -m tests.tools.first_screen          # clones HEAD, runs `make` there, writes README.md
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path

from tests import ROOT
from tests.tools.tasks import cpu_s

README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
MINUTES = re.compile(r"(?<=draws the figure \()[0-9]+ minutes?")
KEPT = re.compile(r"(PATH|SSL_CERT_(FILE|DIR)|\w+_PROXY|\w+_proxy)")  # variables of an empty environment
ANSWER = re.compile(r".* (keeps|meets) .*\(\S+, [0-9]+ x \S+\)$")
HEAD = re.compile(r" {8,}\S|system {2,}")  # the two lines above a table
ROW = re.compile(r"\S+ {2,}\S|† ")  # matches a system, and what the mark behind a name means
FOLD = 110  # characters of the README's lines of output


def shown(output: str) -> str:
    """Return the lines of `make` that the README shows: the first answer, folded, its table and the rate of that.

    Raises ValueError where the output has none.
    """
    lines = [line.rstrip() for line in output.splitlines()]
    starts = [i for i, line in enumerate(lines) if HEAD.match(line)]
    answers = [line for line in lines if ANSWER.match(line)]
    if len(starts) != 2 or starts[1] != starts[0] + 1 or not answers:
        raise ValueError("no answer and table in the output of make")
    rows = takewhile(ROW.match, lines[starts[1] + 1 :])
    at = [line for line in lines[: starts[0]] if line.startswith("Table: ")][-1:]
    return "\n".join([*folded(answers[0]), *at, *lines[starts[0] : starts[1] + 1], *rows, ""])


def folded(line: str) -> list[str]:
    """Fold a line between words."""
    parts = [""]
    for word in line.split(" "):
        if parts[-1] and len(parts[-1]) + 1 + len(word) > FOLD:
            parts.append(word)
        else:
            parts[-1] = f"{parts[-1]} {word}".lstrip()
    return parts


def written(readme: str, screen: str, seconds: float) -> str:
    """Put a screen and minutes, rounded up, into the text of the README. Raises ValueError where it has no place."""
    minutes = max(1, -int(-seconds // 60))
    readme, blocks = BLOCK.subn(lambda _: screen, readme, count=1)
    readme, times = MINUTES.subn(f"{minutes} minute{'s' * (minutes > 1)}", readme, count=1)
    if not blocks or not times:
        raise ValueError("README.md has no block of output, or no minutes beside `make`")
    return readme


def fresh(folder: Path) -> tuple[Path, dict[str, str]]:
    """Clone HEAD into a folder; return the clone and the variables of an empty environment."""
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    return clone, {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)} | {"HOME": str(home)}


def main() -> None:
    """Run `make` in a fresh clone and write what it shows into README.md.

    The minutes are those of two idle processors: CPU seconds / 2, as other programs may run beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone, env = fresh(Path(folder))
        done = subprocess.run(["make"], cwd=clone, env=env, stdout=subprocess.PIPE, text=True, check=True)
        seconds = cpu_s()
    README.write_text(written(README.read_text("utf-8"), shown(done.stdout), seconds / 2), "utf-8")
    print(f"{seconds:.0f} CPU seconds, the installation's and the compile's among them: README.md")


if __name__ == "__main__":
    main()
