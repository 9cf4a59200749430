"""The search for the fewest GPUs against worked answers, what is bought, and a question on the command line."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.answers import size as words
from harness.engines.costs.prices import Price
from harness.policy.types import UserError
from harness.rows import record
from harness.rows.by_window import Counted
from harness.rows.estimate import Estimate
from harness.run.shard import Shard
from harness.study import shared, size_kept, size_why
from harness.study.degrees import fitting, widened
from harness.study.size import SizeSearch
from harness.study.sized import Curve, Met, Outcome, Question, Sized, located
from harness.study.traffic import views
from tests.bench import bench
from tests.cases import cases
from traces import schema
from traces.load import of_table, trace
from workloads.models import model_set

USD = {"h100": Price(3.0, "2026-01-01", "a list"), "l40s": Price(1.0, "2026-01-01", "a list")}


SETTING = {"trace": "sample", "models": "llama-3.2-1b*8"}
USUAL = Question(SETTING, ("h100",), 1, 64, (), "absolute:ttft=1,tpot=1", "both", target=0.99, prices=USD, windows=1)


def question(systems: Sequence[str] = ("prism", "static"), **more: Any) -> Question:
    return replace(USUAL, systems=tuple(systems), **more)


def verdict(gpus: int, pooled: float, worst: float, unfit: str = "") -> Outcome:
    met = Met(Estimate(pooled, pooled - 0.01, pooled, 1), {"m": Counted(round(1000 * (1 - worst), 6), 1000.0)})
    return Outcome(gpus, {} if unfit else {"w": met}, unfit)


class Faked(SizeSearch):
    """A search whose runs are worked numbers: by kind and system, from how many GPUs on each model, and all, hold."""

    needs: Mapping[tuple[str, str], tuple[int, int]]

    def __init__(self, asked: Question, needs: Mapping[tuple[str, str], tuple[int, int]], folder: Path) -> None:
        super().__init__(asked, folder)
        self.needs, self.asks, self.ran = needs, list[tuple[str, str, int]](), set[tuple[str, str, int, float]]()

    def run_counts(self, asks: Sequence[tuple[Curve, int]], times: float, what: str) -> None:
        assert what
        for curve, n in asks:
            self.asks.append((curve.kind, curve.system, n))
            self.ran.add((curve.kind, curve.system, n, times))
            each, pooled = (x * times for x in self.needs[curve.kind, curve.system])
            curve.tried[n] = verdict(n, 1.0 if n >= pooled else 0.9, 1.0 if n >= each else 0.5)

    def answered(self) -> Mapping[tuple[str, str], Curve]:
        curves, _, _ = self.search(self.needs)
        return curves


@cases(("need", "pooled"), [(1, 1), (2, 1), (3, 2), (5, 5), (17, 3), (63, 40), (64, 64)])
def test_the_search_finds_the_fewest_and_asks_few(tmp_path: Path, need: int, pooled: int) -> None:
    work = Faked(question(["prism"], growth=()), {("h100", "prism"): (need, pooled)}, tmp_path)
    (curve,) = work.answered().values()
    assert (curve.fewest(0.99, "each"), curve.fewest(0.99, "pooled")) == (need, pooled)
    assert len(work.asks) <= 16
    assert len(set(work.asks)) == len(work.asks)


def test_a_search_goes_below_the_least_count_while_it_holds(tmp_path: Path) -> None:
    for need, least in ((7, 8), (2, 8), (8, 8), (9, 8)):
        work = Faked(question(["prism"], least=least, most=24, growth=()), {("h100", "prism"): (need, need)}, tmp_path)
        (curve,) = work.answered().values()
        assert curve.fewest(0.99, "each") == need
        assert work.asks[0][-1] == least
    work = Faked(question(["prism"], most=8, growth=()), {("h100", "prism"): (9, 9)}, tmp_path)
    (curve,) = work.answered().values()
    assert (curve.fewest(0.99, "each"), curve.stopped) == (None, "> 8")
    work = Faked(question(["prism"], least=8, most=8, growth=()), {("h100", "prism"): (7, 7)}, tmp_path)
    (curve,) = work.answered().values()
    assert list(curve.tried) == [8]
    alone = Curve("h100", "prism", {8: verdict(8, 1.0, 1.0)})
    told = sized(asked=question(least=8, most=8), curves={("h100", "prism"): alone}, best=("h100", "prism", 8))
    assert "; 8 is the least that was tried" in words.sentence(told)


def test_what_is_rented_is_the_answer_with_spares_in_whole_nodes() -> None:
    """7 GPUs of $4.464 an hour, one spare, a node of 8: $857 a day."""
    usd = {"h200": Price(4.464, "2026-01-01", "a list")}
    asked = question(["prism"], kinds=("h200",), spare=1, node=8, prices=usd)
    curve = Curve("h200", "prism", {7: verdict(7, 1.0, 1.0)})
    told = sized(asked=asked, curves={("h200", "prism"): curve}, best=("h200", "prism", 7))
    assert words.rent(told) == "rent 8 h200 (7 + 1 spare, one node): $857 a day, $26,100 a month"
    assert "spare: 1 more is rented: no loss of a GPU was run" in printed(told)
    assert [asked.bought(n) for n in (1, 7, 8, 15, 16)] == [8, 8, 16, 16, 24]
    assert asked.usd_hour("mi300x", 8) is None
    unpriced = sized(asked=question(["prism"], kinds=("h200",), prices={}), curves=told.curves, best=told.best)
    assert words.rent(unpriced) == "rent 7 h200"


def test_a_kind_that_cannot_hold_a_model_is_a_row_and_the_others_are_answered(tmp_path: Path) -> None:
    setting = SETTING | {"models": "qwen-3-235b-a22b*1"}
    asked = question(["prism"], kinds=("l40s", "h200"), growth=(), setting=setting)
    work = Faked(asked, {("h200", "prism"): (8, 8), ("l40s", "prism"): (8, 8)}, tmp_path)
    curves = work.answered()
    assert curves["h200", "prism"].fewest(0.99, "each") == 8
    assert not curves["l40s", "prism"].tried
    assert re.match(
        r"qwen-3-235b-a22b\S* needs [0-9.]+ GiB on each of 8 l40s, which has 4", curves["l40s", "prism"].stopped
    )
    told = sized(asked=asked, curves=curves, best=("h200", "prism", 8), refused=work.refused)
    assert [row[:3] for row in words.table(told).rows] == [("h200", "prism", "8"), ("l40s", "all", "-")]
    assert any(line.startswith("l40s: qwen-3-235b-a22b") for line in printed(told))
    with pytest.raises(UserError, match="on each of 8 l40s"):
        Faked(question(["prism"], kinds=("l40s",), setting=asked.setting), {}, tmp_path)


def test_more_gpus_that_do_not_help_are_named() -> None:
    flat = Curve("h100", "prism", {19: verdict(19, 0.99, 0.989), 24: verdict(24, 0.99, 0.989)}, "> 24")
    steep = Curve("h100", "static", {19: verdict(19, 0.9, 0.7), 24: verdict(24, 0.95, 0.8)}, "> 24")
    curves = {(c.kind, c.system): c for c in (flat, steep)}
    rows = words.table(sized(curves=curves, best=None, short={("h100", "prism"): "KV"})).rows
    assert {row[1]: row[-1] for row in rows} == {
        "prism": "more do not help: m 98.9 % on 19, 24; KV binds",
        "static": "SLO missed on 24: m 80.0 %",
    }
    assert steep.flat is None


def test_what_binds_where_more_gpus_do_not_help_is_what_explain_names(tmp_path: Path) -> None:
    """An SLO below the time of a prompt alone: no count of GPUs meets it, and steps are what is short."""
    asked = question(["static"], most=2, rule="absolute:ttft=0.0001,tpot=0.0001", growth=())
    answer = SizeSearch(asked, tmp_path).done()
    assert answer.short == {("h100", "static"): "compute"}
    (row,) = words.table(answer).rows
    assert row[-1].startswith("more do not help: ")
    assert row[-1].endswith(" 0.0 % on 1, 2; compute binds")
    told = size_kept.read(size_kept.keep(answer, words.words(answer), tmp_path))
    reason = size_why.why(told, tmp_path)
    assert reason.first == "compute"


def test_compare_takes_the_least_degree_that_fits_as_size_does(tmp_path: Path) -> None:
    setting = {"trace": "sample", "models": "llama-3.3-70b,llama-3.1-8b", "gpu": "h100", "gpus": 4}
    wide, told = widened(setting, tmp_path)
    assert {m.name: m.tp for m in model_set(wide["models"]).members} == {"llama-3.3-70b/1": 4, "llama-3.1-8b/1": 1}
    assert told == "h100: llama-3.3-70b/1 on 4 GPUs, the fewest on which it fits"
    assert model_set(wide["models"]).members[0].tp == fitting(setting, "h100", 4, tmp_path)[1]["llama-3.3-70b/1"]
    for same in ({**setting, "models": "llama-3.1-8b*2"}, {**setting, "gpu": "l40s", "models": "qwen-3-235b-a22b*1"}):
        assert widened(same, tmp_path) == (same, "")


def test_a_question_takes_kinds_and_prices_by_any_name_of_theirs_and_no_others() -> None:
    def ask(kinds: Sequence[str], price: Mapping[str, str], rule: str = "5xP95") -> Question:
        setting = {"trace": "sample", "models": "llama-3.2-1b*8", "table": None}
        return Question.of(setting, kinds, ["prism"], price, rule, None, (1, 2), least=1, most=2, target=0.99)

    asked = ask(["H100", "h100", "L40S+h100*2"], {"H100": "2.5"})
    assert asked.kinds == ("h100", "l40s*1+h100*2")
    assert asked.prices["h100"].usd_hour == 2.5
    assert "table" not in asked.setting
    assert [asked.definition, ask(["h100"], {}, "9xsolo").definition] == ["both", "e2e"]
    for kinds, price in ((["h1000"], {}), (["h100"], {"h10": "2"})):
        with pytest.raises(UserError, match="did you mean h100"):
            ask(kinds, price)


def test_paths_of_what_is_stored_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    there = located({"trace": "a/spend.parquet", "models": "mine.toml", "served": 4})
    assert there == {"trace": str(tmp_path / "a/spend.parquet"), "models": str(tmp_path / "mine.toml"), "served": 4}
    assert located({"trace": "sample", "models": "llama-3.1-8b*2"})["trace"] == "sample"


def test_a_strategy_that_cannot_beat_the_cheapest_is_stopped_and_says_so(tmp_path: Path) -> None:
    work = Faked(question(), {("h100", "prism"): (4, 4), ("h100", "static"): (40, 40)}, tmp_path)
    curves = work.answered()
    assert curves["h100", "prism"].fewest(0.99, "each") == 4
    assert curves["h100", "static"].stopped == "> 4: more cost more than the answer"
    assert max(n for _, system, n in work.asks if system == "static") <= 4


def test_a_dearer_kind_is_tried_up_to_what_the_cheaper_one_costs(tmp_path: Path) -> None:
    needs = {("h100", "prism"): (8, 8), ("l40s", "prism"): (6, 6)}
    work = Faked(question(["prism"], kinds=("h100", "l40s")), needs, tmp_path)
    curves = work.answered()
    assert work._best(curves.values()) == ("l40s", "prism", 6)
    assert max(n for kind, _, n in work.asks if kind == "h100") <= 8


@cases("name", ["dedicated", "contiguous:max"])
def test_what_has_as_many_gpus_as_its_models_need_is_tried_on_those(tmp_path: Path, name: str) -> None:
    work = Faked(question([name]), {("h100", name): (1, 1)}, tmp_path)
    (curve,) = work.answered().values()
    assert list(curve.tried) == [8]


@cases(("of", "needs"), [(2, (3, 9, 5, 2)), (3, (40, 2, 7, 30)), (4, (65, 5, 65, 6)), (9, (65,) * 4)])
def test_shards_run_what_one_call_runs(tmp_path: Path, of: int, needs: tuple[int, ...]) -> None:
    keys = [(kind, name) for kind in ("h100", "l40s") for name in ("prism", "static")]
    need = {key: (n, n - 1) for key, n in zip(keys, needs, strict=True)}
    asked = question(kinds=("h100", "l40s"))
    whole = Faked(asked, need, tmp_path)
    whole.answered()
    ran, searches = set[tuple[str, str, int, float]](), 0
    for number in range(1, of + 1):
        work = Faked(asked, need, tmp_path)
        mine, every = work.part(Shard(number, of))
        assert every == 4
        searches, ran = searches + mine, ran | work.ran
    assert searches == 4
    assert ran >= whole.ran


def test_every_model_decides_and_pooled_stands_beside() -> None:
    hidden = verdict(8, 0.992, 0.626)
    assert hidden.holds(0.99, "pooled")
    assert not hidden.holds(0.99, "each")
    assert not verdict(8, 1.0, 1.0, "no room").holds(0.99, "pooled")


def sized(**more: Any) -> Sized:
    curve = Curve("h100", "prism", {2: verdict(2, 0.995, 0.968), 3: verdict(3, 0.9995, 0.998)})
    other = Curve("h100", "static", {3: verdict(3, 0.9, 0.5)}, "> 3: more cost more than the answer")
    lacking = Curve("h100", "elastic", {2: verdict(2, 0, 0, "no placement"), 4: verdict(4, 1.0, 1.0)})
    fields: dict[str, Any] = {
        "asked": question(["prism", "static", "elastic"]),
        "views": (),
        "curves": {(c.kind, c.system): c for c in (curve, other, lacking)},
        "degrees": {},
        "best": ("h100", "prism", 3),
        "grown": {1.5: 4, 2.0: None},
        "cold_s": {"m": 0.7, "n": 2.0},
        "placed": {"0": {"m": 1.0}, "1": {"n": 1.0}},
        "million_tokens_hour": 18.0,
        "dedicated": {"h100": 12},
        "lacks": "",
    }
    return Sized(**fields | more)


def printed(answer: Sized) -> list[str]:
    return list(words.lines(words.words(answer), len(answer.placed)))


def test_the_answer_is_a_sentence_with_what_is_saved_and_what_pooling_hides() -> None:
    told = words.sentence(sized())
    assert told.startswith(
        "rent 3 h100: $216 a day, $6,570 a month; 3 h100 with prism: every model at 99 % of SLOs (m "
    )
    assert "GPUs of its own for each model would be 12 h100 ($864 a day): sharing saves 9" in told
    assert "2 would do for all requests together, where m meets 96.8 %" in told
    assert told.endswith("elastic needs 4")
    nothing = sized(best=None)
    assert words.sentence(nothing).startswith("no strategy holds 99 % for every model on 1 to 64 GPUs: ")


def test_a_placement_says_where_each_model_is_at_home_and_who_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two runs a has 9 of 10 requests on GPU 0. b and c share GPU 1, d moves from 2 to 3, e takes two."""
    runs = {
        "one": [("a", "0")] * 4 + [("b", "1")] * 3 + [("d", "2>3")] * 2 + [("e", "4+5")],
        "two": [("a", "0")] * 5 + [("a", "1")] + [("c", "1")] * 200 + [("c", "0")] + [("b", "")] + [("d", "2")] * 2,
    }
    read = {
        Path(name): pa.table(dict(zip(("model", "gpus"), zip(*rows, strict=True), strict=True)))
        for name, rows in runs.items()
    }
    monkeypatch.setattr(record, "read", lambda run, columns: read[run])
    shares = shared.placed(map(Path, runs))
    assert shares == {
        "0": {"a": 0.9, "c": pytest.approx(1 / 201)},
        "1": {"c": pytest.approx(200 / 201), "b": 1.0, "a": 0.1},
        "2": {"d": 1.0},
        "3": {"d": 0.5},
        "4": {"e": 1.0},
        "5": {"e": 1.0},
    }
    assert shared.homes(shares) == {"a": "0", "c": "1", "b": "1", "d": "2", "e": "4"}
    lines = [line for line in printed(sized(placed=shares)) if line.startswith(("placement: ", "GPU 0: ", "GPU 1: "))]
    assert lines[0] == "placement: in % of each model's requests"
    assert lines[1] == "GPU 0: a at home 90 %, 1 other with less than 1 %"
    assert lines[2] == "GPU 1: b at home 100 %, c at home 100 %, a 10 %"
    assert any(line.startswith("needs: MPS") for line in printed(sized(placed=shares, at_once=True)))


def test_money_is_of_what_is_held() -> None:
    lines = list(printed(sized()))
    assert any("3 h100, 72 GPU-hours and $216 a day, $0.5 a million tokens; $3 an hour (a list" in x for x in lines)
    assert "cold start from host memory: 0.7 s to 2 s a model" in lines
    assert "more traffic with prism: x 1.5: 4 h100 ($288 a day), x 2: > 64 GPUs" in lines
    rows = {row[1]: row for row in words.table(sized()).rows}
    assert rows["prism"][2:4] == ("3", "2")
    assert rows["prism"][-1] == "SLO missed on 2: m 96.8 %"
    assert rows["elastic"][-1] == "no room on 2: no placement"
    assert (rows["static"][2], rows["static"][-1]) == ("> 3", "> 3: more cost more than the answer")
    alone = Curve("h100", "contiguous", {12: verdict(12, 0.7, 0.4)})  # it brings its own number of GPUs
    failed = {row[1]: row for row in words.table(sized(curves={("h100", "contiguous"): alone})).rows}
    assert failed["contiguous"][-1] == "SLO missed on 12: m 40.0 %"
    assert all(len(line) <= 100 for line in lines if line.startswith("h100"))


def test_a_long_log_is_replayed_whole_and_in_its_busiest_hour(tmp_path: Path) -> None:
    when = [*range(0, 14_000, 100), *(8000 + k for k in range(600))]
    when.sort()
    n = len(when)
    columns = {
        "request_id": range(n),
        "arrival_s": [float(t) for t in when],
        "model": ["a"] * n,
        "prompt_tokens": [5] * n,
        "output_tokens": [5] * n,
    }
    schema.write(schema.table(columns, {"span_s": 14_400.0, "name": "log"}), path := tmp_path / "log.parquet")
    whole, hour = views(str(path), 3, tmp_path)
    assert (whole.name, whole.seeds, hour.name, hour.seeds) == ("second half of the log", (0,), "busiest hour", (0, 1))
    cut = trace(hour.trace)
    assert cut.span_s == 3600.0
    assert len(cut) >= 600
    again = trace(views(str(path), 3, tmp_path)[1].trace)
    assert again.sha256 == cut.sha256
    assert of_table(schema.read(path), "x").span_s == 14_400.0


ASK = "size --trace sample --models llama-3.2-1b*8 --slo absolute:ttft=1,tpot=1 --gpus 1-4 --windows 1".split()


def test_a_question_on_the_command_line_is_answered_and_kept(tmp_path: Path) -> None:
    ask = (*ASK, "--systems", "prism,static", "--grow", "2", "-o", tmp_path)
    answer = json.loads(bench(*ask, "--json", "--no-plot").stdout)
    assert answer["best"]["gpu"] == "h100"
    assert 1 <= answer["best"]["gpus"] <= 4
    tried = {row["gpus"] for row in answer["systems"][0]["tried"]}
    assert answer["systems"][0]["gpus"] in tried
    runs = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_dir()}
    told = bench(*ask)
    assert told.exit_code == 0, told.output
    assert "h100 with prism: every model at 99 % of SLOs" in " ".join(told.stdout.split())
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in runs} == runs  # nothing is done twice
    assert len(list(tmp_path.glob("sample-size-*.pdf"))) == 1


def test_two_shards_and_collect_give_the_answer_of_one_call(tmp_path: Path) -> None:
    ask = (*ASK, "--systems", "static,prism,swap", "--grow", "8", "--no-plot", "-o")
    parts, once = tmp_path / "parts", tmp_path / "once"
    empty = bench(*ask, parts, "--collect")
    assert (empty.exit_code, empty.stdout) == (75, "")
    assert "0 of 3 searches are done" in empty.stderr
    assert f"what makes them: bench {shlex.join(map(str, (*ask, parts)))}, or each of its shards" in empty.stderr
    for number in (1, 2):
        part = bench(*ask, parts, "--shard", f"{number}/2")
        assert part.exit_code == 0, part.output
        assert part.stdout.splitlines()[-1].endswith("--collect")
    collected, whole = bench(*ask, parts, "--collect"), bench(*ask, once)
    assert collected.exit_code == whole.exit_code == 0, collected.output
    assert collected.stdout.replace(str(parts), "") == whole.stdout.replace(str(once), "")
    made = {path.relative_to(once) for path in once.rglob("*.parquet")}
    assert made
    assert all((parts / path).read_bytes() == (once / path).read_bytes() for path in made)


@cases(
    ("option", "value", "why"),
    [
        ("--gpus", "0-4", "is not LEAST-MOST"),
        ("--gpu", "h1000", "did you mean h100"),
        ("--gpu", "h100*0+l40s*4", "no GPU in"),
        ("--price", "h100=free", "not a number above 0"),
        ("--grow", "0", "not a number"),
        ("--target", "100", "--target"),
        ("--systems", "prizm", "prism"),
        ("--slo", "soon", "soon"),
    ],
)
def test_a_wrong_question_is_one_line(tmp_path: Path, option: str, value: str, why: str) -> None:
    told = bench("size", "--trace", "sample", "--models", "llama-3.2-1b*8", option, value, "-o", tmp_path)
    assert told.exit_code == 2, told.output
    assert why in told.stderr
    assert not list(tmp_path.iterdir())


@cases(
    ("models", "gpu", "tp", "shape"),
    [
        ("llama-3.3-70b", "h100", 4, "llama-3.3-70b"),
        ("gemma-3-27b:dtype=int4", "l4", 2, "gemma-3-27b:dtype=int4"),
        ("gemma-3-27b:tp=1:kv_dtype=fp8", "l40s", 2, "gemma-3-27b:kv_dtype=fp8"),
    ],
)
def test_a_model_too_large_for_a_gpu_gets_a_degree_and_keeps_its_formats(
    tmp_path: Path, models: str, gpu: str, tp: int, shape: str
) -> None:
    asked = question(("static",), kinds=(gpu,), setting={"trace": "sample", "models": models})
    path, degrees = SizeSearch(asked, tmp_path).sets[gpu]
    assert degrees == {f"{shape.partition(':')[0]}/1": tp}
    (member,) = tomllib.loads(Path(path).read_text("utf-8"))["model"]
    assert (member["shape"], member["tp"]) == (shape, tp)
