"""Which kernel a round runs on."""

from support.kernels import KERNELS, PAIRS_OF_BFLOAT16

from sdpa._runtime import kernels

# Those with their own arithmetic for bfloat16 come twice, as all other dtypes are those of the next kernel there.
TURNS = [*KERNELS, *PAIRS_OF_BFLOAT16]


def use_kernel(number):
    """Make the kernel of that turn the default, and return its name."""
    name = TURNS[number % len(TURNS)]
    kernels.default = KERNELS[name]
    return name
