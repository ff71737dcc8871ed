# Numbers as int8 with scales (csrc/memory/quantise.c).  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t

cdef struct quantise_call:
    sdpa_array source, out, scales
    int64_t heads, rows, dim, group
    int64_t parts, part_rows  # of a head
    int64_t unit_batches, unit_heads  # more than one where a unit is all
    bint finite


cdef int64_t QUANTISE_AT_ONCE = 1 << 18  # numbers


cdef void quantise_part(const void *of, int64_t unit, char *scratch) noexcept nogil:
    cdef quantise_call *call = <quantise_call *>of
    cdef int64_t row = unit % call.parts * call.part_rows, rows = min(call.part_rows, call.rows - row)
    cdef int64_t batch = unit // call.parts // call.heads, head = unit // call.parts % call.heads
    cdef sdpa_array source = place(&call.source, batch, head, row)
    cdef sdpa_array out = place(&call.out, batch, head, row), scales = place(&call.scales, batch, head, row)
    if call.finite:
        call.finite = sdpa_quantise_rows(
            &source, call.unit_batches, call.unit_heads, rows, call.dim, call.group, &out, &scales)


def quantise(
    cnp.ndarray source not None, cnp.ndarray out not None, cnp.ndarray scales not None, int64_t group
):
    """A 4-D array of floats as int8, with a float32 scale for each `group` of neighbours in a row, into `out` and
    `scales` (see csrc/memory/quantise.c).  False, and these are unfinished, where it met NaN or inf."""
    cdef crew c
    cdef quantise_call call
    cdef int64_t units, batches = cnp.PyArray_DIM(source, 0)
    call.source, call.out, call.scales = array_of(source), array_of(out), array_of(scales)
    call.heads, call.rows, call.dim = (
        cnp.PyArray_DIM(source, 1), cnp.PyArray_DIM(source, 2), cnp.PyArray_DIM(source, 3))
    call.group, call.finite = group, True
    call.part_rows = max(1, QUANTISE_AT_ONCE // max(1, call.dim))
    call.parts = (call.rows + call.part_rows - 1) // call.part_rows
    call.unit_batches = call.unit_heads = 1
    units = batches * call.heads * call.parts
    if call.rows and batches * call.heads <= call.part_rows // call.rows:
        call.unit_batches, call.unit_heads, units = batches, call.heads, 1
    hire(&c, 1, LONG, 0, 0)
    with nogil:
        share(&c, quantise_part, &call, units, EQUALLY, 1, 8 * QUANTISE_AT_ONCE)
    dismiss(&c)
    return call.finite
