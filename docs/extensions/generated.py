"""What pages take from the code: the help of the commands."""

import os
import subprocess
import sys

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

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


def setup(app):
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
