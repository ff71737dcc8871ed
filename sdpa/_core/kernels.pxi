# The kernels of csrc/ that this build has, and which of them serves a call.  Part of _core.pyx.
from libc.stdint cimport int64_t


cdef int purpose_of(const sdpa_input *p) noexcept:
    if p.query.dtype == SDPA_FLOAT64:
        return SDPA_FOR_DOUBLE
    # Without a value (attention_weights) only Q and K meet.  A scale this large would show what was lost below the
    # smallest normal number, which the products of pairs take for 0.
    if (p.query.dtype == SDPA_BFLOAT16 and p.key.dtype == SDPA_BFLOAT16
            and (p.value.data == NULL or p.value.dtype == SDPA_BFLOAT16) and -LARGE_SCALE < p.scale < LARGE_SCALE):
        return SDPA_FOR_BFLOAT16
    return SDPA_FOR_FLOAT


cdef double LARGE_SCALE = 2.0 ** 20


cdef class Kernel:
    """The arithmetic for one instruction set: for float32, float64 and bfloat16, each for many rows and for few."""
    cdef const sdpa_isa *isa

    def __init__(self):
        raise TypeError("kernels() lists the kernels there are")

    @property
    def name(self):
        return self.isa.name.decode()

    cdef const sdpa_kernel *table(self, const sdpa_input *p) noexcept:
        """For the batch with the most rows."""
        cdef const sdpa_kernel *const *engines = self.isa.kernel[purpose_of(p)]
        return engines[1 if p.v == NULL and most_rows(p) <= most_of_few(self.isa, p) else 0]

    def __eq__(self, other):
        return isinstance(other, Kernel) and (<Kernel>other).isa == self.isa

    def __hash__(self):
        return <Py_ssize_t>self.isa >> 4

    def __repr__(self):
        return f"<sdpa kernel {self.name}>"


# Up to so many rows of a key/value head, and a vector of them, the engine for few rows is faster.  Measured with
# AVX-512, 8 heads, D = 128, few against many, in ms.  float32, 2048 keys: 12 rows 0.26 and 0.31, 16 rows 0.34 and 0.31;
# 8192 keys, 16 rows 1.51 and 2.32; 32768 keys, 16 rows 6.4 and 12.6.  float16: 0.34 and 0.39, 5.6 and 8.5 (16 rows).
cdef int MOST_OF_FEW = 16
# The same where both engines multiply pairs of bfloat16, for heads of up to 96 features, and for larger ones, which
# leave less to sums over lanes.  16 rows: D = 64, 4096 keys 0.255 and 0.242, 16384 keys 1.06 and 1.25; D = 96,
# 4096 keys alike; D = 128, 1024 keys 0.106 and 0.117, 8192 keys 0.88 and 1.16; D = 256, 1024 keys of 2 heads 0.046
# and 0.054.
cdef int MOST_OF_FEW_PAIRS = 12, MOST_OF_FEW_WIDE_PAIRS = 16, WIDE = 128
# Few rows of numbers beside many of pairs (AMX).  2048 keys: 8 rows 0.19 and 0.21, 10 rows 0.23 and 0.21, 12 rows 0.27
# and 0.21.
cdef int MOST_BESIDE_PAIRS = 10


# The same where one block holds all keys: the other engine writes results as they are summed.  64 heads of 64 keys,
# D = 64, on one thread, few against many, in µs.  float32: 9 rows 97 and 103, 10 rows 103 and 93, 16 rows 134 and 105;
# bfloat16: 9 rows 85 and 72; float16, which many rows must widen: 12 rows 100 and 119, 16 rows 124 and 128, but bits
# are to be those of widened arrays.
cdef int MOST_BESIDE_SHORT = 9


cdef int64_t most_of_few(const sdpa_isa *isa, const sdpa_input *p) noexcept:
    cdef const sdpa_kernel *const *engines = isa.kernel[purpose_of(p)]
    cdef const sdpa_kernel *const *numbers = isa.kernel[SDPA_FOR_FLOAT]
    cdef bint pairs = purpose_of(p) == SDPA_FOR_BFLOAT16 and engines[0] != numbers[0]
    cdef int most = MOST_OF_FEW
    if p.q_starts == NULL and p.kv_len <= engines[0].block_keys:
        most = MOST_BESIDE_SHORT
    elif pairs and engines[1] == numbers[1]:
        most = MOST_BESIDE_PAIRS
    elif pairs:
        most = MOST_OF_FEW_WIDE_PAIRS if p.dim >= WIDE else MOST_OF_FEW_PAIRS
    return min(most, engines[1].rows)


cdef int64_t most_rows(const sdpa_input *p) noexcept:
    """Of a key/value head, in the longest batch."""
    return p.q_len * sdpa_group(p) if p.kv_heads else 0


def kernels():
    """The kernels that this build has and this CPU runs, best first."""
    cdef Kernel kernel
    cdef int i = 0
    found = []
    while sdpa_isas[i].name != NULL:
        if sdpa_cpu_runs(sdpa_isas[i].name):
            kernel = Kernel.__new__(Kernel)
            kernel.isa = &sdpa_isas[i]
            found.append(kernel)
        i += 1
    return found


cdef extern from *:
    """
    #if defined(SDPA_POOL)
    #define SDPA_THREADS "pool"
    #elif defined(_OPENMP)
    #define SDPA_THREADS "openmp"
    #else
    #define SDPA_THREADS "none"
    #endif
    #ifdef __VERSION__
    #define SDPA_COMPILER __VERSION__
    #else
    #define SDPA_COMPILER "unknown"
    #endif
    """
    const char *SDPA_THREADS
    const char *SDPA_COMPILER

THREADS = SDPA_THREADS.decode()  # whose they are
COMPILER = SDPA_COMPILER.decode()
