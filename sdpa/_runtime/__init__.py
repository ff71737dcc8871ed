"""What the machine offers: which kernels run on it, and how many threads a call may use.  Both files can be read on
their own.
"""
