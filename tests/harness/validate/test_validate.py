"""Measured runs beside ours: files that are read or refused, errors that are counted right, captions that say it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from harness.answers.table import laid
from harness.cli.app import main
from harness.engines.costs import quantities
from harness.policy.types import UserError
from harness.rows import checked
from harness.validate import idle, measured, names
from harness.validate.loads import BLOCK_TOKENS, PROMPTS, Batch, Closed, Poisson, Setting
from harness.validate.measured import Case
from harness.validate.page import page
from harness.validate.validate import AIMS, SEEDS, ours, points, refits, scores, sides, unscored, within, worst
from tests.bench import ok
from tests.cases import cases
from tests.harness.engines.servers.test_stub import fails
from traces.prefix import seen_tokens

CLOSED = "backend,backend_version,model_path,system,isl,osl,concurrency,tp_size,silicon_ttft_ms,silicon_tpot_ms"
LOOP = "vllm,0.12.0,llama-3.1-8b,h100_sxm,512,32,4.0,1,50,8"
POISSON = (
    "model,gpu,tp,mbt,mem,stage,real_e2e_mean,real_ttft_mean,stage_rates_s,system_tokens,question_tokens,"
    "output_tokens,max_num_seqs"
)
STAGE = "llama-3.1-8b,h100,1,2048,0.9,0,500,20,2x20;4x30,100,100,51,128"
OFFLINE = "Hardware,Num of Hardware,Framework,Model,Input Output Length,Batch Size,Latency"
BATCH = "Nvidia H100 GPU,1,vLLM,mistralai/Mistral-7B-v0.1,64,8,1.5"
POOLS = "model,tp,kv_blocks,block_tokens,gpu,engine,gpu_memory_utilization,max_num_batched_tokens"
POOL = "llama-2-7b,1,7463,16,h100-80g,vllm 0.15.1,0.9,2048"
FOUR = Setting("vllm-0.12", "h100", "llama-3.1-8b", 1, Closed(4, 512, 32))  # as LOOP states


def file(folder: Path, *lines: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def case(setting: Setting, stage: int | None = None) -> Case:
    return Case("made.csv", 1, setting, stage, {}, False, {})


# ------------------------------------------------------------------ reading


def test_a_row_of_each_form(tmp_path: Path) -> None:
    for name, lines in {"a": (CLOSED, LOOP), "b": (POISSON, STAGE), "c": (OFFLINE, BATCH), "d": (POOLS, POOL)}.items():
        file(tmp_path, *lines, name=f"{name}.csv")
    loop, stage, batch, pool = measured.cases(tmp_path)
    assert loop.setting == FOUR
    assert loop.measured == pytest.approx({"ttft": 0.05, "tpot": 0.008, "e2e": 0.05 + 31 * 0.008})
    assert stage.setting.load == Poisson(((2.0, 20.0), (4.0, 30.0)), 100, 200, 51)
    assert (stage.setting.config.chunk_tokens, stage.setting.config.batch_cap, stage.stage) == (2048, 128, 0)
    assert stage.measured == pytest.approx({"ttft": 0.02, "tpot": 0.48 / 50, "e2e": 0.5})
    assert batch.setting.load == Batch(8, 64, 64)
    assert batch.measured == pytest.approx({"throughput": 8 * 128 / 1.5})
    assert (pool.setting.load, pool.measured) == (None, {"kv_blocks": 7463})
    assert [case.row for case in (loop, stage, batch, pool)] == [2, 2, 2, 2]
    assert not any(case.fitted for case in (loop, stage, batch, pool))


@cases(
    ("header", "row", "message"),
    [
        (CLOSED, LOOP.replace(",50,", ",fast,"), 'silicon_ttft_ms is "fast", not a number above 0'),
        (CLOSED, LOOP.replace(",50,", ",nan,"), 'silicon_ttft_ms is "nan", not a number above 0'),
        (CLOSED, LOOP.replace("4.0", "4.5"), 'concurrency is "4.5", not a whole number'),
        (CLOSED, LOOP + ",1", "11 values for 10 columns"),
        (CLOSED, LOOP.rpartition(",")[0], "9 values for 10 columns (silicon_tpot_ms is the last)"),
        (POISSON, STAGE.replace("2x20;4x30", "2x20;4"), 'stage_rates_s is "2x20;4", not RATExSECONDS'),
        (POISSON, STAGE.replace("2x20;4x30", "0x20"), 'stage_rates_s is "0x20", not RATExSECONDS'),
        (POISSON, STAGE.replace(",0.9,0,", ",0.9,2,"), 'stage is "2", not -1 (all) or the number of'),
        (POISSON, STAGE.replace(",0.9,0,", ",0.9,²,"), 'stage is "²", not -1 (all) or the number of'),
        (POISSON, STAGE.replace(",0.9,", ",1e9,"), 'mem is "1e9", not a share, at most 1'),
        (POISSON, STAGE.replace(",500,", ",1e300,"), 'real_e2e_mean is "1e300", not between a nanosecond'),
        (POISSON, STAGE.replace(",500,", ",19,"), 'real_e2e_mean is "19", not at least real_ttft_mean'),
        (POISSON, STAGE.replace(",2048,", f",{10**20},"), f'mbt is "{10**20}", not at most 2,147,483,647'),
        (POISSON, STAGE.replace("2x20;4x30", ";".join(["5x60"] * 2001)), "not at most 100 stages"),
        (POISSON, STAGE.replace("2x20;4x30", "1000x1000"), "not at most 200,000 requests"),
        (POISSON, STAGE.replace("2x20;4x30", "0.01x1;9x9"), "not at least 20 requests, where they are scored"),
        (CLOSED, LOOP.replace(",32,", ",1e9,"), 'osl is "1e9", not a length of requests of at most 8,192'),
        (CLOSED, LOOP.replace("4.0", "1e300"), 'concurrency is "1e300", not at most 20,000'),
        (OFFLINE, BATCH.replace(",64,", ",1e9,"), 'Input Output Length is "1e9", not a length'),
        (OFFLINE, BATCH.replace(",8,", ",1e300,"), 'Batch Size is "1e300", not at most 200,000'),
        (POOLS, POOL.replace(",0.9,", ",1e300,"), 'gpu_memory_utilization is "1e300", not a share'),
        (POOLS, POOL.replace(",16,", ",32,"), 'block_tokens is "32", not 16'),
    ],
)
def test_a_bad_value_skips_its_row_and_no_other(tmp_path: Path, header: str, row: str, message: str) -> None:
    good = {CLOSED: LOOP, POISSON: STAGE, OFFLINE: BATCH, POOLS: POOL}[header]
    read = measured.read(file(tmp_path, header, good, row, good))
    assert [case.row for case in read.cases] == [2, 4]
    (skip,) = read.skipped
    assert str(skip).startswith("mine.csv:3: ")
    assert message in str(skip)


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, f"{CLOSED},osl", f"{LOOP},64")
    assert fails("validate", path, "--no-plot") == f"error: {path}:1: column osl is there twice\n"


@cases("given", ["--counts 0", "--table nope.toml", "--window-s 5", "--seeds 5", "--runs x"])
def test_options_of_servers_are_refused_without_them(given: str, tmp_path: Path) -> None:
    text = fails("validate", file(tmp_path, CLOSED, LOOP), "--no-plot", *given.split())
    assert f"{given.partition(' ')[0]} is for --engine NAME" in text


def test_what_we_lack_is_skipped_counted_and_listed_with_the_nearest_names(tmp_path: Path) -> None:
    file(tmp_path, "a,b", "1,2", name="foreign.csv")
    file(tmp_path, CLOSED, LOOP.replace("h100_sxm", "h1000"), LOOP.replace("llama-3.1-8b", "llama-9b"), LOOP)
    text = ok("validate", tmp_path, "--no-plot", "--all")
    assert "1 cases of 1 files, 3 skipped" in text
    assert "skipped foreign.csv:1: no known columns; the nearest form lacks model" in text
    assert 'skipped mine.csv:2: unknown GPU "h1000"; nearest: h100,' in text
    assert 'skipped mine.csv:3: unknown model "llama-9b"; nearest: llama-7b' in text
    file(tmp_path, CLOSED, LOOP.replace("0.12.0", "0.2"), LOOP)
    file(tmp_path, OFFLINE, BATCH.replace("vLLM", "TRT"), name="offline.csv")
    loaded = measured.read(tmp_path)
    assert [case.setting.engine for case in loaded.cases] == ["vllm-0.12"]
    assert [str(skip).partition(";")[0] for skip in loaded.skipped] == [
        "foreign.csv:1: no known columns",
        'mine.csv:2: unknown engine "vllm-0.2"',
        'offline.csv:2: unknown engine "TRT"',
    ]


def test_a_missing_shape_is_given_by_a_file_or_by_columns(tmp_path: Path) -> None:
    shape = "layers = 32, hidden = 4096, q_heads = 32, kv_heads = 8, head_dim = 128, ffn = 14336, vocab = 128256"
    (tmp_path / "mine.toml").write_text(
        f'[shapes]\n"llama-9b" = {{ {shape}, gated = true, tied = false, context = 131072, sampled = true }}\n', "utf-8"
    )
    path = file(tmp_path, CLOSED, LOOP.replace("llama-3.1-8b", "llama-9b"), LOOP)
    text = ok("validate", path, "--shape", tmp_path / "mine.toml", "-o", tmp_path / "fig")
    assert "2 cases of 1 files" in text
    assert all((tmp_path / f"fig.{ending}").is_file() for ending in ("pdf", "png"))
    kept = pd.read_csv(tmp_path / "fig.csv", comment="#")
    assert kept["model"].tolist() == ["llama-9b"] * 3 + ["llama-3.1-8b"] * 3
    assert kept["ours"].tolist()[:3] == kept["ours"].tolist()[3:]  # dimensions are equal, whatever the name
    header = f"{CLOSED},{','.join(measured.SHAPE)}"
    (case_,) = measured.cases(file(tmp_path, header, f"{LOOP},32,4096,32,8,128,14336,128256"))
    assert case_.setting.shape._replace(sampled=True) == measured.cases(file(tmp_path, CLOSED, LOOP))[0].setting.shape


def test_what_holds_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no CSV of measured runs there"):
        measured.cases(tmp_path)
    with pytest.raises(UserError, match=r"mine.csv:1: no known columns; the nearest form lacks .*osl"):
        measured.cases(file(tmp_path, CLOSED.replace("osl", "length"), LOOP))
    with pytest.raises(UserError, match="no rows in its CSVs"):
        measured.cases(file(tmp_path, CLOSED))
    result = CliRunner().invoke(main, ["validate"], env={"MEASURED_DIR": ""})
    assert result.exit_code == 2
    assert "MEASURED_DIR" in result.stderr


def test_rows_that_a_profile_was_fitted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, CLOSED, LOOP, LOOP.replace(",32,", ",64,"), LOOP.replace(",512,", ",256,"))
    wanted: list[dict[str, str | list[str | float]]] = []
    monkeypatch.setattr(quantities, "fitted", lambda _host: wanted)
    assert [case.fitted for case in measured.cases(path)] == [False] * 3
    wanted.append({"file": "other.csv"})
    assert [case.fitted for case in measured.cases(path)] == [False] * 3
    wanted.append({"file": "mine.csv", "osl": [32, 128], "isl": [512], "concurrency": [4], "backend": ["vllm"]})
    assert [case.fitted for case in measured.cases(path)] == [True, False, False]
    wanted.append({"file": "mine.csv", "isl": [256]})
    assert [case.fitted for case in measured.cases(path)] == [True, False, True]
    wanted.append({"file": "mine.csv"})
    assert [case.fitted for case in measured.cases(path)] == [True] * 3


def test_prompts_of_a_poisson_run_come_again_and_begin_alike() -> None:
    jobs = Poisson(((10.0, 20.0),), 100, 200, 51).jobs()
    assert jobs.prefix is not None
    assert jobs.prefix.block_tokens == BLOCK_TOKENS
    ids = jobs.prefix.ids.reshape(len(jobs), 200 // BLOCK_TOKENS)
    assert (ids[PROMPTS:] == ids[:-PROMPTS]).all()
    assert (ids[:, :6] == ids[0, :6]).all()  # 96 tokens of the 100 with which all begin
    assert len(np.unique(ids[:, 6:])) == PROMPTS * 6
    seen = seen_tokens(jobs.prefix, jobs.prompt_tokens)
    assert seen[0] == 0
    assert set(seen[1:PROMPTS].tolist()) == {96}
    assert set(seen[PROMPTS:].tolist()) == {192}


# ------------------------------------------------------------------ ours


def test_our_own_numbers_have_no_error(tmp_path: Path) -> None:
    """Our engine's own numbers, written down as measured, come back at 0 %, each setting run once."""
    (mine,) = ours(measured.cases(file(tmp_path, CLOSED, LOOP)))
    row = LOOP.rpartition(",50,")[0] + f",{1e3 * mine['ttft']!r},{1e3 * mine['tpot']!r}"
    path = file(tmp_path, CLOSED, row, LOOP)
    told: list[tuple[int, int]] = []
    frame = points(measured.cases(path), lambda done, total: told.append((done, total)))
    assert told == [(k, 1 + SEEDS) for k in range(SEEDS + 2)]
    first = frame[frame["row"] == 2]
    np.testing.assert_allclose(first["error"], 0.0, atol=1e-9)  # E2E too: it is TTFT and the gaps
    assert frame[(frame["row"] == 3) & (frame["metric"] == "ttft")]["error"].item() == mine["ttft"] / 0.05 - 1


def test_throughput_of_a_batch_is_its_tokens_over_its_time() -> None:
    single, many = ours([case(Setting("vllm-0.6", "h100", "llama-3.1-8b", 1, Batch(n, 64, 64))) for n in (1, 16)])
    assert single["throughput"] < many["throughput"] < 16 * single["throughput"]


def test_stages_make_the_whole() -> None:
    setting = Setting("vllm-0.15", "h100", "llama-3.1-8b", 1, Poisson(((2.0, 30.0), (8.0, 30.0)), 100, 200, 50))
    assert setting.load is not None
    jobs = setting.load.jobs()
    early = int((jobs.arrival_s < 30.0).sum())
    whole, *stages = ours([case(setting, stage) for stage in (None, 0, 1)])
    for metric in ("ttft", "tpot", "e2e"):
        parts = early * stages[0][metric] + (len(jobs) - early) * stages[1][metric]
        assert whole[metric] == pytest.approx(parts / len(jobs))
    assert stages[0]["tpot"] < stages[1]["tpot"]


def test_errors_are_counted_by_engine_gpu_metric_and_side() -> None:
    frame = pd.DataFrame(
        [
            {"engine": "b", "gpu": "g", "metric": "tpot", "error": error, "fitted": fitted, "unscored": ""}
            for error, fitted in ((0.1, False), (-0.2, False), (0.4, False), (0.05, True))
        ]
        + [
            {"engine": "a", "gpu": "g", "metric": metric, "error": -0.5, "fitted": False, "unscored": why}
            for metric, why in (("ttft", ""), ("tpot", "start unknown"))
        ]
    ).assign(spread=0.02, real_spread=float("nan"))
    header, *lines = scores(frame)
    assert header[:8] == ("engine", "gpu", "metric", "rows", "cases", "median %", "P95 %", "bias %")
    assert header[8:] == ("spread of 8 seeds %", "measured spread %")
    assert lines == [
        ("a", "g", "ttft", "left out", "1", "50.0", "50.0", "-50.0", "2.0", "-"),
        ("a", "g", "tpot", "start unknown", "1", "-", "-", "-", "-", "-"),
        ("b", "g", "tpot", "left out", "3", "20.0", "38.0", "+10.0", "2.0", "-"),
        ("b", "g", "tpot", "fitted", "1", "5.0", "5.0", "+5.0", "2.0", "-"),
    ]


def test_refits_stand_beside_their_aims(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame([{"engine": engine} for engine in ("vllm-0.6", "sglang-0.5", "vllm-0.15")])
    held = {"e2e": {"median": 0.05, "p95": 0.15}, "ttft": {"median": 0.02, "p95": 0.251}}
    monkeypatch.setattr(quantities, "held", lambda name: {"throughput": held["e2e"]} if name == "vllm-0.6" else held)
    assert [line.split(": ", 1)[1] for line in refits(frame)] == [
        "ttft 2.0/25.1 (missed: 10/25), e2e 5.0/15.0 (met: 5/15)",
        "ttft 2.0/25.1, e2e 5.0/15.0",
        "throughput 5.0/15.0 (met: 6/18)",
    ]


def test_the_profiles_meet_their_aims_on_rows_that_a_refit_left_out() -> None:
    for engine, aims in AIMS.items():
        for metric, aim in aims.items():
            assert within(quantities.held(engine)[metric], aim), (engine, metric)
    assert set(quantities.held("vllm-0.15")) == {"ttft", "tpot", "e2e"}


def test_cases_far_off_are_counted_on_both_sides_by_whole_requests() -> None:
    pairs = {"e2e": [(1.0, 1.29), (1.0, 1.31), (1.31, 1.0), (1.29, 1.0)], "ttft": [(1.0, 9.0)]}
    pairs["throughput"] = [(1.31, 1.0), (1.0, 1.31)]
    rows = [(metric, *pair) for metric, each in pairs.items() for pair in each]
    frame = pd.DataFrame(rows, columns=["metric", "measured", "ours"])
    assert sides(frame) == (2, 2, 6)


def test_a_row_that_repeats_has_an_error_without_noise_and_two_spreads(tmp_path: Path) -> None:
    """Its error is that of the fits' steps; ours spreads over seeds, what was measured over its rows."""
    rows = [LOOP.replace(",50,8", f",50,{ms}") for ms in (7, 9) * 4]
    path = file(tmp_path, CLOSED, *rows)
    cases = measured.cases(path)
    frame = points(cases)
    plain = ours(cases, quantities.host("vllm-0.12", "h100"))
    gaps = frame[frame["metric"] == "tpot"]
    assert gaps["ours"].tolist() == [row["tpot"] for row in plain]
    assert gaps["ours"].nunique() == 1
    drawn = [ours(cases[:1], draw=k)[0]["tpot"] for k in range(SEEDS)]
    assert len(set(drawn)) == SEEDS
    assert gaps["spread"].iloc[0] == pytest.approx(np.std(drawn, ddof=1) / plain[0]["tpot"])
    assert gaps["real_spread"].iloc[0] == pytest.approx(np.std([7, 9] * 4, ddof=1) / 8)
    assert "30 % slower: 0; 30 % faster: 0; of 8 cases" in ok("validate", path, "--no-plot")


def test_no_setting_has_the_noise_of_another() -> None:
    """Equal loads on equal machines but for a flag that does nothing: drawn alike, they would err alike."""
    both = [case(FOUR), case(FOUR._replace(flags=(("batch_cap", 512),)))]
    first, other = ours(both, draw=0)
    assert first["tpot"] != other["tpot"]
    alone, beside = ours(both)
    assert alone == beside


def test_tails_are_scored_where_rows_have_them(tmp_path: Path) -> None:
    path = file(tmp_path, POISSON + ",real_ttft_p90,real_e2e_p99", STAGE + ",30,900", STAGE + ",,")
    first, second = measured.cases(path)
    assert {k: first.measured[k] for k in ("ttft_p90", "e2e_p99")} == pytest.approx({"ttft_p90": 0.03, "e2e_p99": 0.9})
    assert set(second.measured) == {"ttft", "tpot", "e2e"}
    (mine, _) = ours([first, second])
    assert mine["ttft"] < mine["ttft_p90"] <= mine["ttft_p99"]
    assert set(points([first], seeds=0)["metric"]) == {"ttft", "tpot", "e2e", "ttft_p90", "e2e_p99"}


def test_ttft_of_a_closed_loop_on_vllm_is_not_scored() -> None:
    """No source says how its clients begin."""
    assert unscored(FOUR, "ttft") == "start unknown"
    assert not unscored(FOUR, "tpot")
    assert not unscored(FOUR._replace(engine="sglang-0.5"), "ttft")
    assert not unscored(FOUR._replace(load=Closed(4, 512, 32, first=True)), "ttft")
    assert not unscored(FOUR._replace(load=Poisson(((1.0, 9.0),), 16, 32, 8)), "ttft")


def test_the_page_has_the_ten_worst_rows_and_their_conditions(tmp_path: Path) -> None:
    rows = [LOOP.replace(",50,8", f",50,{k}") for k in range(1, 13)]
    frame = points(measured.cases(file(tmp_path, CLOSED, *rows)), seeds=0)
    listed = worst(frame)
    assert len(listed) == 10
    off = np.abs(np.log(listed["ours"] / listed["measured"]))
    assert (np.diff(off) <= 0).all()
    kept = idle.Footprint(144 * 2**20, 5, 16_000, 0)
    skipped = [names.Skipped("b.csv", 3, "unknown GPU")]
    text = page(frame, skipped, ["static: met"], kept, laid)
    assert text.count("| 1 x h100 | llama-3.1-8b | 4 clients, 512+32 | defaults | left out |") == 10
    assert "12 cases of 1 files; 1 skipped." in text
    assert "- b.csv:3: unknown GPU\n" in text
    assert "- static: met\n" in text


def test_every_measured_row_is_replayed(measured_dir: Path) -> None:
    cases = measured.cases(measured_dir)
    files = sorted((measured_dir / "single").glob("*.csv"))
    assert len(cases) == sum(len(path.read_text("utf-8").splitlines()) - 1 for path in files)
    assert {checked.checked(case.setting.gpu, case.setting.engine) for case in cases} == {True}
    frame = points(cases, seeds=0)
    assert np.isfinite(frame[["measured", "ours"]].to_numpy(np.float64)).all()
    assert (frame["ours"] > 0).all()
    pools = frame[frame["metric"] == "kv_blocks"]
    assert len(pools) == 3
    assert pools["error"].abs().max() < 0.01
    slower, _, of = sides(frame)
    assert (slower, of) == (0, len(cases) - len(pools))
    gaps = frame[frame["metric"] == "tpot"].groupby("engine")["error"]
    assert gaps.apply(lambda error: error.abs().median()).max() < 0.2  # far from a proof: `bench validate` tells
