"""The table's page in a browser: it loads nothing, sorts by a scenario, and is not blank at a phone's width."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from harness.suite import table
from tests.cases import cases
from tests.harness.answers.test_page import browser, opened
from tests.harness.suite.test_score import known, made_card


def page() -> str:
    suite = known()
    rates = {"a": (9.0, 2.0), "b": (4.0, 6.0), "c": (1.0, 4.0)}
    cards = [made_card(name, suite, *pair) for name, pair in rates.items()]
    rows = [{**row, "bound_rps": 20.0} for of in cards for row in table.of_card(of, suite)]
    return table.page(rows, suite, "ab" * 16)


@pytest.mark.slow
@pytest.mark.browser
@browser
def test_the_ranking_is_sorted_by_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    for clicks, order in ((1, "acb"), (2, "bca")):  # by `mixed`, up and down
        click = '<script>document.querySelectorAll("thead button")[3].click()</script>'
        path.write_text(page().replace("</body>", clicks * click + "</body>"))
        assert re.findall(r'<th scope="row">([abc])</th>', opened(path, tmp_path / "home", "--dump-dom")) == list(order)


@pytest.mark.slow
@pytest.mark.browser
@browser
@cases(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_the_page_is_drawn_at_each_width(tmp_path: Path, width: int, dark: bool) -> None:
    path, shot = tmp_path / "p.html", tmp_path / "shot.png"
    path.write_text(page())
    options = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    opened(path, tmp_path / "home", *options, f"--screenshot={shot}", f"--window-size={width},1200")
    with Image.open(shot) as image:
        histogram = image.convert("L").histogram()
    paper = max(range(256), key=histogram.__getitem__)
    assert (paper > 250) is not dark
    assert 0.01 < sum(n for level, n in enumerate(histogram) if abs(level - paper) > 60) / sum(histogram) < 0.4
