"""The tables of a report, as text and as Markdown."""

import math

from benchmarks import targets
from benchmarks.measure.libraries import OURS, READ, library_of, title_of
from benchmarks.report import tables
from benchmarks.report.rows import ENDED, geometric_mean, is_right, rows_of, speed_up
from sdpa.lab._experiment import Table

TIMES, DIVIDED = "\N{MULTIPLICATION SIGN}", "\N{DIVISION SIGN}"
HEADER = [
    "workload",
    "bound ms",
    "sdpa ms",
    "median",
    "bound/sdpa",
    "GB/s",
    "best peer",
    "ms",
    "speed-up",
    "error",
    "the others",
]


def times(report):
    """Milliseconds of everybody, the best of each row marked; a library counts with its best implementation."""
    rows = rows_of(report)
    libraries = libraries_of(rows)
    cells, best = [], set()
    for number, row in enumerate(rows):
        theirs = [row.libraries.get(library) for library in libraries]
        contenders = [row.ours if row.ours and is_right(row.ours) else None, *theirs]
        fastest = min((result["minimum"] for result in contenders if result), default=None)
        best |= {(number, 2 + i) for i, result in enumerate(contenders) if result and result["minimum"] == fastest}
        ours = [milliseconds(row.ours["minimum"]) + wrong(row.ours) if row.ours else ""]
        cells.append(
            (row.name, milliseconds(row.bound), *ours, *map(time_cell, theirs), fixed(row.share), fixed(row.lead))
        )
    leads = [fixed(geometric_mean(leads_over(rows, library)), TIMES) for library in libraries]
    shares, over_best = ([getattr(row, name) for row in rows] for name in ("share", "lead"))
    cells.append(("geometric mean", "", "", *leads, fixed(geometric_mean(shares)), fixed(geometric_mean(over_best))))
    return Table(
        "Milliseconds, the shortest of all calls; the best of a row is marked; the last line is the time "
        f"{DIVIDED} that of sdpa.",
        ("workload", "bound", OURS, *map(title_of, libraries), "of the bound", "over the best peer"),
        cells,
        frozenset(best),
    )


def errors(report):
    """The largest difference from float64 of what `times` shows; without a right result, of a library's fastest."""
    rows = rows_of(report)
    libraries = sorted({library_of(one["implementation"]) for row in rows for one in row.peers}, key=title_order)
    cells = [(row.name, *map(error_cell, (row.ours, *(shown_of(row, one) for one in libraries)))) for row in rows]
    header = ("workload", OURS, *map(title_of, libraries))
    return Table(
        "The largest difference from float64; a WRONG one is more than what passes, and does not count.", header, cells
    )


def shown_of(row, library):
    """The result of a library that stands for it, None where there is none."""
    theirs = (result for result in row.peers if library_of(result["implementation"]) == library)
    return row.libraries.get(library) or next(theirs, None)


def libraries_of(rows):
    """Those that gave a right result, in a fixed order."""
    return sorted({library for row in rows for library in row.libraries}, key=title_order)


def title_order(library):
    return title_of(library).lower()


def leads_over(rows, library):
    """How many times faster than a library, on each workload that both were measured on."""
    return [speed_up(row.ours, row.libraries[library]) for row in rows if row.ours and library in row.libraries]


def time_cell(result):
    return milliseconds(result["minimum"]) if result else ""


def wrong(result):
    return "" if is_right(result) else " WRONG"


def means(report):
    """This library against each other one."""
    rows = [row for row in rows_of(report) if row.ours]
    cells = []
    for library in libraries_of(rows):
        leads = {row.name: speed_up(row.ours, row.libraries[library]) for row in rows if library in row.libraries}
        least, most = min(leads, key=leads.get), max(leads, key=leads.get)
        ahead = sum(lead >= 1 for lead in leads.values())
        mean = fixed(geometric_mean(leads.values()), TIMES)
        extremes = (f"{fixed(leads[name], TIMES)} ({name})" for name in (least, most))
        cells.append((title_of(library), mean, *extremes, f"{ahead} of {len(leads)}"))
    header = ("library", "geometric mean", "least", "most", "ahead on")
    return Table(f"How many times faster than each library: its time {DIVIDED} that of sdpa.", header, cells)


AIMS = ("workload", "of the bound", "target", "faster", "target", "else", "target")  # as verdict_cells gives them


def aims(report):
    """Each target with what was measured."""
    return Table(
        "Targets: the least share of the bound, the least speed-up over the best peer; else the longest time, or the "
        "longest as a multiple of that in float32.",
        (*AIMS, ""),
        [(*verdict_cells(one), "hit" if one.hit else "missed") for one in targets.verdicts(rows_of(report))],
    )


def losses(report):
    """Where a target is missed, a peer is ahead, and why."""
    return Table(
        "Where it misses a target, or is behind a peer.",
        (*AIMS, "best peer", "why"),
        [
            (*verdict_cells(one), title_of(one.row.best["implementation"]) if one.row.best else "", reason)
            for one in targets.verdicts(rows_of(report))
            if not one.hit
            for reason in [targets.reason_of(one.row.name)]
        ],
    )


def beside(forced, best):
    """How near each of two kernels comes to its own bound: what the CPU can do with the instructions of either."""
    others = {row.name: row for row in rows_of(best)}
    pairs = [(row, others[row.name]) for row in rows_of(forced) if row.ours and row.name in others]
    shares = {one.name: (one.share, other.share) for one, other in pairs if other.ours}
    cells = [(name, fixed(one), fixed(other), fixed(one / other)) for name, (one, other) in shares.items()]
    mean = geometric_mean(one / other for one, other in shares.values())
    return Table(
        "The share of the bound that each kernel reaches, of its own bound, and the one divided by the other.",
        ("workload", forced["kernel"], "best kernel", f"{forced['kernel']} {DIVIDED} best"),
        [*cells, ("geometric mean", "", "", fixed(mean))],
    )


def verdict_cells(verdict):
    row, target = verdict.row, verdict.target
    share = "" if target.share is None else fixed(target.share)
    lead = fixed(target.lead, TIMES) if row.best else ""
    return row.name, fixed(row.share), share, fixed(row.lead, TIMES), lead, *other_target(verdict)


def other_target(verdict):
    """(what was measured, the most it should be)."""
    target = verdict.target
    if target.microseconds is not None:
        return f"{verdict.row.ours['minimum'] * 1e6:.2g} µs", f"{target.microseconds:g} µs"
    if target.of_float32 is not None:
        return f"{fixed(verdict.of_float32)} of float32", fixed(target.of_float32)
    return "", ""


def details(report):
    """The columns of HEADER: all that was measured."""
    rows = rows_of(report)
    cells = [detail(row) for row in rows]
    total = dict.fromkeys(HEADER, "") | {
        "workload": "geometric mean",
        "bound/sdpa": fixed(geometric_mean([row.share for row in rows])),
        "speed-up": fixed(geometric_mean([row.lead for row in rows])),
    }
    return Table("Milliseconds, the shortest of all calls.", tuple(HEADER), [*cells, tuple(total.values())])


def detail(row):
    others = [result for result in row.peers if result is not row.best]
    return (
        row.name,
        milliseconds(row.bound),
        *([milliseconds(row.ours["minimum"]), milliseconds(row.ours["median"])] if row.ours else ["", ""]),
        fixed(row.share),
        rate_cell(row),
        *([row.best["implementation"], milliseconds(row.best["minimum"])] if row.best else ["", ""]),
        fixed(row.lead),
        error_cell(row.ours or row.best),
        ", ".join(map(other_cell, others)),
    )


def rate_cell(row):
    """How fast K and V were read: by this library, of what the loop that only reads them reached."""
    if row.reading is None:
        return ""
    rates = [f"{row.read_bytes / one['minimum'] / 1e9:.0f}" if one else "" for one in (row.ours, row.reading)]
    return " of ".join(rates).strip()


def other_cell(result):
    error = "" if is_right(result) else f" (error {result['error']:.0e})"
    return f"{result['implementation']} {milliseconds(result['minimum'])}{error}"


def error_cell(result):
    return f"{result['error']:.1e}{wrong(result)}" if result else ""


def milliseconds(seconds):
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def fixed(ratio, unit=""):
    return "" if math.isnan(ratio) else f"{ratio:.2f} {unit}".rstrip()


# ------------------------------------------------------------------------------------------------------------- text


def marked(table, before="", after=""):
    """The rows of a table, the header first, with marks around what stands out."""
    body = [
        [f"{before}{cell}{after}" if (i, j) in table.best else cell for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    return [table.header, *body]


def as_text(table):
    return f"{table.caption}\n\n{tables.text(marked(table, after='*'))}"


def as_markdown(table, left=(0,)):
    return tables.markdown(marked(table, "**", "**"), left)


def text(report):
    """All that a terminal shows."""
    shown = [times(report), errors(report)]
    if libraries_of(rows_of(report)):
        shown.append(means(report))
    if any(not one.hit for one in targets.verdicts(rows_of(report))):
        shown.append(without_last_column(losses(report)))  # reasons are too long for a column
    return "\n\n".join([*map(as_text, shown), "\n".join([*facts(report), *failures(report), *left_out(report)])])


def without_last_column(table):
    return table._replace(header=table.header[:-1], rows=[row[:-1] for row in table.rows])


def markdown(report):
    """The tables of all that was measured and of its errors, and where they come from."""
    given = [f"* {fact}" for fact in (*facts(report), *failures(report), *left_out(report))]
    shown = [as_markdown(details(report), left=(0, 6, 10)), "", errors(report).caption, "", as_markdown(errors(report))]
    return "\n".join([*given, "", *shown, ""])


def facts(report):
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    repeated = sum(result["disturbed"] for result in report["results"])
    load = f"load {report['load']:.2f} before, " if "load" in report else ""
    return [
        f"{report['date']}, commit {report['commit']}, kernel {report['kernel']}, {report['compiler']}",
        *([report["limits"]] if report.get("limits") else []),
        *report["machine"].splitlines(),
        versions,
        f"{load}{repeated} slices disturbed by other load",
    ]


def failures(report):
    """What is wrong with our own results, or why they are missing."""
    ours = [result for result in report["results"] if result["implementation"] == OURS]
    return [
        f"sdpa on {result['workload']}: {result['unsupported'] or error_cell(result)}"
        for result in ours
        if result["unsupported"] or not is_right(result)
    ]


def left_out(report):
    """Which peers gave a wrong result or none, and why."""
    theirs = [one for one in report["results"] if one["implementation"] not in (OURS, READ)]
    measured = {one["implementation"] for one in theirs if "minimum" in one}
    wrong, nothing, ended = {}, {}, {}
    for one in theirs:
        name, reason = one["implementation"], one["unsupported"].removeprefix("Unsupported: ")
        if reason.startswith(ENDED):
            ended.setdefault(name, []).append(f"{one['workload']} ({reason})")
        elif name not in measured:
            nothing.setdefault(name, reason)  # the first stands for all
        elif "minimum" in one and not is_right(one):
            wrong.setdefault(name, []).append(f"{one['workload']} (error {one['error']:.1e} of {one['allowed']:.1e})")
    return [
        *(f"{name} is wrong, and does not count, on {', '.join(found)}" for name, found in wrong.items()),
        *(f"{name} failed on {', '.join(found)}" for name, found in ended.items()),
        *(
            f"not measured: {', '.join(name for name in nothing if nothing[name] == reason)} ({reason})"
            for reason in dict.fromkeys(nothing.values())
        ),
    ]


def with_text_between(document, begin, text, end):
    """The document with `text` between its lines `begin` and `end`, in place of what is there."""
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document must have the lines {begin!r} and {end!r}, in this order")
    return f"{before}{begin}\n{text}\n{end}{after}"
