"""The library for transformers: attention for every model that takes `attn_implementation`, and a cache for `generate`.

Nothing happens on import, and `import sdpa` does not import this package.
"""

from .._checks import needs

with needs("sdpa.huggingface", "torch", "transformers"):
    from ._cache import Cache
    from ._register import register

__all__ = ["Cache", "register"]
