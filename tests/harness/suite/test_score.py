"""Scores by worked numbers, and entries that misbehave: each is a line of its card, and no other scenario is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.check.findings import Failure
from harness.check.new import TEMPLATE
from harness.rows import vetted
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import asked as system_of
from harness.run.spec import from_dict
from harness.suite import card, score, table
from harness.suite.entry import UNIFIED, charge, refusals, unified
from harness.suite.score import Entry, Row, standing, total
from harness.suite.suite import Scenario, Suite, load
from tests.bench import bench, mistake
from tests.cases import cases
from tests.harness.check.cheats import cheat
from tests.harness.check.test_check import broken

SCENARIO = Scenario("a", "?", 4.0, "absolute:ttft=1,tpot=0.1", best_rps=10.0, best="x", bound_rps=20.0)
ROW: Row = {"scenario": "a", "rps": 5.0, "low_rps": 4.0, "high_rps": 6.0, "unserved": "", "pool": "", "sign": "="}
ROW["tried_rps"] = 5.0


def test_a_share_is_of_the_best_known() -> None:
    assert standing(ROW, SCENARIO) == {"share": 0.5, "share_low": 0.4, "share_high": 0.6}
    assert standing({**ROW, "rps": 12.0}, SCENARIO)["share"] == 1.2
    for zero in ({"unserved": "1 of 8 models at 0 %"}, {"failed": "does not fit"}, {"rps": 0.0}):
        assert standing({**ROW, **zero}, SCENARIO)["share"] == 0.0


def test_a_total_is_the_mean_of_shares_with_an_interval_of_independent_ones() -> None:
    shares = [{"share": 0.5, "share_low": 0.2, "share_high": 0.9}, {"share": 1.0, "share_low": 0.6, "share_high": 1.3}]
    mean, low, high = total(shares)
    assert mean == 0.75
    assert low == pytest.approx(0.75 - 0.25)  # gaps of 0.3 and 0.4
    assert high == pytest.approx(0.75 + 0.25)
    assert total([{**shares[0], "share_low": None}, shares[1]])[1] is None
    assert total([]) == (None, None, None)


@cases(
    ("mean_s", "budget_s", "charged_s"),
    [(1e-4, 5e-5, 0.0), (2e-4, 5e-5, 0.0), (3e-4, 5e-5, 4e-4), (1e-3, 2e-4, 1.6e-3)],
)
def test_thinking_over_four_budgets_is_charged_to_the_next_power_of_two(
    mean_s: float, budget_s: float, charged_s: float
) -> None:
    assert charge(mean_s, budget_s) == pytest.approx(charged_s)


def test_a_cheat_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    file = cheat("getframe", tmp_path)
    Path(file).write_text(Path(file).read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    assert next(refusals(str(file))).startswith("pure: line")
    assert not (tmp_path / "ran").exists()


def test_a_pure_policy_that_breaks_a_law_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(refusals(str(broken("starves", tmp_path)))).startswith("served: ")
    (tmp_path / "cut.py").write_text("class A(:")
    assert next(refusals(str(tmp_path / "cut.py"))).startswith("starts: invalid syntax")
    monkeypatch.setattr("harness.suite.entry.check", lambda name: [Failure("served", name, None, "")])
    assert list(refusals("static")) == ["served: static"]  # a shipped system goes by its name


def test_a_pool_that_processes_do_not_have_is_marked() -> None:
    def setup(asked: str) -> Setup:
        return Setup(resolve(from_dict({**system_of(asked), "trace": "sample", "models": "llama-3.2-1b*3", "gpus": 2})))

    names = "weaver muxserve:original chunked+kv=paged muxserve elastic static swap chunked".split()
    assert [name for name in names if unified(setup(name))] == names[:3]


# ------------------------------------------------------------------ processes


def small() -> Suite:
    """Two scenarios of seconds."""
    whole = load().only(["light", "mixed"])
    return replace(
        whole, seeds=1, points=1, warmup_s=1.0, scenario=tuple(replace(s, window_s=5.0) for s in whole.scenario)
    )


def policy(folder: Path, before: str = "", at_start: str = "") -> Entry:
    """Write the smallest policy, with lines of mischief."""
    text = TEMPLATE.replace("TITLE", "Mine")
    text = text.replace("from dataclasses", f"{before}\nfrom dataclasses", 1)
    if at_start:
        text = text.replace("            free = [", f"            {at_start}\n            free = [", 1)
    (folder / "mine.py").write_text(text)
    return Entry(str(folder / "mine.py"))


def rows(entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(vetted, "vetted", lambda _: True)
    monkeypatch.setattr(score, "ANSWER_S", 1.0)
    return list(score.score(entry, small(), "", folder / "out").rows)


MISCHIEF = {
    "raises": ("", "raise RuntimeError('mine')", "RuntimeError"),
    "writes": ("", "open('/tmp/suite-was-here', 'w')", "PermissionError"),
    "connects": ("import socket", "socket.create_connection(('127.0.0.1', 9))", "Error"),
    "starts a process": ("import subprocess", "subprocess.run(['true'])", "PermissionError"),
    "hangs": ("", "while True: pass", "1 s"),
}


@pytest.mark.parametrize("name", MISCHIEF)
def test_mischief_is_a_line_of_the_card(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, line, says = MISCHIEF[name]
    made = rows(policy(tmp_path, before, line), tmp_path, monkeypatch)
    assert [says in row["failed"] for row in made] == [True, True]
    assert not Path("/tmp/suite-was-here").exists()


def test_a_process_that_ends_loses_its_own_scenario_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "import os; os._exit(3) if cluster_of(self) == 1 else None"
    before = "def cluster_of(policy):\n    return len(policy.cluster.gpus)\n"
    light, mixed = rows(policy(tmp_path, before, ends), tmp_path, monkeypatch)
    assert light["failed"] == "its process ended with 3"
    assert "failed" not in mixed


def test_an_entry_sees_no_environment_and_what_it_prints_is_kept_from_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    entry = policy(tmp_path, "import os", "print(os.environ); assert 'A_SECRET' not in os.environ")
    assert ["failed" in row for row in rows(entry, tmp_path, monkeypatch)] == [False, False]


def test_a_policy_that_serves_nothing_has_a_share_of_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(policy(tmp_path, "", "return"), tmp_path, monkeypatch)
    assert ["models at 0 %" in row["unserved"] for row in made] == [True, True]
    assert [row["share"] for row in made] == [0.0, 0.0]


def test_a_system_on_gpus_of_its_own_holds_no_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows(Entry("dedicated"), tmp_path, monkeypatch)
    assert {(row["failed"], row["share"]) for row in made} == {
        ("it takes GPUs of its own, however few the scenario has", 0.0)
    }
    assert not {"dedicated", "contiguous"} & {entry.system for entry in table.entries(tmp_path)}


def test_finished_rows_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = policy(tmp_path)
    first = rows(entry, tmp_path, monkeypatch)
    monkeypatch.setattr(score, "_process", lambda *_, **__: pytest.fail("it ran again"))
    assert rows(entry, tmp_path, monkeypatch) == first


# ------------------------------------------------------------------ card and table


def full(scenario: str, rps: float, **more: Any) -> Row:
    curve = [[rps / 2, 1.0], [rps * 2, 0.5]]
    rates = {"rps": rps, "tried_rps": rps, "worst_rps": rps, "curve": curve}
    facts = {"scenario": scenario, "binds": {"KV": 1.0}, "charged_s": 0.0, "decision_s": 1e-6, "never": 0}
    return {**ROW, **rates, **facts, **more}


def known() -> Suite:
    """Two scenarios whose best known rate is ten requests per second."""
    suite = load().only(["light", "mixed"])
    return replace(suite, scenario=tuple(replace(s, best_rps=10.0) for s in suite.scenario))


def made_card(label: str, suite: Suite, light: float, mixed: float) -> score.Card:
    each = [full("light", light), full("mixed", mixed)]
    each = [{**row, **standing(row, s)} for row, s in zip(each, suite.scenario, strict=True)]
    return score.Card(label, suite.version, "", "c" * 64, "d" * 16, each, (), *total(each))


def test_the_page_says_first_where_the_gap_to_the_bound_is_widest() -> None:
    suite = known()
    most = {"light": 20.0, "mixed": 60.0}
    both = (made_card("a", suite, 10.0, 5.0), made_card("<b>", suite, 4.0, 8.0))
    every = [row for of in both for row in table.of_card(of, suite)]
    assert table.totals(every, suite) == {"a": 0.75, "<b>": pytest.approx(0.6)}
    every = [{**row, "bound_rps": most[row["scenario"]]} for row in every]
    page = table.page(every, suite, "")
    first = page.split('<p class="answer">')[1]
    assert first.startswith(
        "The gap between the best known policy and the bound is widest in mixed: &lt;b&gt; holds 8 req/s"
    )
    assert "no policy more than 60, 7.5 times as many" in first
    assert "<b>" not in page
    assert len(page) < 1_000_000


def test_a_refused_entry_and_a_self_reported_row_are_marked(tmp_path: Path) -> None:
    suite = load().only(["light"])
    refused = score.Card("bad", suite.version, "", "c" * 64, "d", [], ["pure: line 1: imports os"], None, None, None)
    (row,) = table.of_card(refused, suite)
    assert row["failed"] == "refused: pure: line 1: imports os"
    entry = {"entry": "mine", "made": table.SELF, "failed": None, "pool": UNIFIED}
    mine = row | full("light", 99.0, binds="", bound_rps=None) | entry
    assert table.best([mine], "light") is None
    assert "mine (self-reported) (unified KV)" in table.page([mine], suite, "")
    assert table.read(tmp_path / "none.parquet") == []


def test_a_card_has_a_line_a_scenario() -> None:
    suite = known()
    lines = list(card.lines(made_card("a", suite, 4.0, 5.0), suite))
    assert lines[0].startswith("a on suite-1: total ")
    assert "the mean of 2 scenarios (" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["light", "mixed"]
    page = card.page(made_card("a", suite, 4.0, 5.0), suite)
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http-equiv", "")


@cases("part", ["--quick", "--only=drift"])
def test_a_table_takes_the_whole_suite(part: str) -> None:
    """A part of an entry's scenarios would put out all its other rows."""
    mistake(bench("score", "--table", part), "--table takes every scenario in full")
