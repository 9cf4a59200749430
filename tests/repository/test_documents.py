"""Every `sh` block of the documents: run on the sample, dry-run, or listed here with the reason why not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from harness.cli.app import COMMANDS, load, main
from harness.cli.values import WORDS
from tests import ROOT
from tests.repository.test_repo import files, text

FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Commands that no test runs, by how they begin.
NAMED = re.compile(r"^```\w+ (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # a file that later blocks use
SERVERS, GPU, MINUTES, NETWORK = "needs servers", "needs a GPU", "takes minutes", "needs a network"
LISTED = {
    "bench calibrate": SERVERS,
    "bench validate": MINUTES,
    "bench claims": MINUTES,
    "bench tune": MINUTES,
    "bench check": MINUTES,
    "bench sensitivity": MINUTES,
    "python3 -m probe": GPU,
    ".venv-vllm/bin/python": GPU,
    "make gpu": GPU,
    "make gpu-servers": GPU,
    "DEVICE=cuda": GPU,
    "git clone": NETWORK,
    "pip install": NETWORK,
    "make servers-": NETWORK,
    "pre-commit": NETWORK,
    ". .venv/bin/activate": "a shell's own",
    "for part in": MINUTES,
    "bench plot split": "draws a run of minutes",
    "bench plot turns": "draws a run of minutes",
}
NEEDS = re.compile(r"# .*\bneeds (\w+_DIR)\b")  # said by a command that reads data which no clone has
OWN = re.compile(r"\bresults/")
DRY = {"compare", "study", "run"}  # commands with --dry-run, which is taken but on the sample


class Result(NamedTuple):
    """A command's end."""

    code: int
    told: str


class Block(NamedTuple):
    """A block of a document."""

    place: str  # FILE:LINE
    code: str


def blocks(path: Path) -> Iterator[Block]:
    whole = text(path)
    for match in FENCE.finditer(whole):
        line = whole.count("\n", 0, match.start()) + 1
        yield Block(f"{path.relative_to(ROOT)}:{line}", match[1])


def commands(code: str) -> list[str]:
    """Return the commands of a block, a line each."""
    lines = (line.strip() for line in code.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def documents() -> list[Path]:
    """List the documents with blocks, but for what is generated and what is past."""
    past = {ROOT / "CHANGELOG.md", ROOT / "docs/decisions.md"}
    paths = [
        path for path in files() if path.suffix == ".md" and path not in past and path.parent != ROOT / "docs/changes"
    ]
    return [path for path in paths if FENCE.search(text(path)) and path.parent.name != "reference"]


def reason(command: str) -> str | None:
    """Return the reason for not running a command; None where it is run."""
    if OWN.search(command):
        return "is about results that its reader has"
    return next((why for start, why in LISTED.items() if command.startswith(start)), None)


def parse(command: str) -> None:
    """Read a command line of `bench` as click does, and run nothing."""
    words = shlex.split(command, comments=True)[1:]
    words = words[: next((k for k, word in enumerate(words) if word in {"&&", ";", "|", ">"}), len(words))]
    if not words or words[0].startswith("-"):
        return
    assert words[0] in COMMANDS, words[0]
    with click.Context(main, **main.context_settings) as top:
        top.meta[WORDS] = words
        load(words[0]).make_context(words[0], words[1:], parent=top)


def test_every_command_of_the_documents_and_the_help_is_one_that_bench_reads(subtests: pytest.Subtests) -> None:
    every = [block for path in documents() for block in blocks(path)]
    every += [Block("help", match[1]) for match in FENCE.finditer(text(ROOT / "docs/reference/commands.md"))]
    lines = [(block.place, line) for block in every for line in commands(block.code) if line.startswith("bench")]
    assert len(lines) > 50
    for place, line in lines:
        with subtests.test(f"{place} {line}"), suppress(click.exceptions.Exit):  # --help
            parse(line)


def run(command: str) -> Result:
    """Run a command as a shell would: on the sample as it is, else dry where it can be."""
    words = [
        path
        for word in shlex.split(command, comments=True)
        for path in (sorted(glob(word)) or [word])  # noqa: PTH207 - as a shell does
    ]
    if words[0] == "make":
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        return Result(done.returncode, done.stderr)
    assert words[0] == "bench", f"no test runs {words[0]}: list it with the reason"
    quick = "sample" in words and "--engine" not in words
    dry = words[1] in DRY and not quick and "--dry-run" not in words
    told = CliRunner().invoke(main, [*words[1:], *(["--dry-run"] if dry else [])])
    return Result(told.exit_code, told.output if told.exception is None else f"{told.output}\n{told.exception!r}")


def tried() -> list[Path]:
    """List the documents whose commands are run: beside `make bare` in CI (BENCH_BARE) those that read data alone."""
    return [path for path in documents() if not os.environ.get("BENCH_BARE") or NEEDS.search(text(path))]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine may be busy
@pytest.mark.parametrize("path", tried(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_document_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """In order, in one folder: a block may use what those before it made."""
    monkeypatch.chdir(tmp_path)
    for name, content in NAMED.findall(text(path)):
        Path(name).write_text(content, "utf-8")
    for block in blocks(path):
        for command in commands(block.code):
            if reason(command) is None and (NEEDS.search(command) or not os.environ.get("BENCH_BARE")):
                with subtests.test(f"{block.place} {command}"):
                    if (needs := NEEDS.search(command)) and needs[1] not in os.environ:
                        pytest.skip(f"{needs[1]} is not set")
                    code, told = run(command)
                    assert code == 0, told
