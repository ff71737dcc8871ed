"""The library for torch: functions on tensors on the CPU, with gradients.

Nothing happens on import but that the functions are there, and `import sdpa` does not import this package.
"""

from ._attention import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
