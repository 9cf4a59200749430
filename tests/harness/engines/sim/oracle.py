"""The independent oracle: the simulator's semantics one step at a time, by scanning everything.

No heap, no closed form, no running sums: every count is taken anew from the list of requests. Slow on purpose.
It shares with the simulator only the harness's values and the layout of cost tables (`harness.engines.costs.coef`).

Over 600 lines: it must be read beside nothing else to be believed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from harness.engines.costs.coef import Tables
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Failed, Finished, Freed, Preempted, Prefilled, TurnEnded
from harness.policy.types import Batch, Gpus, Host, Inst, Jobs, Request

CAUSES = ("admission", "load", "kv", "transfer", "queue", "compute", "time_slice", "contention")
RANK = (Freed, Done, Finished, Prefilled, Preempted, TurnEnded, Arrived)  # order of telling within an instant
Refuse = Callable[[Failed, str], None]
LIVE = ("held", "waiting", "running", "parked", "away", "moving")  # away: its KV is not where its batch is
HOST: Gpus = ()  # the host as a home of KV
HALF_NS = 0.5e-9  # what ends or comes within it belongs to the instant
Kept = tuple[Inst, "int | Req"]  # an account, and an id or the request that left what nobody can find
Lane = tuple[Batch, int]  # slot 0: mixed or prefill, 1: decode


class ModelSetup(NamedTuple):
    """A model's numbers; bytes are per GPU of its group."""

    row: int  # of the cost tables
    footprint_bytes: int
    block_bytes: int
    granule_bytes: int
    granule_blocks: int = 1
    reserve_bytes: int = 0  # part of the footprint that its KV uses first
    cut: Mapping[int, ModelSetup] = {}  # the same on other numbers of GPUs
    layers: int = 1
    max_tokens: int = 1 << 20


@dataclass(frozen=True)
class Setup:
    """Everything of a run but its requests. Links are named h2d0, d2h0, p2p0, net0, ... by the sending GPU."""

    tables: Tables
    models: Mapping[str, ModelSetup]  # in the order of the noise's model index
    gpu_bytes: tuple[int, ...]
    gpu_sms: tuple[int, ...]
    gpu_rows: tuple[int, ...] = ()  # by GPU: the first row of its kind in the cost tables; none: all have one kind
    gpu_nodes: tuple[int, ...] = ()  # by GPU; none: all are of one node
    links: Mapping[str, float] = field(default_factory=dict)  # bytes/s
    ways: Mapping[tuple[Inst, str], tuple[float, Sequence[tuple[str, int]]]] = field(default_factory=dict)
    host_bytes: int | None = None  # of a node's memory for weights; None: for all
    host_order: Mapping[str, int] = field(default_factory=dict)  # bytes of models there, in the order they were read
    disk_ways: Mapping[tuple[Inst, str], tuple[float, Sequence[tuple[str, int]]]] = field(default_factory=dict)
    block_tokens: int = 16
    batch_cap: int = 256
    chunk_tokens: int = 2048
    prefill_tokens: int = 16384
    piece_bytes: float = math.inf
    watermark: float = 0.01
    admission: str = "prompt"
    sharing: Literal["fluid", "turns", "none"] = "fluid"
    co_run: float = 1.0  # of what others slow a step down by, times what its cost table says
    quantum_s: float = 0.0  # of a turn of a process, at least
    switching: float = 0.0  # of it, that a switch takes in addition
    poll_s: float = 0.0  # behind each kernel of an order with `op_s`
    pairs: bool = False  # prefill and decode of an instance are processes of their own
    memory: Literal["real", "unlimited"] = "real"
    kv: Literal["paged", "max", "pow2", "oracle"] = "paged"  # elastic is paged too, in other granules
    preempt: Literal["recompute", "swap"] = "recompute"
    sigma: float = 0.0
    seed: int = 0
    lookahead: int = 0  # steps that are scheduled ahead of the one in flight
    trip_s: float = 0.0  # from the end of a request to a client that thinks no time, and back


class Req:
    """A request: where it stands, and what happened to it (seconds; nan: never)."""

    def __init__(self, id: int, model: str, prompt: int, output: int, ids: tuple[int, ...] = ()) -> None:  # noqa: A002
        self.id, self.model, self.prompt, self.output = id, model, prompt, output
        self.ids = ids  # of the leading blocks of its prompt
        self.shared = self.prefilled = 0  # blocks of its KV that others can find, and tokens of it that are there
        self.found = -1  # tokens that were there when it was first let in
        self.then: list[tuple[float, Req]] = []  # think time, and the request that its client sends next
        self.where, self.state = "future", "unfinished"
        self.batch: Batch | None = None
        self.home: Inst | None = None  # the account of its blocks
        self.to: Inst | None = None  # in transit: the other end, charged as well
        self.at = self.to_at = 0  # the first block of its chunk there
        self.pages, self.to_pages = list[int](), list[int]()  # of each block, where these are known
        self.step: Step | None = None
        self.halted: Step | None = None  # between two slices
        self.later: dict[str, tuple[Callable[[], None], Refuse]] = {}  # effect, refusal: when at rest
        self.seq = self.made = self.blocks = self.preemptions = 0
        self.whole = self.swapped = False  # KV whole; taken to the host by the engine, which brings it back
        self.attend = False  # its KV is attended where it is
        self.joins = 0  # steps that its batch's lane for prompts has to have ended before
        self.admit_s = self.first_s = self.done_s = math.nan
        self.token_s: list[float] = []
        self.token_waits: list[dict[str, float]] = []  # as they stood when each was made
        self.waits = dict.fromkeys(CAUSES, 0.0)
        self.ttft_waits = dict.fromkeys(CAUSES, 0.0)  # as they stood when its first token was made

    @property
    def length(self) -> int:
        return self.prompt + self.made


class Pages:
    """The pages of an account, whose blocks requests take one by one."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks  # of a page
        self.taken = dict[int, int]()  # by page
        self.open = list[int]()  # pages with a free block; the last one is next
        self.made = 0

    def take(self, n: int) -> list[int]:
        """Take n blocks; return the page of each."""
        pages = list[int]()
        while len(pages) < n:
            if not self.open:
                self.open, self.made = [self.made], self.made + 1
            page = self.open[-1]
            pages.append(page)
            self.taken[page] = self.taken.get(page, 0) + 1
            if self.taken[page] == self.blocks:
                self.open.pop()
        return pages

    def give(self, pages: list[int]) -> None:
        """Free blocks of one request, the last first: a page is behind the others when the first of its own is free."""
        for page in dict.fromkeys(reversed(pages)):
            self.open = [x for x in self.open if x != page]
            self.taken[page] -= pages.count(page)
            if self.taken[page]:
                self.open.append(page)
            else:
                del self.taken[page]

    def count(self, more: int) -> int:
        """Return the pages that there are with so many blocks more."""
        free = sum(self.blocks - self.taken[page] for page in self.open)
        return len(self.taken) + max(0, math.ceil((more - free) / self.blocks))


@dataclass(eq=False)
class Turn:
    """A lane's turn: `begun` (nan: not yet) is the start of its first step."""

    order: Run
    begun: float = math.nan
    steps: int = 0
    closing: bool = False  # its last step is in flight

    @property
    def end_s(self) -> float:
        return self.begun + (math.inf if self.order.for_s is None else self.order.for_s)


@dataclass(eq=False)
class Step:
    """A step in flight, whose `progress` was exact at `since`."""

    place: Gpus
    phase: str
    decodes: list[Req]
    pieces: list[tuple[Req, int]]
    work: float
    top: float  # the rate at its SM share
    demand: tuple[float, float]  # compute, HBM at rate 1
    turn: Turn | None
    bound: set[str]  # the engine's caps that kept out what it would else have had
    process: tuple[Inst, int]
    turn_s: float  # the step in its process's turn
    left: int  # layers behind this slice
    sliced: bool  # begun in slices
    usual: float  # its time that rates go by: without noise, at a power of two of the context
    layers: int
    kernels: Sequence[tuple[float, int]]  # seconds, and how many, at which others' attention gets in
    lent: Mapping[Inst, tuple[float, float]]  # where it attends elsewhere: part of the time, and slack a layer
    slow: float  # of the seconds that others add to it by turns
    part: tuple[int, str] | None  # its partition: SMs, and whose they are; None: all
    duty: float  # part of it in which its kernels run
    fill: float  # of the GPU, that they keep from others
    kernels_s: float  # of their turn
    limits: tuple[float, float]  # times as long beside another partition: at least, and for each bandwidth asked for
    rate: float = 0.0
    progress: float = 0.0
    since: float = 0.0
    end: float = math.inf


@dataclass(eq=False)
class Transfer:
    """Weights of an instance, or KV (None), on links; `due` once nothing of it is left there."""

    weights: Inst | None
    gpus: set[int]  # at both ends
    fixed_s: float
    effect: Callable[[], None]
    parts: int
    due: float = math.inf


@dataclass(eq=False)
class Part:
    """The rest of a transfer on a link."""

    of: Transfer
    left: float


class Grant(NamedTuple):
    """Memory waited for: an instance's footprint, or the blocks of `req` in its account; `asked`: order of issue."""

    asked: int
    inst: Inst
    req: Req | None
    start: Callable[[], None]
    fail: Refuse


class Result(NamedTuple):
    """A `Req` per job in order of id, every event told, with its time, and steps: all, and those that a cap bound."""

    requests: list[Req]
    told: list[tuple[float, Event]]
    steps: Counter[str]


def on(inst: Inst) -> Gpus:
    assert not isinstance(inst.place, Host)
    return inst.place


def scramble(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x7FEB352D) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * 0x31848BAB) & 0xFFFFFFFF
    return h ^ h >> 16


def noise(sigma: float, seed: int, model: int, tag: int, slot: int, kind: int, index: int) -> float:
    """Return a step's factor, of mean 1 and standard deviation sigma: four uniform numbers summed."""
    h = 0x9E3779B9
    for v in (seed, model, tag * 2 + slot, kind, index):
        h = scramble(h ^ v & 0xFFFFFFFF)
    h2 = scramble(h ^ 0x85EBCA6B)
    u = sum(half / 65536 for half in (h & 0xFFFF, h >> 16, h2 & 0xFFFF, h2 >> 16))
    return 1 + sigma * math.sqrt(3.0) * (u - 2)


def line(x: Sequence[int], y: Sequence[float], at: int) -> float:
    """Return a table's value: 0 at 0, linear between its points and beyond the last two."""
    i = min(max(sum(v <= at for v in x) - 1, 0), len(x) - 2)
    return y[i] + (at - x[i]) * (y[i + 1] - y[i]) / (x[i + 1] - x[i]) if at else 0.0


class Price(NamedTuple):
    """The parts of a step's price, as the fields of `Step` of these names have them."""

    step: float
    demand: tuple[float, float]
    layers: int
    kernels: Sequence[tuple[float, int]]
    lent: Mapping[Inst, tuple[float, float]]
    slow: float
    duty: float
    fill: float
    passes: float
    limits: tuple[float, float]


def price(
    t: Tables,
    row: int,
    here: tuple[int, float],
    far: Mapping[Inst, tuple[int, float, float]],
    p: int,
    n: int,
    area: float,
    out: int,
    op_s: float | None,
    poll_s: float,
    polls: int | None,
) -> Price:
    """Price decodes (members, context) here, and elsewhere with their seconds on links (formulas: coef.py)."""
    k, grid = dict(zip(t.cost.dtype.names or (), t.cost[row].item(), strict=True)), t.grid.tolist()
    L, B = k["layers"], here[0] + sum(lender[0] for lender in far.values())

    def attention(B: int, C: float) -> float:
        return max(k["att0"] + k["att1"] * B, k["dec0"] + k["dec1"] * B + k["dec2"] * C) if B else 0.0

    gemm, head = line(grid, t.gemm[row].tolist(), B + p), line(grid, t.head[row].tolist(), out)
    gemm *= k["pre_x"] if n else 1.0
    pre = k["pre0"] * n + k["pre1"] * p + k["pre2"] * area if n else 0.0
    back = {inst: attention(seqs, context) + link for inst, (seqs, context, link) in far.items()}
    longest = max([attention(*here), *back.values()])
    kernels = [(gemm + head + attention(*here) + pre, 1)]
    gpu = gemm + head + longest + pre
    if op_s is not None:
        parts = [line(grid, column, min(B + p, grid[-1])) for column in t.kernels[row].T.tolist()]
        each = [(gemm / L * part, L) for part in parts] + [((attention(*here) + pre) / L, L), (head, 1)]
        cuts = [2 ** math.ceil(math.log2(s / op_s)) if s > op_s else 1 for s, _ in each if s > 0]
        kernels = [(s / cut, many * cut) for (s, many), cut in zip([x for x in each if x[0] > 0], cuts, strict=True)]
        gpu += poll_s * (sum(many for _, many in kernels) if polls is None else polls)
    host = k["host0"] + k["host1"] * (B + n)
    step = gpu + host if k["serial"] else max(gpu, host)
    phase = "pre" if n else "dec"
    compute = (k["fl_tok"] * (B + p) + k["fl_area"] * area) / (k["flops"] * step)
    weights = k["wbytes"] + (k["xbytes"] * (1 - k["xmiss"] ** float(B + p)) if k["xbytes"] else 0.0)
    hbm = (weights + k["kbytes"] * here[1]) / (k["hbm"] * step)
    lent = {i: (attention(*far[i][:2]) / step, (longest - back[i]) / L) for i in far}
    duty = k[f"{phase}_duty"] or min(1.0, gpu / step)
    like = np.interp(p, (k["few"], k["many"]), (0.0, 1.0)) if k["few"] < k["many"] else float(p >= k["many"])
    like = float(like) if n else 0.0  # a prompt's step: 1
    fill = k["dec_fill"] + like * (k["pre_fill"] - k["dec_fill"])
    passes = 0.0 if k["equal"] else k["passes"] + like * (1 - k["passes"])
    limits = k["apart"], k["crowd"]
    demand = min(1.0, compute), min(1.0, hbm)
    return Price(step, demand, L, kernels, lent, k[f"{phase}_slow"], duty, fill, passes, limits)


def slowed(steps: Sequence[Step], alone: Sequence[float], rates: Sequence[float]) -> list[float]:
    """Return rates where the seconds that others add to each step count `slow` times."""
    added = [s.slow * (a / rate - 1) for s, a, rate in zip(steps, alone, rates, strict=True)]
    return [a / (1 + more) for a, more in zip(alone, added, strict=True)]


def here(s: Step, stretch: float) -> float:
    """Return the part of the time that a step's kernels are on its GPUs, each of which takes so many times as long."""
    return s.duty * stretch / (1 - s.duty + s.duty * stretch)


def kernels(steps: Sequence[Step]) -> list[float]:
    """Return how many times as long each step's kernels take where they take turns, on the GPU with the most."""
    stretch = [1.0] * len(steps)
    for _ in range(3):
        busy = [here(x, s) * x.fill * x.kernels_s for x, s in zip(steps, stretch, strict=True)]
        swept = list[float]()
        for i, mine in enumerate(steps):
            most = 1.0
            for gpu in mine.place:
                there = [j for j, x in enumerate(steps) if j != i and gpu in x.place]
                apart = [j for j in there if mine.part and steps[j].part and mine.part != steps[j].part]
                waits = sum(busy[j] for j in there if j not in apart)
                most = max(most, mine.fill + waits / mine.kernels_s)
                if apart:
                    asked = sum(steps[j].demand[1] * steps[j].top for j in (i, *apart))
                    most = max(most, mine.limits[0], mine.limits[1] * asked)
            swept.append(most)
        stretch = swept
    return stretch


def longer(s: Step, stretch: float) -> float:
    """Return how many times as long a step takes whose kernels take so many times as long."""
    return 1 - s.duty + s.duty * stretch


def beside(steps: Sequence[Step]) -> list[float]:
    """Return rates where kernels of all steps take turns."""
    return [s.top / longer(s, stretch) for s, stretch in zip(steps, kernels(steps), strict=True)]


def turns(steps: Sequence[Step], quantum_s: float, switching: float) -> tuple[list[float], dict[int, float]]:
    """Return rates where processes have the GPU in turn, and by step the part of time that others leave.

    The slice of a process is its longest step's kernels, beside those of its other steps, or a quantum.
    """
    processes = list(dict.fromkeys(s.process for s in steps))
    groups = {p: [s for s in steps if s.process == p] for p in processes}
    inside = {id(s): x for group in groups.values() for s, x in zip(group, kernels(group), strict=True)}
    needs = {p: [s.duty * inside[id(s)] * s.turn_s for s in group] for p, group in groups.items()}
    first = {p: groups[p][needs[p].index(max(needs[p]))] for p in processes}
    parts = dict.fromkeys(processes, 1.0)
    for _ in range(3):
        rounds = {
            p: here(first[p], inside[id(first[p])] / parts[p]) * max(quantum_s, *needs[p]) * (1 + switching)
            for p in processes
        }
        swept = dict[tuple[Inst, int], float]()
        for p in processes:
            need, waits = max(needs[p]), 0.0
            for gpu in first[p].place:
                waits = max(
                    waits, sum(rounds[x] for x in processes if x != p and any(gpu in s.place for s in groups[x]))
                )
            swept[p] = need / (max(quantum_s, need) * (1 + switching) + waits) if waits else 1.0
        parts = swept
    rates, left = list[float](), dict[int, float]()
    for s in steps:
        took = longer(s, inside[id(s)] / parts[s.process])
        rates.append(s.top / took)
        left[id(s)] = longer(s, inside[id(s)]) / took
    return rates, left


def late(s: Step, slack_s: float) -> float:
    """Return seconds beyond `slack_s` to wait for a step's kernel, at a time drawn from the step: the mean."""
    return sum(many * max(0.0, x / s.top - slack_s) ** 2 for x, many in s.kernels) / (2 * s.turn_s)


def lend(steps: Sequence[Step], rates: Sequence[float]) -> list[float]:
    """Return rates left where steps attend to KV on others' GPUs: they wait for a kernel, then take the time."""
    given = list[float]()
    for s, rate in zip(steps, rates, strict=True):
        others = [x for x in steps if x is not s]
        beside = [(x, slack) for i, (_, slack) in s.lent.items() for x in others if set(on(i)) & set(x.place)]
        waits = s.layers * max((late(*pair) for pair in beside), default=0.0)
        given.append(rate * s.usual / (s.usual + s.slow * waits))
    parts = [1.0] * len(steps)
    for gpu in {g for s in steps for i in s.lent for g in on(i)}:
        parts_of = [sum(part for i, (part, _) in s.lent.items() if gpu in on(i)) for s in steps]
        asked = {k: part * given[k] for k, part in enumerate(parts_of) if part > 0}
        present, left = any(gpu in s.place for s in steps), 1.0
        while modest := [k for k, part in asked.items() if part <= left / (len(asked) + present)]:
            left -= sum(asked.pop(k) for k in modest)
        for k, s in enumerate(steps):
            if gpu in s.place:
                parts[k] = min(parts[k], left / (len(asked) + 1))
            if k in asked:
                parts[k] = min(parts[k], left / (len(asked) + present) / asked[k])
    return slowed(steps, given, [part * rate for part, rate in zip(parts, given, strict=True)])


def attendable(mine: Gpus, to: Gpus | Host | None) -> bool:
    """Return whether KV on some GPUs can be attended from others: as many, and none of them."""
    return isinstance(to, tuple) and len(to) == len(mine) and set(to).isdisjoint(mine)


class Oracle:
    """The simulation of a script of actions, without a policy, over a workload."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def run(
        self,
        jobs: Jobs,
        script: Sequence[tuple[float, Action]],
        end_s: float = math.inf,
        answer: Callable[[float, Event], Iterable[Action]] = lambda now, event: (),
    ) -> Result:
        """Apply `script` (sorted; at -inf: before the clock, with free loads) and pass time to `end_s`.

        `answer` is asked for actions at each event told after the start.
        """
        columns = zip(jobs.model.tolist(), jobs.prompt_tokens.tolist(), jobs.output_tokens.tolist(), strict=True)
        reqs = [Req(i, jobs.models[m], p, o) for i, (m, p, o) in enumerate(columns)]
        self.per = 0  # blocks of an id; 0: no prefix cache
        self.there: dict[Kept, int] = {}  # blocks that can be found, or that a request left and nobody can
        self.pages: dict[Inst, Pages] = {}  # of accounts whose blocks lie in larger granules
        self.line: list[Kept] = []  # those of them that nobody holds, the first released first
        if jobs.prefix is not None and self.setup.kv == "paged":
            self.per = jobs.prefix.block_tokens // self.setup.block_tokens
            for r, first, last in zip(reqs, jobs.prefix.offsets[:-1], jobs.prefix.offsets[1:], strict=True):
                r.ids = tuple(jobs.prefix.ids[first:last].tolist())
        if jobs.after is not None and jobs.think_s is not None:
            for r, before, think_s in zip(reqs, jobs.after.tolist(), jobs.think_s.tolist(), strict=True):
                if before >= 0:
                    reqs[before].then.append((think_s, r))
        times_s = zip(jobs.arrival_s.tolist(), reqs, strict=True)
        self.arrivals, todo = [(at, r) for at, r in times_s if at < math.inf], list(script)
        arrivals = self.arrivals
        self.now, self.fresh, self.admits = -math.inf, False, 0
        self.reqs, self.live = reqs, list[Req]()
        self.weights: dict[Inst, str] = {}  # waiting, loading, in, draining, leaving; absent: out
        self.leaving: dict[Inst, Action] = {}
        self.limits: dict[tuple[str, int], int | None] = {}
        self.routes: dict[str, Batch] = {}
        self.answer = answer
        self.batches: dict[Batch, int] = {}  # in the order in which they were first named
        self.lanes: dict[Lane, Run | None] = {}  # None: closed
        self.turns: dict[Lane, Turn] = {}
        self.steps: dict[Lane, Step] = {}
        self.halted: dict[Lane, Step] = {}  # between two slices
        self.ticks: Counter[tuple[Batch, int]] = Counter()  # steps with decodes (0) and with prefill (1)
        self.ended: Counter[Lane] = Counter()  # steps
        self.sms: dict[Lane, int | None] = {}  # partitions as last ordered
        self.resized: set[Lane] = set()  # lanes whose partition is to change
        self.stalls: set[Batch] = set()  # batches whose decodes wait for a swap
        self.kv_stops: set[Batch] = set()  # batches whose last prefill walk stopped for memory
        self.attended: list[Inst] = []  # accounts that were named as such, in that order
        self.grants: list[Grant] = []  # in order of issue
        self.asks = 0
        self.short = False  # a load found no room before the start
        self.landing: set[Inst] = set()  # an eviction was refused while their weights were on a link
        self.memories: dict[int, list[tuple[str, Inst | None]]] = {}  # by node: models and who reads them from disk
        for node in sorted({0, *self.setup.gpu_nodes}):
            self.memories[node] = []
            for model in self.setup.host_order:
                self.recall(node, model, None)
        self.transfers: list[Transfer] = []
        self.queues: dict[str, list[Part]] = {link: [] for link in self.setup.links}  # in order of issue
        self.wires: dict[str, tuple[float, Part, float]] = {}  # the piece on its way: its end, whose it is, its size
        self.told: list[tuple[float, Event]] = []
        self.news: list[Event] = []
        self.counted: Counter[str] = Counter()  # steps
        while True:
            times = [x[0] for x in arrivals[:1] + todo[:1]] + [x[0] for x in self.wires.values()]
            times += [x.due for x in self.transfers]
            times += [0.0] * (self.now == -math.inf)
            times += [t.end_s for lane, t in self.turns.items() if lane not in self.steps and t.begun == t.begun]
            then = min(times + [s.end for s in self.steps.values()], default=math.inf)
            if then == math.inf and self.grants and self.now + HALF_NS < end_s:  # nothing else will ever free memory
                then = self.now
                self.grants.pop(0).fail("never", "no memory")
            self.pass_time(min(then, end_s))
            if then > end_s + HALF_NS or then == math.inf:
                return Result(reqs, self.told, self.counted)
            soon = self.now + HALF_NS
            for link in [x for x in self.wires if self.wires[x][0] <= soon]:
                self.end_piece(link)
            due = [x for x in self.transfers if x.due <= soon]
            self.transfers = [x for x in self.transfers if x.due > soon]
            for transfer in due:
                transfer.effect()
            for lane in [x for x in self.by_age() if x in self.steps and self.steps[x].end <= soon]:
                self.end_step(lane, self.steps.pop(lane))
            for lane in self.idle_turns():
                turn = self.turns[lane]
                if turn.closing or turn.steps == turn.order.steps:
                    self.end_turn(lane, "steps")
                elif turn.end_s <= soon:
                    self.end_turn(lane, "time")
            self.tell()
            while arrivals and arrivals[0][0] <= soon:
                r = arrivals.pop(0)[1]
                r.where = "held"
                self.live.append(r)
                if r.model in self.routes:
                    self.join(r, self.routes[r.model], self.next_admit())
                else:
                    slo = float(jobs.ttft_slo_s[r.id]), float(jobs.tpot_slo_s[r.id])
                    self.news.append(Arrived(Request(r.id, r.model, self.now, r.prompt, *slo)))
                self.tell()
            while todo and todo[0][0] <= soon:
                self.do(todo.pop(0)[1])
                self.tell()
            self.fresh = -math.inf < soon < end_s  # what would start at the end does not
            while self.fresh:
                while self.fresh:
                    while self.fresh:
                        self.form_all()
                    self.tell()
                over = [(lane, why) for lane in self.idle_turns() if (why := self.over(lane))]
                for lane, why in over:
                    self.end_turn(lane, why)
                self.tell()
            steps = list(self.steps.values())
            rates = [s.top for s in steps]
            if self.setup.sharing == "fluid":
                rates = slowed(steps, rates, beside(steps))
            elif self.setup.sharing == "turns":
                rates = turns(steps, self.setup.quantum_s, self.setup.switching)[0]
            rates = rates if self.setup.sharing == "none" else lend(steps, rates)
            for s, rate in zip(steps, rates, strict=True):
                if rate != s.rate:  # a step whose rate stays keeps its end
                    s.progress, s.since, s.rate = s.progress + (self.now - s.since) * s.rate, self.now, rate
                    s.end = self.now + (s.work - s.progress) / rate

    def form_all(self) -> None:
        """Go one round: memory, then each idle lane in turn; fresh if there is to be another."""
        self.fresh, news = False, len(self.news)
        self.serve_grants()
        for lane in self.by_age():
            order = self.lanes[lane]
            if order and lane not in self.steps and self.usable(lane[0].inst):
                self.form(lane, order)
        self.empty_leaving()
        self.fresh |= len(self.news) > news

    def pass_time(self, until: float) -> None:
        """Charge the time up to `until` to a cause of each request."""
        self.forget_stops()
        there = {inst.model for inst, state in self.weights.items() if state in ("in", "draining", "leaving")}
        sliced = self.setup.sharing == "turns"
        steps = list(self.steps.values())
        parts = turns(steps, self.setup.quantum_s, self.setup.switching)[1] if sliced else {}
        for r in self.live if math.isfinite(until) else []:
            dt = until - self.now
            if r.step:
                had = parts.get(id(r.step), 1.0)
                r.waits["compute"] += r.step.rate * dt
                r.waits["time_slice"] += (1 - had) * dt
                r.waits["contention"] += (had - r.step.rate) * dt
            elif r.batch is None:
                r.waits["admission" if r.model in there else "load"] += dt
            elif not self.usable(r.batch.inst) and self.weights.get(r.batch.inst) != "leaving":
                r.waits["load"] += dt
            elif r.batch in (self.kv_stops if r.where == "waiting" else self.stalls if r.where == "running" else ()):
                r.waits["kv"] += dt
            else:
                r.waits["transfer" if r.where in ("moving", "away") else "queue"] += dt
        self.now = until if until < math.inf else self.now

    def forget_stops(self) -> None:
        """Forget batches of which nobody who was stopped for memory is left."""
        self.kv_stops &= {r.batch for r in self.live if r.batch and r.where == "waiting"}

    def by_age(self) -> list[Lane]:
        return sorted(self.lanes, key=lambda lane: (self.batches[lane[0]], lane[1]))

    def tell(self) -> None:
        """Tell what happened, in order of rank; what is answered to it may make more to tell."""
        self.empty_leaving()
        while self.news:
            self.fresh = True
            news, self.news = sorted(self.news, key=lambda e: RANK.index(type(e))), []
            self.told += [(self.now, e) for e in news]
            for event in news if self.now > -math.inf else []:
                for action in self.answer(self.now, event):
                    self.do(action)
                    self.fresh = True
                    self.empty_leaving()

    def empty_leaving(self) -> None:
        """Let weights go whose last step or member has gone."""
        for inst, state in list(self.weights.items()):
            steps = any(lane[0].inst == inst for lane in self.steps)
            members = any(r.batch and r.batch.inst == inst for r in self.live)
            if (state == "leaving" and not steps) or (state == "draining" and not members):
                self.shed(inst)
                for key in [key for key in self.line if key[0] == inst]:
                    self.forget(key)
                del self.weights[inst]
                self.news.append(Done(self.leaving.pop(inst)))

    # turns

    def idle_turns(self) -> list[Lane]:
        return [lane for lane in self.by_age() if lane in self.turns and lane not in self.steps]

    def end_turn(self, lane: Lane, why: Literal["time", "steps", "empty", "stuck"]) -> None:
        turn = self.turns[lane]
        ran_s = self.now - turn.begun if turn.begun == turn.begun else 0.0
        self.close(lane)
        self.news.append(TurnEnded(lane[0], turn.order.phase, why, turn.steps, ran_s))

    def close(self, lane: Lane) -> None:
        """Close a lane: it steps no more; a turn goes with it, untold."""
        self.lanes[lane] = None
        self.turns.pop(lane, None)
        if lane[1] == 0:
            self.kv_stops.discard(lane[0])
        self.park(lane[0])

    def park(self, batch: Batch) -> None:
        """Park members with KV where no lane decodes, or is about to."""
        orders = [self.lanes.get((batch, 0)), self.lanes.get((batch, 1))]
        open_ = any(order and order.phase != "prefill" for order in orders)
        if not open_ and not any(self.steps[x].decodes for x in ((batch, 0), (batch, 1)) if x in self.steps):
            for r in self.at(batch, "running"):
                r.where = "parked"

    def over(self, lane: Lane) -> Literal["empty", "stuck"] | None:
        """Return whether a turn in whose lane nothing steps is over: nobody to step, or nothing under way for any."""
        batch, phase = lane[0], self.turns[lane].order.phase
        prompts = [r for r in self.at(batch, "waiting") if not r.swapped]
        moving = self.at(batch, "moving")
        here = self.at(batch, "running") + self.at(batch, "parked")
        here += [r for r in self.at(batch, "waiting") if r.swapped]
        if phase == "prefill":
            moving, here, away = [], prompts, []
        else:
            here += prompts if phase == "mixed" else []
            away = self.at(batch, "away")
        if not here + moving + away:
            return "empty"
        if not self.usable(batch.inst):
            return None if self.weights.get(batch.inst) in ("waiting", "loading") else "stuck"
        if moving or lane in self.resized:
            return None
        mine = set(on(batch.inst)).union(*(on(account) for account in self.elsewhere(self.at(batch, "running"))))
        busy = any(mine & set(s.place).union(*map(on, s.lent)) for s in self.steps.values())
        sent = any(mine & x.gpus for x in self.transfers)
        asked = any(mine & (set(on(g.inst)) | set(on(g.req.home) if g.req and g.req.home else ())) for g in self.grants)
        return None if here and (busy or sent or asked) else "stuck"

    # memory

    def sizes(self, inst: Inst) -> ModelSetup:
        """Return a model's numbers on as many GPUs as its place has; a host's are those of its usual number."""
        m = self.setup.models[inst.model]
        return m.cut.get(len(on(inst)), m)

    def held(self, account: Inst, blocks: int, *, gone: int = 0) -> int:
        """Return bytes that an account takes with so many blocks, once the pages of `gone` full ones are free."""
        m = self.sizes(account)
        pages = self.packed(account, blocks)
        if kept := self.pages_of(account):
            pages = kept.count(blocks - self.blocks(account))
        return max(0, m.granule_bytes * (pages - gone // m.granule_blocks) - self.reserve(account))

    def packed(self, account: Inst, blocks: int) -> int:
        return math.ceil(blocks / self.sizes(account).granule_blocks)

    def reserve(self, account: Inst) -> int:
        return self.sizes(account).reserve_bytes if self.weights.get(account, "waiting") != "waiting" else 0

    def pages_of(self, account: Inst) -> Pages | None:
        """Return an account's pages; None where each block is its own, or pages are counted as if packed."""
        blocks = self.sizes(account).granule_blocks
        if blocks == 1 or self.per or self.setup.memory == "unlimited" or not on(account):
            return None
        return self.pages.setdefault(account, Pages(blocks))

    def take(self, account: Inst, n: int) -> list[int]:
        pages = self.pages_of(account)
        return pages.take(n) if pages else []

    def give(self, account: Inst, pages: list[int]) -> None:
        if kept := self.pages_of(account):
            kept.give(pages)

    def blocks(self, account: Inst) -> int:
        held = sum((r.blocks - r.shared) * (r.home == account) + r.blocks * (r.to == account) for r in self.live)
        return held + sum(n for key, n in self.there.items() if key[0] == account and key not in self.line)

    def free(self, gpu: int) -> int:
        there = [i for i, state in self.weights.items() if state != "waiting" and gpu in on(i)]
        accounts = {a for r in self.live for a in (r.home, r.to) if a and gpu in on(a)}
        weights = sum(self.sizes(i).footprint_bytes for i in there)
        return self.setup.gpu_bytes[gpu] - weights - sum(self.held(a, self.blocks(a)) for a in accounts)

    def more(self, account: Inst, n: int, *, gone: int = 0) -> int:
        """Return bytes that n more blocks take."""
        have = self.blocks(account)
        return self.held(account, have + n, gone=gone) - self.held(account, have)

    def asked(self, g: Grant) -> int:
        return self.more(g.inst, g.req.blocks) if g.req else self.sizes(g.inst).footprint_bytes

    def promised(self, gpu: int) -> int:
        return sum(self.asked(g) for g in self.grants if gpu in on(g.inst))

    def limit(self, account: Inst) -> float:
        limits = [self.limits.get((account.model, g)) for g in on(account)]
        return min((x for x in limits if x is not None), default=math.inf)

    def fits(self, account: Inst, n: int, *, growth: bool = False, gone: int = 0) -> bool:
        """Return whether n more blocks fit; memory that is waited for is closed to prompts, not to growth."""
        return self.setup.memory == "unlimited" or (
            self.held(account, self.blocks(account) + n, gone=gone) <= self.limit(account)
            and all(
                self.more(account, n, gone=gone) + (0 if growth else self.promised(g)) <= self.free(g)
                for g in on(account)
            )
        )

    # contiguous KV

    def chunk(self, r: Req) -> int:
        """Return the blocks that a request reserves when it is let in: a power of two."""
        most, output = self.sizes(Inst(r.model, HOST)).max_tokens, r.output
        while self.setup.kv == "pow2" and output & (output - 1):
            output += 1
        tokens = r.prompt + output
        if self.setup.kv == "paged":
            return math.ceil(tokens / self.setup.block_tokens)
        n, blocks = math.ceil((max(tokens, most) if self.setup.kv == "max" else tokens) / self.setup.block_tokens), 1
        while blocks < n:
            blocks *= 2
        return blocks

    @property
    def reserves(self) -> bool:
        return self.setup.kv != "paged" or self.setup.admission == "output"

    def place(self, account: Inst, n: int) -> int | None:
        """Return where n blocks go in an account of contiguous KV: the first of the smallest buddies free for them."""
        if self.setup.kv == "paged" or self.setup.memory == "unlimited" or not on(account):
            return 0
        m = self.sizes(account)
        room = min(self.setup.gpu_bytes[g] for g in on(account)) - m.footprint_bytes
        end = min(room, self.limit(account)) // m.block_bytes
        ends = [(r, r.home, r.at) for r in self.live if r.blocks] + [(r, r.to, r.to_at) for r in self.live if r.to]
        taken = [range(at, at + r.blocks) for r, home, at in ends if home == account]

        def free(at: int, size: int) -> bool:
            return at + size <= end and all(x.stop <= at or at + size <= x.start for x in taken)

        rooms = list[tuple[int, int]]()  # size of the free buddy, place
        for at in [at for at in range(0, int(end), n) if free(at, n)]:
            size = n
            while free(at - at % (2 * size), 2 * size):
                size *= 2
            rooms.append((size, at))
        return min(rooms)[1] if rooms else None

    # the prefix cache

    def hits(self, r: Req, account: Inst, *, held: bool = False) -> int:
        """Return blocks of a prompt that are there, from the first on, or those of them that somebody holds."""
        n = 0
        for key in ((account, i) for i in r.ids):
            if held and key in self.line:
                break
            n += self.there.get(key, 0)
            if self.there.get(key, 0) < self.per:
                break
        return n

    def holds(self, r: Req) -> list[Kept]:
        """Return a request's share of the blocks that others can find."""
        return [(r.home, i) for i in r.ids[: math.ceil(r.shared / self.per)]] if r.home and r.shared else []

    def beside(self, account: Inst) -> int:
        """Return bytes that an account would take with what nobody holds beside what somebody does."""
        return self.held(account, self.blocks(account) + sum(self.there[key] for key in self.line if key[0] == account))

    def shed(self, account: Inst) -> None:
        """Forget what nobody holds and has no room: the first released first, and its last block first."""
        for gpu in on(account) if self.setup.memory == "real" else ():
            while True:
                there = {a for a, _ in self.line if gpu in on(a)}
                more = sum(self.beside(a) - self.held(a, self.blocks(a)) for a in there)
                over = {a for a in there if more > self.free(gpu) or self.beside(a) > self.limit(a)}
                first = next((key for key in self.line if key[0] in over), None)
                if first is None:
                    break
                self.there[first] -= 1
                if not self.there[first]:
                    self.forget(first)

    def forget(self, key: Kept) -> None:
        self.line = [x for x in self.line if x != key]
        self.there.pop(key, None)

    def publish(self, r: Req, tokens: int) -> None:
        """Let others find the blocks that a step fills, up to so many tokens; never one of which there is another."""
        while r.home and r.shared < min(tokens // self.setup.block_tokens, len(r.ids) * self.per):
            key = r.home, r.ids[r.shared // self.per]
            if self.there.get(key, 0) != r.shared % self.per:
                break
            self.there[key] = self.there.get(key, 0) + 1
            r.shared += 1

    def part(self, r: Req) -> None:
        """Let go of a request's blocks; as long as the weights are in they stay until their room is needed."""
        if r.home and on(r.home):
            self.give(r.home, r.pages)
            self.shed(r.home)
            stays = self.per and self.weights.get(r.home) in ("in", "draining", "leaving")
            if stays:
                for key in [key for key in self.there if key[1] is r]:
                    self.forget(key)
                if r.blocks > r.shared:  # a prompt that is in by pieces may have none of its own
                    self.there[r.home, r] = r.blocks - r.shared
                    self.line.append((r.home, r))
            for key in reversed(self.holds(r)):
                if not any(key in self.holds(other) for other in self.live if other is not r):
                    self.line.append(key)
                    if not stays:
                        self.forget(key)
        r.shared = 0

    def never(self, account: Inst, n: int) -> bool:
        """Return whether the account could not hold n blocks even alone."""
        room = min(self.setup.gpu_bytes[g] for g in on(account)) - self.sizes(account).footprint_bytes
        need = max(0, self.sizes(account).granule_bytes * self.packed(account, n) - self.reserve(account))
        return self.setup.memory == "real" and need > min(room, self.limit(account))

    def watermark(self, account: Inst) -> int:
        m, total = self.sizes(account), self.limit(account)
        if self.reserves:  # kept for growth
            return 0
        if total == math.inf:
            total = min(self.setup.gpu_bytes[g] for g in on(account)) - m.footprint_bytes
        return math.floor(self.setup.watermark * (total // m.block_bytes)) if self.blocks(account) else 0

    def under_way(self, r: Req) -> str:
        """Return the state of a request's KV: it waits for memory elsewhere, is between two places, or neither."""
        if any(g.req is r for g in self.grants):
            return "waiting"
        return "moving" if r.to is not None else "none"

    def serve_grants(self) -> None:
        """Serve grants in order on each GPU: one that waits blocks those behind it."""
        blocked: set[int] = set()
        for g in list(self.grants):
            room = all(self.asked(g) <= self.free(x) for x in on(g.inst)) or self.setup.memory == "unlimited"
            if g.req and self.setup.memory == "real":
                room &= self.held(g.inst, self.blocks(g.inst) + g.req.blocks) <= self.limit(g.inst)
                room &= self.place(g.inst, g.req.blocks) is not None
            if room and blocked.isdisjoint(on(g.inst)):
                self.grants.remove(g)
                self.fresh = True
                g.start()
            else:
                blocked |= set(on(g.inst))

    # links

    def send(
        self,
        parts: Sequence[tuple[str, float]],
        fixed_s: float,
        effect: Callable[[], None],
        ends: Sequence[Inst],
        weights: Inst | None = None,
    ) -> None:
        """Queue parts on their links; `effect` a fixed time after the last has gone."""
        transfer = Transfer(weights, {g for inst in ends for g in on(inst)}, fixed_s, effect, len(parts))
        self.transfers.append(transfer)
        transfer.due = math.inf if parts else self.now + fixed_s
        for link, size in parts:
            self.queues[link].append(Part(transfer, size))
            if link not in self.wires:
                self.next_piece(link)

    def urgency(self, part: Part) -> int:
        """Return a transfer's urgency: KV before weights, those for an open lane with members before others."""
        weights = part.of.weights
        open_ = {lane[0] for lane, order in self.lanes.items() if order and lane[0].inst == weights}
        return 0 if weights is None else 1 if any(r.batch in open_ for r in self.live) else 2

    def next_piece(self, link: str) -> None:
        part = min(self.queues[link], key=self.urgency)
        size = min(part.left, self.setup.piece_bytes)
        self.wires[link] = self.now + size / self.setup.links[link], part, size

    def end_piece(self, link: str) -> None:
        _, part, size = self.wires.pop(link)
        part.left -= size
        if part.left <= 0:
            self.queues[link].remove(part)
            part.of.parts -= 1
            if part.of.parts == 0:
                part.of.due = self.now + part.of.fixed_s
        if self.queues[link]:
            self.next_piece(link)

    def elsewhere(self, members: Iterable[Req]) -> list[Inst]:
        """Return the accounts of members that are not their batch's."""
        far = {r.home for r in members if r.batch and r.home != r.batch.inst}
        return [account for account in self.attended if account in far]

    def link_s(self, g: int, h: int) -> float:
        """Return seconds a byte from one GPU to another."""
        return 1 / self.setup.links[f"p2p{g}"]

    def carry(self, r: Req, to: Inst, done: Callable[[str | None], None], attend: bool = False) -> None:
        """Bring a request's KV over the links; both ends are charged until it is there."""
        assert r.home is not None
        kind = "d2h" if not on(to) else "p2p" if on(r.home) else "h2d"
        r.to_at, r.to_pages = self.place(to, r.blocks) or 0, self.take(to, r.blocks)
        r.to, r.where, self.fresh = to, "moving", True

        def effect() -> None:
            self.part(r)
            r.home, r.to, r.attend, r.at, r.pages = r.to, None, attend, r.to_at, r.to_pages
            self.rest(r)
            done(None)

        old, new = on(r.home), on(to)
        if old and new and len({self.setup.gpu_nodes[g] for g in (old[0], new[0]) if self.setup.gpu_nodes}) > 1:
            kind = "net"
        if old and new:  # cut anew: each GPU of the old group sends as much of what the new one is to hold
            size = r.blocks * self.sizes(to).block_bytes * len(new) / len(old)
        else:
            size = r.blocks * self.sizes(r.home if old else to).block_bytes
        self.send([(f"{kind}{g}", size) for g in old or new], 0.0, effect, [r.home, to])

    # requests

    def next_admit(self) -> int:
        """Return a place in the order of Admit, taken when it is said."""
        self.admits += 1
        return self.admits

    def join(self, r: Req, batch: Batch, seq: int) -> None:
        r.admit_s = self.now if r.batch is None else r.admit_s
        r.where = r.where if r.where == "moving" else ""
        self.forget_stops()
        self.leave_step(r)
        r.batch, r.seq = batch, seq
        under_way = (batch, 0) in self.steps or bool(self.rest_of((batch, 0)))
        r.joins = self.ended[batch, 0] + under_way + self.setup.lookahead
        if r.blocks and not r.whole and r.home != batch.inst:  # partly built KV does not travel
            self.release(r)
        self.settle(r)

    def rest(self, r: Req) -> None:
        """Let a request rest: its KV has come, or will not; what was asked of it meanwhile happens now."""
        r.where = ""
        self.settle(r)
        self.catch_up(r)

    def catch_up(self, r: Req) -> None:
        """Do what waited for the request to come to rest: membership first."""
        later, r.later = r.later, {}
        for kind in ("admit", "other"):
            if kind in later:
                later[kind][0]()

    def settle(self, r: Req) -> None:
        """Put a member on the list of its batch where it belongs."""
        if r.where != "moving" and r.batch:
            far = r.home != r.batch.inst and not (
                r.attend and r.home in self.attended and attendable(on(r.batch.inst), r.home.place)
            )
            away = r.blocks and far and not r.swapped
            r.where = "away" if away else "parked" if r.whole and not r.swapped else "waiting"

    def at(self, batch: Batch, where: str) -> list[Req]:
        return sorted((r for r in self.live if r.batch == batch and r.where == where), key=lambda r: r.seq)

    def release(self, r: Req) -> None:
        """Free its blocks: back to the queue, to be computed again."""
        self.part(r)
        self.leave_step(r)
        r.blocks, r.pages, r.home, r.to, r.swapped, r.whole, r.attend = 0, [], None, None, False, False, False
        r.prefilled, r.where = 0, "waiting"

    def finish(self, r: Req, state: Literal["done", "dropped", "failed"]) -> None:
        self.release(r)
        self.live.remove(r)
        r.where, r.state, r.done_s = state, state, self.now
        if r.then:
            self.arrivals += [(self.now + self.setup.trip_s + think_s, then) for think_s, then in r.then]
            self.arrivals.sort(key=lambda x: (round(x[0], 9), x[1].id))
        self.news.append(Finished(r.id, r.batch, state))
        self.empty_leaving()  # the next lane that is formed has the memory

    def token(self, r: Req) -> bool:
        """Make one token more; return whether it was the last."""
        r.made += 1
        r.token_s.append(self.now)
        r.token_waits.append(dict(r.waits))
        if len(r.token_s) == 1:
            r.first_s, r.ttft_waits = self.now, dict(r.waits)
        if r.made == r.output:
            self.finish(r, "done")
        return r.made == r.output

    def end_step(self, lane: Lane, step: Step) -> None:
        members = step.decodes + [r for r, _ in step.pieces]
        if step.left:
            self.halted[lane] = step
            for r in members:
                r.step, r.halted = None, step
            for r in members:
                self.catch_up(r)
            return
        self.ended[lane] += 1
        for kind, part in enumerate((step.decodes, step.pieces)):
            self.ticks[lane[0], kind] += bool(part)
        self.counted.update({"all", *step.bound})
        for r in members:
            r.step = None
        for r in sorted(step.decodes, key=lambda r: r.id):  # who ends first at an instant is released first
            self.token(r)
        for r, c in step.pieces:
            if step.sliced:
                self.publish(r, r.prefilled + c)
            r.prefilled += c
            if r.prefilled == r.length and not self.token(r):
                r.whole, r.where = True, "parked"
                self.news.append(Prefilled(r.id, lane[0]))
        for r in members:
            self.catch_up(r)
        if step.turn and self.turns.get(lane) is step.turn:
            step.turn.steps += 1
        self.park(lane[0])

    # forming a step

    def form(self, lane: Lane, order: Run) -> None:
        batch, phase = lane[0], order.phase
        beside = [self.steps[x].phase for x in ((batch, 0), (batch, 1)) if x in self.steps]
        if beside and "mixed" in (phase, *beside):  # mixed excludes the others, also in flight
            return
        if lane in self.resized:  # partitions of a GPU change together, at the last of their boundaries
            mine = set(on(batch.inst))
            if any(x in self.resized and mine & set(s.place) for x, s in self.steps.items()):
                return
            self.resized.remove(lane)
        if rest := self.rest_of(lane):
            self.start(lane, order, [], rest, self.halted[lane].bound, self.halted[lane])
            return
        cap = min(self.setup.batch_cap, order.seqs or self.setup.batch_cap)
        chunk = self.setup.chunk_tokens if order.chunk_tokens is None else order.chunk_tokens
        running = self.at(batch, "running")
        if phase != "prefill":
            for r in self.at(batch, "parked")[: max(0, cap - len(running))]:
                r.where = "running"
            for r in running[cap:]:
                r.where = "parked"
        pieces: list[tuple[Req, int]] = []
        decodes: list[Req] = []
        self.full = set[str]()
        taken = False
        if self.in_pieces and phase != "decode":
            run = len(self.at(batch, "running")) if phase == "mixed" else 0
            taken = self.grow_prompts(batch, chunk - run if chunk else self.setup.prefill_tokens, whole=not chunk)
        if phase == "prefill" or (phase == "mixed" and chunk == 0):
            busy = len(self.at(batch, "running")) if phase == "mixed" else 0
            pieces = self.walk(batch, cap - busy, chunk or self.setup.prefill_tokens, whole=chunk == 0, new=not taken)
        lost: bool | None = taken
        if phase != "prefill" and not pieces:
            lost = self.grow(batch)
            if lost is None:
                return
            lost |= taken
            decodes = self.at(batch, "running")
        if phase == "mixed" and chunk > 0:
            pieces = self.walk(batch, cap - len(decodes), chunk - len(decodes), whole=False, new=not lost)
        if self.setup.lookahead and phase != "decode" and not decodes + pieces and not lost:  # none scheduled ahead
            pieces = self.walk(batch, cap, chunk or self.setup.prefill_tokens, whole=chunk == 0, ahead=False)
        if len(decodes) == cap and self.at(batch, "parked"):
            self.full.add("cap")
        named = {"cap"} if order.seqs is not None and order.seqs <= self.setup.batch_cap else set()
        named |= {"chunk"} if order.chunk_tokens else set()
        bound = {"prefill" if chunk == 0 and x == "chunk" else x for x in self.full - named}
        if decodes or pieces:
            self.start(lane, order, decodes, pieces, bound)

    def rest_of(self, lane: Lane) -> list[tuple[Req, int]]:
        """Return the pieces of a step between two slices whose requests have not left it."""
        step = self.halted.get(lane)
        return [(r, c) for r, c in step.pieces if r.halted is step] if step else []

    def leave_step(self, r: Req) -> None:
        """Take a request out of a step between two slices, which is over when all have left it."""
        step, r.halted = r.halted, None
        if step and r.batch and not any(x.halted is step for x, _ in step.pieces):
            self.ended[r.batch, 0] += 1

    def slice_of(self, batch: Batch) -> int:
        """Return layers of a slice of a batch's prefill; 0: it runs whole."""
        order = self.lanes[batch, 0]
        layers = (order.slice_layers if order else None) or 0
        return layers if layers < self.sizes(batch.inst).layers else 0

    def walk(
        self, batch: Batch, room: int, budget: int, *, whole: bool, new: bool = True, ahead: bool = True
    ) -> list[tuple[Req, int]]:
        """Return prefill pieces in order of Admit, at most `room` and `budget` tokens; note which of both cut."""
        waiting, pieces = self.at(batch, "waiting"), list[tuple[Req, int]]()
        stop = any(r.swapped for r in waiting)  # the engine's own victims come first
        for r in waiting if not stop else []:
            need, hits = math.ceil((r.length + 1) / self.setup.block_tokens), 0
            need = self.chunk(r) if self.reserves else need
            if ahead and self.ended[batch, 0] < r.joins:  # this step was scheduled before it came
                break
            if len(pieces) >= room or budget <= 0:
                self.full |= {"cap"} if len(pieces) >= room else set()
                self.full |= {"chunk"} if budget <= 0 else set()
                break
            if r.blocks == 0 and not new:  # not in the step in which a member lost its pages
                break
            if r.blocks == 0 and self.never(batch.inst, need):
                self.finish(r, "failed")
                continue
            if r.blocks == 0 and self.in_pieces and not whole:
                start = self.setup.block_tokens * min(
                    self.hits(r, batch.inst), (r.length - 1) // self.setup.block_tokens
                )
                need = self.piece_blocks(r, start, budget)
            asked = need - self.hits(r, batch.inst, held=True) + self.watermark(batch.inst)
            if stop := r.blocks == 0 and not (
                self.fits(batch.inst, asked) and self.place(batch.inst, need) is not None
            ):
                break
            if r.blocks == 0:
                self.shed(batch.inst)
                hits = self.hits(r, batch.inst)
            known = r.prefilled or self.setup.block_tokens * min(hits, (r.length - 1) // self.setup.block_tokens)
            size = r.length - known
            self.full |= {"chunk"} if size > budget and (pieces or not whole) else set()
            if whole and pieces and size > budget:
                break
            if r.blocks == 0:
                r.at = self.place(batch.inst, need) or 0
                r.pages = self.take(batch.inst, need)
                r.blocks, r.home, r.prefilled, r.shared = need, batch.inst, known, hits
                r.found = known if r.found < 0 and self.per else r.found
                self.line = [key for key in self.line if key not in self.holds(r)]
            if not self.slice_of(batch):
                self.publish(r, r.prefilled + min(size, budget) if not whole else r.length)
            most = r.blocks * self.setup.block_tokens - r.prefilled
            if most < size and (whole or most == 0):
                break
            size = min(size, most)
            pieces.append((r, size if whole else min(size, budget)))
            budget -= pieces[-1][1]
        (self.kv_stops.add if stop else self.kv_stops.discard)(batch)
        return pieces

    @property
    def in_pieces(self) -> bool:
        return self.setup.admission == "chunk" and not self.reserves

    def piece_blocks(self, r: Req, done: int, budget: int) -> int:
        """Return the blocks of a prompt after a piece of at most `budget` tokens; with the last comes a token more."""
        size = min(r.length - done, budget)
        return math.ceil((done + size + (done + size == r.length)) / self.setup.block_tokens)

    def grow_prompts(self, batch: Batch, budget: int, *, whole: bool) -> bool:
        """Take blocks for the next pieces of prompts that are let in, preempting the latest: whether any was."""
        lost, ins = False, [r for r in self.at(batch, "waiting") if r.blocks and not r.swapped]
        for r in ins:
            rest = r.length - r.prefilled
            if budget <= 0 or r.blocks == 0 or (whole and r is not ins[0] and rest > budget):  # 0: lost to one before
                break
            more = self.piece_blocks(r, r.prefilled, rest if whole else budget) - r.blocks
            budget -= rest if whole else min(rest, budget)
            while more > 0 and not self.fits(batch.inst, more, growth=True):
                if self.gone(batch.inst):
                    return lost
                free = [x for where in ("running", "parked", "waiting") for x in self.at(batch, where)]
                free = [x for x in free if x.home == batch.inst and x.blocks and not x.step and not x.swapped]
                victim, lost = max(free, key=lambda x: x.seq), True
                self.preempt(victim, batch)
                if victim is r:
                    return lost
            if more > 0:
                r.pages += self.take(batch.inst, more)
                r.blocks += more
        return lost

    def grow(self, batch: Batch) -> bool | None:
        """Take blocks for the next decode step, preempting where none is free: whether any was; None: swapping out."""
        lost, stuck, grown = False, False, list[Req]()
        for account in [batch.inst, *self.elsewhere(self.at(batch, "running"))]:
            short, preempted, stuck = self.room_for(batch, account)
            lost |= preempted
            if stuck:
                break
            grown += short
            for r in short:
                r.pages += self.take(account, 1)
                r.blocks += 1
        (self.stalls.add if stuck else self.stalls.discard)(batch)
        if stuck:  # the step takes nothing
            for r in reversed(grown):
                r.blocks -= 1
                if r.pages and r.home:
                    self.give(r.home, [r.pages.pop()])
            return None
        if not self.gone(batch.inst):  # growth goes before those swapped out, or they would take each other's for ever
            self.bring_back(batch)
        return lost

    def gone(self, account: Inst) -> int:
        """Return blocks of the engine's victims that are on their way out."""
        return sum(r.blocks - r.shared for r in self.live if r.swapped and r.where == "moving" and r.home == account)

    def room_for(self, batch: Batch, account: Inst) -> tuple[list[Req], bool, bool]:
        """Return who lacks a block in an account, whether anybody lost theirs, and whether the step has to wait."""
        lost = False
        while True:
            here = [r for r in self.at(batch, "running") if r.home == account]
            short = [r for r in here if r.blocks * self.setup.block_tokens < r.length]
            gone = self.gone(account)
            if not short or (gone and batch in self.stalls):  # victims are on their way: no more until they are out
                break
            if self.fits(account, len(short), growth=True, gone=gone):
                break
            partly = [r for r in self.at(batch, "waiting") if r.blocks and not r.step and not r.swapped]
            lost = True
            whole = [r for r in here + self.at(batch, "parked") if r.home == account]
            victim = max(whole + [r for r in partly if r.home == account], key=lambda r: r.seq)
            if not any(account in (r.home, r.to) for r in self.live if r is not victim):  # alone in its account
                self.finish(victim, "failed")
                continue
            self.preempt(victim, batch)
        return short, lost, bool(short) and not self.fits(account, len(short), growth=True)

    def preempt(self, victim: Req, batch: Batch) -> None:
        victim.preemptions += 1
        self.news.append(Preempted(victim.id, batch))
        if self.setup.preempt == "swap" and victim.whole:
            victim.swapped = True
            self.carry(victim, Inst(victim.model, HOST), lambda _: None)
        else:
            self.release(victim)

    def bring_back(self, batch: Batch) -> None:
        for r in [r for r in self.at(batch, "waiting") if r.swapped]:
            need = math.ceil(r.length / self.setup.block_tokens)
            if not self.fits(batch.inst, need + self.watermark(batch.inst)):
                return
            r.swapped = False
            self.carry(r, batch.inst, lambda _: None)

    def start(
        self,
        lane: Lane,
        order: Run,
        decodes: list[Req],
        pieces: list[tuple[Req, int]],
        bound: set[str],
        before: Step | None = None,
    ) -> None:
        """Start a step, or its next slice `before` which others were."""
        setup, t, inst = self.setup, self.setup.tables, lane[0].inst
        row, place, kind = self.sizes(inst).row, on(inst), int(bool(pieces))
        row += setup.gpu_rows[place[0]] if setup.gpu_rows else 0
        B, C, p = len(decodes), sum(r.length for r in decodes), sum(c for _, c in pieces)
        area = sum(c * (r.prefilled + c / 2) for r, c in pieces)
        out = B + sum(r.prefilled + c == r.length for r, c in pieces)
        k, homes = t.cost[row], {a: [r for r in decodes if r.home == a] for a in self.elsewhere(decodes)}

        def priced(each: float | None, polls: int | None = None) -> Price:
            """Price it with the context that there is, or as much a member."""
            near = [r for r in decodes if r.home == inst]

            def size(rs: list[Req]) -> tuple[int, float]:
                return len(rs), float(sum(r.length for r in rs)) if each is None else each * len(rs)

            def wire(account: Inst) -> float:
                g, h = place[0], on(account)[0]
                return float(k["query_bytes"] * self.link_s(g, h) + k["result_bytes"] * self.link_s(h, g))

            far = {a: (*size(rs), len(rs) * wire(a)) for a, rs in homes.items()}
            return price(t, row, size(near), far, p, len(pieces), area, out, order.op_s, setup.poll_s, polls)

        # demands, kernels and its part of a round at the power of two below, so that they change seldom
        rough = priced(None if pieces else (1 << C.bit_length() - 1) / B)
        solo, usual, demands = priced(None, sum(n for _, n in rough.kernels)).step, rough.step, rough.demand
        index = self.ticks[lane[0], 1] if pieces else self.ticks[lane[0], 0] // 64
        solo *= noise(setup.sigma, setup.seed, [*setup.models].index(inst.model), lane[0].tag, lane[1], kind, index)
        top = 1.0
        if order.sms is not None:
            rates = t.pre_rate[row] if pieces else [np.interp(B, t.seqs, of_b) for of_b in t.dec_rate[row]]
            top = float(np.interp(order.sms / setup.gpu_sms[place[0]], t.share, rates))
        layers = self.sizes(inst).layers
        left = before.left if before else layers
        part = min(order.slice_layers or left, left) if pieces else layers
        kernels_s = (rough.passes * rough.duty * usual / layers or 1.0) / top
        partition = None if order.sms is None else (order.sms, "decode" if lane[1] else "prompts")
        solo, usual = solo * part / layers, usual * part / layers
        turn = self.turns.get(lane)
        if turn and turn.begun != turn.begun:
            turn.begun = self.now
        process = inst, lane[1] if setup.pairs else 0
        sliced = before.sliced if before else part < layers
        behind = left - part if pieces else 0
        step = Step(
            place, order.phase, decodes, pieces, solo, top, demands, turn, bound, process, usual / top, behind, sliced,
            usual, rough.layers, rough.kernels, rough.lent, setup.co_run * rough.slow, partition, rough.duty,
            rough.fill, kernels_s, rough.limits, since=self.now,
        )  # fmt: skip
        self.halted.pop(lane, None)
        self.steps[lane], self.fresh = step, True
        for r in decodes + [r for r, _ in pieces]:
            r.step, r.halted = step, None

    # actions

    def usable(self, inst: Inst) -> bool:
        return self.weights.get(inst) in ("in", "draining")

    def do(self, action: Action) -> None:
        def done(failed: Failed | None = None, why: str = "") -> None:
            self.news.append(Done(action, failed, why))

        match action:
            case Load(Inst(_, place) as inst, way) if not isinstance(place, Host):
                self.load(inst, way, done)
            case Evict(inst, drain) if self.weights.get(inst) == "waiting":
                mine = next(g for g in self.grants if g.inst == inst and g.req is None)
                self.grants.remove(mine)
                mine.fail("gone", "evicted")
                done()
            case Evict(inst, drain) if self.weights.get(inst) in ("in", "draining", "leaving"):
                if self.weights[inst] == "leaving" or (self.weights[inst] == "draining" and drain):
                    done("gone", "it is leaving already")
                    return
                if inst in self.leaving:
                    self.news.append(Done(self.leaving[inst], "gone", "another took its place"))
                self.leaving[inst] = action
                self.weights[inst] = "draining" if drain else "leaving"
                self.empty_leaving()
            case Limit(model, gpu, kv_bytes):
                accounts = dict.fromkeys(a for a, _ in self.line if a.model == model and gpu in on(a))
                for account in accounts:
                    self.shed(account)
                self.limits[model, gpu] = kv_bytes
                for account in accounts:
                    self.shed(account)
            case Admit(str() as model, batch) if model == batch.inst.model:
                self.batches.setdefault(batch, len(self.batches))
                self.routes[model] = batch
            case Admit(int() as rid, batch) if self.reqs[rid].model == batch.inst.model:
                if self.reqs[rid].where in LIVE:
                    self.batches.setdefault(batch, len(self.batches))
                seq = self.next_admit()

                def admit(r: Req) -> None:
                    self.join(r, batch, seq)

                self.after_step(self.reqs[rid], admit, done)
            case Drop(rid):

                def drop(r: Req) -> None:
                    self.finish(r, "dropped")

                self.after_step(self.reqs[rid], drop, done)
            case Move(int() as rid, to, attend):
                asked, member_of = self.issue(), self.reqs[rid].batch

                def move(r: Req) -> None:
                    self.move(r, to, asked, done, attend)

                if attend and member_of and self.reqs[rid].where in LIVE:
                    if not attendable(on(member_of.inst), to):
                        done("never", "nothing can be attended there")
                        return
                    assert isinstance(to, tuple)
                    self.attend_at(Inst(member_of.inst.model, to))
                self.after_step(self.reqs[rid], move, done)
            case Move(Batch(Inst(model, place)), to, True) if not attendable(on(Inst(model, place)), to):
                self.batches.setdefault(action.who, len(self.batches))  # type: ignore[arg-type]
                done("never", "nothing can be attended there")
            case Move(Batch() as batch, to, attend):
                whole = [r for r in sorted(self.live, key=lambda r: r.seq) if r.batch == batch and r.blocks]
                whole = [r for r in whole if to is None or r.where != "waiting"]
                ends: list[Failed | None] = []

                def end(failed: Failed | None = None, _why: str = "") -> None:
                    ends.append(failed)
                    if len(ends) == len(whole):  # never for some of it is worse than gone
                        done("never" if "never" in ends else next((x for x in ends if x), None))

                def mover(asked: int) -> Callable[[Req], None]:
                    def move(r: Req) -> None:
                        self.move(r, to, asked, end, attend)

                    return move

                self.batches.setdefault(batch, len(self.batches))
                if attend and whole and isinstance(to, tuple):
                    self.attend_at(Inst(batch.inst.model, to))
                for r in whole:
                    self.after_step(r, mover(self.issue()), end)
                if not whole:
                    done("gone", "no KV to move")
            case Run(batch, phase, steps=0):
                lane = (batch, int(phase == "decode"))
                self.batches.setdefault(batch, len(self.batches))
                old, turn, step = self.lanes.get(lane), self.turns.get(lane), self.steps.get(lane)
                if turn and turn.order.phase == phase:
                    if step and step.turn is turn:
                        self.close(lane)
                        self.turns[lane], turn.closing = turn, True
                    else:
                        self.end_turn(lane, "steps")
                elif old and old.phase == phase:
                    self.close(lane)
            case Run(_, phase, slice_layers=int() as layers) if layers < 1 or phase != "prefill":
                done("never", "a slice is of a prefill")
            case Run(batch, phase, sms=sms):
                lane, beside = (batch, int(phase == "decode")), (batch, int(phase != "decode"))
                self.batches.setdefault(batch, len(self.batches))
                if sms != self.sms.get(lane):
                    self.resized.add(lane)
                self.sms[lane] = sms
                self.turns.pop(lane, None)
                self.lanes[lane] = action
                if action.for_s is not None or action.steps:
                    self.turns[lane] = Turn(action)
                old = self.lanes.get(beside)
                if old and "mixed" in (phase, old.phase):
                    self.close(beside)
                self.park(batch)
            case Evict(inst) if self.weights.get(inst) == "loading":
                self.landing.add(inst)
                done("not now", "its weights are on a link")
            case Evict():
                done("gone", "its weights are not in")
            case _:
                done("never", "refused")

    def load(self, inst: Inst, way: str, done: Callable[..., None]) -> None:
        state, size = self.weights.get(inst), self.sizes(inst).footprint_bytes
        real = self.setup.memory == "real"
        if real and any(size > self.setup.gpu_bytes[g] for g in on(inst)):
            done("never", "larger than its GPU")
        elif self.now == -math.inf:  # free and silent
            if state is None and real and any(size > self.free(g) for g in on(inst)):
                done("not now", "no memory")
                if not self.short:  # once the clock runs, a load may wait
                    self.news.append(Freed())
                self.short = True
            else:
                if state is None and self.setup.host_bytes is not None:
                    self.recall(self.node(inst), inst.model, None)
                self.weights[inst] = "in"
        elif state == "in":
            done()
        elif state in ("draining", "leaving"):
            self.weights[inst] = "in"
            self.news.append(Done(self.leaving.pop(inst), "gone", "loaded again"))
            done()
        elif state is None:

            def end() -> None:
                self.weights[inst] = "in"
                if inst in self.landing:
                    self.landing.remove(inst)
                    self.news.append(Freed())
                done()

            here = self.setup.host_bytes is None or self.recall(self.node(inst), inst.model, inst)

            def start() -> None:
                self.weights[inst] = "loading"
                fixed_s, parts = (self.setup.ways if here else self.setup.disk_ways)[inst, way]
                self.send(parts, fixed_s, end, [inst], inst)

            def fail(failed: Failed, why: str) -> None:
                del self.weights[inst]
                kept = self.memories[self.node(inst)]
                kept[:] = [(model, reader) for model, reader in kept if reader != inst]
                done(failed, why)

            self.weights[inst] = "waiting"
            self.ask(Grant(self.issue(), inst, None, start, fail))

    def node(self, inst: Inst) -> int:
        return self.setup.gpu_nodes[on(inst)[0]] if self.setup.gpu_nodes else 0

    def far(self, reader: Inst | None) -> bool:
        """Return whether who reads weights from disk has them not yet."""
        return self.weights.get(reader) in ("waiting", "loading") if reader else False

    def recall(self, node: int, model: str, inst: Inst | None) -> bool:
        """Read a model on a node, and return whether its memory had it: those read longest ago make room."""
        room, sizes, kept = self.setup.host_bytes, self.setup.host_order, self.memories[node]
        assert room is not None
        old = [(m, reader) for m, reader in kept if m == model]
        here = any(not self.far(reader) for _, reader in old)
        if sizes[model] <= room:
            new = (model, None) if here else old[0] if old else (model, inst)
            kept[:] = [x for x in kept if x not in old] + [new]
            while sum(sizes[m] for m, _ in kept) > room:
                kept.pop(0)
        return here

    def after_step(self, r: Req, effect: Callable[[Req], None], failed: Refuse) -> None:
        """Do it now, or at the end of the step that the request is in."""
        if r.step or r.where == "moving":
            kind = "admit" if effect.__name__ == "admit" else "other"
            if kind == "other" and kind in r.later:
                if effect.__name__.startswith("move"):
                    failed("gone", "another is under way")
                    return
                r.later[kind][1]("gone", "dropped")
            r.later[kind] = (lambda: self.after_step(r, effect, failed), failed)
        elif r.where in LIVE:
            effect(r)
        else:
            failed("never" if r.where == "future" else "gone", "request is not here")

    def issue(self) -> int:
        """Return a place in the order of issue, kept while a request's step is awaited."""
        self.asks += 1
        return self.asks

    def ask(self, grant: Grant) -> None:
        self.grants = sorted([*self.grants, grant], key=lambda g: g.asked)

    def attend_at(self, account: Inst) -> None:
        """Let batches that can reach an instance attend from now on to what is moved there for them."""
        if account not in self.attended:
            self.attended.append(account)

    def move(self, r: Req, to: Gpus | Host | None, asked: int, done: Callable[..., None], attend: bool = False) -> None:
        dest = Inst(r.model, HOST if to is None or isinstance(to, Host) else to)
        if r.blocks and to is None:
            self.release(r)
            done()
        elif not r.blocks or r.swapped or to is None:
            done("gone", "no KV to move")
        elif not r.whole:
            done("gone", "its KV is not whole")
        elif dest == r.home:
            if attend != r.attend:
                r.attend, self.fresh = attend, True
                self.settle(r)
            done()
        elif on(dest) and self.never(dest, r.blocks):
            done("never", "larger than the account")
        else:
            r.where = "moving"

            def fail(failed: Failed, why: str) -> None:
                self.rest(r)
                done(failed, why)

            self.ask(Grant(asked, dest, r, lambda: self.carry(r, dest, done, attend), fail))
