"""Two models at once on a GPU, as measured and as simulated: the page of results/h200."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.policy.types import UserError
from harness.validate import corun

FOLDER = Path(__file__).parent.parent / "results" / "h200"
TABLE = str(FOLDER / "h200-measured.toml")


def test_the_page_holds_every_pair_that_was_measured_and_names_the_farthest() -> None:
    rows = list(corun.factors(FOLDER, "h200", TABLE))
    assert len(rows) == len(corun.MODES) * len(corun.ACTS) ** 2
    page = (FOLDER / "corun.md").read_text("utf-8")
    for mode, victim, other, seen, ours in rows:
        assert seen > 1  # nothing is faster beside something
        assert ours > 0.98
        assert f"| {corun.MODES[mode]} | {corun.ACTS_TEXT[victim]} | {corun.ACTS_TEXT[other]} | {seen:.2f} |" in page
    mode, victim, other, seen, _ = max(rows, key=lambda row: row[3] / row[4])
    assert (
        f"{corun.ACTS_TEXT[victim]} beside {corun.ACTS_TEXT[other]}, {corun.MODES[mode]}: it takes {seen:.1f}" in page
    )


def test_two_equal_decodes_share_the_bytes_of_a_card() -> None:
    alone_s, beside_s = (
        corun.unit_s("decode64", other, split=False, gpu="h200", table=TABLE) for other in ("", "decode64")
    )
    assert 1.2 < beside_s / alone_s <= 2.0  # both are bound by memory, beside host time that overlaps


def test_a_folder_without_that_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was measured of two models at once"):
        corun.text(tmp_path, "h200", None)
