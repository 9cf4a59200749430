"""Clusters of several kinds of GPU: their text, their nodes, what policies see, who takes them, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from harness.answers import size as words
from harness.cli.app import main
from harness.engines.machine import Config, Served, machine
from harness.engines.sim.engine import Sim
from harness.loop import system
from harness.policy import mix
from harness.policy.actions import Load
from harness.policy.events import Done, Woke
from harness.policy.types import GIB, Host, Infeasible, Inst, Unsupported, UserError
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec, from_dict
from harness.study import size_why
from harness.study.bases import base_specs, slo_target
from harness.study.size_why import Why
from harness.study.sized import Curve
from tests.cases import cases
from tests.harness.study.test_size_search import USD, Faked, question, sized, verdict
from tests.harness.study.test_size_why import kept, tried
from workloads.models import model_set

MIX = "h100*2+l40s*4"
TAKERS = {"static", "elastic", "swap", "dedicated"}


def spec(name: str = "static", **fields: Any) -> Spec:
    given = {"gpu": MIX, "gpus": 6, "models": "llama-3.2-1b*8", "trace": "sample", "slo": "absolute:ttft=1,tpot=1"}
    return from_dict({"system": name, **given, **fields})


# ---------------------------------------------------------------- text


def test_a_cluster_is_whole_copies_and_a_node_has_one_kind() -> None:
    assert mix.kinds(MIX, 6) == ("h100",) * 2 + ("l40s",) * 4
    assert mix.kinds(MIX, 12) == ("h100",) * 4 + ("l40s",) * 8
    assert mix.nodes(MIX, 12, 3) == (0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 4, 4)
    assert mix.told(MIX, 12) == "4 x h100 + 8 x l40s"
    assert mix.canonical("h100-80g+l40s*4+h100", lambda kind: kind.removesuffix("-80g")) == MIX
    assert list(zip(range(3), mix.counts(MIX, 7), strict=False)) == [(0, 12), (1, 18), (2, 24)]


@cases(("gpus", "node_gpus"), [(1, 8), (8, 8), (12, 8), (7, 3)])
def test_one_kind_is_as_it_was(gpus: int, node_gpus: int) -> None:
    config = Config((), gpus=gpus, node_gpus=node_gpus)
    assert config.kinds == ("h100",) * gpus
    assert config.nodes == tuple(g // node_gpus for g in range(gpus))
    assert config.group_gpus == min(gpus, node_gpus)
    assert list(mix.counts("h100", gpus)) == [gpus]
    assert mix.canonical("h100-80g", str.upper) == "H100-80G"


@cases(
    ("gpu", "why"),
    {
        "a count of zero": ("h100*0+l40s*4", 'gpu "h100*0+l40s*4": no GPU in "h100*0"'),
        "no count": ("h100*x+l40s", '"h100*x" is not KIND*COUNT'),
        "an empty part": ("h100*2+", '"" is not KIND*COUNT'),
        "one kind": ("h100*2", "has one kind: give h100 as the kind, and 2 as the number of GPUs"),
        "an unknown kind": ("h100*2+l40*4", "unknown GPU kind 'l40'"),
        "a part of a copy": ("h100*3+l40s*4", "gpus is 6: h100*3+l40s*4 is 7 GPUs, so a cluster of it has 7, 14"),
    }.values(),
)
def test_another_form_is_one_line(gpu: str, why: str) -> None:
    with pytest.raises(UserError) as told:
        resolve(spec(gpu=gpu))
    assert why in str(told.value)
    assert "\n" not in str(told.value)


# ---------------------------------------------------------------- what a policy sees


def members(tp: int = 1) -> tuple[Served, ...]:
    return tuple(Served(m.name, m.shape, tp, degrees=(1, 2, 4)) for m in model_set("llama-3.1-8b*2").members)


def test_each_gpu_has_the_memory_sms_and_seconds_of_its_kind() -> None:
    mixed = Sim(Config(members(), gpu=MIX, gpus=6)).cluster
    each = {kind: Sim(Config(members(), gpu=kind, gpus=6)).cluster for kind in ("h100", "l40s")}
    for g, gpu in enumerate(mixed.gpus):
        of = each[gpu.kind]
        # a process's share of the driver's memory is by the number of GPUs, which is the same
        assert (gpu.mem_bytes, gpu.sms) == (of.gpus[0].mem_bytes, of.gpus[0].sms)
        inst = Inst("llama-3.1-8b/1", (g,))
        assert mixed.profile.prefill_s(inst, 1000) == of.profile.prefill_s(inst, 1000)
        assert mixed.profile.step_s(inst, 8, 4000) == of.profile.step_s(inst, 8, 4000)
        assert mixed.profile.load_s(inst, "host") == of.profile.load_s(inst, "host")
        assert mixed.profile.move_s(GIB, g, Host(gpu.node)) == of.profile.move_s(GIB, g, Host())
    assert mixed.profile.move_s(GIB, 0, 1) == each["h100"].profile.move_s(GIB, 0, 1)
    assert mixed.profile.move_s(GIB, 1, 2) == GIB / machine(Config((), gpu="h100")).spec.net
    assert mixed.models["llama-3.1-8b/1"].degrees == (1, 2, 4)  # four of a kind; six are of two


def test_an_instance_has_gpus_of_one_kind() -> None:
    sim = Sim(Config(members(2), gpu=MIX, gpus=6))
    assert sim.do(Load(Inst("llama-3.1-8b/1", (0, 1)))) is None
    sim.do(Load(Inst("llama-3.1-8b/2", (1, 2))))
    (end,) = (event for event in sim.orders.events if isinstance(event, Done))
    assert end.failed == "never"
    assert end.why.endswith("GPUs [1, 2] are of several kinds: h100, l40s")


# ---------------------------------------------------------------- who takes them


@cases("name", [name for name in system.names() if name != "unshared"])
def test_every_other_system_is_refused_by_name(name: str) -> None:
    make = system.find(name)
    assert getattr(make, "mixed", False) == (name in TAKERS)
    if name not in TAKERS:
        with pytest.raises(Unsupported, match=f"GPUs of several kinds: {name} takes all for one kind"):
            _ = Setup(spec(name)).policy


def test_a_model_of_its_own_has_the_smallest_gpus_that_hold_it() -> None:
    setup = Setup(resolve(spec("dedicated", models="llama-3.1-8b*3,gemma-3-27b", gpu="h100+l40s*2", gpus=3)))
    assert setup.spec.gpus == 6  # two copies
    loads = [a.inst for a in setup.policy.on(Woke("start"), setup.engine.view()) if isinstance(a, Load)]
    kinds = {
        inst.model: setup.engine.cluster.gpus[inst.place[0]].kind for inst in loads if isinstance(inst.place, tuple)
    }
    assert [kinds[m.name] for m in setup.models.members] == ["l40s"] * 3 + ["h100"]


@cases("name", ["static", "static:equal", "elastic", "swap", "swap:ollama", "swap:router"])
def test_what_is_too_large_for_one_kind_is_on_the_other(name: str) -> None:
    base, _, preset = name.partition(":")
    setup = Setup(
        resolve(spec(base, preset=preset or None, models="llama-3.1-8b*3,gemma-3-27b", gpu="l40s*2+h100*2", gpus=4))
    )
    places = [a.inst for a in setup.policy.on(Woke("start"), setup.engine.view()) if isinstance(a, Load)]
    assert {inst.place for inst in places if inst.model.startswith("gemma")} <= {(2,), (3,)}


def test_a_group_larger_than_a_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "wide.toml"
    path.write_text('[[model]]\nname = "big"\nshape = "llama-3.1-8b"\ntp = 4\n')
    with pytest.raises(Infeasible, match=r"big takes 4 GPUs of one kind and node, h100\*2\+l40s\*2 has at most 2"):
        _ = Setup(resolve(spec(gpu="h100*2+l40s*2", gpus=4, models=str(path), trace="sample+models=1"))).policy


@cases(
    ("fields", "why"),
    {
        "a cost table": ({"table": "mine.toml"}, "table: a cost table is of one kind of GPU"),
        "real servers": ({"engine": "vllm"}, "engine vllm: sim alone takes a mix of kinds"),
        "a placement across kinds": ({"homes": {f"llama-3.2-1b/{k}": [1, 2] for k in range(1, 9)}}, "of several kinds"),
        "calls of other costs": ({"gpu": "mi300x*2+h100*4", "host": "vllm-0.14"}, "other costs of calls on mi300x"),
    }.values(),
)
def test_what_has_one_kind_only_is_refused(fields: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UserError) as told:
        resolve(spec(**fields))
    assert why in str(told.value)
    assert "\n" not in str(told.value)


# ---------------------------------------------------------------- the base of an SLO


@cases(
    ("gpu", "models", "base"),
    {
        "the first kind": (MIX, "llama-3.2-1b*8", "h100"),
        "whatever holds it too": ("l40s*4+h100*2", "llama-3.2-1b*8", "l40s"),
        "the first that holds every model": ("l40s*4+h100*2", "llama-3.2-1b*7,gemma-3-27b", "h100"),
    }.values(),
)
def test_the_base_of_a_mix_is_that_of_its_first_kind_that_holds_every_model(gpu: str, models: str, base: str) -> None:
    mine = spec(gpu=gpu, models=models)
    assert base_specs(mine) == base_specs(spec(gpu=base, gpus=2, models=models))
    assert base_specs(mine, "a100-80g") == base_specs(spec(gpu="a100-80g", gpus=4, models=models))


def test_the_rule_names_the_kind_and_a_request_alone_takes_its_seconds_there(tmp_path: Path) -> None:
    under = slo_target(spec(), "5xsolo", tmp_path)
    assert (under.rule, under.definition, under.seconds) == ("5xsolo@h100", "e2e", None)
    assert under.drain_s == slo_target(spec(gpu="h100", gpus=1), "5xsolo", tmp_path).drain_s
    assert slo_target(spec(gpu="h100", gpus=1), "5xsolo", tmp_path).rule == "5xsolo"
    assert slo_target(spec(), "absolute:ttft=1,tpot=1", tmp_path).rule == "absolute:ttft=1,tpot=1"
    member, tokens = (np.array([k], np.int32) for k in (3, 400))
    alone = {kind: Setup(spec(gpu=kind, gpus=1)).solo_s(member, tokens, tokens) for kind in ("h100", "l40s")}
    assert alone["l40s"][1] > alone["h100"][1]
    for gpu, kind in (("", "h100"), ("l40s", "l40s")):
        assert Setup(spec()).solo_s(member, tokens, tokens, gpu=gpu) == alone[kind]
    assert Setup(spec(gpu="h100", gpus=1)).solo_s(member, tokens, tokens, gpu="l40s") == alone["l40s"]


@cases(
    ("fields", "base", "why"),
    {
        "no kind holds all": (
            {"gpu": "l40s*4+l4*2", "models": "llama-3.2-1b*7,gemma-3-27b"},
            "",
            "no kind of l40s*4+l4*2",
        ),
        "an unknown kind": ({}, "l40", "unknown GPU kind 'l40'; did you mean l40s?"),
        "a real engine": ({"gpu": "h100", "gpus": 1, "engine": "vllm"}, "l40s", "SLO base on l40s: engine vllm has"),
    }.values(),
)
def test_a_base_that_is_nowhere_is_one_line(fields: Mapping[str, Any], base: str, why: str) -> None:
    with pytest.raises(UserError) as told:
        base_specs(spec(**fields), base)
    assert why in str(told.value)
    assert "\n" not in str(told.value)


def test_an_answer_says_of_which_kind_its_base_is() -> None:
    alone = "5xP95 is that of a model alone on h100"
    of_mix = sized(asked=question(kinds=(MIX,), rule="5xP95"), rules={MIX: "5xP95@h100"})
    assert words.base(of_mix) == f"{alone} (P95@l40s: on that kind)"
    several = sized(
        asked=question(kinds=("h100", "l40s", MIX), rule="5xP95"),
        rules={"h100": "5xP95", "l40s": "5xP95", MIX: "5xP95@h100"},
    )
    assert words.base(several) == f"{alone} for h100, l40s for l40s, h100 for {MIX} (P95@h100: on that kind for all)"
    for kinds, rule in ((("h100",), "5xP95"), (("h100", "l40s"), "5xP95@h100"), ((MIX,), "absolute:ttft=1,tpot=1")):
        assert words.base(sized(asked=question(kinds=kinds, rule=rule))) == ""


# ---------------------------------------------------------------- how many GPUs


def test_sizes_of_a_mix_are_whole_copies_and_its_price_is_that_of_all(tmp_path: Path) -> None:
    asked = question(["static"], kinds=(MIX, "l40s"))
    assert asked.usd_hour(MIX, 12) == 4 * USD["h100"].usd_hour + 8 * USD["l40s"].usd_hour
    assert replace(asked, prices={"h100": USD["h100"]}).usd_hour(MIX, 12) is None
    work = Faked(asked, {(MIX, "static"): (7, 7), ("l40s", "static"): (30, 30)}, tmp_path)
    curves = work.answered()
    assert set(curves[MIX, "static"].tried) == {6, 12}
    assert work._best(curves.values()) == (MIX, "static", 12)  # $20 an hour, and 30 of the cheaper kind are $30
    assert work._refused(MIX, "static") == ""
    assert words.cluster(MIX, 18) == "6 h100 + 12 l40s"
    held = Curve(MIX, "static", {12: verdict(12, 1.0, 1.0)})
    tails = {"m": (0.2, 0.03), "n": (0.3, math.nan)}
    placed = {"3": {"m": 1.0}, "4": {"n": 1.0}}
    best = {"curves": {(MIX, "static"): held}, "best": (MIX, "static", 12), "grown": {2.0: 18}}
    answer = sized(asked=asked, placed=placed, tails=tails, **best)
    told = dict(words.details(answer))
    assert (told["GPU 3 (h100)"], told["GPU 4 (l40s)"]) == ("m at home 100 %", "n at home 100 %")
    assert told["longest P95 of a model"] == "TTFT 0.3 s (n), TPOT 30 ms (m)"
    assert told["more traffic with static"] == "x 2: 6 h100 + 12 l40s ($720 a day)"
    assert told["rented"].startswith("4 h100 + 8 l40s, 288 GPU-hours and $480 a day")
    for more in ({"spare": 1}, {"node": 8}):
        with pytest.raises(UserError, match=r"(spare|node): h100\*2\+l40s\*4 has GPUs of several kinds"):
            question(["static"], kinds=("h100", MIX), **more)
    with pytest.raises(UserError, match=r"--gpus ends at 5, and h100\*2\+l40s\*4 is 6 GPUs"):
        Faked(question(["static"], kinds=(MIX,), most=5), {}, tmp_path)
    with pytest.raises(UserError, match="GPUs of several kinds, and prism takes one"):
        Faked(question(["prism"], kinds=(MIX,)), {}, tmp_path).done()


def test_on_a_mix_only_systems_that_take_it_are_tried_as_a_change(tmp_path: Path) -> None:
    work = Faked(question(["static"], kinds=(MIX,)), {}, tmp_path)
    failing = tried("static", 6, None, unfit="no placement")._replace(gpu=MIX)
    reason = Why(kept(failing, best=None), failing, {}, 3 << 30, 2 << 30, ())
    assert [change.what for change in size_why._changes(reason, work)] == ["elastic", "swap"]
    assert next(words.why(reason)).startswith("static on 2 h100 + 4 l40s has no room: weights binds")
    assert size_why._wider(work, failing, "llama-3.2-1b/1") == 2
    on_h100 = failing._replace(gpu="h100", gpus=1)
    single = Faked(question(["static"]), {}, tmp_path)
    assert size_why._wider(single, on_h100, "llama-3.2-1b/1") is None
    assert size_why._wider(single, on_h100._replace(gpus=2), "llama-3.2-1b/1") == 2


def test_a_system_that_was_tried_on_another_kind_than_the_best_is_explained_there() -> None:
    on_mix = tried("static", 6, 1.0, answer=True)._replace(gpu=MIX)
    rows = (on_mix, tried("prism", 2, 0.8), tried("prism", 3, 1.0, answer=True))
    assert size_why._failing(kept(*rows, best=(MIX, "static", 6)), "prism") == rows[1]


# ---------------------------------------------------------------- as a user


def bench(*asked: object) -> str:
    ended = CliRunner().invoke(main, [str(word) for word in asked])
    assert ended.exit_code == 0, ended.output
    return " ".join(ended.output.split())


@pytest.mark.slow
def test_a_mix_is_sized_explained_and_reported_with_the_kind_of_its_base(tmp_path: Path) -> None:
    ask = ("size", "--trace", "sample", "--models", "llama-3.1-8b*8", "--gpu", "l40s+h100", "--gpus", "1-8",
           "--systems", "static,elastic,prism", "--windows", "1", "--grow", "1", "-q", "-o", tmp_path)  # fmt: skip
    told = bench(*ask)
    assert "SLO: 5xP95 is that of a model alone on l40s (P95@h100: on that kind)" in told
    assert "not tried: it takes GPUs of one kind" in told
    folder = next(tmp_path.glob("*/size.parquet")).parent
    why = bench("explain", folder)
    assert " l40s + " in why.partition(".")[0]
    assert "prism" not in why  # it takes no mix, so it is no change to try
    bench("report", folder)
    text = (folder / "report.html").read_text("utf-8")
    assert "How many clusters of l40s*1+h100*1 hold" in text
    assert "5xP95 is that of a model alone on l40s" in text
