"""Progress of loops that take longer than a second."""

import sys
import time

PATIENCE = 1.0  # seconds


class Progress:
    """Writes to stderr: a line that changes if stderr is a terminal, else one line at the end."""

    def __init__(self, what):
        self.what, self.start = what, time.perf_counter()
        self.moves = sys.stderr.isatty()

    def __enter__(self):
        return self

    def __call__(self, items):
        """The items, one after the other."""
        for done, item in enumerate(items):
            if self.moves and self.seconds > PATIENCE:
                print(f"\r\033[K{self.what}: {done} of {len(items)}", end="", file=sys.stderr, flush=True)
            yield item

    def __exit__(self, error, *_):
        if self.seconds > PATIENCE:
            end = "\r\033[K" if self.moves else "" if error else f"{self.what}: {self.seconds:.1f} s\n"
            print(end, end="", file=sys.stderr, flush=True)

    @property
    def seconds(self):
        return time.perf_counter() - self.start
