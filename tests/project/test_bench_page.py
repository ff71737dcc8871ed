"""The page of the benchmarks in a browser; what it says is tested in benchmarks/tests/test_report.py."""

import sys
from pathlib import Path

import pytest
from support.browser import DESK, PHONE, Reader, in_browser, look

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT))
    from benchmarks.report import page, rows

    return page.page(rows.read([ROOT / "docs/speed.json"]))


def test_tags_close(page):
    assert [attributes["id"] for tag, attributes in Reader(page).tags if tag == "section"][:2] == ["bound", "peers"]


@in_browser
def test_nothing_overflows(page, tmp_path):
    for (width, scheme), view in look(page, tmp_path).items():
        assert width in (PHONE, DESK) and view["dark"] == (scheme == "dark")
        assert view["scroll"] <= width and view["outside"] == [] and all(view["tables"])
        assert len(view["images"]) >= 2
        for image in view["images"]:
            assert image["inside"] and not image["cut"] and image["letters"] >= 9 and image["marks"] >= 15, image
