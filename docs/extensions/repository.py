"""Links into the repository.

Pages link to files of the repository as they lie beside each other there: `[the plan](../../csrc/plan/plan.h)`.  On the
site such a link leads to the page that was made of the file, or that includes its section, and else to a page that
shows the file.

What a file of the repository says already is not written again.  A page has sections of it, or all of it, where it says

    ```{sections} ../../csrc/README.md
    Rows in lanes
    Few rows
    ```

If that is how the page begins, the sections are its chapters.
"""

import re
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, CythonLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.util import logging

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
SCHEME = "repository:"
SHOWN = "source"  # the folder of the pages that show files
FENCE = r"^(?P<fence>```+|~~~+).*?^(?P=fence) *$"
LINK = r"(?P<bang>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)"
FENCE_OR_LINK = re.compile(f"{FENCE}|{LINK}", re.MULTILINE | re.DOTALL)
SECTIONS = re.compile(r"^```\{sections\} (?P<path>\S+)\n(?P<titles>.*?)^```$", re.MULTILINE | re.DOTALL)
CHAPTER = re.compile(r"^## (.*)\n", re.MULTILINE)
LEXERS = {".pyx": CythonLexer, ".pxi": CythonLexer, ".h": CLexer}
warn = logging.getLogger(__name__).warning


def setup(app):
    app.connect("source-read", read)
    app.connect("doctree-resolved", resolve)
    app.connect("html-collect-pages", pages_of_files)
    return {"parallel_read_safe": True, "parallel_write_safe": False}


def place(path):
    """Where it is in the repository."""
    return PurePosixPath(path.resolve().relative_to(ROOT).as_posix())


def read(app, page, source):
    """The source of a page, with the sections it asks for, and with links that `resolve` knows."""
    text = with_links(app.env, source[0], PurePosixPath("docs", page).parent)
    source[0] = SECTIONS.sub(lambda asked: sections(app.env, asked), text)


def sections(env, asked):
    """The text that `asked`, a match of SECTIONS, stands for."""
    file = (DOCS / env.docname).parent / asked["path"]
    env.note_dependency(str(file.resolve()))
    text = file.read_text(encoding="utf-8")
    if titles := asked["titles"].splitlines():
        every = chapters(text)
        if missing := [title for title in titles if title not in every]:
            warn("%s has no section %s", asked["path"], ", ".join(missing), location=env.docname)
        text = "\n".join(every[title] for title in titles if title in every)
        if asked.start() == 0:
            text = re.sub(r"^#(#+ )", r"\1", text, flags=re.MULTILINE)
    return with_links(env, text, place(file).parent)


def chapters(text):
    """Its parts between headings of the second level, by heading."""
    found = list(CHAPTER.finditer(text))
    ends = [next_one.start() for next_one in found[1:]] + [len(text)]
    return {one[1]: text[one.start() : end] for one, end in zip(found, ends)}


def with_links(env, text, folder):
    """The links of a text that lies in this folder of the repository become such as `resolve` knows."""

    def of_site(found):
        target = found["target"]
        if target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = normpath(folder / path)
        if found["bang"]:
            target = relpath(path, PurePosixPath("docs", env.docname).parent)
        elif folder.parts[:1] != ("docs",) or not path.startswith("docs/") or not path.endswith(".md"):
            target = SCHEME + path + mark + anchor
        return f"{found['bang']}[{found['text']}]({target})"

    return FENCE_OR_LINK.sub(of_site, text)


def resolve(app, tree, page):
    """Gives links into the repository their addresses on the site."""
    for link in tree.findall(nodes.reference):
        if link.get("refuri", "").startswith(SCHEME):
            link["refuri"] = address(app, page, link["refuri"].removeprefix(SCHEME), link)
            link["internal"] = True


def address(app, page, target, link):
    """Of a file of the repository, or of one of its sections, from a page."""
    path, mark, anchor = target.partition("#")
    uri = app.builder.get_relative_uri
    if path in extra_files(app):
        return relpath(PurePosixPath(path).name, PurePosixPath(page).parent)
    pages = ["index"] if path == "docs" else pages_with(app.env, path)
    if not pages:  # so the site shows the file itself
        if not (ROOT / path).is_file():
            warn("there is no file %s in the repository", path, location=link)
        app.env.shown_files = {*getattr(app.env, "shown_files", ()), path}
        return uri(page, f"{SHOWN}/{path}") + mark + re.sub(r"^L(?=\d)", "L-", anchor)
    if not anchor:
        return uri(page, pages[0])
    for found in pages:
        slugs = app.env.metadata[found].get("myst_slugs", {})
        if anchor in slugs:
            return f"{uri(page, found)}#{slugs[anchor][1]}"
    warn("no page has the section %s of %s", anchor, path, location=link)
    return ""


def extra_files(app):
    return {place(DOCS / name).as_posix() for name in app.config.html_extra_path}


def pages_with(env, path):
    """The page that is made of a file, or those that include it, in their order."""
    if path.startswith("docs/") and path.removeprefix("docs/").removesuffix(".md") in env.found_docs:
        return [path.removeprefix("docs/").removesuffix(".md")]
    file = ROOT / path
    return [page for page in in_order(env) if any((DOCS / name).resolve() == file for name in env.dependencies[page])]


def in_order(env, page="index"):
    """The pages in the order of the contents."""
    yield page
    for child in env.toctree_includes.get(page, ()):
        yield from in_order(env, child)


def pages_of_files(app):
    """A page for each file that others link to."""
    for path in sorted(getattr(app.env, "shown_files", ())):
        text = (ROOT / path).read_text(encoding="utf-8")
        formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
        code = highlight(text, lexer_of(path), formatter)
        body = f'<section class="shown"><h1>{escape(path)}</h1>\n{code}</section>'
        yield f"{SHOWN}/{path}", {"title": path, "body": body, "parents": []}, "page.html"


def lexer_of(path):
    suffix = PurePosixPath(path).suffix
    if suffix in LEXERS:
        return LEXERS[suffix]()
    try:
        return get_lexer_for_filename(path)
    except ClassNotFound:
        return TextLexer()
