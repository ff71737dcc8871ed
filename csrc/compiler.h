/* What compilers other than GCC and clang lack, MSVC among them: all that is not C11 stands in this file alone, behind
 * macros that mean nothing there.  (The instruction sets need those compilers anyway; setup.py asks.)
 *
 *     UNROLL_FOR       a loop of few iterations, written out
 *     INDEPENDENT      for a loop none of whose iterations reads what another one writes, although addresses may be equal
 *     ALWAYS_INLINE    where constant arguments become part of the code
 *     NOINLINE         what is compiled on its own
 *     ALL_WRITTEN      what was written is in memory, and not still in a register
 *     NOT_DERIVED      an address that the compiler shall keep in a register, and not compute from others that it knows
 *     IN_REGISTER      a vector of x86 that is in a register here
 *     PREFETCH         asks for a cache line, into all caches (3) or from the second level on (2)
 *     PAUSE            leaves the core to what else runs on it, for a moment */
#ifndef SDPA_COMPILER_H
#define SDPA_COMPILER_H

#if defined(__clang__)
#define UNROLL_FOR _Pragma("clang loop unroll(full)") for
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define UNROLL_FOR _Pragma("GCC unroll 24") for
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define UNROLL_FOR for
#define INDEPENDENT
#endif

#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define PREFETCH(at, level) __builtin_prefetch(at, 0, level)
#define ALL_WRITTEN() __asm__ volatile("" ::: "memory")
#define NOT_DERIVED(at) __asm__("" : "+r"(at))
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#else
#define ALWAYS_INLINE
#define NOINLINE
#define PREFETCH(at, level) (void)(at)
#define ALL_WRITTEN()
#define NOT_DERIVED(at) (void)(at)
#define IN_REGISTER(vector) (void)(vector)
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define PAUSE() __asm__ volatile("isb" ::: "memory")
#else
#define PAUSE() (void)0
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define NO_LOOP_VECTORIZE _Pragma("GCC optimize(\"no-tree-loop-vectorize\")")
#else
#define NO_LOOP_VECTORIZE
#endif

#endif
