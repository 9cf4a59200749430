"""Prices of a model's tokens on some GPUs, for `bench price`.

Of each offer: how many requests decode together, and what a million output tokens cost when the GPUs are never idle:

    seqs   the most whose KV fits beside the weights, and whose step, prompts included, is within the TPOT
    step   decode of all of them, and the prompts that come in while they decode: seqs / output prompts a step
    price  GPUs x price an hour / (3,600 s x seqs / step)

Steps are those of the cost table under the host profile `vllm-0.15`, and KV memory and the most sequences of a step are
those of that server's settings on the card, unless others are given. Prices of GPUs are those of `bench size`
(`harness/engines/costs/prices.toml`), or a user's. The cost is a bound from below: load that varies leaves GPUs idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.engines.costs import coefficients, kernels, profile, quantities, shapes
from harness.engines.costs.prices import Price
from harness.policy.fields import meant
from harness.policy.types import GIB, UserError
from harness.run.server_line import server_line
from harness.run.setup import Setup
from harness.run.spec import MOST_GPUS, from_dict

QUANT3 = ("qwen-3-32b@2xh100", "qwen-3-32b:dtype=fp8_block@h100", "qwen-3-32b:dtype=int4@l40s")
SETTINGS = (
    "host",
    "chunk_tokens",
    "prefill_tokens",
    "batch_cap",
    "mem_fraction",
    "process_bytes",
    "pool_bytes",
    "scaled",
)
HEAD = ("model", "GPUs", "USD an hour", "GiB a GPU", "seqs", "TPOT ms", "tokens/s", "USD a million", "roofline")


class Load(NamedTuple):
    """Tokens of a request, and the longest time per output token."""

    prompt: int
    output: int
    tpot_s: float


class Offer(NamedTuple):
    """A model on some GPUs of a kind."""

    model: str
    gpu: str
    gpus: int


class Cost(NamedTuple):
    """An offer's numbers at full load; `usd_million` of output tokens is None without a price."""

    offer: Offer
    weight_gib: float
    seqs: int
    tpot_s: float
    tokens_s: float
    usd_hour: float | None
    usd_million: float | None
    roofline: float
    server: str
    host: str


def offer(text: str) -> Offer:
    """Take MODEL@[N x]KIND apart. UserError for another form, or an unknown kind."""
    model, at, where = text.rpartition("@")
    count, times, kind = where.rpartition("x") if where[:1].isdigit() else ("1", "x", where)
    if not (at and model and times and count.isascii() and count.isdecimal() and 1 <= int(count[:9]) <= MOST_GPUS):
        raise UserError(f'"{text}" is not MODEL@KIND or MODEL@NxKIND, as qwen-3-32b@2xh100')
    return Offer(model, quantities.gpu(kind).kind, int(count))


def cost(
    asked: Offer, usd: Mapping[str, Price], load: Load, settings: Mapping[str, Any] = MappingProxyType({})
) -> Cost:
    """Return the numbers of an offer under some settings of a spec (`SETTINGS`).

    UserError for another setting, where the model does not fit, or where it misses the TPOT with one request.
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
        """Return the mean step: decodes, and their part of the prompts that come in."""
        prompts = seqs / load.output
        whole = profile.step_s(row, B=seqs, C=seqs * (load.prompt + load.output // 2))
        return whole + prompts * profile.step_s(row, p=load.prompt, n=1, area=load.prompt**2 / 2)

    most = min(int(room), setup.settings.batch_cap)
    seqs = max((n for n in range(1, most + 1) if step_s(n) <= load.tpot_s), default=0)
    if not seqs:
        raise UserError(f"{asked.model} on {asked.gpus} x {asked.gpu}: a step takes more than {1e3 * load.tpot_s:g} ms")
    q = quantities.quantities(asked.gpu)
    tokens_s, price = seqs / step_s(seqs), usd.get(asked.gpu)
    hour = None if price is None else asked.gpus * price.usd_hour
    return Cost(
        asked, setup.alone(member, asked.gpus, card)[0] / GIB, seqs, step_s(seqs), tokens_s, hour,
        None if hour is None else hour / 3600 / tokens_s * 1e6, kernels.roofline_share(q, card, dims, asked.gpus),
        server_line(setup), host,
    )  # fmt: skip


def table(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """Return the lines of a table, its head first; what has no price has a dash."""

    def line(c: Cost) -> tuple[str, ...]:
        hour, million = ("-" if x is None else f"{x:.2f}" for x in (c.usd_hour, c.usd_million))
        where = f"{c.offer.gpus} x {c.offer.gpu}"
        numbers = f"{c.weight_gib:.1f}", str(c.seqs), f"{1e3 * c.tpot_s:.1f}", f"{c.tokens_s:.0f}"
        return (c.offer.model, where, hour, *numbers, million, f"{100 * c.roofline:.0f} %")

    return [HEAD, *map(line, costs)]


def parts(costs: Sequence[Cost], usd: Mapping[str, Price], load: Load) -> list[str | list[tuple[str, ...]]]:
    """Return the cheapest offer in a sentence, the table, and where the prices are from."""
    cheapest = min((c for c in costs if c.usd_million is not None), key=lambda c: c.usd_million or 0.0, default=None)
    answer = []
    if cheapest is not None:
        of, says = cheapest.offer, "is the cheapest:" if len(costs) > 1 else "costs"
        price = f"{cheapest.usd_million:.2f} USD a million output tokens"
        answer = [f"{of.model} on {of.gpus} x {of.gpu} {says} {price}"]
    told = [f"{kind} {usd[kind].told}" for kind in dict.fromkeys(c.offer.gpu for c in costs) if kind in usd]
    request = f"{load.prompt} tokens in and {load.output} out, TPOT <= {1e3 * load.tpot_s:g} ms"
    bound = "GPUs never idle, so each cost is a bound from below"
    hosts = ", ".join(dict.fromkeys(c.host for c in costs))
    servers = [
        c.server if len(costs) == 1 else f"{c.offer.model} on {c.offer.gpus} x {c.offer.gpu}: {c.server}" for c in costs
    ]
    return [*answer, table(costs), *servers, *told, f"a request: {request}; {bound}; simulated, {hosts}"]
