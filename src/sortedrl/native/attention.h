/* Attention of one token over a slot's keys and values: the query heads that share them read them together. */

#ifndef KERNEL_ATTENTION_H
#define KERNEL_ATTENTION_H

#include "vectors.h"

enum { GROUP = 4 }; /* heads at once, at most */

/* A head's query or key turned to its position: its halves hold what turns together. */
static void turn(float *x, int64_t head_dim, const float *cosines, const float *sines, const float *gain, float floor)
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

INLINE void score_blocks(const float *queries, const float *keys, const float *next, int64_t head_dim, float *scores,
                         int64_t stride, const int group, const int blocks)
{
    vec sum[GROUP][4] = {{{0}}};
    for (int64_t i = 0; i < head_dim; i++)
        for (int b = 0; b < blocks; b++) {
            const vec key = load(keys + (b * head_dim + i) * LANES);
            if (b % 2 == 0) /* a line is two vectors */
                __builtin_prefetch(next + (b * head_dim + 2 * i) * LANES);
            for (int g = 0; g < group; g++)
                sum[g][b] += queries[g * head_dim + i] * key;
        }
    for (int g = 0; g < group; g++)
        for (int b = 0; b < blocks; b++)
            store(scores + g * stride + b * LANES, sum[g][b]);
}

/* Scores of a group's queries with the first keys, in whole blocks; `at_once`: chains of sums that do not wait. As much
 * is fetched from `next` on meanwhile. */
INLINE void score(const float *queries, const float *keys, const float *next, int64_t head_dim, int64_t blocks,
                  float *scores, int64_t stride, const int group, const int at_once)
{
    const int64_t block = head_dim * LANES;
    int64_t b = 0;
    for (; b + at_once <= blocks; b += at_once)
        score_blocks(queries, keys + b * block, next + b * block, head_dim, scores + b * LANES, stride, group, at_once);
    for (; b < blocks; b++)
        score_blocks(queries, keys + b * block, next + b * block, head_dim, scores + b * LANES, stride, group, 1);
}

/* Weights of n positions from their scores, in place and not yet divided; returns what they add up to. */
static float soften(float *scores, int64_t n)
{
    const int64_t whole = (n + LANES - 1) / LANES * LANES;
    for (int64_t i = n; i < whole; i++)
        scores[i] = -INFINITY;
    vec tops = load(scores);
    for (int64_t i = LANES; i < whole; i += LANES)
        tops = pick((ivec)(load(scores + i) > tops), load(scores + i), tops);
    const float top = greatest(tops);
    for (int64_t i = 0; i < whole; i += LANES)
        store(scores + i, exponential(load(scores + i) - top));
    for (int64_t i = n; i < whole; i++)
        scores[i] = 0;
    vec sum = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sum += load(scores + i);
    return total(sum);
}

/* The weighted sums of n values, `vectors` vectors of them; even and odd positions in sums of their own. As much is
 * fetched from `next` on meanwhile. */
INLINE void blend(const float *weights, int64_t stride, const float *values, const float *next, int64_t n,
                  int64_t head_dim, const float *factors, float *out, const int group, const int vectors)
{
    vec sum[2][GROUP][4] = {{{{0}}}};
    int64_t p = 0;
    for (; p + 2 <= n; p += 2)
        for (int s = 0; s < 2; s++) {
            __builtin_prefetch(next + (p + s) * vectors * LANES);
            for (int c = 0; c < vectors; c++) {
                const vec value = load(values + (p + s) * head_dim + c * LANES);
                for (int g = 0; g < group; g++)
                    sum[s][g][c] += weights[g * stride + p + s] * value;
            }
        }
    if (p < n)
        for (int c = 0; c < vectors; c++)
            for (int g = 0; g < group; g++)
                sum[0][g][c] += weights[g * stride + p] * load(values + p * head_dim + c * LANES);
    for (int g = 0; g < group; g++)
        for (int c = 0; c < vectors; c++)
            store(out + g * head_dim + c * LANES, (sum[0][g][c] + sum[1][g][c]) * factors[g]);
}

/* A group's queries over n positions; `vectors` of a value at a time. */
INLINE void attend_group(const float *queries, const float *keys, const float *values, const float *next, int64_t n,
                         int64_t head_dim, float *scores, int64_t stride, float *out, const int group,
                         const int at_once, const int vectors)
{
    float factors[GROUP];
    score(queries, keys, values, head_dim, (n + LANES - 1) / LANES, scores, stride, group, at_once);
    for (int g = 0; g < group; g++)
        factors[g] = 1.0f / soften(scores + g * stride, n);
    int64_t i = 0;
    for (; i + vectors * LANES <= head_dim; i += vectors * LANES)
        blend(scores, stride, values + i, next + i * n, n, head_dim, factors, out + i, group, vectors);
    for (; i < head_dim; i += LANES)
        blend(scores, stride, values + i, next + i * n, n, head_dim, factors, out + i, group, 1);
}

/* Each kind with as many sums at once as there are registers for. All keys and values come from memory: values are
 * fetched while keys are worked on, and the keys that come next, at `next`, while values are. */
static void attend(const float *queries, const float *keys, const float *values, const float *next, int64_t n,
                   int64_t head_dim, float *scores, int64_t stride, float *out, int64_t group)
{
    switch (group) {
    case 1: attend_group(queries, keys, values, next, n, head_dim, scores, stride, out, 1, 4, 4); break;
    case 2: attend_group(queries, keys, values, next, n, head_dim, scores, stride, out, 2, 4, 2); break;
    case 3: attend_group(queries, keys, values, next, n, head_dim, scores, stride, out, 3, 4, 2); break;
    default: attend_group(queries, keys, values, next, n, head_dim, scores, stride, out, GROUP, 2, 1);
    }
}

#endif
