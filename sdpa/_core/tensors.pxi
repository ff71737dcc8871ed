# The memory of torch's tensors as arrays, for sdpa/torch.  Part of _core.pyx.
#
# tensor.numpy() would give the array, but not of bfloat16, for which two views more are made, nor of a tensor with a
# gradient: 1.5 us for the three of one argument, where a small call takes 6.  Nothing here imports torch.
cimport numpy as cnp
from libc.stdint cimport uintptr_t


def tensor_memory(tensor, cnp.dtype dtype not None):
    """An array of the elements of a dense tensor on the CPU, which is known to be one and to have that dtype."""
    cdef cnp.npy_intp shape[MOST_LEADING + 3]
    cdef cnp.npy_intp strides[MOST_LEADING + 3]
    cdef tuple sizes = <tuple>tensor.shape, steps = tensor.stride()  # a torch.Size is a tuple
    cdef uintptr_t address = tensor.data_ptr()
    cdef int axis, axes = <int>len(sizes)
    cdef cnp.npy_intp itemsize = dtype.itemsize
    cdef bint empty = False
    if axes > MOST_LEADING + 3:
        raise ValueError(f"the tensor has {axes} axes: there may be {MOST_LEADING + 3}")
    for axis in range(axes):
        shape[axis], strides[axis] = sizes[axis], itemsize * <cnp.npy_intp>steps[axis]
        empty = empty or shape[axis] == 0
    if address == 0 and not empty:
        raise RuntimeError("the tensor has no memory")
    array = cnp.PyArray_New(
        cnp.ndarray, axes, shape, dtype.type_num, strides, <void *>address, <int>itemsize, cnp.NPY_ARRAY_WRITEABLE,
        None)
    cnp.set_array_base(array, tensor)
    return array
