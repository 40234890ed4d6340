/* Fixed-point numbers for matrix products: 16-bit integers. Inputs form spans, and each span has one step size.
 *
 * Vector instructions multiply twice as many such numbers at a time as floats. A span's step is the smallest for which
 * every number fits in 16 bits and the span's norm is below sqrt(2^31). By Cauchy-Schwarz, the sum of products of two
 * spans then fits in 32 bits, so it is exact. The rounding error is a thirtieth of bfloat16's.
 *
 * Numbers are stored in pairs of inputs that are eight apart, so that two vectors of floats become one vector of pairs.
 */

#ifndef KERNEL_FIXED_H
#define KERNEL_FIXED_H

#include "vectors.h"

enum {
    SPAN = 192,
    PAIRS = SPAN / 2,
    NUMBER_MAX = 32767,
    NORM_MAX = 46333, /* so that the squared norm is below 2^31 even if rounding adds half a step to every number */
};

typedef ivec pairs __attribute__((aligned(4), may_alias));

/* Convert n numbers of a span (n is a multiple of 2 * LANES), and return their step; NaN if a number is not finite. */
static float to_fixed(const float *span, int64_t n, int32_t *numbers)
{
    const vec zero = {0}, magic = zero + 12582912.0f; /* adding 1.5 * 2^23 leaves the rounded integer in the low bits */
    vec squares = zero, tops = zero;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec x = load(span + i), size = (vec)((ivec)x & 0x7fffffff);
        squares += x * x;
        tops = pick((ivec)(size > tops), size, tops);
    }
    const float norm = sqrtf(lane_sum(squares)), top = lane_max(tops);
    if (!(norm > 0 && norm < INFINITY)) {
        memset(numbers, 0, n / 2 * sizeof *numbers);
        return norm * 0;
    }
    const float by_norm = NORM_MAX / norm, by_top = NUMBER_MAX / top, steps = by_norm < by_top ? by_norm : by_top;
    for (int64_t i = 0; i < n; i += 2 * LANES) {
        const ivec low = (ivec)(load(span + i) * steps + magic), high = (ivec)(load(span + i + LANES) * steps + magic);
        *(pairs *)(numbers + i / 2) = (low & 0xffff) | high << 16;
    }
    return 1 / steps;
}

/* sum + x * w for pairs. */
INLINE ivec add_products(ivec sum, ivec x, ivec w)
{
#ifdef __AVX2__
    ivec both; /* in assembly, because compilers schedule the intrinsics so that registers run out */
    __asm__("vpmaddwd %2, %3, %0\n\tvpaddd %0, %1, %1" : "=&x"(both), "+x"(sum) : "x"(x), "x"(w));
    return sum;
#else
    return sum + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
}

#endif
