"""The site of the documentation: that its pages have what there is to say, and how the built site holds together."""

import argparse
import importlib.util
import inspect
import json
import re
import runpy
import threading
import xml.etree.ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import site
from support.browser import DESK, KINDS, PHONE, in_browser, in_frames, said

import sdpa
from sdpa import __main__, lab

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


def blocks(kind, text):
    """(what follows the name, content) of the blocks `{kind}` of a page."""
    return re.findall(rf"^```\{{{kind}\}} *([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# The sources.


def test_each_page_is_in_the_contents():
    listed = {"index"}
    for name, text in PAGES.items():
        folder = Path(name).parent
        listed |= {
            (folder / line).as_posix()
            for _, lines in blocks("toctree", text)
            for line in lines.split("\n")
            if re.match(r"\w", line)
        }
    assert listed == {name.removesuffix(".md") for name in PAGES}


def test_the_sections_that_pages_ask_for_are_there():
    asked = [(name, *block) for name, text in PAGES.items() for block in blocks("sections", text)]
    assert len(asked) > 5
    for name, path, titles in asked:
        text = (DOCS / name).parent.joinpath(path).read_text(encoding="utf-8")
        assert set(titles.splitlines()) <= set(re.findall(r"^## (.*)$", text, re.MULTILINE)), name


def test_every_public_name_is_in_the_reference():
    names = {}
    for page, text in PAGES.items():
        if page.startswith("reference/"):
            module = re.search(r"currentmodule:: ([\w.]+)", text)
            for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", text, re.MULTILINE):
                names.setdefault(name if kind == "module" else f"{module[1]}.{name}", []).append(page)
    modules = {name for name in sdpa.__all__ if inspect.ismodule(getattr(sdpa, name))} | {"torch", "huggingface"}
    assert set(names) == {f"sdpa.{name}" for name in {*sdpa.__all__, *modules}}
    assert all(len(pages) == 1 for pages in names.values())


def test_every_command_is_in_the_reference(monkeypatch):
    parsers = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", lambda parser: parsers.append(parser) or exit())
    with pytest.raises(SystemExit):
        __main__.main()
    (commands,) = (action.choices for action in parsers[0]._actions if action.choices)
    shown = [name for name, _ in blocks("command", PAGES["reference/command_line.md"])]
    assert shown == ["", *commands]


def test_every_environment_variable_is_described():
    """Those that Python code asks for, and those of OpenMP's that change an answer of it."""
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in [*(ROOT / "sdpa").rglob("*.p*"), ROOT / "setup.py"]
        if path.suffix in {".py", ".pyx", ".pxi"}
    )
    read = set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", code))
    told = PAGES["reference/environment.md"] + PAGES["how_to/install.md"]  # of calls, and of builds
    told = set(re.findall(r"`([A-Z_]{4,})(?:=[\w,]+)?`", told))
    assert "SDPA_KERNEL" in read and read <= told
    assert told - read == {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}


def test_the_pictures(monkeypatch):
    """Each is drawn, in the colours that pages make light or dark, and shown once."""
    pytest.importorskip("matplotlib")
    from sdpa._report import drawing, svg

    pictures = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]
    shown = [name for text in PAGES.values() for names, _ in blocks("drawn", text) for name in names.split()]
    assert sorted(shown) == sorted(pictures)
    for draw in pictures.values():
        with drawing.style():
            text = svg.picture(draw(), draw.__doc__)
        assert len(list(xml.etree.ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}path"))) > 20
        assert not re.findall(r"(?<!: )#[0-9a-fA-F]{6}\b", text)


def test_the_claims_of_the_laboratory_are_plain_text():
    from sdpa._report import terminal

    for experiment in lab.EXPERIMENTS:
        assert not re.search(r"[<>{}]|\^\(", terminal.plain(experiment.claim + experiment.title))


def described():
    """(name, object) of all public functions, classes and methods that can be imported here."""
    for module in (sdpa, sdpa.distributed, sdpa.lab, sdpa.models, sdpa.reference):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found):
                yield f"{module.__name__}.{name}", found
            for method in vars(found) if inspect.isclass(found) else ():
                if callable(getattr(found, method)) and (method == "__call__" or not method.startswith("_")):
                    yield f"{module.__name__}.{name}.{method}", getattr(found, method)


def attributes():
    """(name, object) of all public attributes of classes that are no methods, and of what torch's adapter reports."""
    classes = [(name, found) for name, found in described() if inspect.isclass(found)]
    if importlib.util.find_spec("torch"):
        from sdpa.torch._accelerate import Report

        classes.append(("sdpa.torch.Report", Report))
    for name, found in classes:
        for attribute, one in vars(found).items():
            if inspect.isdatadescriptor(one) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", one


def test_attributes_have_docstrings_of_their_own():
    """`help` and the reference show no docstring that Python gives to everything of its kind."""
    told = {name: inspect.getdoc(found) or "" for name, found in attributes()}
    assert {"sdpa.Gradients.bias", "sdpa.reference.AdditiveGradients.v", "sdpa.distributed.KVCache.group"} < told.keys()
    assert "sdpa.distributed.Explanation.balance" in told
    for name, text in told.items():
        assert len(text) > 10 and not re.search("Alias for field number|Return a callable object", text), name


def parts(docstring):
    """{heading: text} of a docstring as numpydoc reads it; what is before the first heading has the name ""."""
    texts = re.split(r"^(\w[\w ]*)\n-{3,}\n", f"\n{docstring}\n", flags=re.MULTILINE)
    return dict(zip(["", *texts[1::2]], texts[::2]))


def test_docstrings_are_as_numpydoc_reads_them():
    """Known headings in their order, no text between them that would belong to a parameter, and no parameter that the
    function does not have."""
    order = ["", "Parameters", "Returns", "Attributes", "Notes", "Examples"]
    with_parameters = 0
    for name, found in described():
        sections = parts(inspect.getdoc(found) or "")
        assert sections[""].strip() and list(sections) == [heading for heading in order if heading in sections], name
        told = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$", sections.get("Parameters", ""), re.MULTILINE)
        names = {one for line in told for one in line.replace("*", "").split(", ")}
        lines = [line for line in sections.get("Parameters", "").splitlines() if re.match(r"\S", line)]
        known = inspect.signature(found).parameters
        others = {"dtype", "window"} if any(one.kind is one.VAR_KEYWORD for one in known.values()) else set()
        assert len(lines) == len(told) and names <= {*known, *others}, name
        assert ">>>" not in "".join(sections.get(heading, "") for heading in order[1:-1]), name
        with_parameters += bool(names)
    assert with_parameters > 40


# The checks of the built site, on one that is made up.


def made_up(folder, body, style=""):
    (folder / "sub").mkdir()
    (folder / "index.html").write_text(f'<link rel="stylesheet" href="a.css"><h1 id="top">x</h1>{body}')
    (folder / "sub/other.html").write_text('<p id="here">x</p><a href="../index.html#top">back</a>')
    (folder / "a.css").write_text(style)
    return site.faults(folder)


GOOD = '<a href="sub/other.html#here">a</a><a href="#top">b</a><a href="https://numpy.org/doc">c</a>'


def test_a_site_without_faults(tmp_path):
    assert made_up(tmp_path, GOOD, "p { background: url(data:image/png;base64,AA) }") == []


@pytest.mark.parametrize(
    "body, style, fault",
    [
        ('<a href="sub/none.html">a</a>', "", "leads to no file"),
        ('<a href="sub/other.html#there">a</a>', "", "leads to no place in other.html"),
        ('<a href="#there">a</a>', "", "leads to no place in index.html"),
        ('<a href="repository:csrc/none.c">a</a>', "", "neither https nor an address"),
        ('<a href="http://example.org/">a</a>', "", "neither https nor an address"),
        ('<script src="https://example.org/a.js"></script>', "", "would be loaded from elsewhere"),
        ('<img src="//example.org/a.png">', "", "would be loaded from elsewhere"),
        ('<p style="background: url(https://example.org/a.png)">', "", "would be loaded from elsewhere"),
        ('<img src="a.png">', "", "is not there"),
        ("", '@import "https://example.org/a.css";', "would be loaded from elsewhere"),
        ("", "@font-face { src: url('font.woff2') }", "is not there"),
    ],
)
def test_faults_of_a_site_are_found(tmp_path, body, style, fault):
    (found,) = made_up(tmp_path, GOOD + body, style)
    assert fault in found


# What leads elsewhere, on a server of this machine.


class Answers(BaseHTTPRequestHandler):
    """By their numbers; /get says no to what only asks whether it is there."""

    def do_GET(self):
        status = self.path.strip("/")
        self.send_response(int(status) if status.isdecimal() else 200 if self.command == "GET" else 405)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def requested(monkeypatch, capsys, folder, *links):
    (folder / "index.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    monkeypatch.setattr("sys.argv", ["site", "--request"])
    return site.main(folder), capsys.readouterr().out


def test_links_elsewhere_are_asked_for(tmp_path, monkeypatch, capsys, server):
    good = [f"{server}/200#part", f"{server}/200", f"{server}/get", f"{server}/403", "mailto:a@example.org", "#here"]
    code, told = requested(monkeypatch, capsys, tmp_path, *good)
    assert code == 0 and told.endswith("3 addresses, of which 0 lead nowhere\n")
    assert told.startswith(f"{server}/403: 403, which says nothing of the page\n")
    code, told = requested(monkeypatch, capsys, tmp_path, *good, f"{server}/404", "http://127.0.0.1:1/")
    assert code == 1 and told.endswith("5 addresses, of which 2 lead nowhere\n")
    assert f"{server}/404: 404\n" in told and re.search(r"^http://127.0.0.1:1/: .*refused", told, re.MULTILINE)


def test_without_a_network_no_link_is_wrong(tmp_path, monkeypatch, capsys):
    code, told = requested(monkeypatch, capsys, tmp_path, "http://127.0.0.1:1/", "http://127.0.0.1:1/other")
    assert code == 0 and told == "skipped: none of 2 addresses has answered; is there a network?\n"


# The built site.

BUILT = pytest.mark.skipif(not (site.SITE / "index.html").is_file(), reason="needs build/docs, which `make docs` makes")


@pytest.mark.builds
@BUILT
def test_links_and_what_pages_load():
    found = site.faults(site.SITE)
    assert len(site.pages(site.SITE)) > len(PAGES) and not found, "\n".join(found)


@pytest.mark.builds
@BUILT
def test_no_formula_and_no_markup_is_left_over():
    for file, text in ((file, file.read_text(encoding="utf-8")) for file in site.SITE.rglob("*.html")):
        if "source" not in file.relative_to(site.SITE).parts[:-1] and file.name not in ("speed.html", "lab.html"):
            shown = re.sub(r"<(script|style|pre|code)\b.*?</\1>|<[^>]*>", "", text, flags=re.DOTALL)
            assert not re.search(r"```|\]\(|\{\w+\}`|repository:", shown), file


MEASURE = """
<script>
function luminance(colour) {
  const [r, g, b] = colour.map(part => part / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function parsed(colour) { return (colour.match(/[\\d.]+/g) || []).map(Number); }
function paper(one, view) {
  for (; one; one = one.parentElement) {
    const [r, g, b, a = 1] = parsed(view.getComputedStyle(one).backgroundColor);
    if (a > 0.99) return [r, g, b];
  }
  return [255, 255, 255];
}
function contrast(one, view) {
  const [low, high] = [luminance(parsed(view.getComputedStyle(one).color).slice(0, 3)), luminance(paper(one, view))]
    .sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function scrolls(one, view) {
  for (; one; one = one.parentElement) if (["auto", "scroll", "hidden"].includes(view.getComputedStyle(one).overflowX)
    && one.tagName != "BODY" && one.tagName != "HTML") return true;
  return false;
}
function measure(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, width = frame.clientWidth;
  const all = [...page.querySelectorAll("main *")].filter(one => one.getClientRects().length && one.checkVisibility());
  const texts = all.filter(one => [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
  return {
    width: width, scroll: page.scrollingElement.scrollWidth, title: page.title,
    dark: page.documentElement.dataset.theme == "dark",
    outside: all.filter(one => {
      const box = one.getBoundingClientRect();
      return box.width && (box.left < -0.5 || box.right > width + 0.5) && !scrolls(one, view);
    }).map(one => one.outerHTML.slice(0, 80)),
    faint: texts.filter(one => contrast(one, view) < 4.5).map(one => one.outerHTML.slice(0, 120)),
    broken: [...page.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src),
    schemes: all.filter(one => one.tagName == "IMG").map(one => one.className),
    results: [...page.querySelectorAll("#search-results li a")].map(one => one.textContent),
  };
}
async function look() {
  const frames = [...document.querySelectorAll("iframe")], found = [];
  for (const address of ADDRESSES) {
    await Promise.all(frames.map(frame => new Promise(loaded => { frame.onload = loaded; frame.src = address; })));
    await new Promise(waited => setTimeout(waited, WAIT));
    found.push(frames.map(measure));
  }
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(found);
}
window.onload = look;
</script>
"""


def look_at(addresses, folder, wait=0):
    """What a browser without a network says of pages of the site, of each by (width, colour scheme).  One browser shows
    all of them: to start it takes longer than to show a page."""
    script = MEASURE.replace("ADDRESSES", json.dumps(addresses)).replace("WAIT", str(wait))
    (folder / "frames.html").write_text(in_frames("", script), "utf-8")
    with site.served(site.SITE, folder) as server:
        budget = (wait + 3000) * len(addresses)  # of the pages' own time, which does not pass while they are loaded
        found = said(
            f"{server}/frames.html", folder, f"--virtual-time-budget={budget}", timeout=120 + 10 * len(addresses)
        )
    return [dict(zip(KINDS, views)) for views in found]


SHOWN = [name.removesuffix(".md") + ".html" for name in PAGES]


LOOKED_AT = [*SHOWN, "source/csrc/plan/visibility.c.html", "genindex.html"]


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    return dict(zip(LOOKED_AT, look_at(LOOKED_AT, tmp_path_factory.mktemp("pages"))))


@in_browser
@BUILT
@pytest.mark.parametrize("page", LOOKED_AT)
def test_pages_in_a_browser(page, views):
    """Nothing is wider than a phone or a desk, all can be read, pictures are there and of the right scheme."""
    for (width, scheme), view in views[page].items():
        assert view["width"] == width and view["dark"] == (scheme == "dark") and view["title"]
        assert view["scroll"] <= width and view["outside"] == []
        assert view["faint"] == [] and view["broken"] == []
        assert not [kind for kind in view["schemes"] if "only-" in kind and f"only-{scheme}" not in kind]


@in_browser
@BUILT
def test_the_search_needs_no_network(tmp_path):
    (views,) = look_at(["search.html?q=softcap"], tmp_path, wait=2000)
    view = views[PHONE, "light"]
    assert "Functions, axes and options" in view["results"] and len(view["results"]) > 9, view


@in_browser
def test_what_a_page_must_not_have_is_seen(tmp_path, monkeypatch):
    """A paragraph that sticks out, letters too faint to read, a picture that is missing."""
    monkeypatch.setattr(site, "SITE", tmp_path)
    (tmp_path / "page.html").write_text(
        '<!DOCTYPE html><html data-theme="light"><title>x</title><main><p style="width: 600px">wide</p>'
        '<p style="color: #aaa">faint</p><img src="none.png" alt="none"></main></html>'
    )
    broken, again = look_at(["page.html", "page.html"], tmp_path)
    view = broken[PHONE, "light"]
    assert view["scroll"] > PHONE and len(view["outside"]) == len(view["faint"]) == len(view["broken"]) == 1
    assert broken == again and broken[DESK, "light"]["outside"] == []
