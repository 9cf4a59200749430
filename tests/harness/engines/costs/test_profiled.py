"""Measured steps that policies see: points, between them and beyond; degrees; the mistakes in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines.costs import profiled
from harness.engines.costs.profiled import Curve, MeasuredProfile
from harness.engines.wallclock import NoProfile
from harness.policy.types import Inst, UserError
from harness.rows import setting
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict, canonical
from tests.cases import cases
from workloads.models import shape

ON, PAIR = Inst("m", (0,)), Inst("m", (0, 1))


def points(factor: float) -> dict[str, Any]:
    """Return ms: of prefills of 100 and 400 tokens (of 400 twice), and of steps of 1 and 4 at 100 and 200 tokens."""
    return {
        "1": {
            "100": {"prefill": 10.0 * factor, "decoding": 4.0 * factor},
            "200": {"prefill": -1, "decoding": 5.0 * factor},
            "400": {"prefill": 30.0 * factor, "decoding": -1},
        },
        "4": {
            "100": {"prefill": 50.0 * factor, "decoding": 10.0 * factor},
            "200": {"prefill": -1, "decoding": 14.0 * factor},
        },
    }


def written(folder: Path, tree: Any = None) -> str:
    """Write a profile of llama-13b on one GPU, at 50 and 100 % of its SMs, and on two."""
    tree = tree or {"llama-13b": {"2": {"100": points(0.5)}, "1": {"100": points(1.0), "50": points(2.0)}}}
    path = folder / "mine.json"
    path.write_text(json.dumps(tree), "utf-8")
    return str(path)


def told(folder: Path, sms: int = 100) -> MeasuredProfile:
    return profiled.measured_profile(written(folder), {"m": (shape("llama-13b"), 1)}, sms, NoProfile())


def test_a_curve_is_flat_before_its_points_and_does_not_fall_behind_them() -> None:
    curve = Curve([1.0, 3.0], [2.0, 6.0])
    assert [curve.at(x) for x in (0.0, 1.0, 2.0, 3.0, 4.0)] == [2.0, 2.0, 4.0, 6.0, 8.0]
    falling = Curve([1.0, 3.0], [6.0, 2.0])
    assert [falling.at(x) for x in (0.0, 2.0, 3.0, 9.0)] == [6.0, 4.0, 2.0, 2.0]
    assert [Curve([5.0], [3.0]).at(x) for x in (0.0, 5.0, 9.0)] == [3.0, 3.0, 3.0]


def test_prefills_go_by_tokens_and_their_mean_where_several_have_as_many(tmp_path: Path) -> None:
    profile = told(tmp_path)
    seconds = [profile.prefill_s(ON, tokens) for tokens in (50, 100, 250, 400, 700)]
    assert seconds == pytest.approx([0.010, 0.010, 0.025, 0.040, 0.070])  # 400 tokens: 30 and 50 ms
    assert profile.prefill_s(PAIR, 100) == pytest.approx(0.005)


def test_decode_steps_go_by_sequences_and_their_mean_context(tmp_path: Path) -> None:
    """To each come 80 us a sequence for scheduling, as MuxServe's estimator adds for a 13B."""
    profile = told(tmp_path)
    assert profile.step_s(ON, 1, 100) == pytest.approx(0.004 + 80e-6)
    assert profile.step_s(ON, 4, 800) == pytest.approx(0.014 + 4 * 80e-6)
    assert profile.step_s(ON, 2, 300) == pytest.approx(0.0045 + (0.012 - 0.0045) / 3 + 2 * 80e-6)
    assert profile.step_s(ON, 7, 700) == pytest.approx(0.016 + 7 * 80e-6)  # beyond: 2 ms a sequence more
    assert profile.step_s(PAIR, 1, 100) == pytest.approx(0.002 + 80e-6)
    assert profile.step_s(ON, 0, 0) == 0.0


def test_sms_lie_between_the_shares_that_were_measured(tmp_path: Path) -> None:
    profile = told(tmp_path, sms=80)
    seconds = [profile.prefill_s(ON, 100, sms) for sms in (None, 80, 40, 60, 8)]
    assert seconds == pytest.approx([0.010, 0.010, 0.020, 0.015, 0.020])
    assert profile.step_s(ON, 1, 100, 60) == pytest.approx(0.006 + 80e-6)


@cases(
    ("tree", "says"),
    [
        ([1], "not a file of model, GPUs, per cent of SMs"),
        ({"llama-13b": {"1": {"100": {"1": {"100": {"prefill": 1.0}}}}}}, "llama-13b, 1 GPU.s., 100 % of the SMs: not"),
        ({"llama-13b": {"one": {"100": points(1.0)}}}, "not a file of"),
        (
            {"llama-13b": {"1": {"100": {"1": {"1": {"prefill": 1.0, "decoding": -1}}}}}},
            "decode steps were not measured",
        ),
        ({"llama-7b": {"1": {"100": points(1.0)}}}, "llama-13b was not measured .llama-7b were."),
        ({"llama-13b": {"2": {"100": points(1.0)}}}, r"llama-13b was not measured on 1 GPU\(s\), but on 2"),
    ],
)
def test_mistakes_name_file_and_key(tree: Any, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, tree)
    with pytest.raises(UserError, match=f"^profile {path}: .*{says}" if isinstance(tree, list) else says):
        profiled.measured_profile(path, {"m": (shape("llama-13b"), 1)}, 100, NoProfile())


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.json: No such file"):
        profiled.read(str(tmp_path / "gone.json"))
    (tmp_path / "bad.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match=r"bad.json: not JSON"):
        profiled.read(str(tmp_path / "bad.json"))


# ---------------------------------------------------------------- in a run


def test_policies_of_a_run_see_it_and_models_have_the_measured_degrees(tmp_path: Path) -> None:
    path = written(tmp_path)
    spec = Spec("static", models="llama-13b", gpu="a100-80g", gpus=4, trace="sample", profile=path)
    setup, plain = Setup(spec), Setup(replace(spec, profile=""))
    (model,), (before,) = setup.cluster.models.values(), plain.cluster.models.values()
    assert (model.degrees, before.degrees) == ((1, 2), (1, 2, 4))
    inst = Inst("llama-13b/1", (0,))
    assert setup.cluster.profile.prefill_s(inst, 100) == pytest.approx(0.010)
    assert setup.cluster.profile.load_s(inst, "host") == plain.cluster.profile.load_s(inst, "host")
    assert setup.engine.cluster.models["llama-13b/1"].degrees == (1, 2)
    assert "policies see the steps of mine" in (setting.machine(as_dict(spec)) or "")


def test_its_content_is_part_of_a_run_and_its_path_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, other = (Spec("static", profile=written(tmp_path / name)) for name in "ab")
    assert first.hash8 == other.hash8 != Spec("static").hash8
    assert "profile" not in canonical(Spec("static"))


@cases(
    ("change", "says"),
    [
        ({"engine": "torch"}, "on the simulator alone"),
        ({"gpu": "a100-80g*1+l40s*1", "gpus": 2}, "on one kind of GPU"),
        ({"profile": "mine.csv"}, "not the path of a .json"),
    ],
)
def test_where_it_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    spec = Spec("static", models="llama-13b", gpu="a100-80g", trace="sample", profile=written(tmp_path))
    with pytest.raises(UserError, match=says):
        resolve(replace(spec, **change))


# ---------------------------------------------------------------- MuxServe's own


def test_muxserves_profile_by_hand(profiles_dir: Path) -> None:
    """At measured points a step takes what stands there; batches end at 256 a GPU, which the estimator goes by."""
    path = profiles_dir / "muxserve" / "llama-a100-sm-share.json"
    tree = json.loads(path.read_text("utf-8"))
    for name, of in tree.items():
        for gpus, by_share in of.items():
            inst = Inst("m", tuple(range(int(gpus))))
            profile = profiled.measured_profile(str(path), {"m": (shape(name), int(gpus))}, 100, NoProfile())
            for share, by_batch in by_share.items():
                assert max(map(int, by_batch)) == 256 * int(gpus)
                ms = by_batch["64"]["128"]["decoding"]
                each_s = {"llama-7b": 1e-4, "llama-13b": 8e-5}.get(name, 7e-5)
                assert profile.step_s(inst, 64, 64 * 128, int(share)) == pytest.approx(ms / 1e3 + 64 * each_s)
            same = [
                by_share["100"][batch][length]["prefill"]
                for batch, length in (("1", "256"), ("2", "128"), ("4", "64"), ("8", "32"))
            ]
            assert profile.prefill_s(inst, 256) == pytest.approx(sum(same) / 4e3)
    degrees = {"llama-7b": [1, 2, 4, 8], "llama-13b": [1, 2, 4, 8], "llama-30b": [2, 4], "llama-65b": [4, 8]}
    assert {name: list(profiled.read(str(path))[name]) for name in tree} == degrees
