"""PD-multiplexing (MuxWise): prefill and decode of a model run side by side on a GPU, each on SMs of its own.

Chen, Cui et al., "Towards High-Goodput LLM Serving with Prefill-decode Multiplexing", ASPLOS 2026 (arXiv 2504.14489v3),
sections and formulas. What its authors released is in SGLang (python/sglang/srt/multiplex), without the paper's
estimator and dispatcher.

    b, c         sequences and tokens of context of a decode step       n      tokens of a prefill
    S; s_d, s_p  SMs of the GPU; those of decode and of prefill         L      layers of the model
    T_d(b, c, s) = alpha c + beta b + gamma                             predicted seconds of a decode step
    T_p(n, s)    = alpha n^2 + beta n + gamma                           and of a prefill, n at least 512
    guard        share by which a decode step may be slower beside a prefill, which uses the same memory bandwidth
    N_PL         layers of a slice of a prefill: ceil(T_d L / T_p), about a decode step (3.4.2)

    s_d = the least with (1 + guard) T_d <= ITL SLO, s_p = S - s_d      while both phases have work; else either has S

Partitions are 16 SMs apart: six on an A100 and seven on an H100 (3.3.2). Both formulas (equations 1 and 2) have the
form of those in predictor.py (56f74d2), with a fit for each partition and range of n and c. Here they are fitted to the
profile. The term in n and reused tokens is left out: no policy is told how many tokens a prompt will find in the cache,
and T_p sets only the length of slices, never a partition.

The paper's guard is the largest slow-down in a grid of pairs of prefill and decode, which is profiled and then refined
while it serves. No values of the grid are published (figure 11 is a picture), and profiles here have no pairs. So
`guard` is in multiples of the largest slow-down of all: 20 % on A100 and 30 % on H100 (3.3.2). On H200 it is 37 %, as
measured here; 30 % would miss the SLO there. Other GPUs have that of the H100.

`preempt` (3.4.2, which calls it optional; the paper switches it on only in 4.4.3) lets a prompt go first that would
miss its TTFT SLO behind the prefill in flight, if that prefill still meets its own. A prompt that goes first is not
preempted in turn.

`windserve` runs both phases side by side without a partition, as section 6 describes WindServe. `sglang` is how SGLang
serves, which predicts nothing. It takes the division of S with index clamp(6 b // 36, 1, 6) or, with `sglang-h200`, the
last one whose least batch is at most b. The division is chosen when a prefill begins, and kept until the prefill ends
or decode runs dry. N_PL = max(1, 65536 // n). A server has its GPUs to itself, and prefills whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import ClassVar

import numpy as np

from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Finished, Preempted, Prefilled, Woke
from harness.policy.fields import choice, number
from harness.policy.memory import kv_manager
from harness.policy.placement import spread
from harness.policy.types import Batch, Cluster, Gpu, Gpus, Infeasible, Inst, Model, Option, Phase, Profile
from harness.policy.view import BatchState, View

DECISION_S = 2e-5  # mean of 90,000 at 80 % load of one A100; 2 busy x86-64 cores, CPython 3.11, 2026-11-22
GRAIN = 16  # SMs (3.3.2); predictor.py has tables for multiples of 8
# Largest slow-down of a decode beside a prefill: on A100 (3.3.2), on H200 (results/h200/corun.md), on H100 (3.3.2).
GUARD, WORST = {"a100": 0.2, "h200": 0.37}, 0.3
LEAST_TOKENS = 512  # of a prefill that is predicted (predictor.py, Predictor.predict_prefill_latency)
PREFILL_RANGES = ((512, 2048), (2048, 8192), (8192, 32768))  # tokens, a fit each (SEQLEN_LT_2K, BT_2K_8K, GT_8K)
DECODE_RANGES = ((1024, 131072), (131072, 524288))  # tokens of context (SEQLEN_LT_128K, GT_128K); the last end is ours
STEP_TOKENS = 16384  # of prompts that a step takes together: what servers prefill at most (max_prefill_tokens)
BATCHES = (1, 8, 32, 128, 256)  # at which decode steps are fitted
LOOSE_ITL_S = 0.1  # where a model has no SLO: the looser of the paper's two (50 ms for 8B, 100 ms for 70B)

# SGLang, pdmux_context.py (00d56e2): PDMuxConfig and divide_sm; docs/advanced_features/pd_multiplexing.md (399507b)
DIVISIONS = 6  # sm_group_num 8, less the two in which one phase has all SMs
DECODE_BS_DIVISOR = 36
SPLIT_FORWARD_TOKEN_BUDGET = 65536
LEAST_DECODE_SMS = 16
H200 = ((112, 20, 1), (104, 28, 5), (96, 36, 10), (80, 52, 15), (64, 68, 20), (56, 76, 25))  # s_p, s_d, least batch


Coefficients = tuple[float, float, float]  # alpha, beta, gamma

# ---------------------------------------------------------------- the predictor


class Predictor:
    """Predicts the seconds of a model's steps for each number of SMs, by fits with least squares of relative errors."""

    def __init__(self, profile: Profile, inst: Inst, gpu: Gpu) -> None:
        self.decode: dict[int, list[Coefficients]] = {}
        for s in decode_counts(gpu):
            steps = [[(c, b) for b in BATCHES for c in between(*ends) if c >= b] for ends in DECODE_RANGES]
            self.decode[s] = [fit(some, [profile.step_s(inst, b, c, s) for c, b in some]) for some in steps]
        self.prefill: dict[int, list[Coefficients]] = {}
        for s in prefill_counts(gpu):
            prompts = [[(n * n, n) for n in between(*ends)] for ends in PREFILL_RANGES]
            self.prefill[s] = [fit(some, [profile.prefill_s(inst, n, s) for _, n in some]) for some in prompts]

    def decode_s(self, b: int, c: int, s: int) -> float:
        """Return T_d, the seconds of a decode step of b sequences with c tokens of context on s SMs."""
        alpha, beta, gamma = self.decode[s][c > DECODE_RANGES[0][1]]
        return alpha * c + beta * b + gamma

    def prefill_s(self, n: int, s: int) -> float:
        """Return T_p, the seconds of a prefill of n tokens on s SMs."""
        n = max(n, LEAST_TOKENS)
        alpha, beta, gamma = self.prefill[s][(n > PREFILL_RANGES[0][1]) + (n > PREFILL_RANGES[1][1])]
        return alpha * n * n + beta * n + gamma


def between(low: int, high: int) -> list[int]:
    """Return five evenly spaced integers from `low` to `high`."""
    return [low + k * (high - low) // 4 for k in range(5)]


def fit(points: Sequence[tuple[int, int]], seconds: Sequence[float]) -> Coefficients:
    """Return alpha, beta and gamma of a linear fit of `seconds` to `points`, by least squares of relative errors."""
    rows = np.column_stack([np.array(points, float), np.ones(len(points))]) / np.array(seconds)[:, None]
    scale = np.abs(rows).max(axis=0)
    alpha, beta, gamma = (np.linalg.lstsq(rows / scale, np.ones(len(points)), rcond=None)[0] / scale).tolist()
    return alpha, beta, gamma


# ---------------------------------------------------------------- SGLang's divisions


def divisions(gpu: Gpu) -> list[tuple[int, int]]:
    """Return at most six evenly spaced divisions (s_p, s_d) of a GPU's SMs, the largest s_p first (divide_sm).

    Each has s_p >= s_d >= 16.
    """
    fit = [(s, gpu.sms - s) for s in gpu.sm_choices if gpu.sms - s <= s <= gpu.sms - LEAST_DECODE_SMS]
    step = max(1, len(fit) // DIVISIONS)
    return fit[::step][:DIVISIONS][::-1]


def forward_count(n: int) -> int:
    """Return the number of layers in a slice of a prefill of n tokens, by SGLang's rule."""
    return max(1, SPLIT_FORWARD_TOKEN_BUDGET // max(1, n))


# ---------------------------------------------------------------- the dispatcher


@dataclass(slots=True)
class Tenant:
    """A model on its GPUs: its requests that wait for a prefill, and the last orders to its two lanes."""

    batch: Batch
    model: Model
    itl_s: float
    predict: Predictor | None
    near: list[Tenant] = field(default_factory=list)  # itself, and all that share its GPUs, directly or through others
    waiting: dict[int, int] = field(default_factory=dict)  # prompt tokens of requests without a first token, in order
    prompts: dict[int, int] = field(default_factory=dict)  # prompt tokens of all requests
    due_s: dict[int, float] = field(default_factory=dict)  # deadlines of those that wait, by their TTFT SLO
    told: dict[Phase, Run] = field(default_factory=dict)
    begun_s: float = 0.0  # when the prefill in flight began, plus the seconds it was preempted for
    ahead: int | None = None  # the request that preempted it
    since_s: float = 0.0  # when that was

    @property
    def fast(self) -> Batch:
        """The batch in which a request that preempts others is prefilled."""
        return self.batch._replace(tag=1)

    def order(self, phase: Phase, sms: int | None = None, layers: int | None = None) -> Iterator[Run]:
        """Order a lane to run on `sms` SMs and in slices of `layers` layers, unless its last order was the same.

        If these are None, it runs on all SMs, or without slices.
        """
        some = None if layers is None or layers >= self.model.layers else max(1, layers)
        batch = self.fast if phase == "prefill" and self.ahead is not None else self.batch
        run = Run(batch, phase, chunk_tokens=0 if phase == "prefill" else None, slice_layers=some, sms=sms)
        if self.told.get(phase) != run:
            self.told[phase] = run
            yield run

    @property
    def closed(self) -> bool:
        """True if the prefill lane is closed."""
        return "prefill" not in self.told

    def close(self) -> Iterator[Run]:
        """Close the prefill lane. The next prefill then needs a new `Run` order, which sets its SMs."""
        if not self.closed:
            yield Run(self.told.pop("prefill").batch, "prefill", steps=0)

    def prefills(self, s: BatchState, view: View, *, alone: bool) -> bool:
        """Tell whether a prefill is under way or can begin.

        It can begin if there is room for its KV. If no decode runs (`alone`), it begins in any case, because no decode
        could free memory for it.
        """
        if not self.waiting or len(self.waiting) > s.waiting or alone:
            return bool(self.waiting)
        return self.room(next(iter(self.waiting)), view)

    def room(self, rid: int, view: View) -> bool:
        """Tell whether there is room for the KV of a prompt that waits."""
        need = (self.waiting[rid] + 1) * self.model.kv_token_bytes + self.model.page_bytes
        return all(view.kv(self.batch.inst.model, g).room_bytes >= need for g in self.batch.inst.place)  # type: ignore[union-attr]


@dataclass(slots=True)
class PDMux:
    """A policy that gives decodes the fewest SMs that meet the ITL SLO, and the other SMs to prefills.

    Prefills run in slices of layers.
    """

    cluster: Cluster
    rule: str = choice("predict", "table", "h200", "none")
    itl_s: float = number(0.0, 0, 10)  # SLO of the time between tokens; 0: each model's own TPOT SLO
    guard: float = number(1.0, 0, 4)  # in multiples of the largest measured slow-down (`worst`)
    preempt: bool = choice(False, True)  # short prompts before long ones, by their TTFT SLO
    ahead: int = number(64, 0, 4096)  # steps by which contexts are taken to grow before a division must meet the SLO
    kv: str = choice("auto", "paged", "elastic")  # how the KV cache is managed; auto: see `kv_manager`
    hears: frozenset[type] = field(default=frozenset({Woke, Arrived, Prefilled, Finished, Preempted}), init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    tenants: dict[str, Tenant] = field(default_factory=dict, init=False)

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "preemptive": {"preempt": True},
        "windserve": {"rule": "none"},
        "sglang": {"rule": "table"},
        "sglang-h200": {"rule": "h200"},
    }

    def __post_init__(self) -> None:
        kv = kv_manager(self.kv, spread(self.cluster).values())
        self.options = {"kv": kv}
        uses = {"Load", "Admit", "Run", "Run.phase:prefill", "Run.phase:decode", "Run.chunk_tokens", "Run.slice_layers"}
        uses |= {"Run.sms", "Run.steps:0"}
        self.preempt = self.preempt and self.rule == "predict"  # the other rules do not predict which prompts are late
        slo = {"Request.slo"} if self.rule == "predict" and (not self.itl_s or self.preempt) else set()
        self.uses = frozenset(uses | slo)
        gpu, models = self.cluster.gpus[0], self.cluster.models
        if self.rule == "h200" and gpu.sms != sum(H200[0][:2]):
            raise Infeasible(f"SGLang's divisions are of 132 SMs, and a {gpu.kind} has {gpu.sms}")
        if self.rule == "table" and not divisions(gpu):
            raise Infeasible(
                f"SGLang divides no {gpu.sms} SMs: at least {LEAST_DECODE_SMS} go to decode, half to prefill"
            )
        known: dict[tuple[object, ...], Predictor] = {}
        for name, place in spread(self.cluster, kv == "elastic").items():
            model, inst, predict = models[name], Inst(name, place), None
            if self.rule == "predict":
                alike = model._replace(ttft_slo_s=0.0, tpot_slo_s=0.0), self.cluster.profile.step_s(inst, 1, 1024)
                predict = known[alike] = known.get(alike) or Predictor(self.cluster.profile, inst, gpu)
            itl_s = self.itl_s or model.tpot_slo_s
            self.tenants[name] = Tenant(Batch(inst), model, itl_s if itl_s < inf else LOOSE_ITL_S, predict)
        for here in neighbours({name: t.batch.inst.place for name, t in self.tenants.items()}):  # type: ignore[misc]
            if len(here) > 1 and self.rule in {"table", "h200"}:
                raise Infeasible(f"an SGLang server divides all SMs of its GPUs: {', '.join(here)} cannot share any")
            for name in here:
                self.tenants[name].near = [self.tenants[other] for other in here]

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Divide the SMs again when a prefill may begin or has ended, and when a decode batch shrinks."""
        match event:
            case Woke("start"):
                for t in self.tenants.values():
                    yield from (Load(t.batch.inst), Admit(t.batch.inst.model, t.batch))
                    yield from t.order("decode")
            case Arrived(r):
                t = self.tenants[r.model]
                t.waiting[r.id] = t.prompts[r.id] = r.prompt_tokens
                t.due_s[r.id] = r.arrival_s + r.ttft_slo_s
                if len(t.waiting) == view.batch(t.batch).waiting:  # no prefill of this model is under way
                    yield from self.divide(t, view)
                elif self.preempt and self.first(t, r.id, view):
                    t.ahead, t.since_s = r.id, view.now_s
                    yield from t.close()
                    yield Admit(r.id, t.fast)
                    yield from self.divide(t, view)
            case Prefilled(rid, batch):
                t = self.tenants[batch.inst.model]
                t.waiting.pop(rid, None)
                yield from self.passed(t, rid, view)
                yield from (Admit(rid, t.batch),) if batch != t.batch else ()
                yield from self.divide(t, view)
            case Finished(rid, Batch(inst)):
                t = self.tenants[inst.model]
                ended = t.waiting.pop(rid, None) is not None
                t.prompts.pop(rid, None)
                yield from self.passed(t, rid, view)
                look = self.rule == "predict" or t.closed or view.batch(t.batch).decoding == 0
                if ended or (look and any(x.waiting for x in t.near)):
                    yield from self.divide(t, view)
            case Preempted(rid, batch):
                t = self.tenants[batch.inst.model]
                again = {rid: t.prompts[rid] + view.request(rid).made_tokens}
                after = again | t.waiting
                t.waiting.clear()
                t.waiting.update(after)

    # ------------------------------------------------------------ preemption, section 3.4.2

    def first(self, t: Tenant, rid: int, view: View) -> bool:
        """Tell whether a new prompt preempts the prefill in flight.

        It does if it would miss its TTFT SLO behind that prefill, and if that prefill still meets its own SLO after the
        prompt.
        """
        run, s = t.told.get("prefill"), view.batch(t.batch)
        if t.ahead is not None or t.predict is None or run is None:
            return False
        flying = list(t.waiting)[: len(t.waiting) - s.waiting]
        s_p = self.fitted(run.sms)
        own_s = t.predict.prefill_s(t.waiting[rid], s_p)
        rest_s = t.predict.prefill_s(sum(t.waiting[r] for r in flying), s_p) - (view.now_s - t.begun_s)
        last_s = view.now_s + own_s + max(rest_s, 0.0)
        # A request that lost its KV has had its first token, so it has no deadline any more.
        return rest_s > 0 and t.due_s[rid] < last_s <= min(t.due_s.get(r, inf) for r in flying) and t.room(rid, view)

    def passed(self, t: Tenant, rid: int, view: View) -> Iterator[Action]:
        """Note that a prompt has its first token or has ended; if it had preempted a prefill, resume that one."""
        t.due_s.pop(rid, None)
        if rid == t.ahead:
            yield from t.close()
            t.ahead, t.begun_s = None, t.begun_s + view.now_s - t.since_s

    # ------------------------------------------------------------ partitions

    def divide(self, tenant: Tenant, view: View) -> Iterator[Action]:
        """Divide the SMs among the prefills and decodes of all models that share this tenant's GPUs."""
        states = [(t, view.batch(t.batch)) for t in tenant.near]
        decodes = [(t, s) for t, s in states if s.decoding]
        prefills = [(t, s) for t, s in states if t.prefills(s, view, alone=not decodes)]
        for t in tenant.near:
            if all(t is not x for x, _ in prefills):
                yield from t.close()
        for t, s in prefills:
            if len(t.waiting) == s.waiting:  # it begins now
                t.begun_s = view.now_s
        if not decodes or not prefills or self.rule == "none":
            for t, _ in decodes:
                yield from t.order("decode")
            for t, s in prefills:  # in slices, where another model's decodes may begin meanwhile
                yield from t.order("prefill", None, self.layers(t, s, t.itl_s, None) if len(states) > 1 else None)
        elif self.rule == "predict":
            yield from self.predicted(decodes, prefills)
        else:
            (t, s), gpu = states[0], self.cluster.gpus[0]
            s_p, s_d = self.division(s.decoding, gpu)
            yield from t.order("decode", s_d)
            yield from t.order("prefill", s_p, forward_count(min(s.prefill_tokens, STEP_TOKENS)))

    def predicted(
        self, decodes: Sequence[tuple[Tenant, BatchState]], prefills: Sequence[tuple[Tenant, BatchState]]
    ) -> Iterator[Action]:
        """Give each model's decodes the fewest SMs (s_d) that meet its SLO; divide the other SMs among the prefills."""
        gpu = self.cluster.gpus[0]
        counts, guard = decode_counts(gpu), self.guard * worst(gpu)
        s_d, slice_s = [], inf
        for t, s in decodes:
            assert t.predict is not None
            b, c = s.decoding, s.ctx_tokens + self.ahead * s.decoding
            guarded = ((1 + guard) * t.predict.decode_s(b, c, n) for n in counts)
            k = next((k for k, seconds in enumerate(guarded) if seconds <= t.itl_s), len(counts) - 1)
            s_d.append(counts[k])
            slice_s = min(slice_s, t.predict.decode_s(b, c, counts[k]))
        if (asked := sum(s_d)) > counts[-1]:  # more than there is beside the least that prefills take
            s_d = [max(1, n * counts[-1] // asked) for n in s_d]
        for (t, _), n in zip(decodes, s_d, strict=True):
            yield from t.order("decode", n)
        left = gpu.sms - sum(s_d)
        s_p = left if len(prefills) == 1 else max(GRAIN, left // len(prefills) // GRAIN * GRAIN)
        for t, s in prefills:
            yield from t.order("prefill", s_p, self.layers(t, s, slice_s, s_p))

    def layers(self, t: Tenant, s: BatchState, slice_s: float, s_p: int | None) -> int:
        """Return N_PL, the number of layers in a prefill slice, so that a slice takes about `slice_s`.

        Without a predictor, it is the number by SGLang's rule.
        """
        n = min(s.prefill_tokens, STEP_TOKENS) if t.ahead is None else t.waiting[t.ahead]
        if t.predict is None:
            return forward_count(n)
        return ceil(slice_s * t.model.layers / t.predict.prefill_s(n, self.fitted(s_p)))

    def fitted(self, s_p: int | None) -> int:
        """Return the largest number of SMs, at most s_p, for which prefills are predicted.

        If s_p is None, it is the largest of all.
        """
        counts = prefill_counts(self.cluster.gpus[0])
        return counts[-1] if s_p is None else max((s for s in counts if s <= s_p), default=counts[0])

    def division(self, b: int, gpu: Gpu) -> tuple[int, int]:
        """Return SGLang's division (s_p, s_d) of the SMs for a decode batch of b sequences (adjust_stream_groups)."""
        if self.rule == "h200":
            return next((s_p, s_d) for s_p, s_d, least in reversed(H200) if b >= least)
        there = divisions(gpu)
        return there[max(1, min(len(there), b * len(there) // DECODE_BS_DIVISOR)) - 1]


def worst(gpu: Gpu) -> float:
    """Return the largest measured slow-down of a decode step beside a prefill on this GPU.

    For GPUs that were not measured, it is that of the H100.
    """
    return next((most for kind, most in GUARD.items() if gpu.kind.startswith(kind)), WORST)


def prefill_counts(gpu: Gpu) -> list[int]:
    """Return the numbers of SMs that a prefill may have, in ascending order."""
    return [n for n in gpu.sm_choices if n % GRAIN == 0]


def decode_counts(gpu: Gpu) -> list[int]:
    """Return the numbers of SMs that decodes may have beside a prefill, in ascending order.

    Each is at least half of GRAIN.
    """
    return [gpu.sms - n for n in reversed(prefill_counts(gpu)) if gpu.sms - n >= GRAIN // 2]


def neighbours(places: Mapping[str, Gpus]) -> list[list[str]]:
    """Group the models whose GPUs overlap, directly or through other models."""
    groups: list[tuple[set[int], list[str]]] = []
    for name, place in places.items():
        mine = [group for group in groups if group[0] & set(place)]
        groups = [group for group in groups if not group[0] & set(place)]
        groups.append((set(place).union(*(gpus for gpus, _ in mine)), [*(m for _, ms in mine for m in ms), name]))
    return [names for _, names in groups]
