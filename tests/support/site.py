"""The site of the documentation as it was built: its links, what it loads, and serving it to a browser.

`python tests/support/site.py` lists the links that lead elsewhere, which no test follows.
"""

import contextlib
import functools
import re
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[2] / "build/docs"
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}
IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)|@import\s+['\"]([^'\"]+)['\"]")


class Page(HTMLParser):
    """The ids of a page, where its links lead, and what a browser loads to show it."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in ("a", "area") and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("href"):
            loaded = LOADED_LINKS & set(given.get("rel", "").split())
            (self.loads if loaded else self.links).append(given["href"])
        elif given.get(LOADS.get(tag)):
            self.loads.append(given[LOADS[tag]])
        self.loads += [found[0] or found[1] for found in IN_STYLE.findall(given.get("style") or "")]


def pages(site):
    """Of the site, by file; what the theme has among its static files is no page."""
    files = sorted(site.rglob("*.html"))
    return {file: Page(file) for file in files if "_static" not in file.relative_to(site).parts}


def elsewhere(link):
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def faults(site):
    """What is wrong with the links of the site, and with what its pages and styles load, a text for each."""
    found, every = [], pages(site)
    for file, page in every.items():
        name = file.relative_to(site).as_posix()
        found += [f"{name}: {why}" for link in page.links if (why := fault(link, file, every))]
        found += [f"{name}: {why}" for address in page.loads if (why := fault_of_resource(address, file))]
    for file in sorted(site.rglob("*.css")):
        for url, imported in IN_STYLE.findall(file.read_text(encoding="utf-8")):
            if why := fault_of_resource(url or imported, file):
                found.append(f"{file.relative_to(site).as_posix()}: {why}")
    return found


def fault(link, file, every):
    if elsewhere(link):
        parts = urlsplit(link)
        right = {"mailto": "@" in parts.path, "https": "." in parts.netloc}
        return "" if right.get(parts.scheme) else f"{link} is neither https nor an address"
    path, _, anchor = link.partition("#")
    target = (file.parent / unquote(path.partition("?")[0])).resolve() if path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return f"{link} leads to no file"
    if anchor and target in every and unquote(anchor) not in every[target].ids:
        return f"{link} leads to no place in {target.name}"
    return ""


def fault_of_resource(address, file):
    if address.startswith(("data:", "#")):
        return ""
    if elsewhere(address):
        return f"{address} would be loaded from elsewhere"
    there = (file.parent / unquote(re.split(r"[?#]", address)[0])).is_file()
    return "" if there else f"{address} is loaded, but is not there"


@contextlib.contextmanager
def served(*folders):
    """The address of a server of these folders, on this machine alone; the first that has a file gives it."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            where = Path(super().translate_path(path)).relative_to(self.directory)
            every = [folder / where for folder in folders]
            return str(next((file for file in every if file.exists()), every[0]))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folders[0])))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    print("\n".join(sorted({link for page in pages(SITE).values() for link in page.links if elsewhere(link)})))
