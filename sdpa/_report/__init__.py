"""What the laboratory and the benchmarks draw and print with.  Begin with document.py for pages and drawing.py for
figures.
"""
