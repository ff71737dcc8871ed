"""Pictures in the colours of the site.

An SVG of this project follows what its reader prefers, light or dark.  The site has a switch of its own, which a picture
in a file cannot see.  So each picture is shown twice, drawn for light and for dark paper, and the theme hides one.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import relpath

from docutils import nodes

WHERE_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{((?:[^{}]|\{[^{}]*\})*)\}")
SCHEMES = {"light": "", "dark": r"\1"}


def setup(app):
    app.connect("doctree-resolved", both)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": False}


def both(app, tree, page):
    """In place of each picture that knows light and dark: one for each."""
    if app.builder.format != "html":
        return
    pictures = app.env.two_pictures = getattr(app.env, "two_pictures", set())
    for image in list(tree.findall(nodes.image)):
        path = image.get("candidates", {}).get("*", image["uri"])
        if not path.endswith(".svg") or not WHERE_DARK.search((Path(app.srcdir) / path).read_text(encoding="utf-8")):
            continue
        pictures.add(path)
        root = relpath(".", PurePosixPath(page).parent)
        shown = [nodes.raw("", tag(image, root, path, scheme), format="html") for scheme in SCHEMES]
        image.replace_self(shown)


def tag(image, root, path, scheme):
    label = nodes.Text(image.get("alt", "")).astext()
    return f'<img class="only-{scheme}" src="{root}/{address(path, scheme)}" alt="{label}">'


def address(path, scheme):
    return f"_images/{PurePosixPath(path).stem}-{scheme}.svg"


def write(app, error):
    if error:
        return
    for path in getattr(app.env, "two_pictures", ()):
        drawn = (Path(app.srcdir) / path).read_text(encoding="utf-8")
        for scheme, rules in SCHEMES.items():
            file = Path(app.outdir, address(path, scheme))
            file.parent.mkdir(exist_ok=True)
            file.write_text(WHERE_DARK.sub(rules, drawn), encoding="utf-8")
