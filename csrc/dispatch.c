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

/* Registers that the operating system saves, as bits of XCR0.  macOS saves those of AVX-512 from their first use on, and
 * does not say so before. */
enum { WIDE = 0x6 };
#ifdef __APPLE__
enum { WIDEST = WIDE };
#else
enum { WIDEST = 0xE6 };
#endif

static int system_saves(unsigned registers)
{
    enum { OSXSAVE = 1 << 27 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return (eax & registers) == registers;
}

/* Whether CPUID has set the bit, which each of its answers numbers anew.  What compilers have for this asks a table of
 * libgcc, which not all linkers have. */
static int cpu_says(unsigned leaf, unsigned subleaf, char answer, int bit)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(leaf, subleaf, &a, &b, &c, &d)) return 0;
    return (answer == 'a' ? a : answer == 'b' ? b : answer == 'c' ? c : d) >> bit & 1;
}

#ifdef SDPA_HAVE_amx
/* Linux lets a process use the registers of AMX that has asked for them. */
static int may_use_tiles(void)
{
#ifdef __linux__
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#endif
#define HAS(flag) HAS_##flag
#define HAS_avx512f (cpu_says(7, 0, 'b', 16) && system_saves(WIDEST))
#define HAS_avx512bw cpu_says(7, 0, 'b', 30)
#define HAS_avx512dq cpu_says(7, 0, 'b', 17)
#define HAS_avx512vl cpu_says(7, 0, 'b', 31)
#define HAS_avx512bf16 cpu_says(7, 1, 'a', 5)
#define HAS_amx_tile (cpu_says(7, 0, 'd', 24) && may_use_tiles())
#define HAS_amx_bf16 cpu_says(7, 0, 'd', 22)
#define HAS_avx2 (cpu_says(7, 0, 'b', 5) && system_saves(WIDE))
#define HAS_fma cpu_says(1, 0, 'c', 12)
#define HAS_f16c cpu_says(1, 0, 'c', 29)
#endif

int sdpa_cpu_runs(const char *isa)
{
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
