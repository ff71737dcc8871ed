"""Pictures in the colours of the site.

An SVG of this project follows what its reader prefers, light or dark.  The site has a switch of its own, which a
picture in a file cannot see.  So each picture is shown twice, for light and for dark paper, and the theme hides one.
"""

import re
from html import escape
from pathlib import Path

import pictures
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from sdpa._report import drawing, svg

WHERE_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{((?:[^{}]|\{[^{}]*\})*)\}")
SCHEMES = {"light": "", "dark": r"\1"}
FOLDER = "_images"


class Drawn(SphinxDirective):
    """Pictures that docs/pictures.py draws, side by side where there is room; what they say of themselves is below."""

    required_arguments = 1
    optional_arguments = 9

    def run(self):
        shown = nodes.container(classes=["drawn"])
        for name in self.arguments:
            draw = pictures.PICTURES[name]
            label = " ".join(draw.__doc__.split())
            with drawing.style():
                text = svg.picture(draw(), label)
            figure = nodes.figure("", in_both(self.env, self.env.docname, name, text, label))
            figure += nodes.caption(label, label)
            shown += figure
        self.env.note_dependency(pictures.__file__)
        return [shown]


def in_both(env, page, name, text, label):
    """What shows a picture; its text is written when the site is finished.  Both images are one part of a figure, as
    the theme also hides the caption beside an image that it hides."""
    env.own_pictures = {**getattr(env, "own_pictures", {}), name: text}
    root = "../" * page.count("/")
    width = int(re.search(r'\bwidth="(\d+)"', text)[1])
    more = " wide" if width > 600 else ""  # whose letters a phone would make too small
    images = "".join(
        f'<img class="only-{scheme}{more}" src="{root}{FOLDER}/{name}-{scheme}.svg" width="{width}" '
        f'alt="{escape(label)}">'
        for scheme in SCHEMES
    )
    return nodes.raw("", f'<span class="both">{images}</span>', format="html")


def replace(app, tree, page):
    """In place of each picture file that knows light and dark: one for each."""
    for image in list(tree.findall(nodes.image)):
        file = Path(app.srcdir, image.get("candidates", {}).get("*", image["uri"]))
        text = file.read_text(encoding="utf-8") if file.suffix == ".svg" else ""
        if WHERE_DARK.search(text):
            image.replace_self(in_both(app.env, page, file.stem, text, image.get("alt", "")))


def write(app, error):
    for name, text in ({} if error else getattr(app.env, "own_pictures", {})).items():
        for scheme, rules in SCHEMES.items():
            file = Path(app.outdir, FOLDER, f"{name}-{scheme}.svg")
            file.parent.mkdir(exist_ok=True)
            file.write_text(WHERE_DARK.sub(rules, text), encoding="utf-8")


def setup(app):
    app.add_directive("drawn", Drawn)
    app.connect("doctree-resolved", replace)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
