/* Draw tokens by the noise scheme of `engine/sampling/noise.py`: in each row, the token with the largest logit + noise.
 * Noise is computed for few tokens only.
 *
 * A token's noise is g = -log(-log(1 - u)) with a uniform number u. Since -log(1 - u) >= u, g <= -log u, and the number
 * of leading zeros of u gives an upper bound of that. If a token's logit plus this bound is below the best score so
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

static const float LOG_2 = 0.69314720f; /* rounded up */
static const float MAX_NOISE = 22.873858f;  /* upper bound of any noise */
static const float ROUNDING_MARGIN = 1e-3f; /* far more than the rounding error of a score */
static const float MAX_UNIFORM = 0x1.fffffep-1f;

/* The steps of murmur3. A word is first multiplied by WORD_FACTOR, and consecutive words by adding to the product. */
static const uint32_t WORD_FACTOR = 0xCC9E2D51;

INLINE uvec rotate_bits(uvec x, int count) { return x << count | x >> (32 - count); }

INLINE uvec mix(uvec h, uvec product) { return rotate_bits(h ^ rotate_bits(product, 15) * 0x1B873593, 13) * 5 + 0xE6546B64; }

INLINE uvec mix_word(uvec h, uint32_t word) { return mix(h, (uvec){0} + word * WORD_FACTOR); }

INLINE uvec finish(uvec h)
{
    h ^= 16;
    h = (h ^ h >> 16) * 0x85EBCA6B;
    h = (h ^ h >> 13) * 0xC2B2AE35;
    return h ^ h >> 16;
}

static float noise(uint32_t bits)
{
    const float u = (float)((bits + 0.5) / 4294967296.0);
    return (float)-log(-log1p(-(double)(u < MAX_UNIFORM ? u : MAX_UNIFORM)));
}

/* An upper bound of the noise of these bits. */
INLINE float noise_bound(uint32_t bits) { return bits ? (__builtin_clz(bits) + 1) * LOG_2 : MAX_NOISE; }

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
        found |= (ivec)(drawn <= UINT32_MAX >> HIGH_NOISE_SHIFT) | (ivec)(load(x + i) >= needed);
    }
    const lvec halves = (lvec)found;
    return (halves[0] | halves[1] | halves[2] | halves[3]) != 0;
}

static int64_t draw_row(const float *x, int64_t n, uvec key, int64_t first)
{
    uint32_t bits[TOKENS_AT_ONCE] __attribute__((aligned(32)));
    struct candidate best = {first, x[first] + noise(finish(mix_word(key, (uint32_t)first))[0])};
    uvec products = {0, 1, 2, 3, 4, 5, 6, 7};
    products *= WORD_FACTOR;
    for (int64_t start = 0; start < n; start += TOKENS_AT_ONCE) {
        const int64_t num = n - start < TOKENS_AT_ONCE ? n - start : TOKENS_AT_ONCE;
        for (int i = 0; i < TOKENS_AT_ONCE; i += LANES) {
            *(uvec *)(bits + i) = finish(mix(key, products));
            products += LANES * WORD_FACTOR;
        }
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
        const uint64_t seed = (uint64_t)seeds[r];
        uvec key = {0};
        key = mix_word(mix_word(key, (uint32_t)seed), (uint32_t)(seed >> 32));
        key = mix_word(key, (uint32_t)positions[r]);
        tokens[r] = is_random[r] ? draw_row(x, vocab, key, first) : first;
    }
}

#endif
