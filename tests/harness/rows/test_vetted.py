"""Passed checks of systems: told by what is in the file, and said wherever it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from harness.answers.commands import check_command
from harness.check.new import write
from harness.loop import system
from harness.rows import vetted
from plots import fig_turns, style
from plots.caption import caption
from tests.bench import bench, ok
from tests.harness.check.cheats import cheat
from tests.harness.study.study_table import about
from tests.plots.test_plots import PLAIN, rows


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new system, on a machine where nothing was checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "mine.py")
    return tmp_path / "mine.py"


def test_what_is_stored_of_shipped_systems_is_of_their_files_as_they_are() -> None:
    stale = [name for name in system.names() if vetted.shipped().get(name) != vetted.content(name)]
    assert not stale, f"{', '.join(stale)}: bench check --all --store"


def test_a_file_has_passed_as_long_as_nothing_in_it_changes(mine: Path) -> None:
    assert vetted.unchecked([str(mine), str(mine)]) == [str(mine)]
    vetted.keep(vetted.content(str(mine)))
    assert vetted.vetted(str(mine))
    moved = mine.with_name("moved.py")
    moved.write_bytes(mine.read_bytes())
    assert vetted.vetted(str(moved))
    mine.write_text(mine.read_text("utf-8") + "\n# another\n", "utf-8")
    assert not vetted.vetted(str(mine))
    assert not vetted.vetted(str(mine.with_name("gone.py")))


def test_other_laws_are_other_checks(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vetted.keep(vetted.content(str(mine)))
    monkeypatch.setattr(vetted, "_laws", lambda: "others")
    assert not vetted.vetted(str(mine))


def test_what_passed_is_stored_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetted, "SHIPPED", tmp_path / "checked.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not vetted.vetted("static")
    vetted.store({"static": vetted.content("static"), "gone": "0"}, system.names())
    assert vetted.vetted("static")
    assert vetted.shipped() == {"static": vetted.content("static")}
    vetted.store({"unshared": "1"}, system.names())
    assert list(vetted.shipped()) == ["static", "unshared"]


def test_what_passed_at_length_is_stored_with_what_it_passed_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vetted, "SHIPPED", tmp_path / "checked.toml")
    names = ["elastic", "static"]
    vetted.store({"static": "1"}, names, "old")
    vetted.store({"elastic": "2"}, names, "old")
    assert vetted.at_length("old") == {"static": "1", "elastic": "2"}
    assert vetted.at_length("new") == {}
    vetted.store({"static": "3"}, names)  # a short check says nothing about a long one
    assert vetted.shipped() == {"static": "3", "elastic": "2"}
    assert vetted.at_length("old") == {"static": "1", "elastic": "2"}
    vetted.store({"static": "3"}, names, "new")
    assert vetted.at_length("new") == {"static": "3"}


def test_captions_say_it_once_until_the_check_has_passed(mine: Path) -> None:
    pairs = {"mine": str(mine), "mine+tau=1": str(mine), "static": "static"}
    lines = rows(*({"label": label, "values": {"both": 1.0, "ttft": 1.0}} for label in pairs))
    lines = [line | {"system": pairs[line["label"]], "host": "vllm-0.15"} for line in lines]
    table = pa.Table.from_pylist(lines, PLAIN).append_column("condition", pa.array(["c"] * len(lines)))
    panel = {"trace": "t", "tier": "replayed", "models": "m", "condition": "c", "own": {}}
    facts = replace(about([panel], []), paper="", controls=(), notes=(), seeds=1)

    def captions() -> list[str]:
        spec = lines[0] | {"preset": None}
        turns = pd.DataFrame(columns=["phase", "start_s", "end_s", "gpus", "model"])
        return [
            style.caption(table.to_pandas(), [1]),
            caption(table, facts, "mean"),
            fig_turns.caption(turns.astype({"start_s": float, "end_s": float}), {"spec": spec}),
        ]

    for text in captions():
        assert text.count("Unchecked") == text.count("bench check has not passed on the file: ") == 1
        assert "static." not in text
    assert all("on the file: mine, mine+tau=1." in caption for caption in captions()[:2])
    vetted.keep(vetted.content(str(mine)), "line 3")
    says = "Checked in part, as no case of bench check reached all of the file: "
    assert [text.count(says) for text in captions()] == [1, 1, 1]
    vetted.keep(vetted.content(str(mine)))
    assert not [caption for caption in captions() if "hecked" in caption]


def test_a_comparison_says_unchecked_until_the_check_has_passed(mine: Path) -> None:
    asks = "--trace sample --models llama-3.2-1b*3 --gpus 1 --rate-scale 1 --seeds 1 --no-plot --workers 1"
    words = ("compare", "--systems", f"static,{mine}", *asks.split(), "-o", mine.parent / "out")
    before = ok(*words)
    assert "mine (unchecked) " in before
    assert "static (unchecked)" not in before
    assert check_command(str(mine)) in before
    ok("check", mine, "--case", "calm")  # a part of it
    assert not vetted.vetted(str(mine))
    vetted.keep(vetted.content(str(mine)))
    assert "(unchecked)" not in ok(*words)


@pytest.mark.slow
def test_the_whole_check_is_kept(mine: Path) -> None:
    ok("check", mine)
    assert vetted.vetted(str(mine))


def test_what_breaks_a_law_stays_unchecked(mine: Path) -> None:
    path = cheat("view", mine.parent)
    assert bench("check", path, "--law", "pure").exit_code == 1
    assert not vetted.vetted(str(path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a system, or an engine by --engine NAME, or ask for --all"),
        (["static", "--all"], "or ask for --all"),
        (["static", "--store", "--law", "pure"], "--store keeps what a whole check of systems says"),
        (["MINE", "--store"], "is not in systems/"),
    ],
)
def test_a_mistake_is_told(words: list[str], says: str, mine: Path) -> None:
    result = bench("check", *(mine if word == "MINE" else word for word in words))
    assert result.exit_code == 2
    assert says in result.stderr
