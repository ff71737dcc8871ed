# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled part of sdpa.  Each part builds on those before it: to follow a call from Python, begin with the last.

Nothing here knows an instruction set, and nothing in csrc/ knows of threads or Python.
"""
cimport numpy as cnp

cnp.import_array()

include "_core/csrc.pxi"        # what csrc/ offers
include "_core/threads.pxi"     # units of work, shared among threads
include "_core/arrays.pxi"      # arrays as the kernels see them
include "_core/kernels.pxi"     # one table of kernels for each instruction set
include "_core/attention.pxi"   # the algorithm
include "_core/backward.pxi"    # the algorithm of the gradients
include "_core/linear.pxi"      # projections
include "_core/heads.pxi"       # heads side by side in rows
include "_core/norm.pxi"        # norms of rows
include "_core/rotary.pxi"      # rotary embedding
include "_core/quantise.pxi"    # int8 for caches
include "_core/cache.pxi"       # what appends change in a KVCache
include "_core/pages.pxi"       # the pages of a PagedKVCache
include "_core/arguments.pxi"   # single arguments
include "_core/inputs.pxi"      # the arrays of a call
include "_core/packed.pxi"      # the same of sequences, and in caches
include "_core/options.pxi"     # the options of a call
include "_core/call.pxi"        # one call
include "_core/functions.pxi"   # the functions that Python calls
include "_core/merge.pxi"       # partial results joined
include "_core/tensors.pxi"     # the memory of torch's tensors
