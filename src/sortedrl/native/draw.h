/* Draw tokens by the noise scheme of `engine/sampling/noise.py`: in each row, the token with the largest logit + noise.
 * Noise is computed for few tokens only.
 *
 * A token's noise is g = -log(-log u) with a uniform number u. Since -log u >= 1 - u, g <= -log(1 - u), and the number
 * of leading zeros of 1 - u gives an upper bound of that. If a token's logit plus this bound is below the best score so
 * far, the token cannot win, and its noise is not computed. So the result is the same as with noise for every token.
 */

#ifndef KERNEL_DRAW_H
#define KERNEL_DRAW_H

#include "vectors.h"

enum {
    TOKENS_AT_ONCE = 16,  /* checked together */
    HIGH_NOISE_SHIFT = 9, /* one token in 2^HIGH_NOISE_SHIFT has more noise than the check assumes */
};

typedef uint32_t uvec __attribute__((vector_size(32)));
typedef int64_t lvec __attribute__((vector_size(32)));

static const uint64_t INCREMENT = 0x9E3779B97F4A7C15;
static const float LOG_2 = 0.69314720f; /* rounded up */
static const float MAX_NOISE = 22.873858f;  /* upper bound of any noise */
static const float ROUNDING_MARGIN = 1e-3f; /* far more than the rounding error of a score */

INLINE uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static float noise(uint32_t bits) { return (float)-log(-log((bits + 0.5) / 4294967296.0)); }

/* An upper bound of the noise of these bits. */
INLINE float noise_bound(uint32_t bits)
{
    const uint32_t rest = ~bits; /* 1 - u is (rest + 1/2) / 2^32 */
    return rest ? (__builtin_clz(rest) + 1) * LOG_2 : MAX_NOISE;
}

/* The index of the first largest of n numbers; NaN is ignored. */
static int64_t largest(const float *x, int64_t n)
{
    vec tops = {0};
    tops -= INFINITY;
    int64_t i = 0, best = 0;
    for (; i + LANES <= n; i += LANES)
        tops = pick((ivec)(load(x + i) > tops), load(x + i), tops);
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        top = tops[lane] > top ? tops[lane] : top;
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    for (best = 0; best < n && x[best] != top; best++)
        ;
    return best < n ? best : 0;
}

/* log(sum(exp(x))); NaN if any x is NaN. */
static float normalizer(const float *x, int64_t n, float top)
{
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum += exponential(load(x + i) - top);
    float rest = 0;
    for (; i < n; i++)
        rest += expf(x[i] - top);
    return top + logf(lane_sum(sum) + rest);
}

struct candidate {
    int64_t token;
    float score;
};

static void consider(struct candidate *best, float x, uint32_t bits, int64_t token)
{
    if (x + noise_bound(bits) + ROUNDING_MARGIN < best->score)
        return;
    const float score = x + noise(bits);
    if (score > best->score || (score == best->score && token < best->token))
        *best = (struct candidate){token, score};
}

/* Whether any of these tokens may win: its noise exceeds HIGH_NOISE_SHIFT * log 2, or its logit needs no more than
 * that. */
INLINE int may_win(const float *x, const uint32_t *bits, float needed)
{
    ivec found = {0};
    for (int i = 0; i < TOKENS_AT_ONCE; i += LANES) {
        const uvec drawn = *(const uvec *)(bits + i);
        found |= (ivec)(drawn >= (UINT32_MAX << (32 - HIGH_NOISE_SHIFT))) | (ivec)(load(x + i) >= needed);
    }
    const lvec halves = (lvec)found;
    return (halves[0] | halves[1] | halves[2] | halves[3]) != 0;
}

static int64_t draw_row(const float *x, int64_t n, uint64_t key, int64_t first)
{
    uint32_t bits[TOKENS_AT_ONCE] __attribute__((aligned(32)));
    struct candidate best = {first, x[first] + noise(mix(key + INCREMENT * (uint64_t)(first + 1)) >> 32)};
    for (int64_t start = 0; start < n; start += TOKENS_AT_ONCE) {
        const int64_t num = n - start < TOKENS_AT_ONCE ? n - start : TOKENS_AT_ONCE;
        for (int64_t i = 0; i < TOKENS_AT_ONCE; i++)
            bits[i] = mix(key + INCREMENT * (uint64_t)(start + i + 1)) >> 32;
        if (num < TOKENS_AT_ONCE || may_win(x + start, bits, best.score - HIGH_NOISE_SHIFT * LOG_2 - ROUNDING_MARGIN))
            for (int64_t i = 0; i < num; i++)
                consider(&best, x[start + i], bits[i], start + i);
    }
    return best.token;
}

/* Draw the tokens of rows `rank`, `rank + size` and so on: at random with the row's seed and position, or the most
 * likely token if the row is not random. Also writes the rows' logsumexp. */
void sortedrl_draw(int64_t rank, int64_t size, int64_t rows, int64_t vocab, const float *logits, const int64_t *seeds,
                   const int64_t *positions, const uint8_t *is_random, int64_t *tokens, float *normalizers)
{
    for (int64_t r = rank; r < rows; r += size) {
        const float *x = logits + r * vocab;
        const int64_t first = largest(x, vocab);
        normalizers[r] = normalizer(x, vocab, x[first]);
        const uint64_t key = mix(mix((uint64_t)seeds[r]) + INCREMENT * ((uint64_t)positions[r] + 1));
        tokens[r] = is_random[r] ? draw_row(x, vocab, key, first) : first;
    }
}

#endif
