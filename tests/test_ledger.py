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
from harness.study import ablation, claims, figure, ledger, weaving
from harness.study.ledger import Held, Ledger, Row
from tests.test_sweep import files
from workloads.models import shape

FIGURE = """
paper = "A test, figure 1"
systems = ["chunked", "static"]
traces = ["sample"]
definitions = ["ttft"]
slo = "absolute:ttft=2,tpot=0.1"
host = "vllm-graph"
requests = 1
warmup_s = 5.0
quick = { seeds = 2, rates = 2, window_s = 20.0, replayed_s = 20.0 }
full = { seeds = 2, rates = 2, window_s = 20.0, replayed_s = 20.0 }

[[row]]
axis = "rate_scale"
models = "llama-3.1-8b*3"
gpus = 1
slo_scale = 1.0
rate_scale = [1.0, 64.0]

[[row]]
axis = "rate_scale"
models = "llama-3.1-8b*3"
gpus = 2
slo_scale = 1.0
rate_scale = [1.0]
full = true

[[claim]]
axis = "rate_scale"
definition = "ttft"
system = "chunked"
row = 1
paper = "reached"

[[claim]]
axis = "rate_scale"
definition = "ttft"
system = "chunked"
row = 1
paper = "never"

[[claim]]
axis = "rate_scale"
definition = "ttft"
system = "static"
over = "chunked"
row = 1
paper = 7.0
comparable = false
why = "no rate | is stated"

[[claim]]
axis = "rate_scale"
definition = "ttft"
system = "chunked"
row = 2
paper = "reached"
"""

ABLATED = """
paper = "A test, section 2"
base = "prism"
slo = "absolute:ttft=2,tpot=0.1"
seeds = 1

[spec]
models = "llama-3.1-8b*2"
gpus = 1
warmup_s = 5.0
window_s = 20.0

[[workload]]
trace = "sample"

[[part]]
system = "prism+evict=never"
off = "eviction"
says = "it helps"
paper = [0.4, 1.0]

[[activation]]
shape = "llama-3.1-8b"
paper = [0.0, 0.7]
why = "the copy comes on top"
"""

FLEET = """
paper = "A test, figure 3"
systems = ["static:rate"]
definition = "ttft"
gpus = [1, 2]
slos = ["absolute:ttft=2,tpot=0.1"]
seeds = 1

[spec]
models = "llama-3.2-1b*2"
warmup_s = 5.0
window_s = 20.0

[[workload]]
trace = "sample"

[[claim]]
system = "static:rate"
slo = "absolute:ttft=2,tpot=0.1"
paper = 2
"""

BRIDGE = """
paper = "A test, figure 4"
definition = "ttft"
slo = "absolute:ttft=2,tpot=0.1"
seeds = 1
rates_rps = [1.0, 400.0]
bisections = 0

[systems]
mine = "chunked"
theirs = "static"

[spec]
trace = "sample"
models = "llama-3.2-1b*2"
gpus = 1
warmup_s = 5.0
window_s = 10.0

[[ratio]]
first = "mine"
over = "theirs"
paper = 40.0
why = "theirs has a lane a model"

[[step]]
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


def test_every_experiment_with_claims_is_a_source() -> None:
    assert list(ledger.sources()) == [
        "aegaeon", "fig7", "pdmux", "pdmux-70b", "fig12", "ablate-prism", "bridge-prism", "weaver"
    ]  # fmt: skip


def test_a_figure_as_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "mine.toml", FIGURE)
    held = ledger.of_figure(path, tmp_path / "out", 1, Silent())
    reached, never, ratio, full = held.rows
    assert {row.paper for row in held.rows} == {"A test, figure 1"}
    assert (reached.claim, reached.says, reached.here) == (
        "chunked, rate (req/s) for 99 % TTFT", "reached", "reached by 2 of 2 seeds"
    )  # fmt: skip
    assert "sample" in reached.conditions
    assert "llama-3.1-8b*3, 1 x h100, vllm-graph, SLO 1 x absolute:ttft=2,tpot=0.1, 2 seeds" in reached.conditions
    assert (reached.verdict, reached.rule, reached.why) == ("agrees", "every seed reaches it", "")
    assert (never.verdict, never.why) == ("differs", ledger.UNKNOWN)
    assert (ratio.claim, ratio.says) == ("static / chunked, rate at 99 % TTFT", "7x")
    assert (ratio.verdict, ratio.why) == ("not comparable", "no rate | is stated")
    assert (full.verdict, full.why, full.here) == ("not run", ledger.FULL, "-")
    assert full.conditions == "sample, llama-3.1-8b*3, 2 x h100, vllm-graph"
    assert ledger.ends((3, 2, 8)) == (2, 8)
    before = files(tmp_path / "out")
    assert ledger.of_figure(path, tmp_path / "out", 1, Silent()) == held
    assert files(tmp_path / "out") == before


def test_an_ablation_a_fleet_and_a_bridge_as_rows(tmp_path: Path) -> None:
    part, activation = ledger.of_ablation(written(tmp_path, "a.toml", ABLATED), tmp_path / "out", 1, Silent()).rows
    assert part.claim == "eviction, the model that gains most"
    assert (part.says, part.verdict) == ("40 - 100 points", "differs")
    assert (activation.conditions, activation.here, activation.verdict) == (
        "idle links of a whole node", "0.74 s", "differs"
    )  # fmt: skip
    assert (part.why, activation.why) == (ledger.UNKNOWN, "the copy comes on top")
    (count,) = ledger.of_fleet(written(tmp_path, "f.toml", FLEET), tmp_path / "out", 1, Silent()).rows
    assert (count.says, count.here, count.verdict, count.why) == ("2", "≤1", "differs", ledger.UNKNOWN)
    assert "llama-3.2-1b*2, 1 to 2 GPUs, 99 % TTFT, one seed" in count.conditions
    ends = ledger.of_bridge(written(tmp_path, "b.toml", BRIDGE), tmp_path / "out", 1, Silent()).rows
    assert [row.says for row in ends] == ["40x", "40x"]
    assert "fair default" in ends[0].conditions
    assert "all assumptions of the bridge" in ends[1].conditions
    assert [(row.verdict, row.why) for row in ends] == [("differs", "theirs has a lane a model")] * 2


def test_a_ratio_of_a_bridge_is_judged_by_the_one_rule() -> None:
    row = {"paper": 3.0, "mean": 2.0, "low": 1.0, "high": 2.5, "n": 4, "sign": "=", "note": ""}
    assert ledger._of_ratio(row) == ("differs", claims.RULES["value, interval"])
    assert ledger._of_ratio({**row, "high": 3.5})[0] == "agrees"
    none = {**row, "mean": None}
    assert ledger._of_ratio({**none, "note": "theirs is infeasible"}) == ("does not fit", "-")
    assert ledger._of_ratio({**none, "note": "neither holds 99 % at 1 req/s"}) == ("open", "-")


@pytest.mark.usefixtures("lengths")
def test_weavers_claims_as_rows_and_what_is_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ledger.of_weaver(tmp_path / "out", 1, Silent())
    value, between, lacks = held.rows
    assert value.paper == "Weaver, USENIX ATC 2025, section 2.3"
    assert (value.verdict, between.verdict, between.why) == ("differs", "agrees", "")
    assert (lacks.verdict, lacks.why, lacks.here) == (ledger.UNTESTED, "lacks OpenRouter's token counts", "-")
    monkeypatch.setattr(weaving, "MEASURES", {})  # nothing is measured again
    assert ledger.of_weaver(tmp_path / "out", 1, Silent()) == held


ROW = Row("P", "static / chunked", "llama-3.1-8b*3", "2x", "a | b", "agrees", "ours is <it>", "~line\nbreak")


def test_markdown_keeps_cells_in_their_columns() -> None:
    page = list(ledger.markdown(Ledger((ROW,), {"fig7": "no trace\nhere"})))
    (line,) = (line for line in page if line.startswith("| P"))
    assert line == (r"| P | static / chunked | llama-3.1-8b\*3 | 2x | a \| b | agrees | ours is \<it> | \~line break |")
    assert "- 1 agrees: the rule in the last column holds" in page
    assert ledger.HEAD[-1] == "agrees if"
    assert page[-1] == "- fig7: no trace here"
    assert ledger.counted([ROW, ROW._replace(verdict="differs")]) == "1 agrees, 1 differs"


def sourced(monkeypatch: pytest.MonkeyPatch, said: Mapping[str, Held | UserError]) -> None:
    """Let the sources be these."""

    def answer(one: Held | UserError, *_: object) -> Held:
        if isinstance(one, UserError):
            raise one
        return one

    monkeypatch.setattr(ledger, "sources", lambda: {name: partial(answer, one) for name, one in said.items()})


def test_a_source_that_cannot_run_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sourced(monkeypatch, {"broken": UserError("no trace"), "fine": Held((ROW,), {"mine": "its policy raised"})})
    found = ledger.ledger(None, tmp_path)
    assert found == Ledger((ROW,), {"broken": "no trace", "fine, mine": "its policy raised"})
    assert ledger.ledger(["fine", "fine"], tmp_path).rows == (ROW,)


def test_the_command_writes_the_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    sourced(monkeypatch, {"fine": Held((ROW,), {}), "broken": UserError("no trace")})
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
    assert 'no claims of "fig8"; did you mean fig7? (there are: aegaeon, fig7, ' in result.stderr


# ------------------------------------------------------------------ the same verdicts, counted otherwise


@pytest.mark.slow
@pytest.mark.usefixtures("lengths")
def test_three_claims_come_out_the_same_by_hand(tmp_path: Path) -> None:
    """Attainment from the rows of runs, an activation from bytes and links, and TP2's loss from two steps."""
    out = tmp_path / "out"
    reached, never, *_ = ledger.of_figure(written(tmp_path, "mine.toml", FIGURE), out, 1, Silent()).rows
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
    assert reached.verdict == ("agrees" if all(some) else "open" if any(some) else "differs")
    assert never.verdict == ("differs" if all(some) else "open" if any(some) else "agrees")

    activated = ablation.activations(ablation.ablation("prism"))
    (said,) = (one for one in activated if "llama-3.1-8b" in one.what)
    weights = 16_060_522_496  # 8.03 billion parameters of 2 bytes
    over_pcie_s, over_nvlink_s = weights / 8 / 54e9, weights * 7 / 8 / 340e9  # eight links side by side, then gathered
    seconds = 0.7 + max(over_pcie_s, over_nvlink_s)
    assert said.here == f"{seconds:.2f} s"
    assert (said.paper, said.says) == ("0 - 0.7 s", "agrees" if seconds <= 0.7 else "differs")

    value, between, _ = ledger.of_weaver(out, 1, Silent()).rows
    config = Config((Served("m", shape("llama-3.1-8b"), 1, degrees=(2,)),), gpu="a100-40g", gpus=2, host=weaving.HOST)
    profile = cluster(config).profile
    step_s = [profile.step_s(Inst("m", place), 16, 16 * (1024 + 64)) for place in ((0,), (0, 1))]
    loss = 1 - (16 / step_s[1]) / (2 * 16 / step_s[0])
    assert value.here == f"{loss:.3g} [{loss:.3g}, {loss:.3g}]"
    assert value.verdict == ("agrees" if np.isclose(loss, 0.266, rtol=1e-9) else "differs")
    assert between.verdict == ("agrees" if 0 <= loss <= 1 else "differs")


def test_rows_that_only_full_runs_are_told_apart() -> None:
    fig7 = figure.figure("fig7")
    left = [one for one in fig7.claims if one.row and fig7.rows[one.row - 1].extra]
    assert len(left) == len(fig7.claims) - len(fig7.of(full=False).claims) > 0
