"""Weaver: a hot model's attention runs on the GPUs of cold models, whose memory holds a share of its KV.

Gao et al., "Weaver: Efficient Multi-LLM Serving with Attention Offloading", USENIX ATC 2025; sections and algorithm are
the paper's. Of its artifact (gswxp2/weaver 2598e04), the scripts of the experiments were read, not its vLLM.

    sender, receiver   decode GPUs of the hot model and of a cold one
    ratio              share of the hot model's requests whose KV lies at the receiver until they end, drawn for each
                       request after its prefill (4.3); 45 % (5.2)
    T_i                seconds of the receiver's i-th kernel of a step
    K, N               seconds of a layer's attention that stays at the sender, and that is offloaded (4.2)
    W                  seconds for which offloaded attention is expected to keep the sender waiting (4.2, formula 3):
                       W = sum max(T_i - (K - N), 0)^2 / (2 sum T_i)

The receiver polls after each of its kernels (GPU-driven control, 4.1). So attention waits only for the kernel that runs
when it comes, not for those that the CPU has issued ahead. Algorithm 1 (4.2) halves the longest kernel until W is below
5 % of the sender's iteration, or no kernel exceeds K - N. The engine takes one length for all kernels of a lane
(`op_s`), so kernels of equal length are halved together. W is for one kernel, and an iteration has one wait in each
layer. Their sum is compared with the 5 %, because one wait alone is always below. If K < N, the sender is blocked
however kernels are split, and the formula does not hold: K - N then counts as 0. `period_s` is ours: the paper says
that K and N are measured "regularly".

A hot instance "distributes the task of processing input sequences to itself and the cold instance, using a fixed
offload ratio" (4.3). This is read as the assignment after prefill, which the next sentence describes. A cold GPU has no
weights of the hot model to prefill with, and the paper gives no other rule for prompts.

Each model has GPUs for prefill and others for decode (section 5, "1p1d"): the second half of the GPUs prefills for the
first. `prefill=beside` does both on one GPU, and so does a cluster that is too small for two sets (ours). The paper has
one hot and one cold model. With more models (ours), the one with the greatest KV demand is hot and has its GPUs for
itself. The others are placed on the rest as `static` places them, and offloaded requests go to the GPUs of the rest in
turn. KV that finds no room there stays at the sender (ours).

Presets: `unsplit` leaves out Algorithm 1; `cpu` leaves out GPU-driven control as well (5.3); `off` is the paper's
dedicated serving: nothing is offloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from harness.policy.actions import Action, Admit, Load, Move, Run, Wake
from harness.policy.chance import draw
from harness.policy.events import Event, Prefilled, Woke
from harness.policy.fields import choice, number
from harness.policy.placement import demand, spread
from harness.policy.types import Batch, Cluster, Gpus, Infeasible, Inst, Option
from harness.policy.view import View

DECISION_S = 24e-6  # mean of 4,808, 2 models on 4 GPUs; 2 shared x86-64 cores, CPython 3.11, 2026-11-22

THRESHOLD = 0.05  # section 4.2: W below 5 % of the sender's mean iteration


@dataclass(slots=True)
class Weaver:
    """A policy that holds a share of the hot model's KV on cold models' GPUs, and computes its attention there."""

    cluster: Cluster
    ratio: float = number(0.45, 0, 1)  # sections 5, 5.2
    control: str = choice("gpu", "cpu")  # section 4.1; "cpu": attention waits behind all that is issued (5.3)
    split: bool = choice(True, False)  # section 4.2, Algorithm 1
    prefill: str = choice("apart", "beside")  # section 5: "1p1d"
    period_s: float = number(27.0, 0.05, 60, tuned=True)  # between two measurements of K and N
    seed: int = number(0, 0, 2**31)  # of the draws
    hears: frozenset[type] = field(init=False)
    uses: frozenset[str] = field(init=False)
    options: Mapping[str, Option] = field(default_factory=lambda: {"kv": "paged"}, init=False)
    hot: str = field(default="", init=False)
    at: dict[str, Batch] = field(default_factory=dict, init=False)  # where a model decodes
    receivers: list[Gpus] = field(default_factory=list, init=False)
    before: tuple[float, int] = field(
        default=(0.0, 0), init=False
    )  # the sender's busy seconds and steps at the last look

    presets: ClassVar[Mapping[str, Mapping[str, Option]]] = {
        "unsplit": {"split": False},
        "cpu": {"control": "cpu", "split": False},
        "off": {"ratio": 0.0},
    }

    def __post_init__(self) -> None:
        far, apart = self.ratio > 0, self.prefill == "apart"
        self.hears = frozenset({Woke, Prefilled} if far or apart else {Woke})
        self.uses = frozenset(
            {"Load", "Run", "Admit"}
            | ({"Run.phase:prefill"} if apart else set())
            | ({"Move", "Move.to:gpu"} if far or apart else set())
            | ({"Move.attend"} if far else set())
            | ({"Run.op_s"} if self.polls else set())
            | ({"Wake"} if self.polls and self.split else set())
        )

    @property
    def polls(self) -> bool:
        """True if receivers look for offloaded attention after each of their kernels."""
        return self.ratio > 0 and self.control == "gpu"

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Place models at the start, assign each request after its prefill, and split kernels as K and N change."""
        match event:
            case Woke("start"):
                yield from self.start()
            case Woke():
                yield from self.algorithm1(view)
                yield Wake(view.now_s + self.period_s, "split")
            case Prefilled(rid, batch):
                yield from self.assign(rid, batch, view)

    # ------------------------------------------------------------ placement

    def start(self) -> Iterator[Action]:
        """Load the hot model on GPUs of its own, and the other models on the rest.

        If prefill is apart, also load all models on a second set of GPUs, for prefill.
        """
        models = self.cluster.models
        self.hot = max(models, key=lambda m: demand(self.cluster, m))
        tp = models[self.hot].tp
        least = tp + (len(models) > 1)
        apart = self.prefill == "apart" and len(self.cluster.gpus) >= 2 * least
        n = len(self.cluster.gpus) // (1 + apart)
        if n < least:
            raise Infeasible(f"a hot model on {tp} GPU(s) leaves none of {n} to the others")
        cold = {m: model for m, model in models.items() if m != self.hot}
        rest = replace(self.cluster, gpus=self.cluster.gpus[tp:n], models=cold)
        homes = {self.hot: tuple(range(tp))} | {m: tuple(g + tp for g in at) for m, at in spread(rest).items()}
        self.receivers = [tuple(range(g, g + tp)) for g in range(tp, n - tp + 1, tp)]
        for m in models:
            here = self.at[m] = Batch(Inst(m, homes[m]))
            yield Load(here.inst)
            yield Run(here, op_s=inf if self.polls and m != self.hot else None)
            if apart:
                there = Batch(Inst(m, tuple(g + n for g in homes[m])))
                yield Load(there.inst)
                yield Run(there, "prefill")
                yield Admit(m, there)
            else:
                yield Admit(m, here)
        if self.polls and self.split:
            yield Wake(self.period_s, "split")

    # ------------------------------------------------------------ requests, section 4.3

    def assign(self, rid: int, batch: Batch, view: View) -> Iterator[Action]:
        """Decode a prefilled request on its model's GPUs; move its KV there or, for a share of requests, to a receiver.

        The KV stays where it was moved until the request ends.
        """
        here = self.at[batch.inst.model]
        to = self.receiver(rid, view) if here.inst.model == self.hot else None
        if batch != here:
            yield Admit(rid, here)
            if to is None:
                yield Move(rid, here.inst.place)
        if to is not None:
            yield Move(rid, to, attend=True)

    def receiver(self, rid: int, view: View) -> Gpus | None:
        """Return the receiver of a request's KV, by a hash of the request's id; None if the KV is not offloaded."""
        if draw(self.seed, rid) >= self.ratio or not self.receivers:
            return None
        to = self.receivers[rid % len(self.receivers)]
        size = view.request(rid).kv_bytes
        return to if all(view.kv(self.hot, g).room_bytes >= size for g in to) else None

    # ------------------------------------------------------------ operator splitting, section 4.2

    def algorithm1(self, view: View) -> Iterator[Action]:
        """Yield orders with a new longest kernel (`op_s`) for the receivers that have KV, by Algorithm 1.

        The length depends on K, N and the mean of the sender's iterations since the last call.
        """
        sender = self.at[self.hot]
        s = view.batch(sender)
        busy_s, steps = s.busy_s - self.before[0], s.steps - self.before[1]
        self.before = s.busy_s, s.steps
        if not steps or not s.decoding:
            return
        model, profile = self.cluster.models[self.hot], self.cluster.profile
        held = {to: view.kv(self.hot, to[0]).used_bytes / model.kv_token_bytes for to in self.receivers}
        far = min(1.0, sum(held.values()) / max(1, s.ctx_tokens))
        K = profile.attend_s(sender.inst, round((1 - far) * s.decoding), round((1 - far) * s.ctx_tokens))
        for to in self.receivers:
            part = min(1.0, held[to] / max(1, s.ctx_tokens))
            if not part:
                continue
            N = profile.attend_s(sender.inst, max(1, round(part * s.decoding)), round(part * s.ctx_tokens))
            for m, batch in self.at.items():
                if m != self.hot and set(to) & set(self.gpus(batch)):
                    cold = view.batch(batch)
                    T = profile.kernels_s(batch.inst, max(1, cold.decoding), max(1, cold.ctx_tokens))
                    yield Run(batch, op_s=grain(T, K - N, THRESHOLD * busy_s / steps / model.layers))

    @staticmethod
    def gpus(batch: Batch) -> Gpus:
        """Return the GPUs on which a batch decodes."""
        assert isinstance(batch.inst.place, tuple)
        return batch.inst.place


def wait_s(ops: Mapping[float, int], slack_s: float) -> float:
    """Return W (formula 3) in seconds; `ops` maps lengths of kernels to their number, and `slack_s` is K - N."""
    late = sum(n * max(T - slack_s, 0.0) ** 2 for T, n in ops.items())
    return late / (2 * sum(n * T for T, n in ops.items()))


def grain(T: Sequence[float], slack_s: float, threshold_s: float) -> float:
    """Return the seconds of the longest kernel after Algorithm 1 has split the kernels of lengths T.

    It halves the longest kernels until W is at most `threshold_s` or no kernel is longer than `slack_s`.
    """
    ops, slack_s = Counter(t for t in T if t > 0), max(slack_s, 0.0)
    while wait_s(ops, slack_s) > threshold_s and (longest := max(ops)) > slack_s:
        ops[longest / 2] += 2 * ops.pop(longest)
    return max(ops)
