"""Pages: reading their HTML, and looking at them in a browser."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser

import pytest

PHONE, DESK = 390, 1280
CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs the command chromium (Debian: apt install chromium)")


def in_browser(test):
    return pytest.mark.slow(NO_CHROMIUM(test))


class Reader(HTMLParser):
    """Tags in order, and that they close as they opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


MEASURE = """
<script>
function inside(box, width) { return box.left >= -0.5 && box.right <= width + 0.5; }
function measure(frame) {
  const page = frame.contentDocument, width = frame.clientWidth, all = [...page.querySelectorAll("body *")];
  const boxes = all.filter(one => !one.closest("svg *") && !one.closest(".table table"));
  const images = [...page.querySelectorAll("svg")].map(image => {
    const box = image.getBoundingClientRect(), drawn = image.getBBox();
    const marks = [...image.querySelectorAll("path, use, text, rect, image")];
    return {
      label: image.getAttribute("aria-label"), width: box.width, height: box.height, inside: inside(box, width),
      drawn: [drawn.width / image.viewBox.baseVal.width, drawn.height / image.viewBox.baseVal.height],
      marks: marks.filter(mark => mark.getBoundingClientRect().width + mark.getBoundingClientRect().height > 0).length,
      cut: [...image.querySelectorAll("text")].filter(text => {
        const at = text.getBoundingClientRect(), edge = 1.5;
        return at.left < box.left - edge || at.right > box.right + edge
          || at.top < box.top - edge || at.bottom > box.bottom + edge;
      }).map(text => text.textContent),
      letters: Math.min(...[...image.querySelectorAll("text")].map(text =>
        parseFloat(frame.contentWindow.getComputedStyle(text).fontSize) * box.width / image.viewBox.baseVal.width)),
    };
  });
  return {
    width: width, scroll: page.scrollingElement.scrollWidth, images: images,
    outside: boxes.filter(one => !inside(one.getBoundingClientRect(), width)).map(one => one.outerHTML.slice(0, 80)),
    tables: [...page.querySelectorAll(".table")].map(one => inside(one.getBoundingClientRect(), width)),
    dark: frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    ink: frame.contentWindow.getComputedStyle(page.body).color,
    line: frame.contentWindow.getComputedStyle(page.querySelector("svg [style*='--series-1']")).fill,
  };
}
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(found);
};
</script>
"""


KINDS = [(PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")]


def look(page, folder):
    """What the browser says of the page by (width, colour scheme).  The page is shown in frames, as a window cannot be
    as narrow as a phone; it takes the colour scheme of its frame."""
    (folder / "frames.html").write_text(in_frames(f'srcdoc="{escape(page)}"', MEASURE), "utf-8")
    return dict(zip(KINDS, said((folder / "frames.html").as_uri(), folder)))


def in_frames(source, script):
    """A page that shows another one in each width and scheme, and runs the script."""
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 900px; color-scheme: {scheme}" {source}></iframe>'
        for width, scheme in KINDS
    )
    return f"<!DOCTYPE html><meta charset=utf-8>{script}<body>{frames}</body>"


def said(address, folder, *options, timeout=120):
    """What the scripts of a page leave in its body, as JSON, in a browser that reaches no other machine."""
    options += (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000",
    )
    run = subprocess.run([CHROMIUM, *options, "--dump-dom", address], capture_output=True, text=True, timeout=timeout)
    found = re.search(r"<body><pre>(.*)</pre></body>", run.stdout, re.DOTALL)
    assert found, run.stderr[-2000:]
    return json.loads(unescape(found[1]))
