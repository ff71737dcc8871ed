# The functions that Python calls, each of which is a Call.  Part of _core.pyx.
cimport numpy as cnp
from libc.stdint cimport int64_t

cdef dict NOTHING = {}


cdef Call open_call(Kernel kernel, dict options, known):
    cdef Call call = Call.__new__(Call)
    call.kernel, call.options, call.known, call.beside, call.left = kernel, options, known, NOTHING, len(options)
    return call


def attention(Kernel kernel not None, query, key, value, dict options not None, known):
    cdef Call call = open_call(kernel, options, known)
    call.take_arrays(query, key, value)
    call.take_options()
    return call.attend()


def attention_varlen(
    Kernel kernel not None, query, key, value, cu_seqlens_q, cu_seqlens_k, dict options not None, known
):
    cdef Call call = open_call(kernel, options, known)
    call.take_packed(query, key, value, cu_seqlens_q, cu_seqlens_k)
    call.take_options()
    return call.attend()


def attend_cache(
    Kernel kernel not None, CacheBase cache not None, query, int64_t rows, lengths, q_offset, dict options not None,
    known,
):
    """Attention to the first `rows` rows of a cache, of which batch b has lengths[b] (None: all)."""
    cdef Call call = open_call(kernel, options, known)
    call.take_cached(cache, query, rows)
    call.own_lengths, call.own_offset = lengths, q_offset
    call.take_options()
    return call.attend()


def cached_query(Kernel kernel not None, CacheBase cache not None, query):
    """`query` as an array, checked."""
    cdef Call call = open_call(kernel, NOTHING, None)
    call.take_cached(cache, query, 0)
    return call.query


def attend_pages(
    Kernel kernel not None, query, cnp.ndarray keys not None, cnp.ndarray values not None, list sequences not None,
    bint one, cu_seqlens_q, dict options not None, known,
):
    cdef Call call = open_call(kernel, options, known)
    call.take_pages(query, keys, values, sequences, one, cu_seqlens_q)
    call.take_options()
    return call.attend()


def attention_weights(Kernel kernel not None, query, key, dict options not None, known):
    cdef Call call = open_call(kernel, options, known)
    cdef cnp.ndarray weights
    call.take_arrays(query, key, None, True, False)
    call.take_options()
    call.choose_threads()
    call.all_taken()
    weights = call.new_result(call.p.kv_len, cnp.PyArray_TYPE(call.query), True)
    call.place(weights, call.p.heads, call.p.q_len, call.p.kv_len, &call.p.weights)
    if call.p.dim:
        run_all(&call.p, call.unit_starts, kernel, call.threads)
    return weights


def plan_call(Kernel kernel not None, query, key, value, dict options not None, known):
    """A Call that has a plan; its results are not asked for."""
    cdef Call call = open_call(kernel, options, known)
    call.take_arrays(query, key, value)
    return planned(call)


def plan_packed(
    Kernel kernel not None, query, key, value, cu_seqlens_q, cu_seqlens_k, dict options not None, known
):
    """The same for packed sequences."""
    cdef Call call = open_call(kernel, options, known)
    call.take_packed(query, key, value, cu_seqlens_q, cu_seqlens_k)
    return planned(call)


cdef Call planned(Call call):
    call.take_options()
    call.flag("return_lse")
    call.option("out")
    call.choose_threads()
    call.all_taken()
    return call


def additive_call(Kernel kernel not None, query, key, value, int64_t features, dict options not None, known):
    """A Call that waits for `project`."""
    cdef Call call = open_call(kernel, options, known)
    call.take_arrays(query, key, value, False)
    call.take_options()
    call.products_of_score = 5 * features  # measured: see the decisions of csrc/README.md
    call.choose_threads()
    return call


def attention_backward(
    Kernel kernel not None, grad_out, query, key, value, out, lse, grad_lse, dict options not None, known,
    list unrounded=None,
):
    """`unrounded`: arrays for the gradients of query, key and value, in the dtype of sums, to be summed further.  They
    are filled and returned; only the gradient of an input that was broadcast is another array, in that dtype, too."""
    cdef Call call = open_call(kernel, options, known)
    call.for_gradients, call.unrounded = True, unrounded
    call.take_arrays(query, key, value)
    call.take_options()
    call.choose_threads()
    call.all_taken()
    return call.differentiate(grad_out, out, lse, grad_lse)


def attention_varlen_backward(
    Kernel kernel not None, grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, grad_lse,
    dict options not None, known, list unrounded=None,
):
    cdef Call call = open_call(kernel, options, known)
    call.unrounded = unrounded
    call.take_packed(query, key, value, cu_seqlens_q, cu_seqlens_k)
    call.take_options()
    call.choose_threads()
    call.all_taken()
    return call.differentiate(grad_out, out, lse, grad_lse)
