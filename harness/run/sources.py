"""Hashes of the source files that decide a result, and the stored runs that were made from these sources.

A hash covers files, and all files of ours that they import, directly or not. So an edit of one system makes only that
system's runs stale, and an edit of a definition of attainment only the scores. A file counts by its meaning
(`harness/loop/meaning.py`): a change of a comment or of a local variable's name has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from harness.loop import engine, meaning
from harness.loop.system import ROOT
from harness.policy import fields
from harness.rows import record
from harness.rows.stored import RUNS
from harness.run.spec import FILES, Spec, as_dict, by_content

PACKAGES = ("harness", "probe", "systems", "workloads", "traces")
DATA = ("harness/engines/costs/tables/*.toml", "workloads/**/*.toml", "traces/*.toml")
RUN = Path(__file__).with_name("execute.py")  # the module that makes the rows of a resolved spec


class Task(NamedTuple):
    """A resolved spec and the hash of the sources that decide its rows."""

    spec: Spec
    code: str
    folder: str  # is the name of its run's folder: `spec.folder`, which hashes the spec

    @classmethod
    def of(cls, spec: Spec, code_hash: str) -> Task:
        """Return the task of a resolved spec."""
        return cls(spec, code_hash, spec.folder)


def code(spec: Spec) -> str:
    """Return the SHA-256 over the sources of a resolved spec's rows: `run`, the engine, the system, and their imports.

    The sources include cost tables, model sets and the trace manifest. They also include the files that the spec itself
    names, in any folder.
    """
    policy = Path(spec.system) if spec.system.endswith(".py") else ROOT / "systems" / f"{spec.system}.py"
    source = engine.path(spec.engine)
    named = [Path(name) for name in (spec.models, spec.table or "", spec.slo[8:]) if name.endswith(".toml")]
    named += [policy] * spec.system.endswith(".py") + [source] * fields.asked(spec.engine).name.endswith(".py")
    return _hash(closure(RUN, source, policy) | _data(), {path for path in named if path.is_file()})


def codes() -> Callable[[Spec], str]:
    """Return a function that hashes specs like `code`, but hashes the same sources only once."""
    hashes: dict[tuple[str | None, ...], str] = {}

    def known(spec: Spec) -> str:
        key = (spec.engine, spec.system, spec.models, spec.table, spec.slo)
        return hashes[key] if key in hashes else hashes.setdefault(key, code(spec))

    return known


def scoring(module: str) -> str:
    """Return the SHA-256 over the file of a module that scores runs, and all files of ours that it imports."""
    return _hash(closure(Path(module)))


def tree(*packages: str) -> str:
    """Return the SHA-256 over all Python and TOML files of packages, including those that no run reads."""
    return _hash({path for name in packages for end in ("py", "toml") for path in (ROOT / name).rglob(f"*.{end}")})


def _hash(files: AbstractSet[Path], asked: AbstractSet[Path] = frozenset()) -> str:
    """Return a hash of files: of names and meanings, but of the meaning alone for files that a user named (`asked`)."""
    pairs = [(str(path.relative_to(ROOT)), path) for path in files - asked] + [("", path) for path in asked]
    total = sha256()
    for name, digest in sorted(meaning.as_before({(name, meaning.digest(path)) for name, path in pairs})):
        total.update(f"{name}\0{digest}\n".encode())
    meaning.keep()
    return total.hexdigest()


@cache
def _data() -> frozenset[Path]:
    return frozenset(path for pattern in DATA for path in ROOT.glob(pattern))


def closure(*roots: Path) -> set[Path]:
    """Return these files and all files of ours that they import, directly or not."""
    files: set[Path] = set()
    todo = list(roots)
    while todo:
        path = todo.pop()
        if path not in files and path.is_file():
            files.add(path)
            todo += imported(path)
    return files


def imported(path: Path) -> tuple[Path, ...]:
    """Return the files of ours that a file imports at any place. Raises UserError if the file is not Python."""
    return _imported(meaning.source(path).imports)


@cache
def _imported(names: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple({file for name in names for file in _files(name)})


def _files(name: str) -> Iterator[Path]:
    """Yield the file of the module or package with a dotted name or, if there is none, the file of its parent."""
    parts = name.split(".")
    if parts[0] in PACKAGES:
        for k in (len(parts), len(parts) - 1):
            stem = ROOT.joinpath(*parts[:k])
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if k > 1 and path.is_file():
                    yield path
                    return


# ------------------------------------------------------------------ stored runs


def current(task: Task, out: Path, tell: Callable[[str], None] = lambda _: None) -> Mapping[str, Any] | None:
    """Return the facts of a task's run if `out` has it undamaged and made from these sources; else None.

    `tell` is called with a line about a damaged run.
    """
    if not record.exists(folder := out / task.folder):
        return None
    inputs = {"code_hash": task.code, "spec_hash": task.folder.rpartition("-")[2]}
    about = RUNS.current(folder, inputs, lambda: tell(f"{folder.name} is damaged: it is run again"))
    # Hashes are short: compare the specs too, but for files' paths.
    made, asked = (about or {}).get("spec") or {}, as_dict(task.spec)
    same = all(made.get(key) == asked.get(key) for key in (made.keys() | asked.keys()) - FILES.keys())
    return about if same else None


def relocate(spec: Spec, out: Path) -> None:
    """Update the file paths in a current run's stored spec, if the run was made from equal files elsewhere."""
    asked = as_dict(spec)
    if by_content(asked) != asked and record.meta(out / spec.folder)["spec"] != asked:
        record.restate(out / spec.folder, {"spec": asked})
