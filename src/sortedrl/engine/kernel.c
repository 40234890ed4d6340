/* A forward pass of a small Llama as one call: from tokens to logits, on one thread.
 *
 * `kernel.py` compiles it, `native.py` lays out weights for it and calls it. A model of this size spends a step of
 * torch calls on calling; here nothing but arithmetic is left. What it keeps true: every token is computed by the same
 * operations in the same order, whichever others share the call and in however many calls they come. Rows are worked on
 * in tiles of four, and a tile that is not full computes rows that nobody reads: there is no second way through the
 * code. So an answer does not depend on its neighbours, and a prefill gives what decoding gives, to the last bit.
 *
 * Shapes: weights lie in panels of 16 outputs, [outputs / 16][inputs][16]; keys in blocks of 8 positions,
 * [positions / 8][head size][8]; values as [positions][head size]. Rows of working memory are as long as whole panels,
 * and zero past their content.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8, PANEL = 16, TILE = 4, CHUNK = 32 };

/* Compilers split it where the processor's vectors are shorter. */
typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32)));

struct layer {
    const float *qkv, *qkv_bias, *q_gain, *k_gain; /* no bias, no gains: null */
    const float *out, *gate_up, *down;
};

struct model {
    int64_t num_layers, size, inner, heads, kv_heads, head_dim, vocab;
    int64_t slots, positions;           /* of the cache; positions are whole blocks */
    float floor, head_floor, scale;     /* size * eps of the norms, and the factor of attention scores */
    const struct layer *layers;
    const float *embedding, *head;
    const float *cosines, *sines;       /* [positions][head size / 2] */
    float *cache;                       /* [layers][keys, values][slots][kv heads][positions][head size] */
};

static inline vec load(const float *p) { return *(const vec *)p; }

static inline void store(float *p, vec x) { *(vec *)p = x; }

static inline float total(vec x)
{
    float s = 0;
    for (int i = 0; i < LANES; i++)
        s += x[i];
    return s;
}

static inline vec pick(ivec is_first, vec first, vec second)
{
    return (vec)((is_first & (ivec)first) | (~is_first & (ivec)second));
}

/* e^x = 2^k e^f with |f| <= log(2) / 2, where eight terms leave less than float32 shows. NaN stays NaN. */
static inline vec exponential(vec x)
{
    const vec zero = {0}, least = zero - 87.3f, most = zero + 88.0f, magic = zero + 12582912.0f;
    x = pick((ivec)(x < least), least, x);
    x = pick((ivec)(x > most), most, x);
    vec k = x * 1.44269504f + magic; /* so large that its last bit counts ones: rounds to the nearest */
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

static inline int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* y = x w, or y = bias + x w, or y += x w. */
static void product(const float *x, int64_t x_stride, const float *w, const float *bias, float *y, int64_t y_stride,
                    int64_t rows, int64_t inputs, int64_t outputs, int adds)
{
    for (int64_t o = 0; o < outputs; o += PANEL, w += inputs * PANEL)
        for (int64_t r = 0; r < rows; r += TILE) {
            vec sum[TILE][2];
            for (int t = 0; t < TILE; t++) {
                const float *start = adds ? y + (r + t) * y_stride + o : bias ? bias + o : 0;
                sum[t][0] = start ? load(start) : (vec){0};
                sum[t][1] = start ? load(start + LANES) : (vec){0};
            }
            const float *row = x + r * x_stride;
            for (int64_t i = 0; i < inputs; i++) {
                const vec w0 = load(w + i * PANEL), w1 = load(w + i * PANEL + LANES);
                for (int t = 0; t < TILE; t++) {
                    const float value = row[t * x_stride + i];
                    sum[t][0] += value * w0;
                    sum[t][1] += value * w1;
                }
            }
            for (int t = 0; t < TILE; t++) {
                store(y + (r + t) * y_stride + o, sum[t][0]);
                store(y + (r + t) * y_stride + o + LANES, sum[t][1]);
            }
        }
}

/* x / sqrt(sum(x^2) + floor): the RMS norm but for a factor that the weights behind it hold. n: whole vectors. */
static void norm(const float *x, float *y, int64_t n, float floor)
{
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES)
        squares += load(x + i) * load(x + i);
    const float factor = 1.0f / sqrtf(total(squares) + floor);
    for (int64_t i = 0; i < n; i += LANES)
        store(y + i, load(x + i) * factor);
}

/* A head's query or key turned to its position: its halves hold what turns together. */
static void turn(float *x, int64_t head_dim, const float *cosines, const float *sines, const float *gain, float floor)
{
    const int64_t half = head_dim / 2;
    if (gain) {
        norm(x, x, head_dim, floor);
        for (int64_t i = 0; i < head_dim; i++)
            x[i] *= gain[i];
    }
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* Scores of one query with the first keys, in whole blocks. */
static void score(const float *query, const float *keys, int64_t head_dim, int64_t blocks, float *scores)
{
    enum { AT_ONCE = 4 }; /* chains of sums that do not wait for each other */
    const int64_t block = head_dim * LANES;
    int64_t b = 0;
    for (; b + AT_ONCE <= blocks; b += AT_ONCE) {
        vec sum[AT_ONCE] = {{0}};
        for (int64_t i = 0; i < head_dim; i++)
            for (int c = 0; c < AT_ONCE; c++)
                sum[c] += query[i] * load(keys + (b + c) * block + i * LANES);
        for (int c = 0; c < AT_ONCE; c++)
            store(scores + (b + c) * LANES, sum[c]);
    }
    for (; b < blocks; b++) {
        vec sum = {0};
        for (int64_t i = 0; i < head_dim; i++)
            sum += query[i] * load(keys + b * block + i * LANES);
        store(scores + b * LANES, sum);
    }
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
    float top = tops[0];
    for (int i = 1; i < LANES; i++)
        top = tops[i] > top ? tops[i] : top;
    for (int64_t i = 0; i < whole; i += LANES)
        store(scores + i, exponential(load(scores + i) - top));
    for (int64_t i = n; i < whole; i++)
        scores[i] = 0;
    vec sum = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        sum += load(scores + i);
    return total(sum);
}

/* The weighted sum of n values, `vectors` vectors of them; even and odd positions in sums of their own. */
static inline void blend(const float *weights, const float *values, int64_t n, int64_t head_dim, float factor,
                         float *out, const int vectors)
{
    vec sum[2][4] = {{{0}}};
    int64_t p = 0;
    for (; p + 2 <= n; p += 2)
        for (int s = 0; s < 2; s++)
            for (int c = 0; c < vectors; c++)
                sum[s][c] += weights[p + s] * load(values + (p + s) * head_dim + c * LANES);
    if (p < n)
        for (int c = 0; c < vectors; c++)
            sum[0][c] += weights[p] * load(values + p * head_dim + c * LANES);
    for (int c = 0; c < vectors; c++)
        store(out + c * LANES, (sum[0][c] + sum[1][c]) * factor);
}

static void attend(const float *query, const float *keys, const float *values, int64_t n, int64_t head_dim,
                   float *scores, float *out)
{
    score(query, keys, head_dim, (n + LANES - 1) / LANES, scores);
    const float factor = 1.0f / soften(scores, n);
    int64_t i = 0;
    for (; i + 4 * LANES <= head_dim; i += 4 * LANES)
        blend(scores, values + i, n, head_dim, factor, out + i, 4);
    for (; i < head_dim; i += LANES)
        blend(scores, values + i, n, head_dim, factor, out + i, 1);
}

/* gate / (1 + e^-gate) * up, into gate. */
static void gate(float *gates, const float *ups, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const vec x = load(gates + i);
        store(gates + i, x / (1.0f + exponential(-x)) * load(ups + i));
    }
}

/* Working memory: rows of a chunk. */
struct work {
    float *x, *normed, *qkv, *heads, *gate_up, *scores;
    int64_t size, qkv_size, heads_size, inner;
};

static int64_t lay_out(const struct model *m, float *memory, struct work *w)
{
    w->size = panels(m->size);
    w->qkv_size = panels((m->heads + 2 * m->kv_heads) * m->head_dim);
    w->heads_size = panels(m->heads * m->head_dim);
    w->inner = panels(m->inner);
    w->x = memory;
    w->normed = w->x + CHUNK * w->size;
    w->qkv = w->normed + CHUNK * w->size;
    w->heads = w->qkv + CHUNK * w->qkv_size;
    w->gate_up = w->heads + CHUNK * w->heads_size;
    w->scores = w->gate_up + CHUNK * 2 * w->inner;
    return w->scores + m->positions + panels(m->vocab) * CHUNK - memory;
}

int64_t sortedrl_memory(const struct model *m)
{
    struct work w;
    return lay_out(m, 0, &w);
}

static void attention_layer(const struct model *m, const struct layer *layer, struct work *w, float *keys,
                            float *values, int64_t count, int64_t rows, const int64_t *slots, const int64_t *positions)
{
    const int64_t d = m->head_dim, half = d / 2, per_head = m->positions * d;
    product(w->normed, w->size, layer->qkv, layer->qkv_bias, w->qkv, w->qkv_size, rows, m->size, w->qkv_size, 0);
    for (int64_t r = 0; r < count; r++) {
        const int64_t p = positions[r];
        const float *cosines = m->cosines + p * half, *sines = m->sines + p * half;
        float *q = w->qkv + r * w->qkv_size, *k = q + m->heads * d, *v = k + m->kv_heads * d;
        for (int64_t h = 0; h < m->heads; h++)
            turn(q + h * d, d, cosines, sines, layer->q_gain, m->head_floor);
        for (int64_t i = 0; i < m->heads * d; i++)
            q[i] *= m->scale;
        for (int64_t h = 0; h < m->kv_heads; h++) {
            const int64_t at = (slots[r] * m->kv_heads + h) * per_head;
            float *block = keys + at + p / LANES * LANES * d + p % LANES;
            turn(k + h * d, d, cosines, sines, layer->k_gain, m->head_floor);
            for (int64_t i = 0; i < d; i++)
                block[i * LANES] = k[h * d + i];
            memcpy(values + at + p * d, v + h * d, d * sizeof(float));
        }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t h = 0; h < m->heads; h++) {
            const int64_t at = (slots[r] * m->kv_heads + h * m->kv_heads / m->heads) * per_head;
            attend(w->qkv + r * w->qkv_size + h * d, keys + at, values + at, positions[r] + 1, d, w->scores,
                   w->heads + r * w->heads_size + h * d);
        }
    product(w->heads, w->heads_size, layer->out, 0, w->x, w->size, rows, m->heads * d, w->size, 1);
}

static void norm_rows(const struct model *m, struct work *w, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++)
        norm(w->x + r * w->size, w->normed + r * w->size, w->size, m->floor);
}

/* Logits of the rows of x that are wanted: `num` of them, from `wanted` less `start`. */
static void head_rows(const struct model *m, struct work *w, const int64_t *wanted, int64_t start, int64_t num,
                      float *logits)
{
    float *padded = w->scores + m->positions;
    const int64_t width = panels(m->vocab), rows = (num + TILE - 1) / TILE * TILE;
    memset(w->normed, 0, rows * w->size * sizeof(float));
    for (int64_t r = 0; r < num; r++)
        norm(w->x + (wanted ? wanted[r] - start : r) * w->size, w->normed + r * w->size, w->size, m->floor);
    product(w->normed, w->size, m->head, 0, padded, width, rows, m->size, width, 0);
    for (int64_t r = 0; r < num; r++)
        memcpy(logits + r * m->vocab, padded + r * width, m->vocab * sizeof(float));
}

/* Tokens at positions of slots to logits of the wanted ones, ascending, or of all where `wanted` is null. A sequence's
 * tokens come in their order, behind what the cache holds of it. */
void sortedrl_forward(const struct model *m, float *memory, int64_t num_tokens, const int64_t *tokens,
                      const int64_t *slots, const int64_t *positions, int64_t num_wanted, const int64_t *wanted,
                      float *logits)
{
    struct work w;
    lay_out(m, memory, &w);
    const int64_t half_layer = m->slots * m->kv_heads * m->positions * m->head_dim;
    int64_t done = 0; /* of the wanted */
    for (int64_t start = 0; start < num_tokens; start += CHUNK) {
        const int64_t count = num_tokens - start < CHUNK ? num_tokens - start : CHUNK;
        const int64_t rows = (count + TILE - 1) / TILE * TILE;
        memset(w.x, 0, rows * w.size * sizeof(float));
        memset(w.heads, 0, rows * w.heads_size * sizeof(float));
        for (int64_t r = 0; r < count; r++)
            memcpy(w.x + r * w.size, m->embedding + tokens[start + r] * m->size, m->size * sizeof(float));
        for (int64_t l = 0; l < m->num_layers; l++) {
            const struct layer *layer = m->layers + l;
            float *keys = m->cache + 2 * l * half_layer;
            norm_rows(m, &w, rows);
            attention_layer(m, layer, &w, keys, keys + half_layer, count, rows, slots + start, positions + start);
            norm_rows(m, &w, rows);
            product(w.normed, w.size, layer->gate_up, 0, w.gate_up, 2 * w.inner, rows, m->size, 2 * w.inner, 0);
            for (int64_t r = 0; r < rows; r++)
                gate(w.gate_up + r * 2 * w.inner, w.gate_up + r * 2 * w.inner + w.inner, w.inner);
            product(w.gate_up, 2 * w.inner, layer->down, 0, w.x, w.size, rows, m->inner, w.size, 1);
        }
        int64_t num = wanted ? 0 : count;
        while (wanted && done + num < num_wanted && wanted[done + num] < start + count)
            num++;
        if (num)
            head_rows(m, &w, wanted ? wanted + done : 0, start, num, logits + done * m->vocab);
        done += num;
    }
}
