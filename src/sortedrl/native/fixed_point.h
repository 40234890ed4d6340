/* Numbers in fixed point for products: of 16 bits, in spans of inputs that share a step.
 *
 * AVX2 multiplies twice as many such numbers at a time as floats. A span is rounded to as small a step as leaves every
 * number within 16 bits and the span's norm below the root of 2^31: a sum of products with any other such span is then,
 * by Cauchy and Schwarz, within 32 bits, and exact. Rounding to steps loses a thirtieth of what bfloat16 loses.
 *
 * Numbers lie in pairs, those of inputs that are eight apart: so vectors of floats become vectors of pairs.
 */

#ifndef KERNEL_FIXED_H
#define KERNEL_FIXED_H

#include "vectors.h"

enum {
    SPAN = 192,
    PAIRS = SPAN / 2,
    NUMBER_MAX = 32767,
    NORM_MAX = 46333, /* with half a step more for each number of a span, its square is less than 2^31 */
};

typedef ivec pairs __attribute__((aligned(4), may_alias));

/* A span's numbers, n of them in whole pairs of vectors, and the step that they count: NaN where it is not finite. */
static float fix(const float *span, int64_t n, int32_t *numbers)
{
    const vec zero = {0}, magic = zero + 12582912.0f; /* so large that its last bits count ones */
    vec squares = zero, tops = zero;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec x = load(span + i), size = (vec)((ivec)x & 0x7fffffff);
        squares += x * x;
        tops = pick((ivec)(size > tops), size, tops);
    }
    const float norm = sqrtf(total(squares)), top = greatest(tops);
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

/* sum + x w of pairs. */
INLINE ivec add_products(ivec sum, ivec x, ivec w)
{
#ifdef __AVX2__
    ivec both; /* written down, since compilers that order them by themselves run out of registers */
    __asm__("vpmaddwd %2, %3, %0\n\tvpaddd %0, %1, %1" : "=&x"(both), "+x"(sum) : "x"(x), "x"(w));
    return sum;
#else
    return sum + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
}

#endif
