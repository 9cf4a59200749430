"""The README's first screen: taken from the output of plain `make`, and put in its place."""

from __future__ import annotations

import pytest

from tests.tools.first_screen import FOLD, README, shown, written

HEADLINE = "prism keeps 99 % up to 10.0 req/s (pooled; worst model 9.1), elastic within 25 % of it; 3.12x the rate of a"
AT = "Table: at 8.02 req/s (2.83 x the trace's rate)."
TABLE = """\
              SLOs met (both) %            req/s at 99 %
system        pooled                worst  crosses
prism         100.0 [100.0, 100.0]  99.9   10.0 [9.8, 10.2]
static:equal  30.8 [30.2, 31.4]     0.0    3.21 [2.76, 3.42]
qlm†          37.8 [36.2, 39.4]     0.0    <0.0885
† qlm: 3 of 8 models at 0 % at the lowest rate that ran
"""
OUTPUT = f"""\
environment    10 s
{HEADLINE} (light8, 1 x h100)
hyperbolic-like, 5106 requests in 1800 s
{AT}
{TABLE}batch_cap = 256 bound more than 1 % of steps: unshared
next: bench explain results/static-c071ab4d
prism keeps 99 % up to 55.3 req/s, alpaserve within 25 % of it (light8, 2 x h100)
"""


def test_the_first_answer_and_its_table_are_shown() -> None:
    screen = shown(OUTPUT)
    answer = screen.removesuffix(f"{AT}\n{TABLE}")
    assert answer != screen
    assert answer.replace("\n", " ").strip() == f"{HEADLINE} (light8, 1 x h100)"
    assert max(map(len, answer.splitlines())) <= FOLD
    with pytest.raises(ValueError, match="no answer and table"):
        shown(OUTPUT.replace("system  ", "names   "))


@pytest.mark.parametrize(("seconds", "says"), [(1.0, "1 minute;"), (60.0, "1 minute;"), (61.0, "2 minutes;")])
def test_screen_and_minutes_take_the_place_of_those_before(seconds: float, says: str) -> None:
    before = README.read_text("utf-8")
    after = written(before, shown(OUTPUT), seconds)
    assert f"```text\n{shown(OUTPUT)}```\n" in after
    assert f"draws the figure ({says}" in after
    assert written(after, shown(OUTPUT), seconds) == after
    with pytest.raises(ValueError, match="no block"):
        written(before.replace("```text", "```"), shown(OUTPUT), seconds)
