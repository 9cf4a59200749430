"""Assignments of a trace's streams: shipped sets as ever, models of equal names by these; and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.policy.types import UserError
from harness.run.setup import Setup, load_models
from harness.run.spec import Spec
from harness.run.streams import lines
from tests.cases import cases
from tests.test_workloads import SPAN_S, drawn
from traces import schema
from traces.load import manifest, sized
from traces.load import trace as load
from workloads.models import ModelSet, Served, model_set, sets, shape
from workloads.picking import assigned

LATER = {"agents8", "quant3", "today12"}  # sets that came after names were matched
GOLDEN = json.loads(Path(__file__).with_name("streams.json").read_text("utf-8"))


@pytest.mark.full
@cases("pair", sorted(GOLDEN))
def test_shipped_sets_have_the_streams_that_they_had(pair: str) -> None:
    """streams.json: of seeds 0 and 1 (once where equal), with shifts; nothing: there are too few. Written before names
    were matched; pairs whose trace is not here are left out."""
    name, _, asked = pair.partition(" <- ")
    models = model_set(name)
    try:
        rows = load(sized(asked, len(models.members)))
    except UserError:
        return
    if rows.name != asked:
        return  # a stand-in
    if not GOLDEN[pair]:
        with pytest.raises(UserError):
            assigned(rows, models)
        return
    drawn = [assigned(rows, models, seed).streams for seed in (0, 1)]
    texts = [" ".join(f"{stream}{shift:+g}" if shift else stream for stream, shift in streams) for streams in drawn]
    assert list(dict.fromkeys(texts)) == GOLDEN[pair]


def test_every_shipped_pair_is_in_the_list() -> None:
    assert {pair.partition(" <- ")[0] for pair in GOLDEN} == set(sets()) - LATER
    alone = {name for name in manifest() if not name.startswith("aegaeon-synth")}
    assert {pair.partition(" <- ")[2] for pair in GOLDEN} >= alone


def test_equal_names_match() -> None:
    """Streams s0 to s4, of which s3 and s1 have a model of their name; the others take what is left by the old rule."""
    rows = drawn(300, streams=5)
    llama = shape("llama-3.2-1b")

    def of(*names: str, ordered: bool = False) -> tuple[str, list[str]]:
        dealt = assigned(replace(rows, ordered=ordered), ModelSet("own", tuple(Served(name, llama) for name in names)))
        return dealt.rule, [stream for stream, _ in dealt.streams]

    assert of("s3", "s1", "s0", "s4", "s2") == ("by name", ["s3", "s1", "s0", "s4", "s2"])
    assert of("s3", "s1") == ("by name", ["s3", "s1"])
    assert of("s3", "mine", "s1", "other", ordered=True) == ("by name", ["s3", "s0", "s1", "s2"])
    assert of("mine", "other", ordered=True) == ("in order", ["s0", "s1"])
    rule, streams = of("mine", "s1", "other", "more", "last")
    assert (rule, streams[1], set(streams)) == ("by name", "s1", {"s0", "s1", "s2", "s3", "s4"})
    assert of("mine", "other")[0] == "by traffic"
    named = ModelSet("own", (Served("s0", llama, stream="s1"), Served("s1", llama, stream="s0")))
    assert assigned(rows, named).streams == (("s1", 0.0), ("s0", 0.0))  # what the set says goes before names
    assert assigned(rows, named).rule == "released"
    assert assigned(rows, named, assign="shuffled").rule == "shuffled"


def test_a_trace_of_ones_own_says_who_gets_what(tmp_path: Path) -> None:
    rows = drawn(300, streams=3)
    counts = np.bincount(rows.model)
    file = tmp_path / "gateway.parquet"
    columns = {"request_id": np.arange(300), "arrival_s": rows.arrival_s, "prompt_tokens": rows.prompt_tokens,
               "output_tokens": rows.output_tokens, "model": [rows.models[k] for k in rows.model]}  # fmt: skip
    meta = {"name": "gateway", "tier": "replayed", "span_s": SPAN_S}
    pq.write_table(schema.table(columns, meta), file)

    def told(models: str, **more: object) -> list[str]:
        text = "".join(f'[[model]]\nname = "{name}"\nshape = "llama-3.2-1b"\n' for name in models.split())
        (tmp_path / "own.toml").write_text(text)
        load_models.cache_clear()
        spec = Spec("static", trace=str(file), models=str(tmp_path / "own.toml"), **more)  # type: ignore[arg-type]
        return lines(Setup(spec))

    assert told("s2 s0 s1") == ["streams by name"]
    assert told("s0 s1 mine") == [
        f"streams by name: 2 of 3 models; gateway -> own: mine <- s2 ({counts[2]:,} requests)"
    ]
    (line,) = told("a b c", assign="shuffled")
    assert line.startswith("streams shuffled (as each seed draws; seed 0): gateway -> own: a <- s")
    (line,) = told("a b c", assign="square")
    assert line.startswith(
        "streams square (each of the busiest meets each size of model once in 2 seeds; seed 0): gateway -> own: a <- s"
    )
    (line,) = told("a b c")
    assert line.startswith(
        "streams by traffic (the busiest, in an order that each seed draws; seed 0): gateway -> own: a"
    )
    assert line.count(" <- ") == 3
    assert lines(Setup(Spec("static", trace="sample", models="llama-3.2-1b*2"))) == []
