"""Makes tables, charts and pages of the numbers.  Begin with rows.py for the numbers and publish.py for the
documents.
"""
