"""The tests of the benchmarks.  Begin with test_workloads.py."""
