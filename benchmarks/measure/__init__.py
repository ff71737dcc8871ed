"""Measures a workload: processes, clocks, memory, and what the machine can do.  Begin with runner.py, which starts the
processes of worker.py.
"""
