"""Ratios of rates on the sample in the simulator: bisected over windows together, side by side and step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.rows import crossings
from harness.rows.estimate import Estimate
from harness.run import sweep
from harness.study import claims
from harness.study.measure import Measured, measure
from harness.study.study import Study
from tests.harness.study.measuring import DROPS
from tests.harness.study.test_measure import study, told

# 1 % of the requests are dropped at a forecast of `most_rps` for all models together, and 16 times that at twice the
# rate. So it crosses 99 % at that rate, whatever the window.
CAPPED = DROPS % "min(1.0, 0.01 * (rate / self.most_rps) ** 4)"
RATIO = """
paper = "A test"
definitions = ["both"]
slo = "absolute:ttft=10,tpot=1"
along = "rate_rps"
at = [1.0, 8.0]
sample = { rule = "bisect", points = 7, digits = 3, below = 4.0 }
layout = "matrix"
quick = { seeds = 8 }
spec = { trace = "sample", models = "llama-3.2-1b*4", gpus = 1, plan = "trace", window_s = 60.0, warmup_s = 5.0 }
systems = { ours = "{ours}", theirs = "{theirs}" }

[[claim]]
what = "ratio"
system = "ours"
over = "theirs"

[[condition]]
name = "alone"
"""


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    (path := tmp_path / "capped.py").write_text(CAPPED)
    return path


def pair(tmp_path: Path, ours: str, theirs: str) -> Study:
    return study(tmp_path, RATIO.replace("{ours}", ours).replace("{theirs}", theirs))


def beside(measured: Measured) -> claims.Verdict:
    (verdict,) = claims.verdicts(measured.table, measured.about)
    return verdict


def rate(measured: Measured, name: str) -> Estimate:
    (panel,) = measured.about.panels
    crossing = crossings.crossing(crossings.of_panel(measured.table, panel), panel, name, "both", 0.99)
    assert crossing is not None
    return crossing.at


def test_a_system_against_itself_is_1(tmp_path: Path, capped: Path) -> None:
    twins = beside(measure(pair(tmp_path, f"{capped}+most_rps=4.0", f"{capped}+most_rps=4"), tmp_path / "out"))
    assert twins.here is not None
    assert (twins.here.mean, twins.here.n, twins.says) == (1.0, 8, "equal within 25 %")


@pytest.mark.full
def test_a_known_factor_is_found_and_stored_runs_are_not_made_again(
    tmp_path: Path, capped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pair(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=2.0")
    measured = measure(asked, tmp_path / "out", workers=1)
    ours = beside(measured)
    assert ours.here is not None
    assert ours.here.mean == pytest.approx(3.0, rel=0.1)
    assert ours.says == "ahead"
    assert rate(measured, "ours").mean == pytest.approx(6.0, rel=0.1)
    assert rate(measured, "theirs").mean == pytest.approx(2.0, rel=0.1)
    assert ours.here.mean == pytest.approx(rate(measured, "ours").mean / rate(measured, "theirs").mean)
    lines = told(measured)
    assert lines[0] == "ours, pooled over models, is ahead of theirs"
    assert lines[2] == "condition theirs"
    assert lines[3] == f"alone + {ours.text.partition(' ')[0]}"
    turned = beside(measure(pair(tmp_path, f"{capped}+most_rps=2.0", f"{capped}+most_rps=6.0"), tmp_path / "out"))
    assert turned.here is not None
    assert turned.here.mean == pytest.approx(1 / ours.here.mean)
    assert turned.says == "behind"
    monkeypatch.setattr(sweep, "execute", None)
    again = measure(asked, tmp_path / "out", workers=1)
    assert again.folder == measured.folder
    assert again.table.equals(measured.table)


@pytest.mark.full
def test_a_search_goes_a_quarter_below_the_lowest_rate_and_no_further(tmp_path: Path, capped: Path) -> None:
    measured = measure(pair(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=0.6"), tmp_path / "out")
    below = rate(measured, "theirs")
    assert below.mean == pytest.approx(0.6, rel=0.25)  # of 200 requests, or two misses
    assert below.sign == "="
    bound = beside(measure(pair(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=0.1"), tmp_path / "out"))
    assert bound.here is not None
    assert (bound.here.sign, bound.here.high, bound.says) == (">", None, "ahead")
    assert bound.here.low is not None
    assert bound.here.low > 1.0
    assert bound.text.startswith(">")


def test_beyond_the_rates_is_said(tmp_path: Path, capped: Path) -> None:
    above = beside(measure(pair(tmp_path, f"{capped}+most_rps=90.0", f"{capped}+most_rps=80.0"), tmp_path / "out"))
    assert (above.here, above.text) == (None, "both hold 99 % at 8 req/s")
    assert above.says == "equal within 25 %"  # as many miss, within half a point
    below = beside(measure(pair(tmp_path, f"{capped}+most_rps=0.15", f"{capped}+most_rps=0.08"), tmp_path / "out"))
    assert (below.here, below.text) == (None, "neither holds 99 % at 0.25 req/s")


def test_what_has_no_room_is_said(tmp_path: Path) -> None:
    def measured(ours: str, theirs: str) -> Measured:
        asked = pair(tmp_path, ours, theirs).only(models=("nemo-12b*4",))  # 91 GiB of weights on one GPU
        return measure(asked, tmp_path / "out", workers=1)

    tight = measured("dedicated", "static")
    assert (beside(tight).here, beside(tight).says, beside(tight).text) == (None, "no room", "theirs does not fit")
    assert "ours / theirs: theirs does not fit under alone." in told(tight)
    assert beside(measured("static", "dedicated"))[3:5] == ("ours does not fit", "no room")
    assert beside(measured("static", "static:equal"))[3:5] == ("ours does not fit, theirs does not fit", "no room")
