"""Published tables of studies: what they say made them, and which are older than the code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from harness.loop.system import ROOT
from harness.run.sources import Task, code
from harness.run.spec import Spec
from harness.study import published


def table(path: Path, code: dict[str, str]) -> None:
    path.write_text(f"<!-- {json.dumps({'date': '2026-01-01', 'code': code})} -->\n\n| a |\n", "utf-8")


def older(folder: Path = published.FOLDER) -> dict[str, list[str]]:
    """Return the systems of published tables whose sources have changed since, by study."""
    code = {path.stem: json.loads(path.read_text("utf-8").split("\n")[0][4:-3])["code"] for path in folder.glob("*.md")}
    stale = {study: [name for name in made if published.today(name) != made[name]] for study, made in code.items()}
    return {study: names for study, names in sorted(stale.items()) if names}


def test_a_table_is_older_where_a_system_has_other_sources(tmp_path: Path) -> None:
    table(tmp_path / "same.md", {"static on sim": published.today("static on sim")})
    table(tmp_path / "other.md", {"elastic on sim": published.today("elastic on sim"), "static on sim": "0" * 16})
    assert older(tmp_path) == {"other": ["static on sim"]}


def test_systems_and_engines_have_sources_of_their_own() -> None:
    names = [f"{system} on {engine}" for system in ("static", "elastic") for engine in ("sim", "vllm")]
    assert len({published.today(name) for name in names}) == 4


def test_a_file_that_a_spec_names_is_none_of_a_systems_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    (tmp_path / "slo.toml").write_text('[class.all]\nttft_s = 1.0\ntpot_s = 0.1\n[models]\n"*" = "all"\n')
    spec = Spec("static", slo=f"classes:{tmp_path / 'slo.toml'}")
    made = [Task.of(spec, code(spec)), Task.of(Spec("elastic"), "f" * 64)]
    assert made[0].code[: published.DIGITS] != published.today("static on sim")
    measured = SimpleNamespace(tasks=made, study=SimpleNamespace(name="mine"), table=pa.table({"fidelity": ["real"]}))
    path = published.publish(measured, ["| a |"])  # type: ignore[arg-type]
    assert path.read_text("utf-8").splitlines()[2].startswith("*Real; run on 20")
    assert older(tmp_path) == {"mine": ["elastic on sim"]}


def test_published_tables_are_of_the_code_that_a_release_has() -> None:
    """At a tag none is older. Elsewhere each says its code, so that `older` can name those to run again."""
    stale = older()
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not (tags.stdout.split() and stale), f"run again: bench study NAME --publish, for {', '.join(stale)}"
