"""What is in the repository: nothing of the place it was made in, nothing heavy, no promise that does not hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from harness.check.check import check
from harness.check.purity import impure
from harness.cli.app import load, main

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 500_000

# Written so that no pattern matches its own line.
FOREIGN = {
    "a folder of some machine": r"(?<![\w.])/(?:wor[k]|roo[t]|hom[e]|Use[r]s|op[t])/\w|/tm[p]/[A-Z]",
    "a package index": r"pyp[i]\.org|pythonh[o]sted|--(?:extra-)?in[d]ex-url|--fin[d]-links|fil[e]:///",
    "how it was made": r"\bthis s[e]ssion\b|\bhelper[ -]s[e]ssion|\bmain e[n]gineer\b|\bH[1-9][]]|\bissues s[h]ow\b",
    "a note that is not here": r"\b(?:facts|simulators|style|traces|vocabulary|COMMON|CONTRACT|SEMANTICS|UX)\.m[d]\b"
    r"|\bresea[r]ch/[a-z]|\bvocab[u]lary,? (?:rule )?\d|\bDES[I]GN\b|\b6[b]\.\d",
    "an unfinished thought": r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b",
}
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)  # a block of code in Markdown
SHARED = "../sh" + "ared"  # the folder beside the checkout that .ci/run may look into


@cache
def files() -> tuple[Path, ...]:
    """What a commit of everything would hold."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return tuple(path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file())


def text(path: Path) -> str:
    """A file's text; empty for what is none."""
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode(errors="replace")


def foreign(name: str, content: str) -> list[str]:
    """Lines that name what a reader elsewhere cannot have."""
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        found += [f"{name}:{number}: {what}: {line.strip()[:80]}" for what, p in FOREIGN.items() if re.search(p, line)]
        if SHARED in line and name != ".ci/run":
            found.append(f"{name}:{number}: a folder outside the checkout: {line.strip()[:80]}")
    return found


def test_nothing_names_another_place() -> None:
    assert [hit for path in files() for hit in foreign(path.relative_to(ROOT).as_posix(), text(path))] == []


@pytest.mark.parametrize(
    "line",
    [
        "path = '/wor" + "k/main'",
        "see /tm" + "p/COMMON",
        "--in" + "dex-url https://example.org",
        "from facts.m" + "d F4",
        "where time went (vocab" + "ulary, 15)",
        "DES" + "IGN section 2",
        "# TO" + "DO: later",
        f"{SHARED}/traces",
    ],
)
def test_a_planted_line_is_found(line: str) -> None:
    assert foreign("x.py", line)


@pytest.mark.parametrize(
    "line",
    [
        "session_id: uint64",
        "see harness/README.md",
        "H100 and H20",
        "a private helper",
        "results/x",
        "~/work",
        "/tmp/out",
    ],
)
def test_an_innocent_line_passes(line: str) -> None:
    assert foreign("x.py", line) == []


@pytest.mark.parametrize(("folder", "outcome"), [(None, "1 skipped"), (".", "1 failed"), ("absent", "1 error")])
def test_data_that_is_said_to_be_there_must_be_used(folder: str | None, outcome: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_x.py").write_text("import pytest\ndef test_x(traces_dir):\n    pytest.skip('no such row')\n")
    env = {key: value for key, value in os.environ.items() if key not in {"TRACES_DIR", "PYTEST_ADDOPTS"}}
    env |= {"TRACES_DIR": str(tmp_path / folder)} if folder else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert outcome in run.stdout.splitlines()[-1]


def test_no_file_is_heavy() -> None:
    assert [path.name for path in files() if path.stat().st_size > MAX_BYTES] == []


def test_only_what_belongs_is_kept() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in files()}
    measured = re.compile(r"results/h200/(README\.md|raw\.jsonl|host\.json|h200-measured\.toml|[a-z]+\.png)")
    kept = {name for name in names if name.startswith("results/") and not measured.fullmatch(name)}
    assert kept <= {"results/README.md"}
    assert not {name for name in names if name.startswith(("plots/out/", "traces/data/"))}
    assert {Path(name).suffix for name in names if name.startswith("plots/")} <= {".py", ".png"}


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        (".venv/x", True),
        (".venv-3.12/x", True),
        ("results/static-0123abcd/requests.parquet", True),
        ("results/README.md", False),
        ("results/h200/raw.jsonl", False),
        ("plots/out/x.pdf", True),
        ("plots/gallery/x.png", False),
        ("traces/data/x.parquet", True),
        ("traces/sample/x.parquet", False),
        ("harness/engines/costs/tables/h100.toml", False),
        ("workloads/sets/heavy8.toml", False),
    ],
)
def test_git_ignores_what_is_made(path: str, ignored: bool) -> None:
    assert files()
    run = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, check=False)
    assert run.returncode == (0 if ignored else 1)


def pyproject() -> Any:
    """The project's own description."""
    return tomllib.loads(text(ROOT / "pyproject.toml"))


def test_packages_are_listed_by_name_and_real() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    real = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("*/**/*.py")
        if path.parent.relative_to(ROOT).parts[0] in {"harness", "systems", "workloads", "traces", "plots"}
    }
    assert set(listed) == real
    assert [name for name in listed if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()] == []


def test_the_lock_is_hashed_and_holds_all_that_is_asked_for() -> None:
    lock = text(ROOT / "requirements.lock")
    pinned = re.findall(r"^([a-z0-9-]+)==\S+", lock, re.MULTILINE)
    blocks = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pinned)
    assert all("--hash=sha256:" in block for block in blocks)
    project = pyproject()
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    assert {re.match(r"[\w-]+", name).group() for name in asked} <= set(pinned)  # type: ignore[union-attr]


def promised(program: str) -> set[tuple[str, ...]]:
    """Commands of `program` in the code of the documents, each as its words."""
    spans: list[str] = []
    for path in files():
        if path.suffix == ".md":
            prose, code = re.sub(FENCE, "", text(path)), re.findall(FENCE, text(path))
            spans += re.findall(r"`([^`\n]+)`", prose) + [
                line.split("#")[0] for block in code for line in block.split("\n")
            ]
    return {tuple(span.split()) for span in spans if re.match(rf"(?:\.venv/bin/)?{program}(?:\s|$)", span)}


def test_the_readme_names_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    asked = {word for words in promised("make") for word in words[1:] if "=" not in word}
    assert asked
    assert asked <= targets


def test_the_readme_names_commands_that_bench_has() -> None:
    assert promised("bench")
    for words in promised("bench"):
        command: click.Command = main
        rest = list(words[1:])
        while rest and isinstance(command, click.Group) and rest[0] in command.commands:
            command = load(rest.pop(0)) if command is main else command.commands[rest.pop(0)]
        assert not rest or not isinstance(command, click.Group), " ".join(words)
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        assert {word.split("=")[0] for word in rest if word.startswith("-")} <= known, " ".join(words)


def example() -> str:
    """The README's system."""
    blocks: list[str] = re.findall(FENCE, text(ROOT / "README.md"))
    return next(block for block in blocks if "def on(" in block)


def test_the_system_of_the_readme_is_short_and_pure() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 20
    assert list(impure(example())) == []


@pytest.mark.slow
def test_the_system_of_the_readme_conforms(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(example(), encoding="utf-8")
    assert check(str(path)) == []


def test_the_make_help_lists_every_target() -> None:
    makefile = text(ROOT / "Makefile")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split())  # type: ignore[union-attr]
    assert phony == set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))


def test_ci_runs_the_test_command_of_the_readme() -> None:
    makefile = text(ROOT / "Makefile")
    test = re.search(r"^test: (.*?) ##", makefile, re.MULTILINE)
    ci = re.search(r"^ci:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert test
    assert ci
    assert ("make", "test") in promised("make")
    assert set(test.group(1).split()) <= set(re.findall(r"[\w-]+", ci.group(1)))
    assert "make ci" in text(ROOT / ".ci/run")
