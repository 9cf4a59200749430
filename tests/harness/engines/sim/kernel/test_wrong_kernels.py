"""Kernels that are wrong in one place, each of which the oracle notices."""

from __future__ import annotations

import pytest

from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import escaped
from tests.harness.engines.sim.worlds import BESIDE, CUT, LAYERED, MEASURED, SHARED, SLICED, TURNED, WILD


@pytest.mark.slow
def test_oracle_notices_a_wrong_kernel() -> None:
    changes = [
        (2, "        n.anchor_work = done\n", ""),  # skips a settle
        (2, "    j = steps_to(S, lane, done_at(S, lane, now - HALF_NS))\n", "    j = 1\n"),  # joins a step early
        (5, "needs(S, f, d, j) - needs(S, f, d, n.steps))\n", "0)\n"),  # leaks pages
        # leaks one of each request
        (5, "            give(S, i, q.blocks, q.", "            give(S, i, q.blocks - 1, q."),
        (0, "    B.context -= q.length\n", ""),  # forgets a context
        (5, "K.end = W.now + K.stop / K.bytes_per_s", "K.end = W.now"),  # a link without a queue
        (0, "W.now", "W.now"),  # none, after all of these: nothing is left of them
    ]
    assert escaped(0, 30, changes) == changes[-1:]


TURN_OR_LINK = [
    # a step too long, or a time
    (2, "steps = min(steps, n.turn_max - n.turn_steps)", "steps = min(steps, n.turn_max - n.turn_steps + 1)"),
    (
        0,
        "n.turn_until - HALF_NS)))\n        if j < n.steps",
        "n.turn_until - HALF_NS))) + 1\n        if j < n.steps",
    ),
    # begins with the order
    (0, "    n.turn_until = INF\n", "    n.turn, n.turn_began, n.turn_until = BEGUN, W.now, W.now + for_s\n"),
    (0, "    if (W.heard >> E_TURN) & 1:\n", "    if (W.heard >> E_TURN) & 1 and why != TIME:\n"),  # never told
    (0, "            elif stuck(S, lane):\n", "            elif False:\n"),
    (0, "            if deserted(S, lane):\n", "            if False:\n"),
    (0, "    n.in_turn = 0\n    if n.turn == NO_TURN:\n", "    if n.turn == NO_TURN:\n"),  # counts the order before
    # KV waits
    (15, "    if K.kv_head >= 0:\n        return K", "    if K.kv_head >= 0 > K.weights_head:\n        return K"),
    (1, "            if awaited(S, xfer_at(S, xfer_at(S, p).transfer).inst):\n", "            if False:\n"),
    (1, "/ W.piece_bytes)) + 1\n", "/ W.piece_bytes)) + 2\n"),  # a piece more
    # once begun, to the end
    (1, "        if K.weights_parts > 1 and K.kv_head < 0 and", "        if K.weights_parts > 99 and"),
]
PAGES = [
    (144, "        if P.emptied != W.emptied:", "        if True:"),  # a page in two extents stands by the first
    (1394, "    fill_begun(S, i)\n    put(S, i, n)\n", "    put(S, i, n)\n"),  # prompts before the steps under way
]
PAGES_OF_TURNS = [(340, "    batch_at(S, b).filled = batch_at(S, b).tick", "    pass")]  # a step with nobody left
PAGES_ON_THEIR_WAY = [(13, "I.granule * (I.gone // I.granule_blocks)", "0")]  # pages of whom goes out stay
PREFIX_CACHE = [
    (10, "        if entry_at(S, x).refs == 0:\n            dequeue(S, x)\n", ""),  # in line although it is held
    (3, "        if E.refs == 0:\n            n += E.blocks\n", "        if E.refs == 0:\n"),  # never freed
    (10, "            take_blocks(S, r, i, need, held)\n", "            take_blocks(S, r, i, need, 0)\n"),  # twice
    (0, "            publish(S, r)\n", "            pass\n"),
    (21, "    forget_cached(S, i)\n", ""),  # weights come back to a warm cache
    (24, "        x = y if x < 0 or entry_at(S, y).stamp < ", "        x = y if x < 0 or entry_at(S, y).stamp > "),
    (109, "I.blocks - I.unbegun + I.cached", "I.blocks + I.cached"),  # for steps that never begin
    # heads first
    (54, "    for k in range(entries_of(S, r) - 1, -1, -1):\n", "    for k in range(entries_of(S, r)):\n"),
    (1, "min(cached, (goal - 1) // W.block_tokens)", "min(cached, goal // W.block_tokens)"),  # nothing to compute
]
WAIT_OR_CAP = [
    (1, "    M.since = W.now\n", ""),  # counts the time with weights as well
    (1, "        load = out_s(S, q.model, t) - q.mark_load\n", "        load = 0.0\n"),  # all of it is the policy's
    (0, "    return inst_at(S, i).state >= IN\n", "    return inst_at(S, i).state == IN\n"),  # forgets who drains
    (0, "    n.bound &= n.own\n", ""),  # the policy's caps as well
    (12, "        if left <= 0:\n            short = 1\n", ""),  # sees only prompts that are cut
    (13, "    if r >= 0 and not blocked and", "    if r >= 0 and"),  # who waits for memory as well
    (14, "                    tally(S, lane, j)\n", ""),  # forgets steps of a span that the end cuts
    (0, "    q.ttft_compute = q.compute\n", ""),  # all of it is decode
    (0, "                made_first(S, r, t)\n", "                q.first = t\n"),
    (507, " or lacks)", ")"),  # a prompt sleeps on for which another batch's victim made room
]
CUT_OR_MOVE = [
    (
        29,
        "    size = float(blocks * J.block_bytes * J.gpu_count) / pairs\n",
        "    size = float(blocks * J.block_bytes)\n",
    ),
    (0, "    batch_at(S, b).asking += 1\n", ""),
    (1, "        transit = 1 if xfer_at(S, x).stage == GRANT else 2\n", "        transit = 2\n"),
]
KERNEL_TURNS = [
    (0, "2 * n.sms + (lane & 1)", "2 * n.sms"),  # a prefill's partition is a decode's
    (
        0,
        "n.partition > 0 and y.partition > 0 and n.partition != y.partition",
        "n.partition > 0 and y.partition > 0",
    ),
    (0, "max(most, k.apart, k.crowd * asked)", "max(most, k.crowd * asked)"),
    (0, "max(most, k.apart, k.crowd * asked)", "max(most, k.apart)"),
    (0, "most = n.fills + meet / n.turn_s if", "most = 1.0 + meet / n.turn_s if"),  # all of the GPU
    (0, "k.passes + w * (1.0 - k.passes)", "k.passes"),  # prompts pass as decodes do
    (0, "        w = (tokens - k.few) / (k.many - k.few)\n", "        w = 0.0\n"),
    (0, "on / (1.0 - n.duty + on) * n.fills", "n.fills"),  # always there
    (0, "for _ in range(SWEEPS):", "for _ in range(1):"),
    (0, "n.fills + (G.round_s - n.round_s) / n.turn_s", "n.fills + G.round_s / n.turn_s"),
]
EXPERTS = [  # which lanes on partitions of their own show
    (62, "k.xbytes * (1.0 - k.xmiss ** float(m))", "k.xbytes"),  # a step reads all of them
    (35, "read_bytes(S, c, decodes + tokens)", "read_bytes(S, c, decodes)"),  # prompts touch none
    (290, "read_bytes(S, c, decodes + tokens)", "read_bytes(S, c, 1 + tokens)"),  # one sequence's
]
PHASES = [(0, "gemm *= k.pre_x", "gemm *= 1.0")]
SHARES = [
    (0, "(k.pre_slow if pieces > 0 else k.dec_slow)", "k.dec_slow"),
    (0, "    n.slow = W.co_run * ", "    n.slow = 1.0 * "),
    (0, "duty = k.pre_duty if pieces > 0 else k.dec_duty", "duty = k.dec_duty"),
    (0, "k.pre_duty if pieces > 0 else k.dec_duty", "k.pre_duty if pieces > 0 else 0.5 * k.dec_duty"),
    (0, "slowed(n.max_rate, n.given, n.slow)", "slowed(n.max_rate, n.given, 1.0)"),
    (178, "n.slow * n.layers * late", "n.layers * late"),
    (7, "slowed(n.given, n.given * part, n.slow)", "n.given * part"),
]
PROCESS_TURNS = [
    (4, "* max(turn, W.quantum_s) * (1.0 + W.switching) if", "* turn * (1.0 + W.switching) if"),  # knows no quantum
    (0, "            slice_ = max(turn, W.quantum_s) *", "            slice_ = turn *"),
    (1, "            longest = turn\n", "            longest = turn + W.quantum_s\n"),  # one alone yields
    (7, "        if x != lane and y.process == n.process:\n", "        if False:\n"),  # lanes of one in sequence
    (0, "                    longest = max(longest, ", "                    longest = min(longest, "),  # no rivals
    (0, "on = n.duty * (n.stretch / n.given)\n", "on = n.duty * n.stretch\n"),  # waits make none be there longer
    (0, " and not (W.sliced and y.process != n.process)", ""),  # processes by kernels, too
    (0, "    q.time_slice += off\n    q.contention += wall - solo - off\n", "    q.contention += wall - solo\n"),
    (0, "            set_part(S, lane, alone / beside)\n", "            pass\n"),  # no time slices
    (0, "        n.off_s = off_s(S, lane, now)\n", ""),  # forgets those before the last change
]
TOKEN_WAITS = [
    (0, "        s.clock_load = B.clock_load\n", ""),
    (0, "        s.clock_stall = B.clock_stall\n", ""),
    (0, "        s.clock_solo = B.clock_solo + n.anchor_work\n", "        s.clock_solo = B.clock_solo\n"),
    (
        0,
        "        s.clock_wall = B.clock_wall + (n.anchor_s - n.started_s)\n",
        "        s.clock_wall = B.clock_wall\n",
    ),
    (
        0,
        "        s.clock_slice = B.clock_slice + off_s(S, lane, n.anchor_s)\n",
        "        s.clock_slice = B.clock_slice\n",
    ),
    (0, "        s.part = n.part\n", ""),
    # a slice that changes while the rate stays
    (4, "        if W.log_tokens and n.rate > 0.0:\n            segment(S, lane, done_at(S, lane, now))\n", ""),
    (5, "    s.clock_stall = q.mark_stall\n", ""),
    (5, "    s.transfer = q.transfer\n", ""),
    (0, "    s.queue = q.queue\n", ""),
    (0, "            if W.log_tokens and n.busy == SPAN:\n", "            if False:\n"),
]
SLICES = [
    (31, "        if q.piece > 0:\n            leave_step(S, r)\n", ""),  # computed for nobody
    (622, "        n.layers_left = 0\n        n.ran += 1\n", "        n.layers_left = 0\n"),  # no end
    (2, "        return q.piece > 0 and lane_at", "        return q.piece > 0 or lane_at"),  # only whole steps end
    (23, "        if W.reuse and not n.sliced:\n", "        if W.reuse:\n"),  # found before it is there
    (17, "        if W.reuse and n.sliced:\n            publish(S, r)\n", ""),  # never found
    (31, "n.busy != IDLE or n.layers_left > 0:", "n.busy != IDLE:"),  # joins a step early
    (0, "    solo *= part / layers\n", "    solo *= n.slice_layers / layers if n.slice_layers > 0 else 1\n"),
    (0, "        n.steps = int(n.layers_left == 0)\n", "        n.steps = 1\n"),  # a step a slice
    (25, "            charge(S, r, W.now)\n            pieces += 1\n", "            pieces += 1\n"),  # runs closed
]


@pytest.mark.full
@cases(
    ("first", "worlds", "changes"),
    [
        (TURNED, 60, TURN_OR_LINK),
        (0, 400, PAGES),
        (TURNED, 60, PAGES_OF_TURNS),
        (WILD, 30, PAGES_ON_THEIR_WAY),
        (SHARED, 120, PREFIX_CACHE),
        (WILD, 30, WAIT_OR_CAP),
        (CUT, 60, CUT_OR_MOVE),
        (BESIDE, 60, KERNEL_TURNS),
        (BESIDE, 300, EXPERTS),
        (0, 60, PHASES),
        (MEASURED, 90, SHARES),
        (SLICED, 60, PROCESS_TURNS),
        (SLICED, 60, TOKEN_WAITS),
        (LAYERED, 240, SLICES),
    ],
)
def test_oracle_notices_whatever_else_is_wrong(first: int, worlds: int, changes: list[tuple[int, str, str]]) -> None:
    assert escaped(first, first + worlds, changes) == []
