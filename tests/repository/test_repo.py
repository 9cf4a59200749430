"""The repository's content: nothing heavy, nothing that is made, no promise that does not hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from harness.check.check import check
from harness.check.purity import impure
from harness.cli.app import load, main
from tests import ROOT

MAX_BYTES = 500_000
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)  # a block of code in Markdown


@cache
def files() -> tuple[Path, ...]:
    """List the files that a commit of everything would hold."""
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
    """Return a file's text; empty for what is none."""
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode(errors="replace")


def test_data_that_is_said_to_be_there_must_be_used(tmp_path: Path, subtests: pytest.Subtests) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    whole = "import pytest\ndef test_x(traces_dir):\n    pytest.skip('no such row')\n"
    part = whole.replace("(traces_dir)", "(traces_dir, subtests)").replace(
        "    pytest", "    with subtests.test(1): pytest"
    )
    env = {key: value for key, value in os.environ.items() if key not in {"TRACES_DIR", "PYTEST_ADDOPTS"}}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    for test, folder, outcome in [
        (whole, None, "1 skipped"),
        (whole, ".", "1 failed"),
        (whole, "absent", "1 error"),
        (part, ".", "2 failed"),  # the case, and so its test
    ]:
        with subtests.test(test=test, folder=folder):
            (tmp_path / "test_x.py").write_text(test)
            named = {"TRACES_DIR": str(tmp_path / folder)} if folder else {}
            run = subprocess.run(command, cwd=tmp_path, env=env | named, capture_output=True, text=True, check=False)
            assert outcome in run.stdout.splitlines()[-1]


def test_no_file_is_heavy() -> None:
    assert [path.name for path in files() if path.stat().st_size > MAX_BYTES] == []


def test_no_output_is_kept() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in files()}
    assert not {name for name in names if name.startswith(("plots/out/", "traces/data/"))}
    assert {Path(name).suffix for name in names if name.startswith("plots/")} <= {".py", ".png"}


def pyproject() -> Any:
    """Return the project's own description."""
    return tomllib.loads(text(ROOT / "pyproject.toml"))


def pinned(lock: str) -> set[str]:
    """Return the packages of a lock, each of which must have a hash."""
    blocks = re.split(r"^(?=[a-z0-9-]+==)", text(ROOT / lock), flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in block for block in blocks)
    return {block.partition("==")[0] for block in blocks}


def test_the_locks_are_hashed_and_hold_all_that_is_asked_for() -> None:
    project = pyproject()
    extras = project["project"]["optional-dependencies"]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras["dev"]]

    def names(of: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", name).group() for name in of}  # type: ignore[union-attr]

    assert names(asked) <= pinned("requirements.lock")
    assert names(extras["docs"]) <= pinned("requirements-docs.lock")
    assert names(extras["cluster"]) <= pinned("requirements-cluster.lock")
    for extra in ("docs", "cluster"):
        assert names(extras[extra]).isdisjoint(pinned("requirements.lock"))  # who runs the bench installs none of it


def test_the_version_stands_in_one_place() -> None:
    import harness

    version = pyproject()["project"]["version"]
    assert harness.__version__ == version
    assert f"version: {version}\n" in text(ROOT / "CITATION.cff")  # which tools read by itself
    assert f"## [{version}]" in text(ROOT / "CHANGELOG.md")
    others = [path for path in files() if path.suffix == ".py" and f'"{version}"' in text(path)]
    assert others == []


def copied(to: Path) -> Path:
    """Return a checkout of what a commit would hold."""
    for path in files():
        target = to / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return to


def test_a_wheel_is_refused_with_a_sentence(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "out")]
    run = subprocess.run([*pip, str(copied(tmp_path / "clone"))], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "installed from a checkout only: pip install -e ." in run.stdout + run.stderr


@pytest.mark.slow
def test_an_editable_install_of_a_checkout_works(tmp_path: Path) -> None:
    clone = copied(tmp_path / "clone")
    venv.create(tmp_path / "venv")
    there = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    # all that it depends on, behind its own packages
    (Path(there) / "zz-locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(tmp_path / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", "-e"]
    subprocess.run([*pip, str(clone)], capture_output=True, check=True)
    (path,) = Path(there).glob("__editable__*.pth")
    assert path.read_text().strip() == str(clone)  # no import hook, which type checkers do not follow
    where = "import harness; print(harness.__file__)"
    printed = subprocess.run([python, "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(printed.strip()) == clone / "harness/__init__.py"
    listed = [str(tmp_path / "venv/bin/bench"), "list", "traces"]
    told = subprocess.run(listed, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "sample" in told


def promised(program: str) -> set[tuple[str, ...]]:
    """Return commands of `program` in the code of documents that are neither past nor written by click, as words."""
    spans: list[str] = []
    for path in files():
        if path.suffix == ".md" and "change" not in path.as_posix().lower() and path.parent.name != "reference":
            prose, code = re.sub(FENCE, "", text(path)), re.findall(FENCE, text(path))
            spans += re.findall(r"`([^`\n]+)`", prose) + [
                line.split("#")[0] for block in code for line in block.split("\n")
            ]
    return {tuple(span.split()) for span in spans if re.match(rf"(?:\.venv/bin/)?{program}(?:\s|$)", span)}


def test_the_readme_names_targets_that_make_has() -> None:
    targets = re.findall(r"^([a-z0-9-]+%?):", text(ROOT / "Makefile"), re.MULTILINE)
    asked = {word for words in promised("make") for word in words[1:] if "=" not in word}
    assert asked
    assert {
        word for word in asked if not any(fnmatchcase(word, target.replace("%", "*")) for target in targets)
    } == set()


def test_the_readme_names_commands_that_bench_has() -> None:
    assert promised("bench")
    for words in promised("bench"):
        command: click.Command = main
        rest = list(words[1 : words.index("|") if "|" in words else None])
        while rest and isinstance(command, click.Group) and rest[0] in command.commands:
            command = load(rest.pop(0)) if command is main else command.commands[rest.pop(0)]
        if isinstance(command, click.Group):  # one that stands alone takes options of its own
            alone = command.invoke_without_command and all(word.startswith("-") for word in rest)
            assert alone or rest in ([], ["--help"], ["--version"]), " ".join(words)
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        assert {word.split("=")[0] for word in rest if word.startswith("-")} <= known, " ".join(words)


def example() -> str:
    """Return the README's system."""
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


def stages(target: str) -> dict[str, int]:
    """Return the stages of a target and the seconds that each may take."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text(ROOT / "Makefile"), re.MULTILINE)
    assert recipe
    return {name: int(most_s) for name, most_s in re.findall(r"([a-z-]+):(\d+)", recipe[1])}


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert ("make", "test") in promised("make")
    assert {"test-fast", "test-slow"} <= stages("test").keys()
    assert stages("test").items() <= stages("ci").items()  # each with its time limit
    assert "make ci" in text(ROOT / ".ci/run")


def test_the_forge_runs_each_stage_of_ci_and_at_night_all() -> None:
    jobs = re.findall(r"\brun: \"?([a-z -]+)\"?}", text(ROOT / ".github/workflows/ci.yml"))
    ran = {target for job in jobs for target in job.split()}
    installed = {"setup", "compile", "torch", "servers-llamacpp"}  # jobs install these themselves
    assert ran - {"test-cluster"} == stages("ci").keys() - installed  # `make ci` has no time for clusters
    assert "run: make ci-full\n" in text(ROOT / ".github/workflows/nightly.yml")
    assert stages("ci").keys() - {"compile", "servers-llamacpp", "test-llamacpp"} <= stages("ci-full").keys()
