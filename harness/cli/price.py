"""`bench price`: what a million tokens of a model cost, by the GPUs that serve it."""

from __future__ import annotations

from typing import Any

import click

from harness.answers.table import printed
from harness.cli.options import SET, count, examples
from harness.cli.values import Number, read_pairs


@click.command(
    epilog=examples(
        "bench price",
        "bench price llama-3.1-8b@h100 llama-3.1-8b@l40s --price l40s=0.9",
        "bench price gpt-oss-120b@h200 gpt-oss-120b@2xh100 --prompt 4096 --output 512 --tpot 30",
    )
)
@click.argument("offers", nargs=-1, metavar="[MODEL@[Nx]KIND]...")
@count("--prompt", "Prompt of a request.", most=1_000_000, default=1024, metavar="TOKENS")
@count("--output", "Output of a request.", most=1_000_000, default=256, metavar="TOKENS")
@click.option(
    "--tpot",
    type=Number(0, 60_000, min_open=True),
    default=50.0,
    show_default=True,
    metavar="MS",
    help="Longest time per output token.",
)
@click.option(
    "--price",
    multiple=True,
    callback=read_pairs,
    metavar="KIND=USD",
    help="Price of a GPU an hour, instead of the listed one.",
)
@SET
def price(
    *, offers: tuple[str, ...], prompt: int, output: int, tpot: float, price: dict[str, str], settings: dict[str, Any]
) -> None:
    """Price a million tokens of a model, by its GPUs.

    An offer is a model on GPUs of a kind: qwen-3-32b@2xh100, or in other formats qwen-3-32b:dtype=fp8_block@h100.
    Without offers, the offers of the set quant3 are priced. The GPUs are never idle, so each cost is a lower bound;
    bench size finds the GPUs that traffic needs.
    """
    from harness.engines.costs import quantities
    from harness.engines.costs.prices import prices
    from harness.study import offers as priced

    usd = prices({quantities.gpu(kind).kind: text for kind, text in price.items()})
    load = priced.Load(prompt, output, tpot / 1e3)
    costs = [priced.cost(priced.offer(text), usd, load, settings) for text in offers or priced.QUANT3]
    click.echo("\n".join(printed(priced.parts(costs, usd, load))))
