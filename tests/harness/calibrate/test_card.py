"""A cost table from measurements: what a known table tells is told again by the table that is fitted to it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.calibrate import card, tables
from harness.engines.costs import coefficients, kernels, profile, quantities
from harness.policy.types import UserError
from probe import report
from probe.plan import PLAN
from tests.bench import ok
from tests.cases import cases
from tests.harness.calibrate import raw

SPEC = quantities.gpu("h200")


def truth() -> dict[str, Any]:
    """Return a card that is not as the committed table has it."""
    q: dict[str, Any] = copy.deepcopy(dict(quantities.quantities("h200")))
    q["gemm"] |= {"launch_s": 1.5 * q["gemm"]["launch_s"], "hbm_frac": 0.9 * q["gemm"]["hbm_frac"]}
    q["gemm"]["tiles"] = [[m, n, 0.92 * rate] for m, n, rate in q["gemm"]["tiles"]]
    q["decode"]["gqa"] |= {"floor_s": 0.7 * q["decode"]["gqa"]["floor_s"], "hbm_frac": 0.75}
    q["prefill"] |= {"floor_s": 8e-6, "flops_frac": [1.1 * f for f in q["prefill"]["flops_frac"]]}
    q["small"] |= {"floor_s": 9e-6, "hbm_frac": 0.6}
    q["share"] |= {"arith_power": 0.95, "saturation": 0.3}
    return q


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[str]]:
    """Return the table that is fitted to the made-up card, its file, and what was said."""
    folder = raw.write(tmp_path_factory.mktemp("h200"), truth(), noise=0.01)
    table = card.table(folder)
    path = folder / f"{table.name}.toml"
    path.write_text(tables.dumps(table.file))
    tables.check(path, table.file)
    return dict(quantities.quantities("h200", str(path))), path, list(table.notes(path))


def off(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) / np.asarray(b) - 1).max())


def test_a_known_card_is_recovered(fitted: tuple[dict[str, Any], Path, list[str]]) -> None:
    got, want = fitted[0], truth()
    m, n, k = (x.ravel() for x in np.meshgrid([1, 16, 100, 1024, 4096], [4096, 14336, 28672], [3072, 4096, 8192]))
    assert off(kernels.gemm_s(got["gemm"], SPEC, m, n, k), kernels.gemm_s(want["gemm"], SPEC, m, n, k)) < 0.06
    B, ctx = (x.ravel() for x in np.meshgrid([1, 4, 32, 200], [512, 1500, 4096]))
    for heads, kv, d in ((32, 8, 128), (24, 8, 128), (32, 8, 64)):
        assert off(*(kernels.decode_s(q["decode"], SPEC, B, ctx, heads, kv, d) for q in (got, want))) < 0.06
        tokens = np.array([200.0, 1000, 4096])
        assert off(*(kernels.prefill_s(q["prefill"], SPEC, 1, tokens, heads, kv, d) for q in (got, want))) < 0.06
    assert off(got["small"]["floor_s"], 9e-6) < 0.03
    assert off(got["small"]["hbm_frac"], 0.6) < 0.03
    share = np.array([0.125, 0.25, 0.5, 0.75])
    assert off(kernels.part_of(got["share"], share).sms, kernels.part_of(want["share"], share).sms) < 0.06
    assert off(kernels.part_of(got["share"], share).hbm, kernels.part_of(want["share"], share).hbm) < 0.06


def test_its_errors_are_those_of_its_noise(fitted: tuple[dict[str, Any], Path, list[str]]) -> None:
    for op in ("gemm", "decode", "prefill", "small", "share"):
        for part in ("fit", "held"):
            assert fitted[0][op][part]["median"] < 0.025, (op, part)
        assert fitted[0][op]["source"].startswith("make gpu on NVIDIA H200, CUDA 13.0")


def test_it_is_a_table_that_a_run_can_take(fitted: tuple[dict[str, Any], Path, list[str]]) -> None:
    _, path, notes = fitted
    assert path.name == "h200-measured.toml"
    shape = card.SHAPES["8B"]
    mine, theirs = (coefficients.tables([(shape, 1)], "h200", "none", table) for table in (str(path), None))
    assert np.isfinite(mine.gemm).all()
    assert profile.step_s(profile.row(mine, 0), B=1, C=1024) > profile.step_s(
        profile.row(theirs, 0), B=1, C=1024
    )  # slower HBM, as made up
    assert any("committed table" in note for note in notes)
    assert any(re.fullmatch(r"h2d: (49|50)\.\d GB/s measured, 54\.0 in the table of h200", note) for note in notes)


def keep(folder: Path, *texts: str) -> None:
    """Leave only the raw lines that have these texts."""
    lines = (folder / "raw.jsonl").read_text().splitlines(keepends=True)
    (folder / "raw.jsonl").write_text("".join(line for line in lines if all(text in line for text in texts)))


def test_a_call_that_was_cut_short_gives_what_it_can(tmp_path: Path) -> None:
    folder = raw.write(tmp_path / "h200", truth())
    keep(folder, '"of": "8B', '"ask": 132')
    got = card.table(folder).file
    assert set(got) == {"kind", "gemm"}  # four prompts and eight batches, one held out, are too few for four numbers
    assert "held" not in got["gemm"]
    assert "small: 0 measured rows, the committed table holds" in card.table(folder).notes(folder)
    mine = tmp_path / "mine.toml"
    assert f"wrote {mine} (--table takes it)" in ok("calibrate", folder, "-o", mine)
    assert mine.read_text() == tables.dumps(got)


@cases(
    ("short", "kind", "says"),
    [
        ("h200", None, "h200"),
        ("h100-80gb-hbm3", None, "h100"),
        ("x300", None, "--gpu names one of"),
        ("x300", "h200", "h200"),
    ],
)
def test_the_kind_is_told_by_the_card_or_the_user(short: str, kind: str | None, says: str, tmp_path: Path) -> None:
    folder = raw.write(tmp_path / short, truth())
    keep(folder, '"source": "step"')
    host = folder / "host.json"
    host.write_text(host.read_text().replace('"short": "h200"', f'"short": "{short}"'))
    if says.startswith("--"):
        with pytest.raises(UserError, match=says):
            card.table(folder, kind)
    else:
        assert card.table(folder, kind).file["kind"] == says


def test_a_folder_without_measurements_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make gpu writes them"):
        card.table(tmp_path)


def test_the_report_says_what_was_found(tmp_path: Path) -> None:
    folder = raw.write(tmp_path / "h200", truth())
    line = report.write(folder, PLAN)
    text = (folder / "README.md").read_text()
    assert text.startswith("# An NVIDIA H200, probed")
    assert "| hole | fault (killed by signal 6) | CUDA_ERROR_ILLEGAL_ADDRESS |" in text
    assert "| swap | not run | within 10 % of the link |" in text
    assert "## swap" not in text
    assert "2 MiB: create 200 us, map 2 us, allow 40 us, unmap 30 us, release 10 us" in text
    assert "decode step takes 1.5 times as long as alone where both use all SMs" in " ".join(text.split())
    assert "h2d: 50.0 GB/s" in text
    assert line == f"{text}wrote {folder / 'README.md'}"
    assert all(len(line.split("|")) == 5 for line in text.splitlines() if line.startswith("|"))
    assert all(len(line) <= report.WIDTH for line in text.splitlines())
