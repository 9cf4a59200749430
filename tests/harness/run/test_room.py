"""Rooms that systems lack, and changes that give it: each is tried, and each a step before fails."""

from __future__ import annotations

import re
from dataclasses import replace

from harness.cli.asked import Asked
from harness.run.room import STEP_BYTES, Remedy, fits, remedies, short_bytes
from harness.run.spec import Spec
from tests import ROOT
from tests.cases import cases
from workloads.usual import POOL_BYTES, WORLD

FULL = Spec(
    "elastic", models="heavy8", gpus=2, trace="hyperbolic-like", served=2048, chunk_tokens=2048, batch_cap=256
)  # 139.7 GiB in whole models on 142.6


def shipped() -> list[str]:
    """Return the systems of plain `make`."""
    (names,) = re.findall(r"^SYSTEMS = (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    return [*names.split(","), "prism", "muxserve"]


def test_every_system_of_the_default_world_has_room() -> None:
    setting = {**WORLD, "trace": "hyperbolic-like"}
    for name in dict.fromkeys(shipped()):
        asked = Asked(name, setting, slo="P95", rates=(1.0,), seeds=1).study()
        assert asked.spec["pool_bytes"] == POOL_BYTES
        spec = asked.spec_of(asked.condition[0], name)
        assert all(fits(replace(spec, seed=seed, rate_scale=rate)) for seed in range(2) for rate in (1.0, 32.0)), name


@cases("other", [{"gpus": 2}, {"models": "heavy8"}, {"gpu": "a100-80g"}, {"mem_fraction": 0.95}, {"engine": "mock"}])
def test_another_world_has_the_memory_of_its_card(other: dict[str, object]) -> None:
    asked = Asked("static", {**WORLD, "trace": "sample"} | other, slo="P95", rates=(1.0,), seeds=1).study()
    assert "pool_bytes" not in asked.spec


def test_the_smallest_changes_that_fit() -> None:
    assert not fits(FULL)
    memory, gpus = remedies([FULL])
    assert memory.options[0] == "--set"
    assert re.fullmatch(r"mem_fraction=0\.9\d", memory.options[1])
    assert gpus.options == ("--gpus", "3")
    share = dict(memory.fields)["mem_fraction"]
    assert fits(replace(FULL, mem_fraction=share))
    assert not fits(replace(FULL, mem_fraction=round(share - 0.01, 2)))
    assert fits(replace(FULL, gpus=3))
    short = short_bytes(FULL)
    assert short is not None
    assert fits(FULL, short)
    assert not fits(FULL, short - STEP_BYTES)


def test_servers_of_fewer_sequences_take_less_memory() -> None:
    """By default vLLM on an H100 holds memory for 1,024 sequences and 8,192 tokens of each model's step."""
    eight = replace(FULL, models="llama-3.2-3b*8", gpus=1, batch_cap=None, chunk_tokens=None)
    assert not fits(eight)
    memory, _ = remedies([eight])
    assert memory.fields == (("batch_cap", 256), ("chunk_tokens", 2048))
    assert fits(replace(eight, batch_cap=256, chunk_tokens=2048))


def test_what_no_change_gives_room_to_has_no_remedy() -> None:
    lone = Spec("weaver", models="llama-3.2-1b*2", gpus=1, trace="sample")  # needs a second GPU, and no more memory
    assert short_bytes(lone) is None
    assert remedies([lone]) == [Remedy((("gpus", 2),))]
    assert remedies([replace(FULL, trace="sample", models="llama-3.1-8b*60", gpus=1)]) == []


def test_a_pool_stands_in_the_command_with_more_gpus() -> None:
    """Beside --gpus the default world's pool would go."""
    pooled = replace(FULL, models="light8", gpus=1, pool_bytes=62 * 2**30)
    (way,) = remedies([pooled])
    assert way.options == ("--gpus", "2", "--set", f"pool_bytes={62 * 2**30}")
