"""Measured rows of quantised models and mixtures: what is read of them, and how they are judged."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from harness.cli.app import main
from harness.validate import names, validate
from harness.validate.loads import Closed, Setting
from harness.validate.measured import ENGINES, Case, read, read_all
from harness.validate.names import UnknownName
from harness.validate.replayed import replayed

HEAD = (
    "backend,backend_version,model_path,system,precision,isl,osl,gemm_quant_mode,moe_quant_mode,batch_size,tp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
OSS = "vllm,0.18.0,openai/gpt-oss-120b,h200_sxm,fp4,1024,1024,nvfp4,nvfp4,4.0,1.0,,1.0,1.0,90.0,6.0"
ALONE = "vllm,0.15.1,openai/gpt-oss-120b,h200_sxm,fp4,1024,1024,nvfp4,nvfp4,4.0,2.0,,2.0,1.0,90.0,6.0"
LLAMA = "sglang,0.5.6.post2,meta-llama/Llama-3.1-8B-Instruct,h200_sxm,fp8,1000,100,fp8_block,,8.0,1.0,,1.0,1.0,90.0,6.0"


def file(folder: Path, *lines: str) -> Path:
    """Write measured rows under the source's columns."""
    path = folder / "closed_loop.csv"
    path.write_text("\n".join((HEAD, *lines, "")))
    return path


def test_the_checkpoint_states_its_format(tmp_path: Path) -> None:
    cases = read(file(tmp_path, OSS, ALONE, LLAMA)).cases
    assert [case.group for case in cases] == [
        "vllm-0.18 as 0.15 | h200 | mxfp4 | MoE",
        "vllm-0.15 | h200 | mxfp4 | MoE",
        "sglang-0.5 | h200 | fp8_block | dense",
    ]
    stored = [case.setting.shape.formats for case in cases]
    assert [entry and entry.experts.name for entry in stored[:2]] == ["mxfp4", "mxfp4"]  # whatever the column says
    assert stored[2] is not None
    assert stored[2].ffn.name == "fp8_block"  # quantised when loaded: here the column counts
    assert cases[0].measured["e2e"] == pytest.approx(0.090 + ((819 + 1024) / 2 - 1) * 0.006)
    assert cases[2].measured["e2e"] == pytest.approx(0.090 + 99 * 0.006)
    assert not any(case.fitted for case in cases)


def test_rows_of_inferencex_have_its_conditions(tmp_path: Path) -> None:
    """`random-range-ratio: 0.8`, and `kv-cache-dtype: fp8` on the B200 alone (SemiAnalysisAI/InferenceX)."""
    rows = read(file(tmp_path, OSS, OSS.replace("h200_sxm", "b200_sxm"), LLAMA))
    here, there, other = (case.setting for case in rows.cases)
    assert (here.shape.kv_format, there.shape.kv_format) == ("bf16", "fp8")
    jobs = here.load.jobs()  # type: ignore[union-attr]
    for tokens in (jobs.prompt_tokens, jobs.output_tokens):
        assert int(0.8 * 1024) <= tokens.min() < tokens.max() <= 1024
    assert set(other.load.jobs().prompt_tokens) == {1000}  # type: ignore[union-attr]
    assert (here.load.first, other.load.first) == (True, False)  # type: ignore[union-attr]
    # utils/bench_serving/backend_request_func.py, `async_request_openai_completions`: temperature 0
    assert [setting.sampling for setting in (here, there, other)] == ["greedy", "greedy", "checkpoint"]


def test_the_first_wave_counts_where_its_source_counts_it() -> None:
    """All clients begin at once: the first tokens of that wave come later than those of any other."""
    loop = Setting("sglang-0.5", "h100", "llama-3.1-8b", 1, Closed(8, 512, 32))
    cases = [
        Case("made.csv", 1, loop._replace(load=Closed(8, 512, 32, first=first)), None, {}, False, {})
        for first in (False, True)
    ]
    without, with_ = validate.ours(cases)
    assert with_["ttft"] != without["ttft"]
    every = replayed(loop.config, Closed(8, 512, 32).jobs())
    assert with_["ttft"] == pytest.approx(float(every.ttft_s.mean()))
    assert without["ttft"] == pytest.approx(float(every.ttft_s[8:].mean()))


def test_a_column_says_how_clients_sampled(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEAD},sampling\n{LLAMA},greedy\n{LLAMA},\n")
    assert [case.setting.shape.sampled for case in read(path).cases] == [False, True]
    path.write_text(f"{HEAD},sampling\n{LLAMA},beam\n")
    (skipped,) = read(path).skipped
    assert 'sampling is "beam", not greedy or checkpoint' in skipped.why


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("tp_size", "2.0", "attention on 2 GPUs, experts on 1"),
        ("backend_version", "", "no version of the engine"),
        ("silicon_ttft_ms", "462000", "a mean TTFT of 462 s"),
        ("model_path", "openai/gpt-oss-121b", 'unknown model "openai/gpt-oss-121b"'),
        ("moe_tp_size", "0.0", 'moe_tp_size is "0.0", not a number above 0'),
        ("moe_ep_size", "3.0", "model "),
        ("system", "a100", 'GPU "a100" is a100-40g or a100-80g'),
    ],
)
def test_rows_without_a_counterpart_are_skipped(tmp_path: Path, column: str, value: str, why: str) -> None:
    values = dict(zip(HEAD.split(","), OSS.split(","), strict=True)) | {column: value}
    rows = read(file(tmp_path, ",".join(values.values()), OSS))
    assert len(rows.cases) == 1
    assert [skip.why.startswith(why) for skip in rows.skipped] == [True]


def test_a_version_that_nobody_measured_takes_the_one_before_and_says_so() -> None:
    assert names.generation("vllm", "0.15.1", ENGINES) == ("vllm-0.15", "vllm-0.15")
    assert names.generation("vLLM", "0.18.0", ENGINES) == ("vllm-0.15", "vllm-0.18 as 0.15")
    assert names.generation("vllm", "0.13.0", ENGINES) == ("vllm-0.12", "vllm-0.13 as 0.12")
    assert names.generation("vllm", "0.5.1", ENGINES) == ("vllm-0.6", "vllm-0.5 as 0.6")
    with pytest.raises(UnknownName):
        names.generation("trtllm", "1.0.0", ENGINES)


def test_groups_are_judged_by_tpot_and_throughput() -> None:
    def line(metric: str, error: float) -> dict[str, object]:
        return {"group": "vllm-0.15 | h200 | mxfp4 | MoE", "metric": metric, "error": error}

    good = [line(metric, 0.05) for metric in ("tpot", "e2e", "ttft")]
    slow = [line("tpot", 0.05), line("e2e", -0.4), line("ttft", 0.05)]  # 1 / 0.6: throughput is 67 % too high
    assert [row[-1] for row in validate.groups(pd.DataFrame(good))] == ["aim", "met"]
    assert validate.groups(pd.DataFrame(slow))[1][4:] == ("1", "5.0/5.0", "66.7/66.7", "+5.0", "5.0", "missed")
    assert validate.groups(pd.DataFrame([line("tpot", 0.1) | {"group": ""}])) == []


def test_several_folders_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    file(tmp_path / "a", OSS)
    file(tmp_path / "b", LLAMA, LLAMA)
    assert len(read_all([tmp_path / "a", tmp_path / "b"]).cases) == 3
    both = f"{tmp_path / 'a'}:{tmp_path / 'b'}"
    result = CliRunner().invoke(main, ["validate", "--no-plot"], env={"MEASURED_DIR": both})
    assert result.exit_code == 0, result.output
    assert "3 cases of 1 files" in result.stdout
    assert "quantised models and mixtures: no row was fitted on" in result.stdout
