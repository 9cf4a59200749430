"""Looks of systems, and the form of a paper."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.types import UserError
from plots import fig_compare, form, style
from tests.cases import cases
from tests.plots.test_plots import GRID, folder

VARIANTS = ["prism_released", "prism:v1", "prism+placement=fixed", "aegaeon:decode-first", "static:rate", "mine+k=2"]


LABELS = st.lists(st.sampled_from([*style.SYSTEMS, *VARIANTS, "mine", "yours", "a", "b", "c"]), max_size=12)


@given(LABELS)
def test_no_two_systems_look_alike_in_a_figure(labels: list[str]) -> None:
    looks = style.looks(labels)
    assert looks == style.looks(reversed(labels))
    assert len({look.color for look in looks.values()}) == len(looks)
    assert len({(look.marker, look.line) for look in looks.values()}) == len(looks)
    for label, look in looks.items():
        if label in {**style.PRESETS, **style.SYSTEMS}:
            assert look == {**style.PRESETS, **style.SYSTEMS}[label]  # the same in every figure


def lightness(color: str) -> float:
    """Return CIE L* of an sRGB colour, 0 to 100: what is left of it in grey."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in mpl.colors.to_rgb(color)]
    y = float(np.dot([0.2126, 0.7152, 0.0722], linear))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


LIGHTEST = 72  # of lines on white, CIE L*: a contrast of 2 and more


def test_every_system_is_seen_on_white_and_no_preset_is_taken_for_another() -> None:
    known = {**style.SYSTEMS, **style.PRESETS}
    assert max(lightness(look.color) for look in known.values()) < LIGHTEST
    assert len({look for name, look in known.items() if not name.startswith("muxserve+")}) == len(known) - 1


def test_a_system_that_meets_no_slo_of_some_model_has_a_mark_in_names_and_captions() -> None:
    with form.on(form.Form(unserved={"alpaserve": "4 of 16 models at 0 %"})):
        assert style.called("alpaserve (4 GPUs)") == "alpaserve (4 GPUs)†"
        assert style.called("prism") == "prism"
        assert style.unserved() == "† alpaserve (4 of 16 models at 0 %)."
    assert (style.called("alpaserve"), style.unserved()) == ("alpaserve", "")


@cases("system", [*style.SYSTEMS])
def test_lines_of_one_system_differ_by_lightness_as_seen_by_everyone(system: str) -> None:
    """Its four shades are at least 11 apart in CIE L*, of which about 2 can be told apart side by side."""
    kin = [system, f"{system}:v1", f"{system}+placement=fixed", f"{system} (A/A)"]
    looks = style.looks([*kin, *style.SYSTEMS])
    shades = sorted(lightness(looks[label].color) for label in kin)
    assert min(b - a for a, b in pairwise(shades)) >= 11
    assert shades[-1] < LIGHTEST
    assert len({looks[label].line for label in kin}) == 4
    alone = style.looks([f"{system}:v1"])[f"{system}:v1"]
    assert alone == style.SYSTEMS[system]  # without the plain system


@cases("beside", [[], ["static:equal"], [*style.SYSTEMS], ["static", "static:equal", "static:mine", "b"]])
def test_a_preset_of_the_studies_looks_alike_in_every_figure(beside: list[str]) -> None:
    assert style.looks([*beside, "static:rate"])["static:rate"] == style.PRESETS["static:rate"]


def test_a_system_has_one_name_in_figures() -> None:
    assert style.called("muxserve:plusplus+quotas=none") == "muxserve++ without quotas"
    assert style.called("chunked+tau=256") == "chunked tau=256"
    assert style.called("static:rate (4 GPUs)") == "static:rate (4 GPUs)"


def test_known_systems_differ_in_colour_and_in_grey() -> None:
    markers = {look.marker for look in style.SYSTEMS.values()}
    assert len({look.color for look in style.SYSTEMS.values()}) == len(markers) == len(style.SYSTEMS)
    assert markers <= set(style.MARKERS)


def test_a_figure_takes_a_papers_form(tmp_path: Path) -> None:
    (file := tmp_path / "own.mplstyle").write_text("axes.labelsize: 9\nbackend: agg\n")
    names = ("prism", "static"), {"static": "S-Partition"}
    asked = form.Form(3.33, *names, "a", caption=False, formats=("svg",), style=file)
    with form.on(asked):
        svg, points = fig_compare.render(folder(tmp_path / "x", GRID), tmp_path / "f", "bench plot")
        with style.theme():
            assert mpl.rcParams["axes.labelsize"] == 9
    assert [path.name for path in (svg, points)] == ["f.svg", "f.csv"]
    text = svg.read_text("utf-8")
    assert 'width="239.76pt"' in text  # 3.33 in of 72 points
    assert "S-Partition" in text
    assert "dedicated" not in text
    assert "TPOT" not in text  # of other panels, and of a caption
    assert set(pd.read_csv(points, comment="#")["label"]) == {"prism", "static"}
    with form.on(asked):
        again, _ = fig_compare.render(tmp_path / "x", tmp_path / "g", "bench plot")
    assert again.read_bytes() == svg.read_bytes()


def test_marks_of_a_drawing_have_their_numbers_as_words(tmp_path: Path) -> None:
    with form.on(form.Form(formats=("svg",))):
        svg, _ = fig_compare.render(folder(tmp_path / "x", GRID), tmp_path / "f", "bench plot")
    words = re.findall(r"<title>(.*?)</title>", svg.read_text("utf-8"))
    both = [word for word in words if word.startswith("prism: requests that meet both SLOs (%)")]
    assert [word.split("(%) ")[1].split(",")[0] for word in both] == ["96.5", "94"]  # 1 - x/40 - 0.01, from 90 % on
    assert [word.rpartition(" ")[2] for word in both] == ["1.5", "3"]  # req/s


@cases(
    ("asked", "line"),
    [
        (form.Form(1.0), "made for 3.4 inches, and its words collide below 2.21"),
        (form.Form(only=("prsm",)), r'--only: no system "prsm" here; did you mean prism\?'),
        (form.Form(rename={"x": "y"}), r'--rename: no system "x" here'),
        (form.Form(panel="z"), r'--panel "z" is not one of a, b, c, d, e'),
        (form.Form(style=Path("/nope")), "--style /nope: No such file"),
    ],
)
def test_a_form_that_cannot_be_had_is_one_line(tmp_path: Path, asked: form.Form, line: str) -> None:
    made = folder(tmp_path / "x", GRID)
    with pytest.raises(UserError, match=line), form.on(asked):
        fig_compare.render(made, tmp_path / "f", "bench plot")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_style_with_a_wrong_key_is_one_line(tmp_path: Path) -> None:
    (file := tmp_path / "own.mplstyle").write_text("font.sizee: 3\n")
    with pytest.raises(UserError, match=r"Bad key font.sizee in file .*, line 1"), form.on(form.Form(style=file)):
        pass


@pytest.mark.skipif(form.latex() is not None, reason="a LaTeX is here")
def test_pgf_without_latex_is_one_line() -> None:
    with pytest.raises(UserError, match="pgf needs LaTeX"), form.on(form.Form(formats=("pgf",))):
        pass
