"""Prices of a model's tokens on some GPUs, for `bench price`.

Of each offer: how many requests decode together, and what a million output tokens cost when the GPUs are never idle:

    seqs   the most whose KV fits beside the weights, and whose step, prompts included, is within the TPOT
    step   decode of all of them, and the prompts that come in while they decode: seqs / output prompts a step
    price  GPUs x price an hour / (3,600 s x seqs / step)

Steps are those of the cost table under the host profile `vllm-0.15`. Prices of GPUs are those of `bench size`
(`harness/engines/costs/prices.toml`), or a user's. The cost is a bound from below: load that varies leaves GPUs idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.engines.costs import coefficients, kernels, profile, quantities
from harness.engines.costs.prices import Price
from harness.engines.machine import Config, Served, cluster
from harness.policy.types import GIB, UserError
from workloads.models import shape

QUANT3 = ("qwen-3-32b@2xh100", "qwen-3-32b:dtype=fp8_block@h100", "qwen-3-32b:dtype=int4@l40s")
HOST = "vllm-0.15"
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


def offer(text: str) -> Offer:
    """Take MODEL@[N x]KIND apart. UserError for another form, or an unknown kind."""
    model, at, where = text.rpartition("@")
    count, times, kind = where.rpartition("x") if where[:1].isdigit() else ("1", "x", where)
    if not at or not model or not count.isdigit() or not times or int(count) < 1:
        raise UserError(f'"{text}" is not MODEL@KIND or MODEL@NxKIND, as qwen-3-32b@2xh100')
    return Offer(model, quantities.gpu(kind).kind, int(count))


def cost(asked: Offer, usd: Mapping[str, Price], load: Load) -> Cost:
    """Return the numbers of an offer. UserError where the model does not fit, or misses the TPOT with one request."""
    dims = shape(asked.model)
    dims = dims._replace(max_tokens=min(dims.max_tokens, 2 * (load.prompt + load.output)))
    config = Config((Served("m", dims, asked.gpus),), gpu=asked.gpu, gpus=asked.gpus, host=HOST)
    its = cluster(config)
    card, model = its.gpus[0], its.models["m"]
    room = (card.mem_bytes - model.weight_bytes) // (model.kv_token_bytes * (load.prompt + load.output))
    if room < 1:
        raise UserError(f"{asked.model} and one request do not fit on {asked.gpus} x {asked.gpu}")
    row = profile.row(coefficients.tables([(dims, asked.gpus)], asked.gpu, HOST), 0)

    def step_s(seqs: int) -> float:
        """Return the mean step: decodes, and their part of the prompts that come in."""
        prompts = seqs / load.output
        whole = profile.step_s(row, B=seqs, C=seqs * (load.prompt + load.output // 2))
        return whole + prompts * profile.step_s(row, p=load.prompt, n=1, area=load.prompt**2 / 2)

    seqs = max((n for n in range(1, int(room) + 1) if n <= config.batch_cap and step_s(n) <= load.tpot_s), default=0)
    if not seqs:
        raise UserError(f"{asked.model} on {asked.gpus} x {asked.gpu}: a step takes more than {1e3 * load.tpot_s:g} ms")
    q, spec = quantities.quantities(asked.gpu), quantities.gpu(asked.gpu)
    tokens_s, price = seqs / step_s(seqs), usd.get(asked.gpu)
    hour = None if price is None else asked.gpus * price.usd_hour
    return Cost(
        asked, model.weight_bytes / GIB, seqs, step_s(seqs), tokens_s, hour,
        None if hour is None else hour / 3600 / tokens_s * 1e6, kernels.roofline_share(q, spec, dims, asked.gpus),
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
    return [*answer, table(costs), *told, f"a request: {request}; {bound}; simulated, {HOST}"]
