"""Write harness/run/as_before.toml: a rewrite of files, since a commit, that makes the same rows.

    python -m tests.tools.as_before CHECKOUT

CHECKOUT is a checkout of the commit that made the stored runs. Before it writes, the tool makes runs of each system by
both, and refuses where their rows differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.loop import meaning
from harness.loop.system import ROOT, names

LISTED = """
import json, sys
from harness.check import under
from harness.loop import engine, meaning
from harness.loop.system import ROOT, names
from harness.run import sources
before = getattr(sources, "AS_BEFORE", None)
runs = {path for system in names()
        for path in sources.closure(sources.RUN, engine.path("sim"), ROOT / "systems" / f"{system}.py")}
checks = {path for pattern in under.FILES for path in ROOT.glob(pattern)}
for paths in (runs, checks - runs):
    pairs = {(str(path.relative_to(ROOT)), meaning.digest(path)) for path in paths}
    if sys.argv[1] == "before":  # today's entries are written anew
        pairs = meaning.as_before(pairs) if before is None else {(n, before.get(d[:16], d)) for n, d in pairs}
    print(json.dumps(dict(pairs)))
"""
SPECS = (
    "--models light8 --gpus 1 --trace hyperbolic-like",
    "--models heavy8 --gpus 4 --trace arena-like --assign square",
    "--models aegaeon+models=12 --gpus 8 --trace aegaeon-like",
    "--models weaver --gpus 4 --gpu a100-40g --trace hot-cold+rate_rps=4+lengths=azure-conv+span_s=300",
)
LIMITS = (
    "--rate-scale 1 --seeds 1 --set window_s=60 --set warmup_s=30 --slo absolute:ttft=1,tpot=0.1 --budget 0 --no-plot"
)


def _python(checkout: Path, *arguments: str) -> str:
    run = [sys.executable, *arguments]
    path = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(run, cwd=checkout, env=path, check=True, capture_output=True, text=True).stdout


def _rows(checkout: Path, out: Path, systems: str) -> Iterator[tuple[str, pa.Table]]:
    """Run the specs of a checkout; yield each run's name and its rows, without its facts, in which the code stands."""
    for k, spec in enumerate(SPECS):
        to = str(out / str(k))
        _python(checkout, "-m", "harness", "compare", "--systems", systems, *spec.split(), *LIMITS.split(), "-o", to)
        for path in sorted(Path(to).glob("*/requests.parquet")):
            yield f"{k}/{path.parent.name}", pq.read_table(path).replace_schema_metadata(None)


def main(arguments: list[str]) -> int:
    """Compare runs of two checkouts and write the rewrite between them; 1 where rows differ."""
    before = Path(arguments[0]).resolve()
    systems = arguments[1] if len(arguments) > 1 else ",".join(names())
    with tempfile.TemporaryDirectory() as out:
        rows = [dict(_rows(checkout, Path(out) / side, systems)) for side, checkout in (("a", before), ("b", ROOT))]
    every = sorted(rows[0].keys() | rows[1].keys())
    unlike = [name for name in every if not all(name in side for side in rows) or rows[0][name] != rows[1][name]]
    sys.stdout.write(f"{len(rows[0])} runs before, {len(rows[1])} now, {len(unlike)} unlike {' '.join(unlike)}\n")
    if unlike or not rows[0]:
        return 1
    lists = (_python(*side).splitlines() for side in ((before, "-c", LISTED, "before"), (ROOT, "-c", LISTED, "now")))
    lines = ["# Written by `python -m tests.tools.as_before`, after runs of all systems had equal rows."]
    seen = set[str]()
    for old, new in zip(*(map(json.loads, texts) for texts in lists), strict=True):  # of runs, of checks alone
        changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} - seen
        seen |= old.keys() | new.keys()  # what runs import by now, checks alone may have read before
        alone = {name for name in changed if name.startswith(("systems/", "harness/policy/"))}  # no run has them all
        for group in (changed - alone, *({name} for name in sorted(alone))):
            lines += ["[[rewrite]]"]
            for head, side in (("now", new), ("before", old)):
                lines += [f"[rewrite.{head}]", *(f'"{name}" = "{side[name]}"' for name in sorted(group & side.keys()))]
    meaning.REWRITES.write_text("\n".join(lines) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
