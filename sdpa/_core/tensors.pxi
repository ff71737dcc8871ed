# The memory of torch's tensors as arrays, for sdpa/torch.  Part of _core.pyx.
#
# tensor.numpy() would give the array, but not of bfloat16, for which two views more are made, nor of a tensor with a
# gradient: 1.5 us for the three of one argument, where a small call takes 6.  A capsule of DLPack says all in 0.2 us,
# where the attributes of a tensor take 0.4.  Nothing here imports torch.
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t, uint8_t

cdef struct dlpack_tensor:
    # The first members of DLManagedTensor, as dlpack.h has had them since 2017.
    char *data
    int32_t device_type, device_id, axes
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # in elements
    uint64_t byte_offset


cdef int32_t DLPACK_CPU = 1
cdef uint8_t DLPACK_INT = 0, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_BOOL = 6


cdef int type_of_dlpack(const dlpack_tensor *t) noexcept:
    """NumPy's number of the dtype, or -1 where it is none that is taken from tensors."""
    if t.code == DLPACK_FLOAT and t.bits == 32:
        return cnp.NPY_FLOAT32
    if t.code == DLPACK_BFLOAT and t.bits == 16:
        return bfloat16_number
    if t.code == DLPACK_FLOAT and t.bits == 16:
        return cnp.NPY_FLOAT16
    if t.code == DLPACK_FLOAT and t.bits == 64:
        return cnp.NPY_FLOAT64
    if t.code == DLPACK_BOOL and t.bits == 8:
        return cnp.NPY_BOOL
    if t.code == DLPACK_INT and (t.bits == 32 or t.bits == 64):
        return cnp.NPY_INT32 if t.bits == 32 else cnp.NPY_INT64
    return -1


def tensor_memory(capsule):
    """An array of the elements of a tensor, which the capsule keeps; None where it is not dense, on the CPU and of a
    dtype that is known."""
    cdef const dlpack_tensor *t = <const dlpack_tensor *>PyCapsule_GetPointer(capsule, "dltensor")
    cdef cnp.npy_intp strides[MOST_LEADING + 3]
    cdef int axis, axes = t.axes, type_num = type_of_dlpack(t)
    cdef cnp.npy_intp itemsize = t.bits // 8
    cdef bint empty = False
    if t.device_type != DLPACK_CPU or type_num < 0 or t.lanes != 1:
        return None
    if axes > MOST_LEADING + 3:
        raise ValueError(f"the tensor has {axes} axes: there may be {MOST_LEADING + 3}")
    for axis in range(axes):
        strides[axis] = itemsize * t.strides[axis]
        empty = empty or t.shape[axis] == 0
    if t.data == NULL and not empty:
        return None
    array = cnp.PyArray_New(
        cnp.ndarray, axes, <cnp.npy_intp *>t.shape, type_num, strides, t.data + t.byte_offset, <int>itemsize,
        cnp.NPY_ARRAY_WRITEABLE, None)
    cnp.set_array_base(array, capsule)
    return array
