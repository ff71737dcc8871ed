/* What one core of this machine can do: multiply-adds, softmax, memory.  Compiled by probe.py for one
 * instruction set, with LANES floats to a vector; only probe_read_together starts threads, nothing allocates. */
#define _DEFAULT_SOURCE /* syscall */
#include <stdint.h>
#include <string.h>
#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__)
enum { ACCUMULATORS = 24 }; /* up to four units, of 32 registers */
#else
enum { ACCUMULATORS = 12 };
#endif
enum { DOUBLE_LANES = LANES / 2 };
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef double vd __attribute__((vector_size(DOUBLE_LANES * 8)));
typedef uint64_t vw __attribute__((vector_size(DOUBLE_LANES * 8), may_alias));
typedef uint64_t word __attribute__((may_alias));

#define UNROLL _Pragma("GCC unroll 32")

int probe_supported(void)
{
#if defined(__AMX_BF16__)
    /* The CPU has it, and Linux, which must be asked, lets this process use the registers. */
    enum { AMX_BF16 = 1 << 22, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#elif defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* `count` dependent additions of one cycle each: their time is the clock.  Of a number that is in a register: some CPUs
 * add several constants at once. */
int64_t probe_clock(int64_t count)
{
    int64_t sum = 0, one = 1;
    for (int64_t i = 0; i < count; i += 16) UNROLL for (int j = 0; j < 16; ++j)
        {
            sum += one;
            __asm__ volatile("" : "+r"(sum), "+r"(one)); /* keeps the compiler from adding 16 at once */
        }
    return sum;
}

/* `count` vector multiply-adds in independent chains: enough of them to hide the latency of all units. */
#define DEFINE_FMA(name, vector, scalar, lanes)                                                                        \
    scalar name(int64_t count)                                                                                         \
    {                                                                                                                  \
        volatile scalar factor = (scalar)0.5, term = (scalar)1;                                                        \
        vector a = (vector){0} + factor, b = (vector){0} + term, acc[ACCUMULATORS];                                    \
        UNROLL for (int j = 0; j < ACCUMULATORS; ++j) acc[j] = b * (scalar)j;                                          \
        for (int64_t i = 0; i < count; i += ACCUMULATORS)                                                              \
            UNROLL for (int j = 0; j < ACCUMULATORS; ++j) acc[j] = acc[j] * a + b;                                     \
        scalar sum = 0;                                                                                                \
        UNROLL for (int j = 0; j < ACCUMULATORS; ++j) for (int l = 0; l < lanes; ++l) sum += acc[j][l];                \
        return sum;                                                                                                    \
    }
DEFINE_FMA(probe_fma_float32, vf, float, LANES)
DEFINE_FMA(probe_fma_float64, vd, double, DOUBLE_LANES)

#if defined(__AMX_BF16__)
enum { TILE_VECTORS = 16 * 16 }; /* multiply-adds of vectors of pairs that a product of tiles does */

/* The same with products of tiles: four of sums, each with two others of bfloat16. */
float probe_fma_bfloat16(int64_t count)
{
    static const uint8_t shapes[64] = {1,         [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64,
                                       [26] = 64, [28] = 64, [30] = 64, [48] = 16, 16,        16,
                                       16,        16,        16,        16,        16};
    static const float zeros[256];
    float sum[256];
    _tile_loadconfig(shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
    for (int64_t i = 0; i < count; i += 4 * TILE_VECTORS) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sum, 64);
    _tile_release();
    return sum[0];
}
#elif defined(__AVX512BF16__)
#include <immintrin.h>
enum { PAIR_ACCUMULATORS = 16 }; /* the latency of a dot product is longer */

/* The same with dot products: to each float the products of two pairs of bfloat16 are added. */
float probe_fma_bfloat16(int64_t count)
{
    volatile float factor = 0.5f, term = 1.0f;
    __m512 halves = _mm512_set1_ps(factor), ones = _mm512_set1_ps(term), acc[PAIR_ACCUMULATORS];
    __m512bh a = _mm512_cvtne2ps_pbh(halves, halves), b = _mm512_cvtne2ps_pbh(ones, ones);
    UNROLL for (int j = 0; j < PAIR_ACCUMULATORS; ++j) acc[j] = ones * (float)j;
    for (int64_t i = 0; i < count; i += PAIR_ACCUMULATORS)
        UNROLL for (int j = 0; j < PAIR_ACCUMULATORS; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], a, b);
    float sum = 0;
    UNROLL for (int j = 0; j < PAIR_ACCUMULATORS; ++j) for (int l = 0; l < LANES; ++l) sum += acc[j][l];
    return sum;
}
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
static inline vf nearest(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf times_power(vf p, vf n) { return _mm512_scalef_ps(p, n); }
static inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
#else
#if defined(__AVX2__)
#include <immintrin.h>
static inline vf nearest(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vi to_int(vf n) { return (vi)_mm256_cvtps_epi32(n); }
static inline vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
#else
static inline vf nearest(vf x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
static inline vi to_int(vf n) { return __builtin_convertvector(n, vi); }
static inline vf larger(vf a, vf b)
{
    vi above = a > b;
    return (vf)(((vi)a & above) | ((vi)b & ~above));
}
#endif
static inline vf times_power(vf p, vf n) { return (vf)((vi)p + (to_int(n) << 23)); }
#endif

/* 2**x, degree 5: 2**n * 2**f with |f| <= 1/2. */
static inline vf exp2_vector(vf x)
{
    vf n = nearest(x), f = x - n;
    vf p = (vf){0} + 0x1.5bba14p-10f;
    p = p * f + 0x1.3cea88p-7f;
    p = p * f + 0x1.c6b752p-5f;
    p = p * f + 0x1.ebf9bcp-3f;
    p = p * f + 0x1.62e42ap-1f;
    return times_power(p * f + 1.0f, n);
}

enum { ROW_VECTORS = 4 }; /* rows side by side: so many chains of max and of sum */

/* The softmax step of a block of `keys` x (4 vectors of rows), rows in lanes: the largest score of each row,
 * then weights[key] = exp2(c * scores[key] - largest) and their sum. */
static void softmax_block(int64_t keys, const vf *scores, vf *weights, vf *sum)
{
    const float c = 0.18033688f; /* log2(e) / sqrt(64) */
    vf largest[ROW_VECTORS], total[ROW_VECTORS];
    UNROLL for (int j = 0; j < ROW_VECTORS; ++j) largest[j] = scores[j];
    for (int64_t k = 1; k < keys; ++k)
        UNROLL for (int j = 0; j < ROW_VECTORS; ++j) largest[j] = larger(scores[k * ROW_VECTORS + j], largest[j]);
    UNROLL for (int j = 0; j < ROW_VECTORS; ++j)
    {
        largest[j] *= c;
        total[j] = (vf){0};
    }
    for (int64_t k = 0; k < keys; ++k) UNROLL for (int j = 0; j < ROW_VECTORS; ++j)
        {
            vf weight = exp2_vector(scores[k * ROW_VECTORS + j] * c - largest[j]);
            weights[k * ROW_VECTORS + j] = weight;
            total[j] += weight;
        }
    UNROLL for (int j = 0; j < ROW_VECTORS; ++j) sum[j] = total[j];
}

/* `count` times the same block; returns the number of scores in it. */
int64_t probe_softmax(int64_t count, int64_t keys, const void *scores, void *weights, void *sum)
{
    for (int64_t i = 0; i < count; ++i) softmax_block(keys, scores, weights, sum);
    return keys * ROW_VECTORS * LANES;
}

enum { LINE = 64, LINES = 16, STEP = LINES * LINE, CHAINS = 8, VECTORS = LINE / (LANES * 4) };

/* The words of `streams` runs of `part` bytes, one after the other in memory, are added to the lanes of `sum`: STEP
 * bytes of the first run, of the second and so on, each vector from an aligned place. */
static inline __attribute__((always_inline)) void read_runs(const char *data, int64_t part, int64_t streams,
                                                            const int prefetch, int64_t ahead, vw *sum)
{
    for (int64_t at = 0; at < part; at += STEP)
        for (int64_t stream = 0; stream < streams; ++stream) {
            const char *from = data + stream * part + at;
            UNROLL for (int line = 0; line < LINES; ++line)
            {
                if (prefetch) __builtin_prefetch(from + line * LINE + ahead);
                UNROLL for (int v = 0; v < VECTORS; ++v) sum[line % CHAINS] += ((const vw *)(from + line * LINE))[v];
            }
        }
}

/* The sum of all words of `bytes` from `data` (both multiples of 8), read in `streams` places at once with a prefetch
 * `ahead` bytes (0: none).  The sum shows that each byte was read. */
static uint64_t read_words(const char *data, int64_t bytes, int64_t streams, int64_t ahead)
{
    const char *end = data + bytes;
    uint64_t total = 0;
    vw sum[CHAINS] = {{0}};
    for (; data < end && (uintptr_t)data % LINE; data += sizeof total) total += *(const word *)data;
    const int64_t part = (end - data) / streams / STEP * STEP;
    if (ahead)
        read_runs(data, part, streams, 1, ahead, sum);
    else
        read_runs(data, part, streams, 0, 0, sum);
    for (int chain = 0; chain < CHAINS; ++chain)
        for (int lane = 0; lane < DOUBLE_LANES; ++lane) total += sum[chain][lane];
    for (data += part * streams; data < end; data += sizeof total) total += *(const word *)data;
    return total;
}

/* The same, `count` times. */
uint64_t probe_read(int64_t count, int64_t bytes, const char *data, int64_t streams, int64_t ahead)
{
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        total += read_words(data, bytes, streams, ahead);
        __asm__ volatile("" ::: "memory"); /* keeps the compiler from reading once and multiplying */
    }
    return total;
}

#if defined(_OPENMP)
/* The sum of the words of several arrays, of each of which every thread reads its part: of all arrays together that is
 * as much for one thread as for another. */
uint64_t probe_read_together(int64_t arrays, const char *const *data, const int64_t *bytes, int64_t threads,
                             int64_t streams, int64_t ahead)
{
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t thread = 0; thread < threads; ++thread)
        for (int64_t i = 0; i < arrays; ++i) {
            const int64_t part = bytes[i] / threads / LINE * LINE, begin = thread * part;
            const int64_t size = thread == threads - 1 ? bytes[i] - begin : part;
            total += read_words(data[i] + begin, size, streams, ahead);
        }
    return total;
}

/* Copies several arrays, `piece` bytes at a time: long pieces go past the caches, as memcpy sees fit, short ones do not.
 * Of each array every thread copies its part. */
void probe_copy_together(int64_t arrays, char *const *to, const char *const *from, const int64_t *bytes,
                         int64_t threads, int64_t piece)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; ++thread)
        for (int64_t i = 0; i < arrays; ++i) {
            const int64_t part = bytes[i] / threads / LINE * LINE;
            const int64_t end = thread == threads - 1 ? bytes[i] : (thread + 1) * part;
            for (int64_t at = thread * part; at < end; at += piece)
                memcpy(to[i] + at, from[i] + at, end - at < piece ? end - at : piece);
        }
}
#endif
