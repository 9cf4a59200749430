"""Systems that passed `bench check`, identified by their files' content. Others given by path are `unchecked`.

systems/checked.toml lists the shipped systems. `bench check --all --store` writes it, and a test compares it with the
files. Its table `full` lists the systems that passed `--full`, with the digest of the laws, cases and engine at that
time. Any other system that passed on this machine, under the present laws, is listed in the user's cache folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.loop.system import ROOT, path, user_cache
from harness.policy.types import UserError
from harness.rows import record
from harness.rows.stored import TEXTS
from harness.store import digest

SHIPPED = ROOT / "systems" / "checked.toml"
UNCHECKED, IN_PART = "unchecked", "checked in part"  # marks of rows
LAWS = ROOT / "harness" / "check"
HEAD = """\
# SHA-256 of each system's file as it was when it last passed `bench check`.
# Written by: bench check --all --store, with --full also the table `full`
"""


def content(name: str) -> str:
    """Return the SHA-256 of the whole file of a system, named or given by path; comments and docstrings count.

    They count because some laws of `bench check` read them. Raises UserError if there is no such system.
    """
    return sha256(path(name).read_bytes()).hexdigest()


def vetted(name: str) -> bool:
    """Tell whether the present content of a system's file has passed `bench check`."""
    try:
        passed = content(name)
    except UserError:  # it ran, and is gone
        return False
    return passed in shipped().values() or TEXTS.current(_note(passed), {}) is not None


def unreached(name: str) -> str:
    """Describe the code of a system's file that no case of its check executed; "" if all was executed.

    Also "" for a system that is not given by path, or has not passed.
    """
    try:
        note = _note(content(name))
        return TEXTS.read(note) if name.endswith(".py") and TEXTS.current(note, {}) is not None else ""
    except (UserError, OSError, UnicodeDecodeError):
        return ""


def mark(name: str) -> str:
    """Return the mark of a system: UNCHECKED, IN_PART if its check did not execute all of its file, else ""."""
    if unchecked([name]):
        return UNCHECKED
    return IN_PART if unreached(name) else ""


def unchecked(names: Iterable[str]) -> list[str]:
    """Return the systems among `names` that are given by path and have not passed `bench check`."""
    return [name for name in dict.fromkeys(names) if name.endswith(".py") and not vetted(name)]


def shipped() -> dict[str, str]:
    """Return the stored hash of each shipped system that passed `bench check`, by name."""
    return {name: passed for name, passed in _read().items() if isinstance(passed, str)}


def at_length(under: str) -> dict[str, str]:
    """Return the stored hash of each system that passed `bench check --full`, by name.

    `under` is the digest of the laws, cases and engine. The result is empty if the hashes were stored under another
    digest.
    """
    full: dict[str, str] = _read().get("full", {})
    return {name: passed for name, passed in full.items() if name != "under"} if full.get("under") == under else {}


def _read() -> dict[str, Any]:
    return tomllib.loads(SHIPPED.read_text("utf-8")) if SHIPPED.is_file() else {}


def keep(passed: str, unreached: str = "") -> None:
    """Record on this machine that a file of this hash has passed; `unreached` describes its code that no case executed.

    Raises UserError if nothing can be written.
    """
    TEXTS.write(_note(passed), unreached, {})


def store(passed: dict[str, str], names: Iterable[str], under: str | None = None) -> None:
    """Write the hashes of the systems that passed into systems/checked.toml.

    `names` are all present systems: those that did not pass this time keep their entries. For a check at full length,
    `under` is the digest of the laws, cases and engine.
    """
    full = _read().get("full", {})
    if under is not None:
        full = {"under": under} | at_length(under) | passed
    text = HEAD + _lines(shipped() | passed, names)
    if full:
        text += f'\n[full]\nunder = "{full["under"]}"\n{_lines(full, names)}'
    record.write_bytes(SHIPPED, text.encode())


def _lines(digests: dict[str, str], names: Iterable[str]) -> str:
    return "".join(f'{name} = "{digests[name]}"\n' for name in sorted(names) if name in digests)


def _note(passed: str) -> Path:
    return user_cache() / "checked" / digest(passed, _laws())


@cache
def _laws() -> str:
    """Return the hash of the laws that a check tests. If it changes, systems must pass again."""
    return sha256(b"\0".join(file.read_bytes() for file in sorted(LAWS.glob("*.py")))).hexdigest()
