"""The site of the documentation as it was built: its links, what it loads, and serving it to a browser.

`python tests/support/site.py` lists the links that lead elsewhere, which no test follows; with --request it asks for
each of them.
"""

import argparse
import contextlib
import functools
import http.client
import re
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


def links_elsewhere(site):
    return sorted({link for page in pages(site).values() for link in page.links if elsewhere(link)})


def answer(address, method, timeout):
    """The status, or why there is none."""
    request = urllib.request.Request(address, method=method, headers={"User-Agent": "sdpa (links of the documents)"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException) as error:  # without an answer, or with none that HTTP knows
        return str(getattr(error, "reason", error))


def answers(links, timeout=20):
    """{address: status, or why there is none}, some at once.  HEAD is enough where a server takes it."""

    def ask(address):
        status = answer(address, "HEAD", timeout)
        return status if status in range(200, 300) else answer(address, "GET", timeout)

    addresses = sorted({link.partition("#")[0] for link in links if not link.startswith("mailto:")})
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(addresses, pool.map(ask, addresses)))


# What some servers say to all programs, whether there is a page or not.
TOLD_TO_PROGRAMS = {401, 403, 429}


def main(site=SITE):
    parser = argparse.ArgumentParser(description="The links of the built site that lead elsewhere.")
    parser.add_argument("--request", action="store_true", help="ask for each; fails if one leads nowhere")
    links = links_elsewhere(site)
    if not parser.parse_args().request:
        print("\n".join(links))
        return 0
    found = answers(links)
    if not any(isinstance(status, int) for status in found.values()):
        print(f"skipped: none of {len(found)} addresses has answered; is there a network?")
        return 0
    wrong = {link: status for link, status in found.items() if status not in {*range(200, 300), *TOLD_TO_PROGRAMS}}
    for link, status in found.items():
        if status not in range(200, 300):
            print(f"{link}: {status}{'' if link in wrong else ', which says nothing of the page'}")
    print(f"{len(found)} addresses, of which {len(wrong)} lead nowhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
