"""Who else takes part in a call."""

import torch


def watched() -> bool:
    """Whether more than autograd must see the call: a compiler, torch.func, a dispatch mode or a trace."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def autocast(*tensors):
    """In the dtype of torch.autocast, as torch's own attention: all floats but float64."""
    dtype = torch.get_autocast_dtype("cpu")
    return [x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors]
