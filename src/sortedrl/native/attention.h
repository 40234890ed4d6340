/* Attention of tokens over the keys and values of their slot. Queries that share a key head are computed together, so
 * that keys and values are read once: several heads of a token, or consecutive tokens of a prefill.
 *
 * Guarantees: a query's result is the same to the last bit, whatever other queries are computed with it. */

#ifndef KERNEL_ATTENTION_H
#define KERNEL_ATTENTION_H

#include "vectors.h"
#include "wide_vectors.h"

enum { GROUP = 4 }; /* most queries that are computed together */

/* A token's query of one head, with where its result goes, and how many positions it attends to. In a group, queries
 * are ordered by these numbers. */
struct query {
    const float *head;
    float *out;
    int64_t n;
};

/* Apply the head's norm, if there is a gain, and the rotary embedding. x[i] and x[half + i] are rotated together. */
static void rotate(float *x, int64_t head_dim, const float *cosines, const float *sines, const float *gain, float floor)
{
    const int64_t half = head_dim / 2;
    if (gain) {
        const float factor = norm_factor(x, head_dim, floor);
        for (int64_t i = 0; i < head_dim; i++)
            x[i] = x[i] * factor * gain[i];
    }
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

INLINE void score_blocks(const struct query *queries, const float *keys, const float *next, int64_t head_dim, float *scores,
                         int64_t stride, const int group, const int blocks)
{
    vec sum[GROUP][4];
    for (int g = 0; g < group; g++)
        for (int b = 0; b < blocks; b++)
            sum[g][b] = (vec){0};
    for (int64_t i = 0; i < head_dim; i++)
        for (int b = 0; b < blocks; b++) {
            const vec key = load(keys + (b * head_dim + i) * LANES);
            if (b % 2 == 0) /* a cache line holds two vectors */
                __builtin_prefetch(next + (b * head_dim + 2 * i) * LANES);
            for (int g = 0; g < group; g++)
                sum[g][b] += queries[g].head[i] * key;
        }
    for (int g = 0; g < group; g++)
        for (int b = 0; b < blocks; b++)
            store(scores + g * stride + b * LANES, sum[g][b]);
}

/* Scores of a group's queries with `blocks` blocks of keys. `at_once` blocks are computed together, so that their sums
 * do not wait for each other. Prefetches the same amount of memory from `next` on. */
INLINE void score(const struct query *queries, const float *keys, const float *next, int64_t head_dim, int64_t blocks,
                  float *scores, int64_t stride, const int group, const int at_once)
{
    const int64_t block = head_dim * LANES;
    int64_t b = 0;
    for (; b + at_once <= blocks; b += at_once)
        score_blocks(queries, keys + b * block, next + b * block, head_dim, scores + b * LANES, stride, group, at_once);
    for (; b < blocks; b++)
        score_blocks(queries, keys + b * block, next + b * block, head_dim, scores + b * LANES, stride, group, 1);
}

/* Replace the scores of n positions by e^(score - maximum), and return the sum: the softmax before its division. */
static float softmax_weights(float *scores, int64_t n)
{
    const int64_t whole = (n + LANES - 1) / LANES * LANES;
    for (int64_t i = n; i < whole; i++)
        scores[i] = -INFINITY;
    vec tops = load(scores);
    for (int64_t i = LANES; i < whole; i += LANES)
        tops = pick((ivec)(load(scores + i) > tops), load(scores + i), tops);
    const float top = lane_max(tops);
    for (int64_t i = 0; i < whole; i += LANES)
        store(scores + i, exponential(load(scores + i) - top));
    for (int64_t i = n; i < whole; i++)
        scores[i] = 0;
    vec sum = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sum += load(scores + i);
    return lane_sum(sum);
}

/* Weighted sums of the values, from element `first` of the head on, for `vectors` vectors. Even and odd positions have
 * separate sums, which are added at the end. Prefetches the same amount of memory from `next` on. */
INLINE void weighted_sums(const struct query *queries, const float *weights, int64_t stride, const float *values,
                          const float *next, int64_t head_dim, int64_t first, const float *factors, const int group,
                          const int vectors)
{
    vec sum[2][GROUP][4]; /* set one by one: compilers would clear the whole array in memory */
    for (int g = 0; g < group; g++)
        for (int c = 0; c < vectors; c++)
            sum[0][g][c] = sum[1][g][c] = (vec){0};
    const int64_t shared = queries[0].n / 2 * 2; /* positions of all queries */
    for (int64_t p = 0; p < shared; p += 2)
        for (int s = 0; s < 2; s++) {
            __builtin_prefetch(next + (p + s) * vectors * LANES);
            for (int c = 0; c < vectors; c++) {
                const vec value = load(values + (p + s) * head_dim + first + c * LANES);
                for (int g = 0; g < group; g++)
                    sum[s][g][c] += weights[g * stride + p + s] * value;
            }
        }
    for (int g = 0; g < group; g++) {
        const float *own = weights + g * stride;
        int64_t p = shared;
        for (; p + 2 <= queries[g].n; p += 2)
            for (int s = 0; s < 2; s++)
                for (int c = 0; c < vectors; c++)
                    sum[s][g][c] += own[p + s] * load(values + (p + s) * head_dim + first + c * LANES);
        for (int c = 0; c < vectors && p < queries[g].n; c++)
            sum[0][g][c] += own[p] * load(values + p * head_dim + first + c * LANES);
        for (int c = 0; c < vectors; c++)
            store(queries[g].out + first + c * LANES, (sum[0][g][c] + sum[1][g][c]) * factors[g]);
    }
}

/* Attention of a group's queries; sums `vectors` vectors of the values at a time. */
INLINE void attend_group(const struct query *queries, const float *keys, const float *values, const float *next,
                         int64_t head_dim, float *scores, int64_t stride, const int group, const int at_once,
                         const int vectors)
{
    float factors[GROUP];
    const int64_t n = queries[group - 1].n;
    score(queries, keys, values, head_dim, (n + LANES - 1) / LANES, scores, stride, group, at_once);
    for (int g = 0; g < group; g++)
        factors[g] = 1.0f / softmax_weights(scores + g * stride, queries[g].n);
    int64_t i = 0;
    for (; i + vectors * LANES <= head_dim; i += vectors * LANES)
        weighted_sums(queries, scores, stride, values, next + i * n, head_dim, i, factors, group, vectors);
    for (; i < head_dim; i += LANES)
        weighted_sums(queries, scores, stride, values, next + i * n, head_dim, i, factors, group, 1);
}

/* Each group size has as many sums at once as there are registers. Keys and values come from memory, so values are
 * prefetched while scores are computed, and the next call's keys, at `next`, while values are summed. */
static void narrow_attend(const struct query *queries, int64_t group, const float *keys, const float *values,
                   const float *next, int64_t head_dim, float *scores, int64_t stride)
{
    switch (group) {
    case 1: attend_group(queries, keys, values, next, head_dim, scores, stride, 1, 4, 4); break;
    case 2: attend_group(queries, keys, values, next, head_dim, scores, stride, 2, 4, 2); break;
    case 3: attend_group(queries, keys, values, next, head_dim, scores, stride, 3, 4, 2); break;
    default: attend_group(queries, keys, values, next, head_dim, scores, stride, GROUP, 2, 1);
    }
}

#if HAS_WIDE_VECTORS
/* With twice the registers. */
static WIDE_TARGET void wide_attend(const struct query *queries, int64_t group, const float *keys, const float *values,
                                    const float *next, int64_t head_dim, float *scores, int64_t stride)
{
    switch (group) {
    case 1: attend_group(queries, keys, values, next, head_dim, scores, stride, 1, 4, 4); break;
    case 2: attend_group(queries, keys, values, next, head_dim, scores, stride, 2, 4, 4); break;
    case 3: attend_group(queries, keys, values, next, head_dim, scores, stride, 3, 4, 4); break;
    default: attend_group(queries, keys, values, next, head_dim, scores, stride, GROUP, 4, 2);
    }
}
#endif

static void attend(const struct query *queries, int64_t group, const float *keys, const float *values,
                   const float *next, int64_t head_dim, float *scores, int64_t stride)
{
#if HAS_WIDE_VECTORS
    if (has_wide_vectors()) {
        wide_attend(queries, group, keys, values, next, head_dim, scores, stride);
        return;
    }
#endif
    narrow_attend(queries, group, keys, values, next, head_dim, scores, stride);
}

#endif
