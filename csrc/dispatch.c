/* The kernels of this build, best first, and whether this CPU can run them.  SDPA_HAVE_<isa> comes from setup.py, which
 * leaves a row out where the compiler lacks its flags or the target is another architecture.  Its value asks the CPU for
 * each of those flags: HAS(avx2) && HAS(fma) && ... */
#define _DEFAULT_SOURCE /* syscall */
#include "sdpa.h"

#include <string.h>

/* sdpa_kernel_<isa>_<bytes of real>_<few rows>.  Without instructions for bfloat16 it is widened to float. */
#define DECLARE(isa)                                                                                                   \
    extern const sdpa_kernel sdpa_kernel_##isa##_4_0, sdpa_kernel_##isa##_4_1;                                         \
    extern const sdpa_kernel sdpa_kernel_##isa##_8_0, sdpa_kernel_##isa##_8_1;
#define PAIR(isa, bytes) {&sdpa_kernel_##isa##_##bytes##_0, &sdpa_kernel_##isa##_##bytes##_1}
#define LIST(isa)                                                                                                      \
    {                                                                                                                  \
        #isa, { PAIR(isa, 4), PAIR(isa, 8), PAIR(isa, 4) }                                                             \
    }

#ifdef SDPA_HAVE_avx512
DECLARE(avx512)
#endif
#ifdef SDPA_HAVE_avx512_bf16
extern const sdpa_kernel sdpa_kernel_avx512_bf16_4_0, sdpa_kernel_avx512_bf16_4_1;
#endif
#ifdef SDPA_HAVE_amx
extern const sdpa_kernel sdpa_kernel_amx_4_0;
#endif
#ifdef SDPA_HAVE_avx2
DECLARE(avx2)
#endif
#ifdef SDPA_HAVE_neon
DECLARE(neon)
#endif
DECLARE(baseline)

/* Beside AMX few rows are widened: such CPUs multiply pairs in vectors at a quarter of the rate of numbers. */
#define FOR_PAIRS(isa, few)                                                                                            \
    {                                                                                                                  \
        #isa,                                                                                                          \
        {                                                                                                              \
            PAIR(avx512, 4), PAIR(avx512, 8), { &sdpa_kernel_##isa##_4_0, &sdpa_kernel_##few##_4_1 }                   \
        }                                                                                                              \
    }

const sdpa_isa sdpa_isas[] = {
#ifdef SDPA_HAVE_amx
    FOR_PAIRS(amx, avx512),
#endif
#ifdef SDPA_HAVE_avx512_bf16
    FOR_PAIRS(avx512_bf16, avx512_bf16),
#endif
#ifdef SDPA_HAVE_avx512
    LIST(avx512),
#endif
#ifdef SDPA_HAVE_avx2
    LIST(avx2),
#endif
#ifdef SDPA_HAVE_neon
    LIST(neon),
#endif
    LIST(baseline),
    {NULL, {{NULL, NULL}}}, /* the end */
};

#if defined(SDPA_HAVE_avx512) || defined(SDPA_HAVE_avx2)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* __builtin_cpu_supports also asks whether the operating system saves the wide registers.  Not all compilers let it ask
 * for F16C, whose registers are those of AVX2. */
static int converts_float16(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

#ifdef SDPA_HAVE_amx
/* Whether the CPU has AMX for bfloat16, and Linux lets this process use its registers, which it has to be asked for. */
static int multiplies_tiles(void)
{
#ifdef __linux__
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & AMX_BF16) && (edx & AMX_TILE) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#endif
#define HAS(flag) HAS_##flag
#define HAS_avx512f __builtin_cpu_supports("avx512f")
#define HAS_avx512bw __builtin_cpu_supports("avx512bw")
#define HAS_avx512dq __builtin_cpu_supports("avx512dq")
#define HAS_avx512vl __builtin_cpu_supports("avx512vl")
#define HAS_avx512bf16 __builtin_cpu_supports("avx512bf16")
#define HAS_amx_tile multiplies_tiles()
#define HAS_amx_bf16 HAS_amx_tile
#define HAS_avx2 __builtin_cpu_supports("avx2")
#define HAS_fma __builtin_cpu_supports("fma")
#define HAS_f16c converts_float16()
#endif

int sdpa_cpu_runs(const char *isa)
{
#if defined(SDPA_HAVE_avx512) || defined(SDPA_HAVE_avx2)
    __builtin_cpu_init();
#endif
#ifdef SDPA_HAVE_amx
    if (!strcmp(isa, "amx")) return SDPA_HAVE_amx;
#endif
#ifdef SDPA_HAVE_avx512_bf16
    if (!strcmp(isa, "avx512_bf16")) return SDPA_HAVE_avx512_bf16;
#endif
#ifdef SDPA_HAVE_avx512
    if (!strcmp(isa, "avx512")) return SDPA_HAVE_avx512;
#endif
#ifdef SDPA_HAVE_avx2
    if (!strcmp(isa, "avx2")) return SDPA_HAVE_avx2;
#endif
#ifdef SDPA_HAVE_neon
    if (!strcmp(isa, "neon")) return SDPA_HAVE_neon;
#endif
    return !strcmp(isa, "baseline");
}
