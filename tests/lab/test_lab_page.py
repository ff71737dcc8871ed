"""The page of the laboratory: what is written, and what a browser makes of it."""

import re
from collections import Counter
from html import escape, unescape

import pytest
from support.browser import DESK, PHONE, Reader, in_browser, look

import sdpa
from sdpa import lab
from sdpa._report import document, drawing, page_style, svg
from sdpa.lab import _page
from sdpa.lab._experiment import HELD, VERDICTS, Experiment, Figure, Finding, Run, Table, carry_out

# Options by which experiments take less long; each experiment gets those that it has.
SMALL = {
    "seeds": 2, "dims": (4, 64, 256), "products": 200, "queries": 16, "tokens": 64, "counts": (96, 768), "steps": 5,
    "batch": 2, "rates": (0.003,), "calls": 20,
    "lengths": (64, 128),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return [
        carry_out(one, {name: value for name, value in SMALL.items() if name in one.options}) for one in lab.EXPERIMENTS
    ]


@pytest.fixture(scope="module")
def page(runs):
    return _page.page(runs, figures=True, date="2026-01-01 00:00")


# The text.


def test_tags_close_and_ids_are_unique(page):
    tags = Reader(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert not [name for name, count in Counter(ids).items() if count > 1]
    used = re.findall(r"url\(#([^)]+)\)", page) + re.findall(r'href="#([^"]+)"', page)
    assert len(used) > 20 and set(used) <= set(ids)


def test_nothing_comes_from_elsewhere(page):
    assert not re.search(r"https?:|//|<script|<link|@import|\ssrc=|url\((?!#)", page)


def test_each_experiment_is_there(page, runs):
    tags = Reader(page).tags
    assert [attributes["id"] for tag, attributes in tags if tag == "section"] == [run.experiment.name for run in runs]
    text = unescape(re.sub(r"<[^>]+>", "", page))
    for run in runs:
        assert f"python -m sdpa lab {run.experiment.name}" in text and f"sdpa.lab.{run.experiment.name}(" in text
        for finding in run.experiment.findings(run.numbers):
            assert finding.claim.replace("_", "") in text.replace("_", "")
            assert f"{VERDICTS[finding.verdict]}{finding.claim}".replace("_", "") in text.replace("_", "")
        for table in run.experiment.tables(run.numbers):
            for row in table.rows:
                assert "".join(row).replace("_", "") in text.replace("_", "")
    images = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(images) == sum(len(run.experiment.figures) for run in runs)
    captions = [figure.caption for run in runs for figure in run.experiment.figures]
    assert [image["aria-label"] for image in images] == captions
    assert {image["role"] for image in images} == {"img"}


def test_formulas_in_text():
    assert document.as_html("a < N e^(-1/(2·d_k))") == "a &lt; N e<sup>−1/(2·<var>d<sub>k</sub></var>)</sup>"
    assert document.as_html("√d_model, √d, d") == "√<var>d</var><sub>model</sub>, √<var>d</var>, d"
    in_one_piece = '<span class="formula">1/√<var>d</var><sub>model</sub></span>'
    assert document.as_html("scale 1/√d_model") == f"scale {in_one_piece}"


def test_it_says_where_it_comes_from(page):
    footer = unescape(page[page.index("<footer") :])
    for text in (sdpa.__version__, sdpa.build_info()["kernel"], "2026-01-01 00:00", "NumPy", "Python", "threads"):
        assert text in footer


def test_the_same_numbers_give_the_same_page(page, runs):
    assert _page.page(runs, figures=True, date="2026-01-01 00:00") == page


def test_text_is_escaped():
    nasty = "<b>&\"'</b>"

    def odd(*, size=1, progress=iter):
        return None

    def draw(numbers):
        figure, axes = drawing.panel()
        axes.set_xlabel(nasty)
        axes.plot([0, 1])
        return figure

    experiment = Experiment(
        odd, nasty, "claim", "<p>reason</p>", lambda _: [Finding(nasty, nasty, HELD)],
        lambda _: [Table(nasty, (nasty,), [(nasty,)])], [Figure(nasty, draw)],
    )  # fmt: skip
    text = _page.page([Run(experiment, {"size": nasty}, None, 1.0)], figures=True, date=nasty)
    Reader(text)
    assert "<b>" not in text and text.count(escape(nasty)) >= 8


def test_colours_of_figures_are_variables(page):
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--series-1)" in drawn and "var(--ink)" in drawn and "var(--muted)" in drawn
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawn)
    for names in (page_style.LIGHT, page_style.DARK):
        assert {f"var({name})" for name in svg.VARIABLES.values()} <= {
            f"var({n})" for n in re.findall(r"--[\w-]+", names)
        }


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("colours", [page_style.LIGHT, page_style.DARK], ids=["light", "dark"])
def test_colours_can_be_read(colours):
    """Contrast as WCAG 2 has it: 4.5 for text, 3 for lines."""
    named = dict(re.findall(r"--([\w-]+): (#\w{6});", colours))
    for paper in ("paper", "desk"):
        for name, colour in named.items():
            if name not in ("paper", "desk", "grid"):
                low, high = sorted((luminance(colour), luminance(named[paper])))
                assert (high + 0.05) / (low + 0.05) >= (3 if name.startswith("series") else 4.5), (name, paper)


# In a browser.


@pytest.fixture(scope="module")
def views(page, tmp_path_factory):
    return look(page, tmp_path_factory.mktemp("page"))


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_overflows(views, width, scheme):
    view = views[width, scheme]
    assert view["width"] == width and view["dark"] == (scheme == "dark")
    assert view["scroll"] <= width
    assert view["outside"] == []
    assert view["tables"] and all(view["tables"])


@in_browser
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_all_figures_are_drawn(views, runs, width):
    images = views[width, "light"]["images"]
    assert [image["label"] for image in images] == [f.caption for run in runs for f in run.experiment.figures]
    for image in images:
        assert image["inside"] and image["width"] >= 359 and image["height"] >= 150, image
        assert image["marks"] >= 15 and min(image["drawn"]) > 0.8, image
        assert not image["cut"] and image["letters"] >= 9, image


@in_browser
def test_colours_follow_the_scheme(views):
    for width in (PHONE, DESK):
        light, dark = views[width, "light"], views[width, "dark"]
        for name in ("paper", "ink", "line"):
            assert light[name] != dark[name]
        assert dark["paper"] == "rgb(19, 22, 26)"


@in_browser
def test_the_measure_finds_what_overflows(page, tmp_path):
    """The checks above see a figure that is too wide, one that is empty, and a paragraph that sticks out."""
    broken = page.replace("max-width: 100%; height: auto;", "width: 500px;").replace(
        '<p class="claim">', '<p style="width: 600px">x</p><p class="claim">', 1
    )
    empty = re.sub(r"(<svg[^>]*>).*?</svg>", r"\1<path d='M0 0' style='fill: var(--series-1)'/></svg>", broken, count=1)
    view = look(empty, tmp_path)[PHONE, "light"]
    assert view["scroll"] > PHONE and len(view["outside"]) > 1
    assert not view["images"][1]["inside"] and view["images"][0]["marks"] == 0
