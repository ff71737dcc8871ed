"""Contiguous and paged key/value caches for decoding.  Begin with `KVCache` in kv.py; the pages are in paged.py."""
