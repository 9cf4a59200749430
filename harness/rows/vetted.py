"""Systems that passed `bench check`, identified by the content of their files. Others given by path are `unchecked`.

Shipped systems are listed in systems/checked.toml, which `bench check --all --store` writes and a test compares with
the files. Its table `full` lists those that passed `--full`, with the digest of the laws, cases and engine at that
time. Other systems that passed on this machine, under the present laws, are listed in the user's cache folder.
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
    """Return the SHA-256 of a system's whole file, by name or path. It covers comments and docstrings.

    Some laws of `bench check` read these too. Raises UserError if there is no such system.
    """
    return sha256(path(name).read_bytes()).hexdigest()


def vetted(name: str) -> bool:
    """Tell whether a system's file, as it is now, has passed `bench check`."""
    try:
        passed = content(name)
    except UserError:  # it ran, and is gone
        return False
    return passed in shipped().values() or TEXTS.current(_note(passed), {}) is not None


def unreached(name: str) -> str:
    """Describe the code of a system's file that no case of its check reached; "" if all was reached.

    It is also "" for a system that is not given by path, or has not passed.
    """
    try:
        note = _note(content(name))
        return TEXTS.read(note) if name.endswith(".py") and TEXTS.current(note, {}) is not None else ""
    except (UserError, OSError, UnicodeDecodeError):
        return ""


def mark(name: str) -> str:
    """Return the mark of a system: UNCHECKED, IN_PART if its check did not reach all of its file, else "" (none)."""
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
    """Record on this machine that a file of this hash has passed, and which of its code no case reached.

    Raises UserError where nothing can be written.
    """
    TEXTS.write(_note(passed), unreached, {})


def store(passed: dict[str, str], names: Iterable[str], under: str | None = None) -> None:
    """Write into the repository the hashes of the systems that passed.

    `names` are the systems on hand: those among them that did not pass now keep their entries. For a check at full
    length, `under` is the digest of the laws, cases and engine.
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
    """Return the hash of the laws that a check tests: once they change, systems must pass again."""
    return sha256(b"\0".join(file.read_bytes() for file in sorted(LAWS.glob("*.py")))).hexdigest()
