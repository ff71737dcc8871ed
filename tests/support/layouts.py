"""Arrays that lie differently in memory."""

import numpy as np

# Layouts: each gives an array of the same shape and dtype that lies differently in memory; those that broadcast
# repeat elements, so tests compare with a contiguous copy of what they get.


def backwards(axis):
    def layout(x):
        return x if -axis > x.ndim else np.flip(np.ascontiguousarray(np.flip(x, axis)), axis)

    return layout


def every(axis, step):
    def layout(x):
        if -axis > x.ndim:
            return x
        wide = np.full(tuple(n * step if i == x.ndim + axis else n for i, n in enumerate(x.shape)), 77, x.dtype)
        view = wide[(Ellipsis, slice(None, None, step), *[slice(None)] * (-axis - 1))]
        view[...] = x
        return view

    return layout


def repeated(axis):
    def layout(x):
        return x if -axis > x.ndim or not x.shape[axis] else np.broadcast_to(x.take([0], axis), x.shape)

    return layout


def heads_inside(x):
    """As (B, S, H, D) seen as (B, H, S, D)."""
    return x if x.ndim < 3 else np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def in_records(x):
    """A field of packed records: neither aligned nor adjacent."""
    records = np.zeros(x.shape, np.dtype([("before", "u1"), ("x", x.dtype)]))
    records["x"] = x
    return records["x"]


def off_by_a_byte(x):
    """Adjacent, not aligned."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "heads inside": heads_inside,
    "Fortran order": np.asfortranarray,
    "columns backwards": backwards(-1),
    "rows backwards": backwards(-2),
    "heads backwards": backwards(-3),
    "batches backwards": backwards(-4),
    "every third column": every(-1, 3),
    "every second row": every(-2, 2),
    "one column": repeated(-1),
    "one row": repeated(-2),
    "one head": repeated(-3),
    "one batch": repeated(-4),
    "read-only": read_only,
    "in records": in_records,
    "off by a byte": off_by_a_byte,
}


# The same of the axes before the heads, for arrays (2, 3, ...) or (2, 3, 4): no one stride leads from each batch to the
# next, but in the last ones.


def with_gaps(x):
    wide = np.full((len(x), x.shape[1] + 2, *x.shape[2:]), 77, x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


LEADING = {
    "gaps": with_gaps,
    "turned": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "one axis backwards": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "one axis repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "an axis of 1": lambda x: x[:, None],
    "an axis of 1 and any stride": lambda x: np.lib.stride_tricks.as_strided(
        x, (*x.shape[:1], 1, *x.shape[1:]), (*x.strides[:1], 10007 * x.itemsize, *x.strides[1:])
    ),
}
