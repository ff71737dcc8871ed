"""The multi-head layer with its projections and rotary embedding.  Begin with `MultiHeadAttention` in layer.py."""
