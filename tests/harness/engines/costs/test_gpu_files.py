"""A user's file of a GPU or a cost table: what it replaces, and how a mistake is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engines.costs import coefficients, profile, quantities
from harness.policy.types import Shape, UserError
from tests.cases import cases

LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192)
ROWS = [(LLAMA_8B, tp) for tp in (1, 2, 4)]


def test_users_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="did you mean h100"):
        quantities.gpu("h10")
    with pytest.raises(UserError, match=r'"vllm-eager" was not measured on mi300x \(it was on: a100-80g, h800, '):
        coefficients.tables(ROWS, "mi300x", "vllm-eager")
    with pytest.raises(UserError, match="unknown host profile 'vlm'"):
        coefficients.tables(ROWS, "h100", "vlm")
    with pytest.raises(UserError, match="do not split over tp 8"):
        coefficients.tables([(LLAMA_8B._replace(q_heads=28, kv_heads=4), 8)], "h100", "none")


def test_a_users_table_replaces_what_it_names(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text('kind = "h100"\n[small]\nsource = "mine"\nformula = "floor"\nfloor_s = 1e-3\nhbm_frac = 0.8\n')
    rows = [(LLAMA_8B, 1)]
    each = coefficients.tables(rows, "h100", "none", str(table)), coefficients.tables(rows, "h100", "none")
    slow_s, usual_s = (profile.step_s(profile.row(t, 0), B=1, C=100) for t in each)
    assert slow_s == pytest.approx(usual_s + 32 * 0.98e-3, rel=1e-3)
    assert "mine" in {s.source for s in quantities.sources(rows, "h100", "none", str(table))}


B200 = """
kind = "b200"
name = "NVIDIA B200 180GB (SXM6)"
aliases = ["b200-180g"]
like = "h200"
[spec.mem_bytes]
value = 191_000_000_000
source = "data sheet"
[spec.sms]
value = 148
source = "data sheet"
[spec.flops]
value = 2.25e15
source = "dense bf16, data sheet"
[spec.hbm]
value = 8e12
source = "data sheet"
[small]
floor_s = 5e-6
source = "a guess"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of the tables, which are read there meanwhile."""
    monkeypatch.setattr(quantities, "TABLES", shutil.copytree(quantities.TABLES, tmp_path / "tables"))
    yield quantities.TABLES
    quantities.forget()


def write(folder: Path, text: str) -> None:
    """Write the file of a GPU among the tables."""
    (folder / "b200.toml").write_text(text)
    quantities.forget()


def test_a_gpu_is_a_file_that_states_what_differs(folder: Path) -> None:
    write(folder, B200)
    new, old = quantities.gpu("b200-180g"), quantities.gpu("h200")
    assert (new.kind, new.sms, new.hbm, new.flops) == ("b200", 148, 8e12, 2.25e15)
    assert (new.h2d, new.nvlink, new.disk, new.host_bytes) == (old.h2d, old.nvlink, old.disk, old.host_bytes)
    sources = {source.quantity: source for source in quantities.sources(ROWS, "b200", "none")}
    assert sources["b200.h2d"].source == f"as h200: {quantities.quantities('h200')['spec']['h2d']['source']}"
    assert sources["b200.hbm"].source == "data sheet"
    assert sources["b200.gemm"].source == "roofline: coefficients of h200 at this card's own peaks, unmeasured"
    assert sources["b200.gemm"].error == "roofline, error unknown"  # that of another chip is none of this one
    assert sources["b200.small"].source == "a guess"
    rows = [(LLAMA_8B, 1)]
    b200, h200 = (profile.row(coefficients.tables(rows, kind, "none"), 0) for kind in ("b200", "h200"))
    assert profile.step_s(b200, B=64, C=64_000) < profile.step_s(h200, B=64, C=64_000)


WRONG = [
    ("hbm]\nvalue = 8e12", 'hbm]\nvalue = "8e12"', 'spec.hbm.value is "8e12", not a number, as in h100.toml'),
    ("value = 8e12", "value = true", "spec.hbm.value is true, not a number, as in h100.toml"),
    ('[spec.hbm]\nvalue = 8e12\nsource = "data sheet"', "[spec]\nhbm = 8e12", "spec.hbm is 8000000000000.0, not a"),
    ("floor_s = 5e-6", "floor_s = [5e-6]", "small.floor_s is [5e-06], not a number, as in h100.toml"),
    ('aliases = ["b200-180g"]', 'aliases = "b200-180g"', 'aliases is "b200-180g", not a list, as in h100.toml'),
    ('like = "h200"', "like = 200", "like is 200, not a string, as in h100.toml"),
    ('like = "h200"', "", "all_reduce is missing: state it, or like = "),
]


@cases(("old", "new", "says"), WRONG)
def test_a_wrong_type_in_the_file_of_a_gpu_is_one_line(folder: Path, old: str, new: str, says: str) -> None:
    assert old in B200
    write(folder, B200.replace(old, new))
    with pytest.raises(UserError, match=re.escape(f"{folder / 'b200.toml'}: {says}")):
        quantities.gpu("b200")
    assert quantities.gpu("h200").sms == 132  # a broken file costs its own kind alone


def test_every_kind_of_gpu_has_its_form_and_no_table_of_one_run(tmp_path: Path) -> None:
    for kind in quantities.gpu_kinds():
        assert quantities.gpu(kind).sms > 0
        with pytest.raises(UserError, match=r"describes a GPU kind: put it into harness/engines/costs/tables .* --gpu"):
            quantities.quantities(kind, str(quantities.TABLES / f"{kind}.toml"))
    (mine := tmp_path / "b300.toml").write_text(B200)
    with pytest.raises(UserError, match="describes a GPU kind"):
        quantities.gpu("h100", str(mine))
