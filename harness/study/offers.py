"""Prices of GPUs, and the cost of a model's tokens on these GPUs, for `bench price`.

For each offer: how many requests decode together, and what a million output tokens cost if GPUs are never idle:

    seqs   the most sequences whose KV fits next to the weights, and whose step with prompts takes at most the TPOT
    step   the time of a step, which decodes all sequences and prefills seqs / output new prompts
    price  GPUs x price an hour / (3,600 s x seqs / step)

The times of steps are those of the cost table under the host profile `vllm-0.15`. KV memory and the most sequences of a
step follow from that server's settings on the GPU, unless others are given. Prices of GPUs are those of `bench size`
(`harness/engines/costs/prices.toml`), or a user's. The cost is a lower bound, as GPUs are idle at times if the load
varies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.engines.costs import coefficients, kernels, profile, quantities, shapes
from harness.engines.costs.prices import Price
from harness.policy import mix
from harness.policy.fields import meant
from harness.policy.types import GIB, UserError
from harness.run.server_line import server_line
from harness.run.setup import Setup
from harness.run.spec import MOST_GPUS, from_dict

QUANT3 = ("qwen-3-32b@2xh100", "qwen-3-32b:dtype=fp8_block@h100", "qwen-3-32b:dtype=int4@l40s")
SETTINGS = tuple("host chunk_tokens prefill_tokens batch_cap mem_fraction process_bytes pool_bytes scaled".split())
HEAD = ("model", "GPUs", "USD an hour", "GiB a GPU", "seqs", "TPOT ms", "tokens/s", "USD a million", "roofline")
OFFER = re.compile(r"(.+)@(?:([0-9]{1,9})x)?([^0-9].*)")


class Load(NamedTuple):
    """Prompt and output tokens of a request, and the longest time per output token."""

    prompt: int
    output: int
    tpot_s: float


class Offer(NamedTuple):
    """A model on some number of GPUs of one kind."""

    model: str
    gpu: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus} x {self.gpu}"


class Cost(NamedTuple):
    """The throughput, memory and price of an offer when its GPUs are never idle."""

    offer: Offer
    weight_gib: float
    seqs: int
    tpot_s: float
    usd_hour: float | None
    roofline: float
    server: str
    host: str

    @property
    def tokens_s(self) -> float:
        """Output tokens a second."""
        return self.seqs / self.tpot_s

    @property
    def usd_million(self) -> float | None:
        """The price of a million output tokens; None without a price."""
        return None if self.usd_hour is None else self.usd_hour / 3600 / self.tokens_s * 1e6


def usd_hour(usd: Mapping[str, Price], kind: str, gpus: int) -> float | None:
    """Return the price of GPUs of a kind, or of a mix of kinds, in USD an hour; None if a kind has no price."""
    counts = mix.copies(kind, gpus)
    return sum(usd[name].usd_hour * n for name, n in counts) if all(name in usd for name, _ in counts) else None


def offer(text: str) -> Offer:
    """Parse MODEL@[N x]KIND. Raises UserError for text of any other form, or an unknown kind."""
    match = OFFER.fullmatch(text)
    if match is None or not 1 <= int(match[2] or 1) <= MOST_GPUS:
        raise UserError(f'"{text}" is not MODEL@KIND or MODEL@NxKIND, as qwen-3-32b@2xh100')
    return Offer(match[1], quantities.gpu(match[3]).kind, int(match[2] or 1))


def cost(
    asked: Offer, usd: Mapping[str, Price], load: Load, settings: Mapping[str, Any] = MappingProxyType({})
) -> Cost:
    """Return the throughput, memory and price of an offer, under some settings of a spec (`SETTINGS`).

    Raises UserError for any other setting, if the model does not fit, or if it misses the TPOT even with one request.
    """
    if unknown := next((key for key in settings if key not in SETTINGS), None):
        raise UserError(f"--set {unknown}: it changes no price{meant(unknown, SETTINGS)} ({', '.join(SETTINGS)})")
    where = {"gpu": asked.gpu, "gpus": asked.gpus, "models": f"{asked.model}:tp={asked.gpus}"}
    setup = Setup(from_dict({"system": "dedicated", "served": 2 * (load.prompt + load.output), **where, **settings}))
    (member,), card, host = setup.served.members, quantities.gpu(asked.gpu), setup.spec.host
    dims, kv_bytes = member.shape, setup.kv_bytes(member, card)
    room = kv_bytes // (shapes.kv_token_bytes(dims, asked.gpus) * (load.prompt + load.output))
    if room < 1:
        raise UserError(f"{asked.model} and one request do not fit on {asked.gpus} x {asked.gpu}")
    row = profile.row(coefficients.tables([(dims, asked.gpus)], asked.gpu, host), 0)

    def step_s(seqs: int) -> float:
        """Return the mean seconds of a step that decodes `seqs` sequences and prefills seqs / output new prompts."""
        prompts = seqs / load.output
        whole = profile.step_s(row, B=seqs, C=seqs * (load.prompt + load.output // 2))
        return whole + prompts * profile.step_s(row, p=load.prompt, n=1, area=load.prompt**2 / 2)

    most = min(int(room), setup.settings.batch_cap)
    seqs = max((n for n in range(1, most + 1) if step_s(n) <= load.tpot_s), default=0)
    if not seqs:
        raise UserError(f"{asked}: a step takes more than {1e3 * load.tpot_s:g} ms")
    return Cost(
        asked,
        setup.alone(member, asked.gpus, card)[0] / GIB,
        seqs,
        step_s(seqs),
        usd_hour(usd, *asked[1:]),
        kernels.roofline_share(quantities.quantities(asked.gpu), card, dims, asked.gpus),
        server_line(setup),
        host,
    )


def parts(costs: Sequence[Cost], usd: Mapping[str, Price], load: Load) -> list[str | list[tuple[str, ...]]]:
    """Return what `bench price` prints: a sentence on the cheapest offer, the table, servers, and sources of prices.

    The first row of the table has the column names.
    """
    priced = [(c.usd_million, str(c.offer)) for c in costs if c.usd_million is not None]
    rows, answer = list[tuple[str, ...]]([HEAD]), list[str]()
    if priced:
        million, which = min(priced, key=lambda pair: pair[0])
        says = "is the cheapest:" if len(costs) > 1 else "costs"
        answer = [f"{which} {says} {million:.2f} USD a million output tokens"]
    for c in costs:
        hour, each = ("-" if x is None else f"{x:.2f}" for x in (c.usd_hour, c.usd_million))
        numbers = f"{c.weight_gib:.1f}", str(c.seqs), f"{1e3 * c.tpot_s:.1f}", f"{c.tokens_s:.0f}"
        rows.append(
            (c.offer.model, f"{c.offer.gpus} x {c.offer.gpu}", hour, *numbers, each, f"{100 * c.roofline:.0f} %")
        )
    sources = [f"{kind} {usd[kind].told}" for kind in dict.fromkeys(c.offer.gpu for c in costs) if kind in usd]
    request = f"{load.prompt} tokens in and {load.output} out, TPOT <= {1e3 * load.tpot_s:g} ms"
    bound = "GPUs never idle, so each cost is a bound from below"
    hosts = ", ".join(dict.fromkeys(c.host for c in costs))
    servers = [c.server if len(costs) == 1 else f"{c.offer}: {c.server}" for c in costs]
    return [*answer, rows, *servers, *sources, f"a request: {request}; {bound}; simulated, {hosts}"]
