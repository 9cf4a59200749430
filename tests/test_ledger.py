"""The ledger of claims: each source's verdicts as rows, one page, and verdicts that a second count confirms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from harness.cli import claims as command
from harness.cli.app import main
from harness.engines.machine import Config, Served, cluster
from harness.policy.types import Inst, UserError
from harness.rows import record
from harness.run.teller import Silent
from harness.study import claims, ledger, load, weaving
from harness.study.ledger import Ledger, Line, Source
from harness.study.measure import activation_s, measure
from tests.test_sweep import files
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

[[condition]]
name = "rates"
at = [1.0, 64.0]
spec = { gpus = 1 }

[[condition]]
name = "more"
at = [1.0]
extra = true
spec = { gpus = 2 }

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

[[condition]]
name = "sample"

[[claim]]
what = "difference"
system = "prism"
over = "prism+evict=never"
subject = "eviction"
says = "it helps"
paper = [0.4, 1.0]

[[claim]]
what = "value"
system = "prism"
shape = "llama-3.1-8b"
paper = [0.0, 0.7]
why = "the copy comes on top"
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

[[condition]]
name = "sample"

[[claim]]
what = "fewest"
system = "static:rate"
paper = 2
"""

STEPS = """
paper = "A test, figure 4"
definitions = ["ttft"]
slo = "absolute:ttft=2,tpot=0.1"
along = "rate_rps"
at = [1.0, 400.0]
sample = { rule = "bisect", each = "seed", points = 2 }
cumulative = true
layout = "steps"
quick = { seeds = 1 }
spec = { trace = "sample", models = "llama-3.2-1b*2", gpus = 1, warmup_s = 5.0, window_s = 10.0 }

[systems]
mine = "chunked"
theirs = "static"

[[claim]]
what = "ratio"
system = "mine"
over = "theirs"
paper = 40.0
why = "theirs has a lane a model"

[[condition]]
name = "one process a model"
spec = { process = "model" }
origin = "unknown"
source = "nowhere"
"""

WEAVER = """
[[claim]]
says = "TP2 loses 26.6 % at batch 16"
section = "2.3"
paper = 0.266
measure = "tp2_loss_16"

[[claim]]
says = "... 0 to 100 %"
section = "2.3"
paper = [0.0, 1.0]
measure = "tp2_loss_16"

[[claim]]
says = "the top 5 % of models take 74.8 % of the tokens"
section = "2.2"
paper = 0.748
lacks = "OpenRouter's token counts"
"""


def bench(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weaver's claims of `WEAVER`, and a trace of lengths."""
    (tmp_path / "claims.toml").write_text(WEAVER)
    monkeypatch.setattr(weaving, "CLAIMS", tmp_path / "claims.toml")
    path = tmp_path / weaving.LENGTHS
    path.parent.mkdir()
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023,700,240\n" * 4)
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    weaving.lengths.cache_clear()


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_every_study_with_claims_is_a_source() -> None:
    assert list(ledger.sources()) == [
        "aegaeon", "fig12", "fig7", "pdmux", "pdmux-70b", "prism-ablations", "prism-bridge", "weaver"
    ]  # fmt: skip


def test_a_study_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "mine.toml", LINES)
    monkeypatch.chdir(tmp_path)  # a study's runs are in a folder of its name
    held = ledger.of_study("mine.toml", tmp_path / "out", 1, Silent())
    assert path
    reached, never, ratio, full = held.lines
    assert {line.paper for line in held.lines} == {"A test, figure 1"}
    assert (reached.claim, reached.says, reached.here) == (
        "chunked, rate for 99 % TTFT", "reached", "reached by 2 of 2 seeds"
    )  # fmt: skip
    assert "sample" in reached.conditions
    assert "llama-3.1-8b*3, 1 x h100, vllm-graph, SLO 1 x absolute:ttft=2,tpot=0.1, 2 seeds" in reached.conditions
    assert (reached.verdict, reached.rule, reached.why) == ("agrees", "every seed reaches it", "")
    assert (never.verdict, never.why) == ("differs", ledger.UNKNOWN)
    assert (ratio.claim, ratio.says) == ("static / chunked, rate at 99 % TTFT", "7x")
    assert (ratio.verdict, ratio.why) == ("not comparable", "no rate | is stated")
    assert (full.verdict, full.why, full.here) == ("not run", ledger.FULL, "-")
    assert full.conditions == "sample, llama-3.1-8b*3, more"
    before = files(tmp_path / "out")
    assert ledger.of_study("mine.toml", tmp_path / "out", 1, Silent()) == held
    assert files(tmp_path / "out") == before


def test_parts_a_fleet_and_steps_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def lines_of(text: str) -> tuple[Line, ...]:
        written(tmp_path, "mine.toml", text)
        return ledger.of_study("mine.toml", tmp_path / "out", 1, Silent()).lines

    part, activation = lines_of(PARTS)
    assert part.claim == "eviction, the model that gains most"
    assert (part.says, part.verdict) == ("40-100 points", "differs")
    assert (activation.conditions, activation.here, activation.verdict) == (
        "idle links of a whole node", "0.74 s", "differs"
    )  # fmt: skip
    assert (part.why, activation.why) == (ledger.UNKNOWN, "the copy comes on top")
    (count,) = lines_of(FLEET)
    assert (count.says, count.here, count.verdict, count.why) == ("2", "≤1", "differs", ledger.UNKNOWN)
    assert "llama-3.2-1b*2, 1 to 2 x h100" in count.conditions
    assert "one seed" in count.conditions
    ends = lines_of(STEPS)
    assert [line.says for line in ends] == ["40x", "40x"]
    assert "fair default" in ends[0].conditions
    assert "all assumptions of the bridge" in ends[1].conditions
    assert [(line.verdict, line.why) for line in ends] == [("differs", "theirs has a lane a model")] * 2


@pytest.mark.usefixtures("lengths")
def test_weavers_claims_as_rows(tmp_path: Path) -> None:
    held = ledger.of_weaver(tmp_path / "out", 1, Silent())
    value, between, lacks = held.lines
    assert value.paper == "Weaver, USENIX ATC 2025, section 2.3"
    assert (value.verdict, between.verdict, between.why) == ("differs", "agrees", "")
    assert (lacks.verdict, lacks.why, lacks.here) == (ledger.UNTESTED, "lacks OpenRouter's token counts", "-")
    assert ledger.of_weaver(tmp_path / "out", 1, Silent()) == held


ROW = Line("P", "static / chunked", "llama-3.1-8b*3", "2x", "a | b", "agrees", "ours is <it>", "~line\nbreak")


def test_markdown_keeps_cells_in_their_columns() -> None:
    page = list(ledger.markdown(Ledger((ROW,), {"fig7": "no trace\nhere"})))
    (line,) = (line for line in page if line.startswith("| P"))
    assert line == (r"| P | static / chunked | llama-3.1-8b\*3 | 2x | a \| b | agrees | ours is \<it> | \~line break |")
    assert "- 1 agrees: the rule in the last column holds" in page
    assert ledger.HEAD[-1] == "agrees if"
    assert page[-1] == "- fig7: no trace here"
    assert ledger.counted([ROW, ROW._replace(verdict="differs")]) == "1 agrees, 1 differs"


def sourced(monkeypatch: pytest.MonkeyPatch, said: Mapping[str, Source | UserError]) -> None:
    """Let the sources be these."""

    def answer(one: Source | UserError, *_: object) -> Source:
        if isinstance(one, UserError):
            raise one
        return one

    monkeypatch.setattr(ledger, "sources", lambda: {name: partial(answer, one) for name, one in said.items()})


def test_a_source_that_cannot_run_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sourced(monkeypatch, {"broken": UserError("no trace"), "fine": Source((ROW,), {"mine": "its policy raised"})})
    found = ledger.ledger(None, tmp_path)
    assert found == Ledger((ROW,), {"broken": "no trace", "fine, mine": "its policy raised"})
    assert ledger.ledger(["fine", "fine"], tmp_path).lines == (ROW,)


def test_the_command_writes_the_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    sourced(monkeypatch, {"fine": Source((ROW,), {}), "broken": UserError("no trace")})
    result = bench("claims")
    assert result.exit_code == 2
    assert "broken: no trace" in result.stderr
    assert "1 agrees" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["claims.md"]
    assert "| P |" in (tmp_path / "claims.md").read_text("utf-8")
    (tmp_path / "claims.md").write_text("all of it")
    part = bench("claims", "--only", "fine")
    assert (part.exit_code, "| P |" in part.stdout) == (0, True)
    assert (tmp_path / "claims.md").read_text("utf-8") == "all of it"  # a part does not take its place
    assert bench("claims", "--only", "fine", "-o", tmp_path / "part.md").exit_code == 0
    assert "| P |" in (tmp_path / "part.md").read_text("utf-8")


def test_an_unknown_name_is_one_line_with_a_suggestion() -> None:
    result = bench("claims", "--only", "fig8")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert 'no claims of "fig8"; did you mean fig7? (there are: aegaeon, fig12, ' in result.stderr


# ------------------------------------------------------------------ the same verdicts, counted otherwise


@pytest.mark.slow
@pytest.mark.usefixtures("lengths")
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
            own = rows[(rows["arrival_ns"] >= 0) & (rows["arrival_ns"] < spec["window_s"] * 1e9)]
            ttft_s = (own["first_ns"].astype(float) - own["arrival_ns"]) / 1e9  # NaN where none came
            held.setdefault(spec["seed"], []).append(float((ttft_s <= 2.0).mean()))
    assert all(len(shares) == 2 for shares in held.values())
    some = [max(shares) >= 0.99 for shares in held.values()]
    assert len(some) == 2
    assert reached.says == ("agrees" if all(some) else "open" if any(some) else "differs")
    assert never.says == ("differs" if all(some) else "open" if any(some) else "agrees")

    parts = load.study("prism-ablations")
    (claim,) = (one for one in parts.claim if one.shape == "llama-3.1-8b")
    weights = 16_060_522_496  # 8.03 billion parameters of 2 bytes
    over_pcie_s, over_nvlink_s = weights / 8 / 54e9, weights * 7 / 8 / 340e9  # eight links side by side, then gathered
    seconds = 0.7 + max(over_pcie_s, over_nvlink_s)
    assert activation_s(parts, claim) == pytest.approx(seconds, rel=1e-3)
    assert claim.paper == (0.0, 0.7)

    value, between, _ = ledger.of_weaver(out, 1, Silent()).lines
    config = Config((Served("m", shape("llama-3.1-8b"), 1, degrees=(2,)),), gpu="a100-40g", gpus=2, host=weaving.HOST)
    profile = cluster(config).profile
    step_s = [profile.step_s(Inst("m", place), 16, 16 * (1024 + 64)) for place in ((0,), (0, 1))]
    loss = 1 - (16 / step_s[1]) / (2 * 16 / step_s[0])
    assert value.here == f"{loss:.3g} [{loss:.3g}, {loss:.3g}]"
    assert value.verdict == ("agrees" if np.isclose(loss, 0.266, rtol=1e-9) else "differs")
    assert between.verdict == ("agrees" if 0 <= loss <= 1 else "differs")


def test_claims_that_only_full_runs_are_told_apart() -> None:
    fig7 = load.study("fig7")
    extra = {one.name for one in fig7.condition if one.extra}
    left = [one for one in fig7.claim if one.on["condition"] in extra]
    assert len(left) == len(fig7.claim) - len(fig7.of(full=False).claim) > 0
