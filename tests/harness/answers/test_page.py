"""A page holds a whole answer in one file: nothing is loaded, text is escaped, numbers have keys to sort by."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from harness.answers.page import Page, Picture, page, question
from harness.answers.table import Table, value
from harness.policy.types import UserError
from tests.bench import bench, mistake, ok
from tests.cases import cases

COMPARE = ("compare", "--systems", "static,prism", "--trace", "sample", "--models", "llama-3.2-1b*2", "--rate-scale",
           "1,2", "--seeds", "1", "--slo", "absolute:ttft=1,tpot=1", "--workers", "1", "--no-plot", "-q")  # fmt: skip
SIZE = ("size", "--trace", "sample", "--models", "llama-3.2-1b*8", "--systems", "static", "--gpus", "1-1", "--slo",
        "absolute:ttft=1,tpot=1", "--windows", "1", "--no-plot", "--grow", "1", "-q")  # fmt: skip
ODD = "a<script>b</script>\"&' "
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = (
    *"--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split(),
    *"--disable-background-networking --disable-component-update".split(),
    "--host-resolver-rules=MAP * ~NOTFOUND",
    *"--proxy-server=127.0.0.1:9 --hide-scrollbars --virtual-time-budget=2000".split(),
)


def made(**changes: object) -> Page:
    fields: dict[str, object] = {
        "question": f"Why {ODD}?",
        "answer": "it is 3 [2, 4]",
        "pictures": [Picture("<svg></svg>", ODD)],
        "tables": [Table(["name", "count"], [["a", "10"], ["b", "9"], ["c", "-"], ["d", "<1.5"]], title="Numbers")],
        "notes": [ODD],
        "conditions": [("GPUs", "1 x h100")],
        "fidelity": "Simulated.",
        "made": [("count", ODD)],
        "command": f"bench {ODD}",
        "source": "here",
    }
    return Page(**fields | changes)  # type: ignore[arg-type]


class Tags(HTMLParser):
    """Collects what a page would load, and its open tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "xlink:href", "action", "data", "poster")
        self.loads += [v for k, v in attrs if k in names and v and not v.startswith(("#", "data:,"))]


def sound(text: str) -> None:
    """Assert that a page is one file of less than a megabyte that loads nothing."""
    assert len(text.encode()) < 1_000_000
    assert Tags(text).loads == []
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\((?!#)", text)


def test_a_page_loads_nothing_and_escapes_all_words() -> None:
    text = page(made())
    sound(text)
    assert Tags(text).tags.count("script") == 1  # the words of a caption, a note, a command are no elements
    assert '<p class="answer">It is 3 [2, 4]</p>' in text


@cases(
    ("cell", "number"),
    [
        ("10", 10.0),
        ("<0.418", 0.418),
        ("1.45 [0.76, 2.14]", 1.45),
        ("-", None),
        ("1,234", 1234.0),
        ("1e999", None),
    ],
)
def test_the_key_by_which_a_cell_is_sorted(cell: str, number: float | None) -> None:
    assert value(cell) == number


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a comparison and a size that were made by commands, and their pages."""
    out = tmp_path_factory.mktemp("answers")
    folders = {}
    for kind, argv, name in (("comparison", COMPARE, "attainment.parquet"), ("size", SIZE, "size.parquet")):
        ok(*argv, "-o", out)
        folders[kind] = next(out.glob(f"*/{name}")).parent
        assert question(folders[kind]) == kind
        ok("report", folders[kind])
    return folders


@cases("kind", ["comparison", "size"])
def test_the_page_of_an_answer(stored: dict[str, Path], kind: str) -> None:
    text = (stored[kind] / "report.html").read_text("utf-8")
    sound(text)
    command = (stored[kind] / "command.txt").read_text().strip()
    assert command.startswith("bench ")
    assert " -o " not in command
    parts = ("<svg", "<title>static: ", "Simulated.", "h100", "both", "How each number")
    for part in (command.partition(" --slo")[0], *parts):
        assert part.replace("'", "&#x27;") in text
    ok("report", stored[kind], "-o", stored[kind] / "again.html")
    assert (stored[kind] / "again.html").read_text("utf-8") == text  # equal answers, equal bytes


def test_what_is_no_answer_is_told(stored: dict[str, Path], tmp_path: Path) -> None:
    run = next(stored["comparison"].parent.glob("prism-*"))
    with pytest.raises(UserError, match=r"one run is no answer: bench explain prism-"):
        question(run)
    mistake(bench("report", tmp_path), "no answer here")
    mistake(bench("report", "fig77"), "did you mean fig7")
    mistake(bench("report", tmp_path / "x"), "no such folder")


# ------------------------------------------------------------------ in a browser, without a network

browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package chromium)")


def opened(path: Path, home: Path, *options: str) -> str:
    """Open a page in headless Chromium; returns what it prints."""
    assert CHROMIUM is not None
    argv = [CHROMIUM, *QUIET, f"--user-data-dir={home}", *options, path.as_uri()]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_tables_are_sorted_by_their_heads(tmp_path: Path) -> None:
    click = '<script>document.querySelectorAll("thead button")[1].click()</script></body>'
    for clicks, order in ((1, "dbac"), (2, "abdc")):  # "-" comes last, up and down
        (tmp_path / "p.html").write_text(page(made()).replace("</body>", clicks * click))
        dom = opened(tmp_path / "p.html", tmp_path / "home", "--dump-dom")
        assert re.findall(r'<th scope="row">(.)</th>', dom) == list(order)
    assert 'aria-sort="descending"' in dom


@pytest.mark.slow
@pytest.mark.browser
@browser
@cases(
    ("kind", "options", "size"),
    [
        ("comparison", [], (1100, 1400)),
        ("size", [], (1100, 1400)),
        ("size", ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"], (1100, 1400)),
    ],
)
def test_a_page_opens_without_a_network(
    stored: dict[str, Path], tmp_path: Path, kind: str, options: list[str], size: tuple[int, int]
) -> None:
    shot = tmp_path / "shot.png"
    picture = f"--screenshot={shot}", f"--window-size={size[0]},{size[1]}"
    opened(stored[kind] / "report.html", tmp_path / "home", *options, *picture)
    with Image.open(shot) as image:
        assert image.size == size
        pixels = image.convert("L")
        histogram = pixels.histogram()
    paper = max(range(256), key=histogram.__getitem__)
    assert (paper > 250) is not bool(options)  # light or dark
    inked = sum(count for level, count in enumerate(histogram) if abs(level - paper) > 60)
    assert 0.01 < inked / (size[0] * size[1]) < 0.4  # neither blank nor a block


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_a_page_prints(stored: dict[str, Path], tmp_path: Path) -> None:
    opened(stored["size"] / "report.html", tmp_path / "home", f"--print-to-pdf={tmp_path / 'p.pdf'}")
    data = (tmp_path / "p.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type /Page\b(?!s)", data)) <= 4
