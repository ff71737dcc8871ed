"""What pages take from the code: the help of the commands, and what the laboratory tests."""

import os
import subprocess
import sys
from html import escape

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from sdpa import lab
from sdpa._report import terminal

WIDTH = 88  # columns; what a desk shows without scrolling


class Command(SphinxDirective):
    """What `python -m sdpa COMMAND --help` prints."""

    optional_arguments = 1

    def run(self):
        command = [sys.executable, "-m", "sdpa", *self.arguments, "--help"]
        environment = os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise self.error(f"{' '.join(command[1:])}: {shown.stderr.strip()}")
        return [nodes.literal_block(shown.stdout, shown.stdout, language="text", classes=["command"])]


class Experiments(SphinxDirective):
    """The claims of the laboratory, each with a link to what was measured."""

    def run(self):
        page = "../" * self.env.docname.count("/") + "lab.html"
        link = nodes.reference("", "The page of the laboratory", refuri=page, internal=True)
        first = nodes.paragraph("", "", link, nodes.Text(" has all measurements, with figures. These are the claims:"))
        claims = nodes.definition_list()
        for experiment in lab.EXPERIMENTS:
            address = f"{page}#{experiment.name}"
            link = nodes.reference("", terminal.plain(experiment.title), refuri=address, internal=True)
            claim = nodes.paragraph("", terminal.plain(experiment.claim))
            claims += nodes.definition_list_item("", nodes.term("", "", link), nodes.definition("", claim))
        return [first, claims]


class Framed(SphinxDirective):
    """A link to a page that was made beside the site, and below it the page in a frame.  site.css leaves out the frame
    where a screen is as narrow as a phone, so that the page is not loaded there."""

    required_arguments = 1
    has_content = True

    def run(self):
        page = "../" * self.env.docname.count("/") + self.arguments[0]
        title = " ".join(self.content)
        link = nodes.reference("", title, refuri=page, internal=True)
        frame = f'<iframe class="framed" src="{page}" title="{escape(title)}" loading="lazy"></iframe>'
        return [nodes.paragraph("", "", link), nodes.raw("", frame, format="html")]


def setup(app):
    app.add_directive("experiments", Experiments)
    app.add_directive("framed", Framed)
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
