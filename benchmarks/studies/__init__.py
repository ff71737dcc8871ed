"""Questions with tables of their own: how exact the kernels are, and what caches, projections and sizes cost.  Each
file can be read and run on its own.
"""
