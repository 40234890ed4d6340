/* Whether functions for AVX-512 are compiled, and whether this processor can run them.
 *
 * The files are compiled for AVX2, and only functions with WIDE_TARGET may use more. Fixed point needs VNNI as well, so
 * a processor must have all of it.
 */

#ifndef KERNEL_WIDE_VECTORS_H
#define KERNEL_WIDE_VECTORS_H

#if defined(__AVX2__) && defined(__x86_64__) && !defined(NO_WIDE_VECTORS) && (__GNUC__ >= 9 || __clang_major__ >= 9)
#define HAS_WIDE_VECTORS 1
#define WIDE_TARGET __attribute__((target("avx512f,avx512vl,avx512vnni"), noinline))
#define WIDE_INLINE __attribute__((target("avx512f,avx512vl,avx512vnni"), always_inline)) static inline

static int has_wide_vectors(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#else
#define HAS_WIDE_VECTORS 0
static int has_wide_vectors(void) { return 0; }
#endif

#endif
