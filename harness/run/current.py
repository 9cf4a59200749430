"""Stored runs that are current: of an equal spec, and made by the sources as they are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.rows import record
from harness.rows.stored import RUNS
from harness.run.spec import FILES, Spec, as_dict, by_content


def current(
    spec: Spec, out: Path, code_hash: str, tell: Callable[[str], None] = lambda _: None
) -> Mapping[str, Any] | None:
    """Return the facts of the whole run of a resolved spec that `out` has, made by these sources, or None.

    `tell` hears of a damaged one.
    """
    folder = out / spec.folder
    if not record.exists(folder):
        return None
    inputs = {"code_hash": code_hash, "spec_hash": spec.hash8}
    about = RUNS.current(folder, inputs, lambda: tell(f"{folder.name} is damaged: it is run again"))
    if about is None:
        return None
    # Hashes are short: compare the specs too, but for files' paths.
    made, asked = about.get("spec") or {}, as_dict(spec)
    same = all(made.get(key) == asked.get(key) for key in (made.keys() | asked.keys()) - FILES.keys())
    return about if same else None


def relocate(spec: Spec, out: Path) -> None:
    """Store the present paths of the files in a current run's spec, if it was made from equal files elsewhere."""
    asked = as_dict(spec)
    if by_content(asked) != asked and record.meta(out / spec.folder)["spec"] != asked:
        record.restate(out / spec.folder, {"spec": asked})
