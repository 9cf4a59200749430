"""The ledger of claims: each source's verdicts as rows, one page, and verdicts that a second count confirms."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.cli import claims as command
from harness.engines.machine import Config, Served, cluster
from harness.policy.types import Inst, UserError
from harness.rows import record
from harness.run.teller import Silent
from harness.study import claims, ledger, load
from harness.study.facts import activation_s
from harness.study.ledger import Ledger, Source
from harness.study.measure import measure
from harness.study.rule import CLASSES
from tests.bench import bench, mistake
from tests.harness.answers.test_ledger import LINE, ROW
from tests.harness.run.test_sweep import files
from workloads.models import shape

LINES = """
paper = "A test, figure 1"
systems = ["chunked", "static"]
definitions = ["ttft"]
slo = "absolute:ttft=2,tpot=0.1"
controls = true
requests = 1
warmup_s = 5.0
quick = { seeds = 2, window_s = 20.0, replayed_s = 20.0 }
spec = { trace = "sample", host = "vllm-graph", models = "llama-3.1-8b*3", slo_scale = 1.0 }
condition = [
  { name = "rates", at = [1.0, 64.0], spec = { gpus = 1 } },
  { name = "more", at = [1.0], extra = true, spec = { gpus = 2 } },
]

[[claim]]
what = "crossing"
on = { condition = "rates" }
system = "chunked"
paper = "reached"

[[claim]]
what = "crossing"
on = { condition = "rates" }
system = "chunked"
paper = "never"

[[claim]]
what = "ratio"
on = { condition = "rates" }
system = "static"
over = "chunked"
paper = 7.0
comparable = false
why = "no rate | is stated"
says = "ours holds 7 times the rate"
section = "2, figure 1"
name = "shared"
also = [{ system = "chunked", over = "static" }]

[[claim]]
what = "crossing"
on = { condition = "more" }
system = "chunked"
paper = "reached"
"""

PARTS = """
paper = "A test, section 2"
systems = ["prism", "prism+evict=never"]
definitions = ["ttft"]
slo = "absolute:ttft=2,tpot=0.1"
by_model = true
layout = "parts"
at = [1.0]
quick = { seeds = 1 }
spec = { trace = "sample", models = "llama-3.1-8b*2", gpus = 1, warmup_s = 5.0, window_s = 20.0 }
condition = [{ name = "sample" }]

[[claim]]
what = "difference"
system = "prism"
over = "prism+evict=never"
subject = "eviction"
says = "it helps"
paper = 0.4
bound = "at least"

[[claim]]
what = "value"
system = "prism"
shape = "llama-3.1-8b"
paper = 0.7
bound = "up to"
input = "0.7 s are of the paper"
"""

FLEET = """
paper = "A test, figure 3"
systems = ["static:rate"]
definitions = ["ttft"]
along = "gpus"
at = [1, 2]
sample = { rule = "bracket" }
slo = "absolute:ttft=2,tpot=0.1"
layout = "fleet"
quick = { seeds = 1 }
spec = { trace = "sample", models = "llama-3.2-1b*2", warmup_s = 5.0, window_s = 20.0 }
condition = [{ name = "sample" }]
claim = [{ what = "fewest", system = "static:rate", paper = 2 }]
"""

STEPS = """
paper = "A test, figure 4"
definitions = ["ttft"]
slo = "absolute:ttft=2,tpot=0.1"
along = "rate_rps"
at = [1.0, 400.0]
sample = { rule = "bisect", points = 2 }
cumulative = true
layout = "steps"
quick = { seeds = 1 }
spec = { trace = "sample", models = "llama-3.2-1b*2", gpus = 1, warmup_s = 5.0, window_s = 10.0 }
systems = { mine = "chunked", theirs = "static" }
condition = [{ name = "one process a model", spec = { process = "model" }, origin = "unknown", source = "nowhere" }]

[[claim]]
what = "ratio"
system = "mine"
over = "theirs"
paper = 40.0
name = "shared"
evidence = true
why = "sufficient: theirs has a lane a model"
"""

MEASURED = """
paper = "Weaver, USENIX ATC 2025"
systems = ["weaver"]
layout = "claims"
setting = "two models"
slo = "absolute:ttft=1,tpot=1"
along = "gpus"
at = [4]
measures = ["tp2_loss_16"]
quick = { seeds = 2 }
condition = [{ name = "two models", spec = { gpu = "a100-40g", host = "vllm-0.6", models = "weaver" } }]
spec = { trace = "hot-cold+span_s=10+rate_rps=1", scaling = "none", plan = "trace", drain_s = 0.0 }

[[claim]]
what = "measure"
system = "weaver"
measure = "tp2_loss_16"
says = "TP2 loses 26.6 % at batch 16"
section = "2.3"
paper = 0.266

[[claim]]
what = "measure"
system = "weaver"
measure = "tp2_loss_16"
says = "... 0 to 100 %"
section = "2.3"
paper = [0.0, 1.0]

[[claim]]
what = "measure"
system = "weaver"
says = "the top 5 % of models take 74.8 % of the tokens"
section = "2.2"
paper = 0.748
lacks = "OpenRouter's token counts"
"""


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Source]:
    """Judge the claims of a study that stands in a file."""
    monkeypatch.chdir(tmp_path)  # a study's runs are in a folder of its name

    def of_text(text: str) -> Source:
        written(tmp_path, "mine.toml", text)
        return ledger.of_study("mine.toml", tmp_path / "out", 1, Silent())

    return of_text


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_every_study_with_claims_is_a_source() -> None:
    assert {*"aegaeon fig12 fig7 muxserve pagedattention pdmux pdmux-70b placement".split()} <= {*ledger.sources()}
    assert {*"prism-ablations prism-bridge prism-surge qlm warmserve weaver".split()} <= {*ledger.sources()}
    assert not {"everyone", "fig7-torch"} & {*ledger.sources()}  # these have no paper's numbers, or other models


def test_a_study_as_statements(tmp_path: Path, judge: Callable[[str], Source]) -> None:
    held = judge(LINES)
    reached, never, ratio, full = held.statements
    assert {statement.paper for statement in held.statements} == {"A test, figure 1"}
    (line,) = reached.lines
    assert (line.what, reached.number) == ("chunked, rate for 99 % TTFT", "reached")
    assert line.here == "reached by 2 of 2 seeds"
    assert "sample" in line.where
    assert "llama-3.1-8b*3, 1 x h100, vllm-graph, SLO 1 x absolute:ttft=2,tpot=0.1, 2 seeds" in line.where
    assert (reached.verdict, line.weak) == ("direction", "")
    assert line.note == "at least 22 % of windows do as the paper says (one-sided 95 % limit)"
    assert (never.verdict, never.why) == ("contradicted", "")
    assert (ratio.says, ratio.section, ratio.number) == ("ours holds 7 times the rate", "2, figure 1", "7x")
    assert (ratio.verdict, ratio.why) == ("not comparable", "no rate | is stated")
    assert [(line.what, line.evidence) for line in ratio.lines] == [
        ("static / chunked, rate at 99 % TTFT", False),
        ("chunked / static, rate at 99 % TTFT", True),
    ]
    (absent,) = full.lines
    assert (full.verdict, absent.note, absent.here) == ("full form", "`bench study mine --full` runs it", "-")
    assert absent.where == "sample, llama-3.1-8b*3, more"
    before = files(tmp_path / "out")
    assert judge(LINES) == held
    assert files(tmp_path / "out") == before


def test_what_takes_no_part_and_what_nothing_ran_with_is_not_run(judge: Callable[[str], Source]) -> None:
    text = LINES.replace('system = "static"', 'system = "static and prism"').replace("comparable = false\n", "")
    text += '\n[[claim]]\nwhat = "crossing"\nsystem = "static"\npaper = "never"\n'
    text += 'on = { condition = "rates", trace = "arena-chat" }\n'
    *_, ratio, elsewhere, _ = judge(text).statements
    assert (ratio.verdict, ratio.lines[0].note) == ("not run", "prism took no part")
    assert [line.says in CLASSES for line in ratio.lines] == [False, True, True]
    assert elsewhere.verdict == "not run"
    assert elsewhere.lines[0].note == "nothing ran with condition rates, trace arena-chat"


def test_parts_a_fleet_and_steps_as_statements(judge: Callable[[str], Source]) -> None:
    part, activation = judge(PARTS).statements
    assert (part.says, part.lines[0].what) == ("it helps", "eviction, the model that gains most")
    assert part.number == "at least 40 points"
    (line,) = activation.lines
    assert (line.where, line.here) == ("idle links of a whole node", "0.74 s")
    assert (activation.verdict, activation.why) == ("input", "0.7 s are of the paper")
    (count,) = judge(FLEET).statements
    assert (count.number, count.lines[0].here, count.verdict) == ("2", "≤1", "open")
    assert "llama-3.2-1b*2, 1 to 2 x h100" in count.lines[0].where
    assert "one seed" in count.lines[0].where
    (ends,) = judge(STEPS).statements
    assert not ends.stands
    assert ["fair default" in line.where for line in ends.lines] == [True, False]
    assert "all assumptions of the bridge" in ends.lines[1].where
    assert all(line.evidence for line in ends.lines)


def test_claims_about_measures_as_statements(judge: Callable[[str], Source]) -> None:
    held = judge(MEASURED)
    value, between, lacks = held.statements
    assert (value.paper, value.section) == ("Weaver, USENIX ATC 2025", "2.3")
    assert (value.verdict, between.verdict, between.why) == ("size", "size", "")
    assert (value.lines[0].what, value.lines[0].where) == ("geometric lengths", "two models, 2 seeds")
    assert (lacks.verdict, lacks.why, lacks.lines[0].here) == ("not testable", "lacks OpenRouter's token counts", "-")
    assert judge(MEASURED) == held


# ------------------------------------------------------------------ statements, and their page


def sourced(monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, Source | UserError]) -> None:
    """Let the sources be these."""

    def answer(name: str, *_: object) -> Source:
        if isinstance(source := sources[name], UserError):
            raise source
        return source

    monkeypatch.setattr(ledger, "sources", lambda: [*sources])
    monkeypatch.setattr(ledger, "of_study", answer)


def test_a_source_that_cannot_run_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sourced(monkeypatch, {"broken": UserError("no trace"), "fine": Source((ROW,), {"mine": "its policy raised"})})
    book = ledger.ledger(None, tmp_path)
    assert book == Ledger((ROW,), {"broken": "no trace", "fine, mine": "its policy raised"})
    assert ledger.ledger(["fine", "fine"], tmp_path).statements == (ROW,)


def test_the_command_writes_the_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "DRAFT", tmp_path / "made" / "draft.md")
    sourced(monkeypatch, {"fine": Source((ROW,), {}), "broken": UserError("no trace")})
    assert bench("claims").exit_code == 2
    draft = (tmp_path / "made" / "draft.md").read_text("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]  # the published page is left alone
    shutil.rmtree(tmp_path / "made")
    for other in (("--only", "fine"), ("-o", tmp_path / "x.md")):
        refused = bench("claims", "--publish", *other)
        mistake(refused, f"leave out {other[0]}")
    result = bench("claims", "--publish")
    assert result.exit_code == 2
    assert "broken: no trace" in result.stderr
    assert "1 direction" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["claims.md"]
    assert "## P" in (tmp_path / "claims.md").read_text("utf-8")
    assert (tmp_path / "claims.md").read_text("utf-8") == draft
    (tmp_path / "claims.md").write_text("all of it")
    part = bench("claims", "--only", "fine", "--all")
    assert (part.exit_code, "## P" in part.stdout) == (0, True)
    first, head, row, *_ = bench("claims", "--only", "fine").stdout.splitlines()
    assert (first, head.split()) == ("1 direction", ["class", "paper", "here", "statement"])
    assert row.split()[:3] == ["direction", "2x", "1.5x"]
    assert (tmp_path / "claims.md").read_text("utf-8") == "all of it"  # a part does not take its place
    assert bench("claims", "--only", "fine", "-o", tmp_path / "part.md").exit_code == 0
    assert "## P" in (tmp_path / "part.md").read_text("utf-8")


def test_check_fails_where_a_class_rests_on_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    weak = ROW._replace(lines=(LINE._replace(weak="9 misses of 10"),))
    beside = ROW._replace(lines=(LINE, LINE._replace(weak="9 misses of 10", evidence=True)))
    sourced(monkeypatch, {"fine": Source((ROW, beside), {}), "weak": Source((weak,), {})})
    undecided = weak._replace(lines=(*weak.lines, LINE._replace(says="open")))  # nothing rests on it
    beaten = weak._replace(lines=(*weak.lines, LINE._replace(says="contradicted")))
    assert ledger.weak(Ledger((undecided, beaten), {})) == []
    fine = bench("claims", "--only", "fine", "--check")
    assert (fine.exit_code, "too little" in fine.stderr) == (0, False)
    assert bench("claims").exit_code == 0
    result = bench("claims", "--check")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "too little evidence: P, figure 1: it holds 2x: static / chunked direction: 9 misses of 10"
    )


def test_an_unknown_name_is_one_line_with_a_suggestion() -> None:
    result = bench("claims", "--only", "fig8")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert 'no claims of "fig8"; did you mean fig7? (aegaeon, fig12, ' in result.stderr


# ------------------------------------------------------------------ the same verdicts, counted otherwise


@pytest.mark.full
def test_three_claims_come_out_the_same_by_hand(tmp_path: Path) -> None:
    """Attainment from the rows of runs, an activation from bytes and links, and TP2's loss from two steps."""
    out = tmp_path / "out"
    measured = measure(load.study(written(tmp_path, "mine.toml", LINES)), out, workers=1)
    reached, never, *_ = claims.verdicts(measured.table, measured.about)
    held = dict[int, list[float]]()  # by seed
    for path in sorted(out.rglob("requests.parquet")):
        spec = record.meta(path.parent)["spec"]
        if spec["system"] == "chunked" and spec["seed"] < 2:  # without the A/A copy
            rows = pq.read_table(path).to_pandas()
            window = rows[(rows["arrival_ns"] >= 0) & (rows["arrival_ns"] < spec["window_s"] * 1e9)]
            ttft_s = (window["first_ns"].astype(float) - window["arrival_ns"]) / 1e9  # NaN where none came
            held.setdefault(spec["seed"], []).append(float((ttft_s <= 2.0).mean()))
    assert all(len(shares) == 2 for shares in held.values())
    some = [max(shares) >= 0.99 for shares in held.values()]
    assert len(some) == 2
    assert reached.says == ("direction" if all(some) else "open" if any(some) else "contradicted")
    assert never.says == ("contradicted" if all(some) else "open" if any(some) else "direction")

    parts = load.study("prism-ablations")
    (claim,) = (stated for stated in parts.claim if stated.shape == "llama-3.1-8b")
    weights = 16_060_522_496  # 8.03 billion parameters of 2 bytes
    over_pcie_s, over_nvlink_s = weights / 8 / 54e9, weights * 7 / 8 / 340e9  # eight links side by side, then gathered
    seconds = 0.7 + max(over_pcie_s, over_nvlink_s)
    assert activation_s(parts, claim) == pytest.approx(seconds, rel=1e-3)
    assert (claim.paper, claim.bound) == (0.7, "up to")

    measured = measure(load.study(written(tmp_path, "weaver.toml", MEASURED)), out, workers=1)
    value, between, _ = claims.verdicts(measured.table, measured.about)
    config = Config((Served("m", shape("llama-3.1-8b"), 1, degrees=(2,)),), gpu="a100-40g", gpus=2, host="vllm-0.6")
    profile = cluster(config).profile
    step_s = [profile.step_s(Inst("m", place), 16, 16 * (1024 + 64)) for place in ((0,), (0, 1))]
    loss = 1 - (16 / step_s[1]) / (2 * 16 / step_s[0])
    assert value.text == f"{loss:.3g} [{loss:.3g}, {loss:.3g}]"
    assert value.says == ("size" if 0.266 / 1.25 <= loss <= 0.266 * 1.25 else "contradicted")
    assert between.says == "size"


def test_claims_that_only_full_runs_are_told_apart() -> None:
    fig7 = load.study("fig7")
    extra = {condition.name for condition in fig7.condition if condition.extra}
    left = [claim for claim in fig7.claim if claim.on.get("condition") in extra]
    assert len(left) == len(fig7.claim) - len(fig7.of(full=False).claim) > 0
