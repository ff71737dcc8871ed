"""The library for torch: functions on tensors on the CPU, with gradients, also for torch.compile and torch.func.

Importing this package changes nothing in torch, except that it adds the operators `torch.ops.sdpa`.  `import sdpa` does
not import this package.
"""

from .._checks import needs

with needs("sdpa.torch", "torch"):
    from ._accelerate import accelerate, restore
    from ._attention import attention, attention_varlen
    from ._beside import merge, rotary
    from ._enable import disable, enable, enabled, explain, register_flash_attention_impl
    from ._like_torch import scaled_dot_product_attention

__all__ = [
    "accelerate",
    "attention",
    "attention_varlen",
    "disable",
    "enable",
    "enabled",
    "explain",
    "merge",
    "register_flash_attention_impl",
    "restore",
    "rotary",
    "scaled_dot_product_attention",
]
