/* Draws by the noise scheme of `noise.py`: per row the token of largest logit + noise, without noise for all of them.
 *
 * With u the uniform number behind a token's noise g = -log(-log u), g <= -log(1 - u) since -log u >= 1 - u, and the
 * leading zeros of 1 - u bound that from above. A token whose logit and bound stay below the best score so far cannot
 * win, and its noise is never made; so the result is that of the definition.
 */

#ifndef KERNEL_DRAW_H
#define KERNEL_DRAW_H

#include "vectors.h"

enum {
    TOKENS = 16, /* looked at together */
    SHIFT = 9,   /* one token in 2^SHIFT has more noise than is taken for granted */
};

typedef uint32_t uvec __attribute__((vector_size(32)));
typedef int64_t lvec __attribute__((vector_size(32)));

static const uint64_t INCREMENT = 0x9E3779B97F4A7C15;
static const float LOG_2 = 0.69314720f; /* rounded up */
static const float MOST = 22.873858f; /* noise is never more */
static const float SLACK = 1e-3f;     /* far more than a score is rounded by */

INLINE uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static float noise(uint32_t bits) { return (float)-log(-log((bits + 0.5) / 4294967296.0)); }

/* No less than the noise of these bits. */
INLINE float noise_bound(uint32_t bits)
{
    const uint32_t rest = ~bits; /* 1 - u is (rest + 1/2) / 2^32 */
    return rest ? (__builtin_clz(rest) + 1) * LOG_2 : MOST;
}

/* The largest of n numbers, and the first that is; a NaN is passed over. */
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

/* log(sum(exp(x))); NaN if any is. */
static float normalizer(const float *x, int64_t n, float top)
{
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum += exponential(load(x + i) - top);
    float rest = 0;
    for (; i < n; i++)
        rest += expf(x[i] - top);
    return top + logf(total(sum) + rest);
}

struct leader {
    int64_t token;
    float score;
};

static void challenge(struct leader *leader, float x, uint32_t bits, int64_t token)
{
    if (x + noise_bound(bits) + SLACK < leader->score)
        return;
    const float score = x + noise(bits);
    if (score > leader->score || (score == leader->score && token < leader->token))
        *leader = (struct leader){token, score};
}

/* Whether any of these tokens has a chance: noise of more than SHIFT log 2, or a logit that needs no more than that. */
INLINE int is_open(const float *x, const uint32_t *bits, float needed)
{
    ivec found = {0};
    for (int i = 0; i < TOKENS; i += LANES) {
        const uvec drawn = *(const uvec *)(bits + i);
        found |= (ivec)(drawn >= (UINT32_MAX << (32 - SHIFT))) | (ivec)(load(x + i) >= needed);
    }
    const lvec halves = (lvec)found;
    return (halves[0] | halves[1] | halves[2] | halves[3]) != 0;
}

static int64_t draw_row(const float *x, int64_t n, uint64_t key, int64_t first)
{
    uint32_t bits[TOKENS] __attribute__((aligned(32)));
    struct leader leader = {first, x[first] + noise(mix(key + INCREMENT * (uint64_t)(first + 1)) >> 32)};
    for (int64_t start = 0; start < n; start += TOKENS) {
        const int64_t num = n - start < TOKENS ? n - start : TOKENS;
        for (int64_t i = 0; i < TOKENS; i++)
            bits[i] = mix(key + INCREMENT * (uint64_t)(start + i + 1)) >> 32;
        if (num < TOKENS || is_open(x + start, bits, leader.score - SHIFT * LOG_2 - SLACK))
            for (int64_t i = 0; i < num; i++)
                challenge(&leader, x[start + i], bits[i], start + i);
    }
    return leader.token;
}

/* Rows `rank`, `rank + size` and so on: the token drawn at a position with a seed, or the likeliest of a row that is not
 * random, and what the row's distribution is normalised by, as a logarithm. */
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
