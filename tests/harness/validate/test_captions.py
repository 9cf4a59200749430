"""Captions of tables that no measured run has checked."""

from __future__ import annotations

import math

import pandas as pd

from harness.engines.costs import quantities
from harness.rows import checked
from harness.validate.measured import ENGINES
from plots import scatter, style
from tests.cases import cases


def test_the_list_of_checked_engines_names_what_exists() -> None:
    assert set(checked.PAIRS) == set(ENGINES)
    assert {gpu for gpus in checked.PAIRS.values() for gpu in gpus} <= set(quantities.gpu_kinds())
    assert checked.note("h100", "vllm-0.15") == ""
    assert checked.note("a100-80g", "vllm-0.15") == checked.note("h100", "none") == "unchecked end to end"


def test_captions_say_where_a_table_rests_on_kernels_alone() -> None:
    marked = [k for k in quantities.gpu_kinds() if quantities.quantities(k).get("evidence") == checked.KERNELS_ONLY]
    assert checked.KINDS_BY_KERNELS == marked == ["h20"]
    assert checked.note("h20", "vllm-0.15") == "unchecked end to end (h20: kernels only)"
    assert not {gpu for gpus in checked.PAIRS.values() for gpu in gpus} & set(marked)


@cases(("gpu", "host", "shown"), [("h100", "vllm-0.15", False), ("a100-80g", "vllm-0.15", True), ("h20", "none", True)])
def test_captions_say_what_is_unchecked(gpu: str, host: str, shown: bool) -> None:
    columns = "trace tier models gpus gpu host slo fidelity plan_origin".split()
    runs = pd.DataFrame([("t", "replayed", "m", 1, gpu, host, "5xP95", "simulated", "trace")], columns=columns)
    assert ("unchecked end to end" in style.caption(runs, [1])) == shown
    assert "unchecked" not in style.caption(runs.assign(fidelity="real"), [1])


def test_rows_left_out_of_a_fit_are_hollow() -> None:
    numbers = [{"row": k, "measured": 10.0**k, "ours": 11.0**k, "fitted": k == 1} for k in (1, 2, 3)]
    frame = pd.DataFrame(numbers).assign(file="f", engine="vllm-0.6", gpu="h100", metric="throughput", unscored="")
    with style.theme():
        figure = scatter.runs(frame)
    (axes,) = figure.axes
    points = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert sorted((len(line.get_xdata()), line.get_markerfacecolor() == "white") for line in points) == [  # type: ignore[arg-type]
        (1, False),
        (2, True),
    ]
    assert math.isclose(*axes.get_xlim()[:1], *axes.get_ylim()[:1])
