"""Traces: golden statistics, conversion, and every way in which a table can be wrong."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli import lists
from harness.policy.types import UserError
from harness.run.setup import load_trace
from tests.cases import cases
from tests.there import there
from traces import drawing, readers, schema, synthetic
from traces.convert import convert
from traces.load import Trace, manifest, of_table, present, sized, trace
from traces.stats import stats

COLUMNS = {"arrival_s": "t", "prompt_tokens": "in", "output_tokens": "out", "model": "m"}


def csv(path: Path, rows: Sequence[str], header: str = "t,in,out,m") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


# ---------------------------------------------------------------- the real trace


@pytest.fixture(scope="module")
def real(traces_dir: Path) -> Trace:
    arena = trace("arena-chat")
    assert arena.notice is None, "TRACES_DIR is set but holds no Arena-Chat"
    return arena


def test_arena_statistics(real: Trace) -> None:
    s = stats(real)
    assert (s["requests"], s["models"], s["span_s"]) == (1500, 27, 600.0)
    assert real.arrival_s[[0, -1]].tolist() == [0.0, 600.0]
    for column, golden in {
        "prompt_tokens": {"mean": 136.265, "p50": 40, "p99": 902.27, "max": 1021, "min": 2},
        "output_tokens": {"mean": 256.198, "p50": 211, "p99": 785, "max": 977, "min": 2},
    }.items():
        assert s[column] == pytest.approx(golden, abs=6e-4)
    assert s["one_token_outputs"] == 0
    assert (real.output_tokens == 2).sum() == 13
    assert s["iat_cv"] == pytest.approx(1.1044, abs=5e-5)
    assert s["minute_cv"] == pytest.approx(0.1318, abs=5e-5)
    assert s["top1_share"] == pytest.approx(0.1973, abs=5e-5)
    assert s["bottom60_share"] == pytest.approx(0.174, abs=5e-4)
    assert s["minute_cv_models"] == pytest.approx([0.631, 0.926, 1.725], abs=5.1e-4)
    assert s["active_fraction"] == pytest.approx(0.615, abs=5e-4)
    assert (real.tier, real.licence) == ("replayed", "Apache-2.0")
    assert real.where(0).endswith("arena_vtc_real_trace.csv:2")


def test_another_file_under_the_name_of_the_real_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv(tmp_path / "arena_vtc_real_trace.csv", ["0,0,a,1,1"], "req_id,req_time,adapter_dir,prompt_len,output_len")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    with pytest.raises(UserError, match="sha256 differs"):
        trace("arena-chat")


# ---------------------------------------------------------------- samples and the stand-in


@cases("name", ["arena-like", "sample"])
def test_samples_are_what_the_generator_draws(name: str) -> None:
    kept = schema.read(Path(str(present(name))))
    again = drawing.table(name)
    assert kept.column_names == again.column_names
    for column in again.column_names:
        if column == "arrival_s":  # another libm may differ in the last bit
            np.testing.assert_allclose(kept[column].to_numpy(), again[column].to_numpy(), rtol=1e-12)
        else:
            assert kept[column].combine_chunks().to_pylist() == again[column].combine_chunks().to_pylist()
    assert schema.metadata(kept) == schema.metadata(again)


@cases("name", sorted(synthetic.PRESETS))
def test_the_manifest_tells_the_truth_of_what_is_drawn(name: str) -> None:
    loaded, entry = load_trace(name), manifest()[name]
    facts = (loaded.tier, loaded.licence, len(loaded.models), len(loaded), loaded.span_s)
    assert facts == tuple(entry[key] for key in ("tier", "licence", "models", "requests", "span_s"))


def test_without_the_real_trace_the_fitted_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    if present("arena-chat") is not None:
        pytest.skip("traces/data/ holds the real one")
    stand_in = trace("arena-chat")
    assert (stand_in.name, stand_in.tier) == ("arena-like", "synthetic")
    notice = there(stand_in.notice)
    assert "synthetic" in notice
    assert "VTC-artifact" in notice
    assert "\n" not in notice


# ---------------------------------------------------------------- Aegaeon's released workloads

RELEASED = [
    "Request Time,Model Name,Input Length,Output Length",
    "00:00:00.250,synth_model_02,93,233",
    "00:01:00.500,synth_model_00,5000,100",
    "00:01:01.000,synth_model_02,7,16",
]


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    (tmp_path / "aegaeon_synth").mkdir()
    (tmp_path / "aegaeon_synth" / "synth-4-0.1-1.0-1.0.csv").write_text("\n".join(RELEASED) + "\n")
    return "aegaeon-synth/4-0.1-1.0-1.0"


def test_a_released_workload_is_read_as_it_is(released: str) -> None:
    loaded = load_trace.__wrapped__(released)
    assert (loaded.name, loaded.tier, loaded.span_s, loaded.ordered) == (released, "synthetic", 120.0, True)
    assert loaded.models == tuple(f"synth_model_{k:02d}" for k in range(4))  # two of them idle
    assert loaded.arrival_s.tolist() == [0.25, 60.5, 61.0]
    assert loaded.model.tolist() == [2, 0, 2]
    assert (loaded.prompt_tokens.tolist(), loaded.output_tokens.tolist()) == ([93, 5000, 7], [233, 100, 16])
    cut = load_trace.__wrapped__(f"{released}+max_tokens=4096")
    assert (cut.prompt_tokens.tolist(), cut.output_tokens.tolist()) == ([93, 3996, 7], [233, 100, 16])
    assert "1 prompts cut" in cut.note
    assert cut.sha256 != loaded.sha256


@cases(
    ("name", "generator"),
    [
        ("40-0.5-2.0-1.0", "aegaeon-like+models=40+rate_rps=0.5+lengths=sharegpt-ix2"),
        ("8-0.1-1.0-2.0+max_tokens=2048", "aegaeon-like+models=8+rate_rps=0.1+lengths=sharegpt-ox2+max_tokens=2048"),
    ],
)
def test_without_a_released_workload_its_kind_is_drawn(released: str, name: str, generator: str) -> None:
    loaded = load_trace.__wrapped__(f"aegaeon-synth/{name}")
    assert f"using {generator}; for the real one" in there(loaded.notice)
    assert loaded.maker == str(synthetic.preset(generator))
    assert sized(f"aegaeon-synth/{name}", 8) == generator
    assert sized(released, 8) == released


def test_the_name_of_a_released_workload_is_checked(released: str) -> None:
    for name, says in {
        "aegaeon-synth": "is a family",
        "aegaeon-synth/forty": "not M-RATE-IN-OUT",
        f"{released}+span_s=4": "is not \\+max_tokens=N",
    }.items():
        with pytest.raises(UserError, match=says):
            load_trace.__wrapped__(name)


def test_the_released_workloads_are_what_the_notes_say(traces_dir: Path) -> None:
    assert present("aegaeon-synth"), f"{traces_dir} holds none"
    plain, long = (trace(f"aegaeon-synth/{x}-1.0") for x in ("80-0.1-1.0", "40-0.1-2.0"))
    assert (len(plain), len(plain.models), plain.span_s) == (839, 80, 120.0)
    assert plain.prompt_tokens.mean() == pytest.approx(714, abs=0.5)
    assert plain.output_tokens.mean() == pytest.approx(302.5, abs=0.5)
    assert (long.prompt_tokens.mean(), long.output_tokens.mean()) == pytest.approx((1379.7, 287.5), abs=0.1)
    counts = np.bincount(plain.model, minlength=80)
    assert counts.min() > 0
    assert counts.max() <= 12  # its generator draws 12 gaps a model and stops at 120 s: 10.5 on average, not Poisson


@cases("lengths", ["sharegpt-ix2", "sharegpt-ox2"])
def test_doubled_lengths_are_doubled(lengths: str) -> None:
    plain, doubled = (drawing.draw(f"aegaeon-like+max_tokens=99999{more}", 3) for more in ("", f"+lengths={lengths}"))
    x, y = (2, 1) if lengths.endswith("ix2") else (1, 2)
    np.testing.assert_allclose(doubled.prompt_tokens, x * plain.prompt_tokens, atol=1)
    np.testing.assert_allclose(doubled.output_tokens, y * plain.output_tokens, atol=1)
    np.testing.assert_array_equal(plain.arrival_s, doubled.arrival_s)


# ---------------------------------------------------------------- pickles


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo owned > owned",)


PICKLES = {
    "a program": ("evil.pkl", pickle.dumps(Evil())),
    "under another name": ("evil.csv", pickle.dumps(Evil())),
    "records as text": ("old.pickle", pickle.dumps([1], 0)),
}


@cases(("name", "data"), PICKLES)
def test_a_pickle_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    for read in (readers.converted, partial(readers.read, "arena"), partial(convert, columns=COLUMNS)):
        with pytest.raises(UserError, match=rf"^{name}: a pickle, which is not read.*write its records as CSV"):
            read(Path(name))
    assert not Path("owned").exists()


# ---------------------------------------------------------------- readers of released formats


BURSTGPT = {
    "6 columns": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        ["5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,300,0,300,API log", "118,GPT-4,417,276,693,API log"],
    ),
    "8 columns": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        [
            "5,a,1.5,ChatGPT,472,18,490,Conversation log",
            "45,,0,GPT-4,300,0,300,API log",
            "118,,2,GPT-4,417,276,693,API log",
        ],
    ),
}


@cases(("header", "lines"), BURSTGPT)
def test_burstgpt_leaves_out_what_failed(tmp_path: Path, header: str, lines: list[str]) -> None:
    rows = readers.read("burstgpt", csv(tmp_path / "BurstGPT_1.csv", lines, header))
    loaded = of_table(rows, "BurstGPT_1.csv")
    assert (loaded.name, loaded.tier, loaded.licence) == ("BurstGPT_1", "replayed", "CC-BY-4.0")
    assert [loaded.models[k] for k in loaded.model] == ["ChatGPT", "GPT-4"]
    assert (loaded.prompt_tokens.tolist(), loaded.output_tokens.tolist()) == ([472, 417], [18, 276])
    assert np.floor(loaded.arrival_s).tolist() == [5, 118]  # spread inside their second
    assert schema.metadata(rows)["dropped"] == {"without output tokens": 1}


def test_what_is_asked_stands_in_place_of_what_a_reader_says(tmp_path: Path) -> None:
    header, lines = BURSTGPT["6 columns"]
    path = csv(tmp_path / "b.csv", lines, header)
    assert of_table(readers.read("burstgpt", path, name="mine", span_s=500.0), "x").span_s == 500.0
    with pytest.raises(UserError, match=r"b\.csv:3: column \"Response tokens\" is 0"):
        readers.read("burstgpt", path, drop_bad=False)
    with pytest.raises(UserError, match="hyperbolic takes no --sort"):
        readers.read("hyperbolic", path, sort=True)
    with pytest.raises(UserError, match=r"gone\.csv: no such file"):
        readers.read("hyperbolic", tmp_path / "gone.csv")


def test_every_reader_of_the_manifest_is_there_and_says_what_it_reads() -> None:
    assert {entry["reader"] for entry in manifest().values() if "reader" in entry} <= set(readers.names())
    assert [name for name, what in lists.listing(readers) if not what.endswith(".")] == []


BROKEN = {
    "syntax": ("def read(:\n", "SyntaxError: "),
    "import": ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "empty": ('"""Nothing."""\n', "it has no COLUMNS, no FIELDS and no function `read`"),
}


def test_a_broken_reader_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "whole.py").write_text('"""What it reads.\n\nMore."""\n\n\ndef read(path): ...\n')
    monkeypatch.setattr(readers, "FOLDER", tmp_path)
    monkeypatch.setattr(readers, "__path__", [str(tmp_path)])
    told = dict(lists.listing(readers))
    assert told.keys() == {*BROKEN, "whole"}
    assert told["whole"] == "What it reads."
    for name, (_, says) in BROKEN.items():
        assert told[name].startswith(f"traces/readers/{name}.py is broken: ")
        assert says in told[name]
        assert "\n" not in told[name]
    with pytest.raises(UserError, match=r'no reader "burstgpt" \(there is: empty, import, syntax, whole\)'):
        readers.find("burstgpt")


LOG = """\"\"\"A gateway's log.\"\"\"

KEYS = ({"came", "in", "out"},)
FIELDS = {"arrival_s": "came", "model": ("alias", "name"), "prompt_tokens": "in", "output_tokens": "usage.out"}
OPTIONS = {"unit": 1e-3, "licence": "CC0"}


def skip(record):
    return "refused" if record.get("status") == 429 else None
"""


def test_a_new_reader_is_a_file_that_maps_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gateway.py").write_text(LOG)
    monkeypatch.setattr(readers, "FOLDER", tmp_path)
    monkeypatch.setattr(readers, "__path__", [str(tmp_path)])
    rows = [
        {"came": 2500, "name": "b", "alias": "", "in": 5, "usage": {"out": 2}, "out": None},
        {"came": 1000, "name": "b", "alias": "a", "in": 7, "usage": {"out": 3}, "out": None},
        {"came": 1500, "name": "b", "in": 7, "usage": {"out": 3}, "status": 429},
    ]
    log = tmp_path / "gateway.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, report = readers.converted(log)
    assert table["arrival_s"].to_pylist() == [1.0, 2.5]
    assert table["model"].to_pylist() == ["a", "b"]
    assert table["output_tokens"].to_pylist() == [3, 2]
    assert report == "gateway.jsonl read as a log of gateway; left out: 1 refused"
