"""The section of results/cpu/torch/README.md, from the files beside it: `python -m harness.validate.torch_section`.

    torch-cpu.toml        bench calibrate torch+wide=4 --models llama-3.1-8b -o results/cpu/torch
    validate.md, .png     bench validate --engine torch --table ... -o results/cpu/torch/validate
    fig7/*.md, *.csv      make reproduce-fig7 ENGINE=torch

The text between the marks `torch results` is replaced, and says which files are missing. The page docs/validation.md
includes the section.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.engines.costs import quantities
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows.record import write_bytes

FOLDER = ROOT / "results/cpu/torch"
README = FOLDER / "README.md"
MARKS = "<!-- torch results -->", "<!-- /torch results -->"
ROWS = 30  # most rows of a table
NEAR = 5.0  # points of attainment, as in validation.md
Attained = Mapping[tuple[str, float], float]  # percent, by system and requests a second
FIGURE_7 = {"simulator": "The simulator, by the devices' cost table:", "devices": "The devices, two cores of one host:"}


def section(folder: Path) -> Iterator[str]:
    """Yield the section's lines, from the files of a folder."""
    table, page = folder / "torch-cpu.toml", folder / "validate.md"
    if table.is_file():
        measured = quantities.machine(str(table))
        assert measured is not None
        yield f"Measured on {measured.name}.\n"
    if page.is_file():
        yield from validated(page.read_text("utf-8"))
        if (folder / "validate.png").is_file():
            yield "\n![Attainment and latencies, devices and simulator](validate.png)"
    else:
        yield f"No run of `bench validate --engine torch` is stored: {page.name} is missing."
    if all((folder / "fig7" / f"{name}.csv").is_file() for name in FIGURE_7):
        yield from compared(*(attained(folder / "fig7" / f"{name}.csv") for name in FIGURE_7))
    for name, title in FIGURE_7.items():
        path = folder / "fig7" / f"{name}.md"
        if path.is_file():
            yield f"\n**Figure 7 on two devices.** {title}\n"
            yield from path.read_text("utf-8").rstrip().splitlines()
        else:
            yield f"\nFigure 7: fig7/{path.name} is missing (`make reproduce-fig7 ENGINE=torch`)."


def attained(path: Path) -> dict[tuple[str, float], float]:
    """Read the attainment of TTFT, in percent, keyed by system and requests per second, from a study's table."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {(row["label"], round(float(row["shown_x"]), 3)): 100 * float(row["ttft_mean"]) for row in rows}


def compared(simulated: Attained, measured: Attained) -> Iterator[str]:
    """Yield a sentence on how well the simulator predicts figure 7 on devices, then a table of both attainments."""
    off = {key: abs(simulated[key] - measured[key]) for key in measured}
    near = sum(points <= NEAR for points in off.values())
    yield (
        f"\n**Figure 7 on two devices**: the simulator's attainment of TTFT is within {NEAR:g} points of the devices' "
        f"in {near} of {len(off)} cells, and off by {max(off.values()):.0f} at most.\n"
    )
    rates = sorted({rate for _, rate in measured})
    yield "| TTFT in time, %: devices / simulator | " + " | ".join(f"{rate:g} req/s" for rate in rates) + " |"
    yield "| --- |" + " --- |" * len(rates)
    for system in dict.fromkeys(system for system, _ in measured):
        cells = (f"{measured[system, rate]:.1f} / {simulated[system, rate]:.1f}" for rate in rates)
        yield f"| {system} | {' | '.join(cells)} |"


def validated(page: str) -> Iterator[str]:
    """Yield a page of `bench validate`, with each table of pairs of systems replaced by its number of rows."""
    blocks = [block for block in re.split(r"\n\s*\n", page.strip()) if block]
    tables = [k for k, block in enumerate(blocks) if block.startswith("|")]
    pairs = tables[:-1]
    for k, block in enumerate(blocks):
        if k in pairs:
            yield f"Pairs of systems, {len(block.splitlines()) - 2} of them, are in `cpu/torch/validate.md`.\n"
        elif k in tables:
            yield from cut(block.splitlines())
            yield ""
        else:
            yield f"{block}\n"


def cut(rows: Sequence[str]) -> Iterator[str]:
    """Yield the first ROWS rows of a table, and how many more there are."""
    yield from rows[: ROWS + 2]
    if (more := len(rows) - ROWS - 2) > 0:
        yield f"\n{more} more rows are in the file."


def written(readme: str, lines: Iterator[str]) -> str:
    """Return a README with `lines` between its marks. Raises UserError if it lacks the marks."""
    head, begin, rest = readme.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not begin or not end:
        raise UserError(f"no marks {MARKS[0]} and {MARKS[1]}")
    text = "\n".join(lines).strip()
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def main(readme: Path = README, folder: Path = FOLDER) -> None:
    """Write the section into the README."""
    write_bytes(readme, written(readme.read_text("utf-8"), section(folder)).encode())


if __name__ == "__main__":
    main()
    print(README)
