"""The charts of a report, in the style of the laboratory.  What was not measured is left out."""

from functools import partial

import numpy as np

from benchmarks.measure.libraries import OURS, READ, library_of, title_of
from benchmarks.report.report import TIMES, libraries_of
from benchmarks.report.rows import geometric_mean, rows_of, speed_up
from benchmarks.workloads import DTYPES
from sdpa._report.drawing import COLOURS, INK, PAPER, panel
from sdpa._report.panels import mark_sizes
from sdpa.lab._experiment import Figure

ROW, LIBRARY, FRAME = 14, 30, 90  # heights in pixels: of a workload, of a library, and of what is around them
WIDEST = 1.1  # share of the bound at which the axis ends, unless something exceeds it


def shares(report):
    """{name: Figure}, one for each dtype: how much of the bound is reached."""
    return {
        f"bound-{dtype}": Figure(
            f"{DTYPES[dtype].name}: share of the bound that sdpa (bar) and the best of its peers (dot) reach; 1 is the "
            "least time that the machine can be expected to take.",
            partial(draw_shares, dtype=dtype),
        )
        for dtype in dtypes_of(report)
    }


def leads(report):
    """{name: Figure}, one for each dtype that any peer was measured in: how much faster than each library."""
    return {
        f"lead-{dtype}": Figure(
            f"{DTYPES[dtype].name}: time of each library divided by that of sdpa, a dot for each workload, and the "
            "geometric mean. Right of 1 sdpa is faster.",
            partial(draw_leads, dtype=dtype),
        )
        for dtype in dtypes_of(report)
        if libraries_of(rows_in(report, dtype))
    }


def lines(report):
    """{name: Figure} of what was swept."""
    families = report.get("sweeps", {}).get("families", {})
    return {name: figure for name, figure in LINES.items() if families.get(name.partition("-in-")[0])}


def dtypes_of(report):
    return [dtype for dtype in DTYPES if rows_in(report, dtype)]


def rows_in(report, dtype):
    """Those that this library was measured on."""
    return [row for row in rows_of(report) if row.ours and row.name.endswith(f"-{dtype}")]


# ------------------------------------------------------------------------------------------------------ by workload


def draw_shares(report, dtype):
    rows = rows_in(report, dtype)
    figure, axes = panel(height=FRAME + ROW * len(rows))
    at = np.arange(len(rows))
    ours = [row.share for row in rows]
    best = [row.bound / row.best["minimum"] if row.best else np.nan for row in rows]
    axes.barh(at, ours, height=0.66, color=COLOURS[0], label=OURS)
    if any(row.best for row in rows):
        axes.plot(best, at, "o", color=COLOURS[1], markeredgecolor=PAPER, markersize=6, label="the best peer")
    axes.axvline(1, color=INK, linewidth=0.9, linestyle="--")
    axes.set_yticks(at, [row.name.removesuffix(f"-{dtype}") for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="bound ÷ time", xlim=(0, max([WIDEST, *(share * 1.05 for share in ours)])))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    return figure


def draw_leads(report, dtype):
    rows = rows_in(report, dtype)
    libraries = libraries_of(rows)
    figure, axes = panel(height=FRAME + LIBRARY * len(libraries))
    farthest = 1.0
    for at, library in enumerate(libraries):
        over = [speed_up(row.ours, row.libraries[library]) for row in rows if library in row.libraries]
        mean = geometric_mean(over)
        axes.plot(over, [at] * len(over), "o", color=COLOURS[1], alpha=0.35, markersize=5, markeredgewidth=0)
        axes.plot(mean, at, "D", color=COLOURS[0], markersize=5)
        axes.annotate(
            f"{mean:.2f} {TIMES}", (mean, at), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=INK
        )
        farthest = max(farthest, *over)
    axes.axvline(1, color=INK, linewidth=0.9, linestyle="--")
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if tick <= farthest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.set_yticks(range(len(libraries)), [title_of(library) for library in libraries])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(libraries) - 0.4, -0.7)
    axes.set(xlabel="times as fast")
    return figure


# -------------------------------------------------------------------------------------------------------- by size


def draw_lines(report, family, xlabel, ylabel, value, yscale, sizes="log"):
    """A line for each library, by its best implementation, and one for the bound; `value` of a point and seconds."""
    points = report["sweeps"]["families"][family]
    figure, axes = panel()
    at = [point["size"] for point in points]
    axes.plot(at, [value(point, point["bound"]) for point in points], "--", color=INK, linewidth=1.1, label="bound")
    series = {}
    for point in points:
        for name, time in point["times"].items():
            keep_best(series, name, point["size"], time)
    by_size = {point["size"]: point for point in points}
    drawn = {library: {n: value(by_size[n], time) for n, time in times.items()} for library, times in series.items()}
    draw_series(axes, report, drawn)
    finish(figure, axes, at, xlabel, ylabel, yscale, sizes)
    return figure


def draw_memory(report):
    figure, axes = panel()
    series = {}
    for name, sizes in report["sweeps"]["families"]["memory"].items():
        for size, extra in sizes.items():
            if extra is not None:
                keep_best(series, name, int(size), max(extra, SMALLEST) / 1e6)
    draw_series(axes, report, series)
    sizes = sorted({size for held in series.values() for size in held})
    finish(figure, axes, sizes, "queries and keys", "MB beyond arrays", "log", "log")
    return figure


def keep_best(series, name, size, number):
    """Of the implementations of a library, the one with the least."""
    if name != READ:
        numbers = series.setdefault(library_of(name), {})
        numbers[size] = min(numbers.get(size, np.inf), number)


def draw_series(axes, report, series):
    """{library: {size: number}} as lines; a library has the same colour in all charts."""
    for number, library in enumerate(swept_libraries(report)):
        if library in series:
            ours = {"linewidth": 2.2, "zorder": 3} if library == OURS else {}
            dash, colour = "-" if number < len(COLOURS) else ":", COLOURS[number % len(COLOURS)]
            line = zip(*sorted(series[library].items()))
            axes.plot(*line, dash, color=colour, marker="o", markersize=3, label=title_of(library), **ours)


def swept_libraries(report):
    """This one first."""
    families = dict(report["sweeps"]["families"])
    names = {*families.pop("memory", {}), *(n for points in families.values() for one in points for n in one["times"])}
    found = {library_of(name) for name in names - {READ}}
    return sorted(found, key=lambda library: (library != OURS, title_of(library).lower()))


SMALLEST = 10_000  # bytes: what is less, or nothing, is drawn as so many


def finish(figure, axes, at, xlabel, ylabel, yscale, sizes):
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale=yscale)
    if yscale == "log":
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.minorticks_off()
    else:
        axes.set_ylim(0, None)
    if sizes == "log":
        mark_sizes(axes, at)
    else:
        axes.set_xticks(at, [f"{size:g}" for size in at], fontsize=8, rotation=90)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, handlelength=1.6, columnspacing=1.2)


def milliseconds(point, seconds):
    return seconds * 1e3


def gigaflops(point, seconds):
    return point["flops"] / seconds / 1e9


def tokens(point, seconds):
    return 1 / seconds


LINES = {
    "length": Figure(
        "Time of a call by length: causal attention with as many keys as queries, 2 heads of 64, float32.",
        partial(draw_lines, family="length", xlabel="length", ylabel="ms", value=milliseconds, yscale="log"),
    ),
    "length-in-rate": Figure(
        "The same calls as a rate. It counts the multiply-adds of visible pairs only, half of the square.",
        partial(draw_lines, family="length", xlabel="length", ylabel="GFLOP/s", value=gigaflops, yscale="linear"),
    ),
    "threads": Figure(
        "Rate by the number of CPUs: causal attention of 2048 queries and keys, 8 heads of 64, float32.",
        partial(draw_lines, family="threads", xlabel="threads", ylabel="GFLOP/s", value=gigaflops, yscale="linear"),
    ),
    "head-size": Figure(
        "Rate by the size of a head: 1024 queries and keys, 8 heads, float32.",
        partial(
            draw_lines, family="head-size", xlabel="size of a head", ylabel="GFLOP/s", value=gigaflops, yscale="linear",
            sizes="linear",
        ),
    ),
    "context": Figure(
        "Decoding: one query of 16 heads, keys and values of 2 heads of 128, float32: tokens per second of this layer "
        "by the number of keys. The bound is a loop that only reads keys and values.",
        partial(draw_lines, family="context", xlabel="keys", ylabel="tokens per second", value=tokens, yscale="log"),
    ),
    "memory": Figure(
        "Memory of a call beyond its arguments and its result, by length: 8 heads of 64, float32.", draw_memory
    ),
}  # fmt: skip
