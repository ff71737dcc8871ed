"""The named workloads that every benchmark of this project runs: one table, WORKLOADS, of a case in a dtype each.

workload.py says what all of them offer, cases.py lists them; the other modules hold the kinds.
"""

import fnmatch

from benchmarks.workloads.cases import SWEEPS, WORKLOADS
from benchmarks.workloads.workload import DTYPES, Workload

__all__ = ["DTYPES", "KEEP_BYTES", "NAMED", "SWEEPS", "WORKLOADS", "Workload", "batches", "restored", "select"]

KEEP_BYTES = 400 << 20  # of prepared workloads: a worker drops what is beyond, the oldest first

NAMED = WORKLOADS | {workload.name: workload for family in SWEEPS.values() for workload in family.values()}
KINDS = {type(workload).kind: type(workload) for workload in WORKLOADS.values()}


def restored(fields):
    """The workload that gave these fields by `as_json`."""
    return KINDS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def batches(workloads, limit=KEEP_BYTES):
    """The workloads in their order, as few lists as a worker can prepare at once."""
    lists, total = [[]], 0
    for workload in workloads:
        total += workload.bytes
        if lists[-1] and total > limit:
            lists.append([])
            total = workload.bytes
        lists[-1].append(workload)
    return lists


def select(patterns, dtypes=None):
    """The workloads whose name contains or matches one of the comma-separated patterns, in one of these dtypes; all for
    None."""
    unknown = [part for part in parts(patterns) if not any(matches(name, part) for name in WORKLOADS)]
    if unknown:
        raise SystemExit(f"no workload matches {', '.join(map(repr, unknown))}; there are: {', '.join(WORKLOADS)}")
    chosen = [
        workload
        for name, workload in WORKLOADS.items()
        if matches(name, patterns) and (dtypes is None or workload.dtype_name in dtypes)
    ]
    if not chosen:
        raise SystemExit(f"no workload matches {patterns!r} in {', '.join(dtypes)}; there are: {', '.join(WORKLOADS)}")
    return chosen


def matches(name, patterns):
    return patterns is None or any(part in name or fnmatch.fnmatch(name, part) for part in parts(patterns))


def parts(patterns):
    return [] if patterns is None else [part for part in patterns.split(",") if part] or [patterns]
