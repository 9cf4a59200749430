"""Every block and page of KV is counted once, whatever happens when."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.engines.sim.kernel import peek, reuse
from harness.policy.actions import Drop, Move
from harness.policy.events import Done, Event, Finished, Freed, TurnEnded
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import FULL
from tests.harness.engines.sim.world import HEARD, NEVER
from tests.harness.engines.sim.worlds import SHARED, TURNED, WILD, world


def under_way(sim: Sim) -> Iterator[np.void]:
    """Yield the transfers that have not ended."""
    x = int(sim.S.s["transfer_head"])
    while x >= 0:
        yield sim.S.transfers[x]
        x = int(sim.S.transfers[x]["next"])


def books(sim: Sim) -> None:
    """Check that each block belongs to a request at rest or a move's end, each byte to an account or weights."""
    S = sim.S
    owned = np.zeros(len(S.insts), np.int64)
    for r in S.requests[: int(S.s["arrived"])]:
        if r["state"] >= state.DONE:
            assert (r["home"], r["blocks"]) == (-1, 0)
        elif r["home"] >= 0:
            blocks = int(r["blocks"])
            if r["state"] == state.RUN:
                b = int(r["batch"])
                lane = peek.decode_lane(S.at, b)
                made = int(S.batches[b]["tick"]) - int(r["joined_tick"])
                made += peek.stepped(S.at, lane) + 1 if lane >= 0 else 0  # a step begun writes one token more
                blocks = max(blocks, -(-(int(r["length"]) + made - 1) // sim.config.block_tokens))
            owned[r["home"]] += blocks - int(r["shared"])
    transfers = list(under_way(sim))
    for X in transfers:
        if X["request"] >= 0 and X["stage"] in (state.LINK, state.TAIL):
            owned[X["inst"]] += X["blocks"]  # both ends are charged until it is there
            assert S.requests[X["request"]]["home"] == X["source"]
    cached = cache_books(sim) if sim.names.prompt_ids else 0
    owned += cached
    ahead = np.zeros(len(S.insts), np.int64)
    for b in range(len(S.batches)):
        for i in range(len(S.insts)):
            ahead[i] += peek.ahead(S.at, b, i)
    assert (owned == S.insts["blocks"] - ahead).all()
    used = np.where(np.arange(len(S.gpus)) < sim.config.gpus, 0, S.gpus["used"] - S.gpus["kv_bytes"])
    kv = np.zeros(len(S.gpus), np.int64)
    for i in S.insts:
        for g in i["gpus"][: i["gpu_count"]]:
            kv[g] += i["held"]
            used[g] += i["footprint"] * (i["state"] not in (state.OUT, state.QUEUED))
    assert (kv == S.gpus["kv_bytes"]).all()
    assert (used + kv == S.gpus["used"]).all()
    assert (S.gpus["used"] <= S.gpus["cap"]).all() or S.s["unlimited"]
    told = S.events[: int(S.s["events_told"])]
    taken = [  # an action's number is free exactly when no transfer, eviction, request or event has it
        *told["subject"][told["kind"] == state.E_DONE],
        *S.insts["evict"][np.isin(S.insts["state"], (state.DRAINING, state.LEAVING))],
        *S.requests["pending_arg"][S.requests["pending"] == state.P_DISCARD],
        *(X["action"] for X in transfers if X["action"] >= 0),
    ]
    assert len(S.actions) - S.s["action_spare"] == len(set(taken))
    for b, batch in enumerate(sim.names.batches):
        mine = np.flatnonzero((S.requests["batch"] == b) & (S.requests["state"] < state.DONE))
        queue = S.requests[mine][S.requests["state"][mine] == state.WAIT]
        assert S.batches[b]["left"] == (queue["prompt"] + queue["made"] - queue["prefilled"]).sum()
        assert sim.view().members(batch) == tuple(mine[np.argsort(S.requests["seq"][mine])])


def cache_books(sim: Sim) -> np.ndarray:
    """Check the blocks of entries that requests hold, by account; the others are in line, each once, oldest first."""
    S, per, held = sim.S, int(sim.S.s["id_blocks"]), np.zeros(len(sim.S.insts), np.int64)
    refs = np.zeros(len(S.entries), np.int64)
    for r in S.requests[S.requests["shared"] > 0]:
        ids = S.chains["entry"][r["chain"] : r["chain"] + -(-int(r["shared"]) // per)]
        refs[S.insts["entries"][r["home"]] + ids] += 1
    assert (refs == S.entries["refs"]).all()
    assert (S.entries["blocks"] >= 0).all()
    assert (S.entries["blocks"][len(S.requests) :] <= per).all()
    lined = set[int]()
    for i, inst in enumerate(S.insts):
        if inst["entries"] < 0:
            continue
        span = slice(int(inst["entries"]), int(inst["entries"]) + sim.names.prompt_ids[inst["model"]])
        held[i] = S.entries["blocks"][span][refs[span] > 0].sum()
        x, before, total = int(inst["oldest"]), -1, 0
        while x >= 0:
            entry = S.entries[x]
            assert (entry["inst"], entry["prev"], refs[x]) == (i, before, 0)
            assert entry["blocks"] > 0
            assert before < 0 or entry["stamp"] > S.entries["stamp"][before]
            lined.add(x)
            total += int(entry["blocks"])
            x, before = int(entry["next"]), x
        assert (before, total) == (inst["youngest"], inst["cached"])
    assert lined == set(np.flatnonzero(S.entries["stamp"] > 0).tolist())
    idle = np.flatnonzero((S.entries["blocks"][len(S.requests) :] > 0) & (refs[len(S.requests) :] == 0))
    assert set((idle + len(S.requests)).tolist()) <= lined
    return held


def shed_all(sim: Sim) -> None:
    """Forget what has lost its room: what is left has some."""
    S = sim.S
    for i in range(len(S.insts)):
        reuse.shed(S.at, i)
    for g in range(sim.config.gpus):
        on = [i for i, inst in enumerate(S.insts) if g in inst["gpus"][: inst["gpu_count"]]]
        reuse.note_unbegun(S.at, g)
        kv = sum(int(reuse.full_bytes(S.at, i)) for i in on)
        fits = S.gpus["used"][g] - S.gpus["kv_bytes"][g] + kv <= S.gpus["cap"][g]
        assert fits or S.s["unlimited"] or all(S.insts["cached"][i] == 0 for i in on)
        assert S.s["unlimited"] or not any(reuse.over_limit(S.at, i) for i in on)


@cases("seed", range(TURNED, TURNED + 40))
def test_who_listens_changes_nothing(seed: int) -> None:
    w = world(seed)

    def run(hears: frozenset[type]) -> tuple[list[tuple[float, Event]], bytes]:
        sim, told = w.begun(hears), list[tuple[float, Event]]()
        for t, action in [*(x for x in w.script if x[0] > NEVER), (30.0, Drop(0))]:
            while (event := sim.poll(t)) is not None:
                told.append((sim.view().now_s, event))
            sim.do(action)
        columns = (sim.S.requests[c] for c in sim.S.requests.dtype.names or () if c != "pending_arg")
        return told, b"".join(np.array(column).tobytes() for column in columns)

    def kind(event: Event) -> type:
        return type(event.action) if isinstance(event, Done) else type(event)

    few = frozenset({Finished, Move})
    told, rows = run(HEARD)
    heard = [(t, e) for t, e in told if kind(e) in {*few, Freed} or (isinstance(e, Done) and e.failed)]
    assert run(few) == (heard, rows)


@cases("first", [*range(TURNED, TURNED + 40, 20), *range(WILD, WILD + 40, 20), *range(SHARED, SHARED + 40, 20)])
def test_no_kv_is_lost_or_counted_twice_in_any_order_of_turns_moves_and_evictions(first: int) -> None:
    for seed in range(first, first + (20 if FULL else 8)):
        w = world(seed)
        sim, answer, rng = w.begun(frozenset({TurnEnded})), w.answer(), np.random.default_rng(seed)
        view = sim.view()

        def hear(until: float) -> None:
            while (event := sim.poll(until)) is not None:  # noqa: B023 - called at once
                for action in answer(view.now_s, event):  # noqa: B023
                    sim.do(action)  # noqa: B023
                    books(sim)  # noqa: B023

        stops = [(t, a) for t, a in w.script if t > NEVER]
        looks = [(float(t), None) for t in rng.uniform(0, w.jobs.arrival_s[-1] + 3.0, 40)]
        for t, a in sorted([*stops, *looks], key=lambda x: x[0]):
            hear(t)
            books(sim)
            if a is None and sim.names.prompt_ids:
                shed_all(sim)
                books(sim)
            if a is not None:
                sim.do(a)
                books(sim)
        hear(math.inf)
        books(sim)
        lost = sim.S.requests["state"] == state.DONE
        assert (sim.S.requests["made"][lost] == sim.S.requests["output"][lost]).all()
