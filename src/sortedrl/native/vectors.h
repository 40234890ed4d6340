/* Vectors of eight floats, and functions on them. The kernel's headers and the learner's `layers.c` use them. */

#ifndef KERNEL_VECTORS_H
#define KERNEL_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8 };

#define INLINE static inline __attribute__((always_inline))

/* Where the processor's vectors are shorter, the compiler splits these. */
typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32)));

static inline vec load(const float *p) { return *(const vec *)p; }

static inline void store(float *p, vec x) { *(vec *)p = x; }

static inline float lane_sum(vec x)
{
    float s = 0;
    for (int i = 0; i < LANES; i++)
        s += x[i];
    return s;
}

static inline float lane_max(vec x)
{
    float top = x[0];
    for (int i = 1; i < LANES; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static inline vec pick(ivec is_first, vec first, vec second)
{
    return (vec)((is_first & (ivec)first) | (~is_first & (ivec)second));
}

/* e^x = 2^k e^f with |f| <= log(2) / 2, where eight Taylor terms are exact to float32. NaN stays NaN. */
static inline vec exponential(vec x)
{
    const vec zero = {0}, least = zero - 87.3f, most = zero + 88.0f, magic = zero + 12582912.0f;
    x = pick((ivec)(x < least), least, x);
    x = pick((ivec)(x > most), most, x);
    vec k = x * 1.44269504f + magic; /* adding and subtracting 1.5 * 2^23 rounds to an integer */
    k = k - magic;
    vec f = x - k * 0.693359375f + k * 2.12194440e-4f;
    vec y = zero + 1.0f / 5040;
    y = y * f + 1.0f / 720;
    y = y * f + 1.0f / 120;
    y = y * f + 1.0f / 24;
    y = y * f + 1.0f / 6;
    y = y * f + 0.5f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    ivec power = (__builtin_convertvector(k, ivec) + 127) << 23;
    return y * (vec)power;
}

/* gate / (1 + e^-gate) * up. */
static inline vec gated_silu(vec gate, vec up) { return gate / (1.0f + exponential(-gate)) * up; }

/* 1 / sqrt(sum(x^2) + floor): an RMS norm without the factor that is folded into the next weights. n is a multiple of
 * LANES. */
static float norm_factor(const float *x, int64_t n, float floor)
{
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES)
        squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(lane_sum(squares) + floor);
}

#endif
