/* What a Llama's layer computes beside its large products, forward and backward, on one thread.
 *
 * `learner/native_layers.py` compiles and calls it. Attention goes row by row, a row being a sample with its prompt: its
 * tokens are gathered from the packed ones, turned to their positions, and what comes out is put back where it belongs.
 * Siblings share the tokens of their prompt. All of them compute the same there; one of them, the owner, takes in the
 * gradient of what was computed, and gradients of shared keys and values add up.
 *
 * Shapes: a row's tokens and a head's numbers are padded with zeros to whole tiles, [tokens][head size] each, or
 * [head size][tokens] where transposed. Scores are [queries][keys], and zero where a key comes after its query.
 */

#include "vectors.h"

enum { TALL = 4, WIDE = 16 }; /* of a tile: as many sums at once as there are registers for */

struct rows {
    int64_t num_rows, heads, kv_heads, head_dim;
    const int32_t *edges;           /* where each row's tokens begin and end in `index` */
    const int64_t *index, *owner;   /* the packed token of each row's token; a packed token's place in `index` */
    const float *cosines, *sines;   /* [packed tokens][head size] */
    float scale;
};

static int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* y[r][c] = sum over t in [first, last) of w[r][t] x[t][c], a tile of it; added to what is there where `adds`. */
INLINE void tile(float *y, int64_t y_row, const float *w, int64_t w_row, int64_t w_column, const float *x,
                 int64_t x_row, int64_t first, int64_t last, const int adds)
{
    vec low[TALL] = {{0}}, high[TALL] = {{0}};
    for (int64_t t = first; t < last; t++) {
        const vec a = load(x + t * x_row), b = load(x + t * x_row + LANES);
        for (int r = 0; r < TALL; r++) {
            const float factor = w[r * w_row + t * w_column];
            low[r] += factor * a;
            high[r] += factor * b;
        }
    }
    for (int r = 0; r < TALL; r++) {
        float *target = y + r * y_row;
        if (adds) {
            low[r] += load(target);
            high[r] += load(target + LANES);
        }
        store(target, low[r]);
        store(target + LANES, high[r]);
    }
}

/* One head of a row: where its numbers are among the packed tokens', and how it is laid out. */
struct head {
    const struct rows *rows;
    int64_t start, length, padded, width; /* width: the head's size, padded */
};

static int64_t floats(const struct head *h) { return h->padded * h->width; }

/* The head's part of each token, `stride` apart in `x`, turned to its position where `turns`, and times `factor`. */
static void gather(const struct head *h, const float *x, int64_t stride, int turns, float factor, float *out)
{
    const int64_t size = h->rows->head_dim, half = size / 2;
    memset(out, 0, floats(h) * sizeof(float));
    for (int64_t t = 0; t < h->length; t++) {
        const int64_t token = h->rows->index[h->start + t];
        const float *c = h->rows->cosines + token * size, *s = h->rows->sines + token * size;
        const float *from = x + token * stride;
        float *to = out + t * h->width;
        for (int64_t i = 0; i < half; i++) {
            const float a = from[i] * factor, b = from[half + i] * factor;
            to[i] = turns ? a * c[i] - b * s[i] : a;
            to[half + i] = turns ? b * c[i] + a * s[i] : b;
        }
    }
}

/* Adds the gradients of what `gather` gave to those of the tokens. */
static void scatter(const struct head *h, const float *by, int turns, float factor, float *by_x, int64_t stride)
{
    const int64_t size = h->rows->head_dim, half = size / 2;
    for (int64_t t = 0; t < h->length; t++) {
        const int64_t token = h->rows->index[h->start + t];
        const float *c = h->rows->cosines + token * size, *s = h->rows->sines + token * size;
        const float *from = by + t * h->width;
        float *to = by_x + token * stride;
        for (int64_t i = 0; i < half; i++) {
            const float a = from[i] * factor, b = from[half + i] * factor;
            to[i] += turns ? a * c[i] + b * s[i] : a;
            to[half + i] += turns ? b * c[i] - a * s[i] : b;
        }
    }
}

static void transpose(const struct head *h, const float *x, float *out)
{
    for (int64_t t = 0; t < h->padded; t++)
        for (int64_t i = 0; i < h->width; i++)
            out[i * h->padded + t] = x[t * h->width + i];
}

/* Products of four queries with the keys up to theirs; both padded. Returns how many keys that is, in whole tiles. */
static int64_t score(const struct head *h, const float *queries, const float *keys, int64_t query, float *scores)
{
    const int64_t seen = whole(query + TALL, WIDE);
    for (int64_t key = 0; key < seen; key += WIDE)
        tile(scores + key, h->padded, queries + query * h->width, h->width, 1, keys + key, h->padded, 0,
             h->rows->head_dim, 0);
    return seen;
}

/* Scores of one query's first keys to weights that add up to 1, the others' to 0; returns the log of what they were
 * divided by. */
static float soften(float *scores, int64_t num_keys, int64_t seen)
{
    for (int64_t i = num_keys; i < seen; i++)
        scores[i] = -INFINITY;
    vec tops = load(scores), sums = {0};
    for (int64_t i = LANES; i < seen; i += LANES)
        tops = pick((ivec)(load(scores + i) > tops), load(scores + i), tops);
    const float top = greatest(tops);
    for (int64_t i = 0; i < seen; i += LANES) {
        const vec weight = exponential(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    const float sum = total(sums);
    for (int64_t i = 0; i < seen; i += LANES)
        store(scores + i, load(scores + i) / sum);
    for (int64_t i = num_keys; i < seen; i++)
        scores[i] = 0;
    return top + logf(sum);
}

static float *take(float **memory, int64_t n)
{
    float *start = *memory;
    *memory += n;
    return start;
}

static struct head head_of(const struct rows *rows, int64_t row)
{
    const int64_t start = rows->edges[row], length = rows->edges[row + 1] - start;
    return (struct head){rows, start, length, whole(length, WIDE), whole(rows->head_dim, WIDE)};
}

/* Floats of working memory for the longest row. */
int64_t sortedrl_layers_memory(const struct rows *rows, int64_t longest)
{
    const int64_t padded = whole(longest, WIDE);
    return 9 * padded * whole(rows->head_dim, WIDE) + 2 * padded * padded;
}

/* qkv: [tokens][heads + 2 kv_heads][head_dim]. out: [tokens][heads][head_dim]. logs: [heads][tokens of all rows]. */
void sortedrl_layers_attend(const struct rows *rows, const float *qkv, float *out, float *logs, float *memory)
{
    const int64_t size = rows->head_dim, heads = rows->heads, group = heads / rows->kv_heads;
    const int64_t stride = (heads + 2 * rows->kv_heads) * size, total_length = rows->edges[rows->num_rows];
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const struct head h = head_of(rows, row);
        float *end = memory, *q = take(&end, floats(&h)), *k = take(&end, floats(&h)), *v = take(&end, floats(&h));
        float *keys = take(&end, floats(&h));
        float *weights = take(&end, TALL * h.padded), *found = take(&end, TALL * h.width);
        for (int64_t head = 0; head < heads; head++) {
            if (head % group == 0) {
                gather(&h, qkv + (heads + head / group) * size, stride, 1, 1, k);
                gather(&h, qkv + (heads + rows->kv_heads + head / group) * size, stride, 0, 1, v);
                transpose(&h, k, keys);
            }
            gather(&h, qkv + head * size, stride, 1, rows->scale, q);
            for (int64_t query = 0; query < h.length; query += TALL) {
                const int64_t seen = score(&h, q, keys, query, weights);
                for (int r = 0; r < TALL; r++) {
                    const float sum = soften(weights + r * h.padded, query + r + 1, seen);
                    if (query + r < h.length)
                        logs[head * total_length + h.start + query + r] = sum;
                }
                for (int64_t i = 0; i < h.width; i += WIDE)
                    tile(found + i, h.width, weights, h.padded, 1, v + i, h.width, 0, query + TALL, 0);
                for (int r = 0; r < TALL && query + r < h.length; r++)
                    memcpy(out + (rows->index[h.start + query + r] * heads + head) * size, found + r * h.width,
                           size * sizeof(float));
            }
        }
    }
}

/* Of four queries: from scores in `weights` to weights, from the weights' gradients in `scores` to the scores'. */
static void back_through_scores(const struct head *h, int64_t query, int64_t seen, const float *logs, const float *out,
                                const float *by_out, float *weights, float *scores)
{
    for (int r = 0; r < TALL; r++) {
        float *weight = weights + r * h->padded, *score = scores + r * h->padded, along = 0;
        const int64_t last = query + r < h->length ? query + r + 1 : 0;
        for (int64_t i = 0; i < h->width; i++)
            along += out[(query + r) * h->width + i] * by_out[(query + r) * h->width + i];
        const float log = last ? logs[query + r] : 0;
        for (int64_t i = 0; i < seen; i += LANES) {
            const vec w = exponential(load(weight + i) - log);
            store(weight + i, w);
            store(score + i, w * (load(score + i) - along));
        }
        for (int64_t i = last; i < seen; i++)
            weight[i] = score[i] = 0;
    }
}

/* sums[key] += weights of the key by query, times what is summed: for every key, over the queries that see it. */
static void add_by_key(const struct head *h, const float *weights, const float *summed, float *sums)
{
    const int64_t end = whole(h->length, TALL);
    for (int64_t key = 0; key < h->length; key += TALL)
        for (int64_t i = 0; i < h->width; i += WIDE)
            tile(sums + key * h->width + i, h->width, weights + key, 1, h->padded, summed + i, h->width, key, end, 1);
}

/* The gradient of `qkv`, to be zero before, from that of `out`. */
void sortedrl_layers_attend_backward(const struct rows *rows, const float *qkv, const float *out, const float *logs,
                              const float *by_out, float *by_qkv, float *memory)
{
    const int64_t size = rows->head_dim, heads = rows->heads, kv_heads = rows->kv_heads, group = heads / kv_heads;
    const int64_t stride = (heads + 2 * kv_heads) * size, total_length = rows->edges[rows->num_rows];
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const struct head h = head_of(rows, row);
        const int64_t n = floats(&h);
        float *end = memory, *q = take(&end, n), *k = take(&end, n), *v = take(&end, n), *o = take(&end, n);
        float *by = take(&end, n), *turned = take(&end, n), *by_q = take(&end, n), *by_k = take(&end, n);
        float *by_v = take(&end, n), *weights = take(&end, h.padded * h.padded), *scores = end;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t key_at = (heads + head / group) * size, value_at = key_at + kv_heads * size;
            if (head % group == 0) {
                gather(&h, qkv + key_at, stride, 1, 1, k);
                gather(&h, qkv + value_at, stride, 0, 1, v);
                memset(by_k, 0, n * sizeof(float));
                memset(by_v, 0, n * sizeof(float));
            }
            gather(&h, qkv + head * size, stride, 1, rows->scale, q);
            gather(&h, out + head * size, heads * size, 0, 1, o);
            gather(&h, by_out + head * size, heads * size, 0, 1, by);
            for (int64_t t = 0; t < h.length; t++)
                if (rows->owner[rows->index[h.start + t]] != h.start + t)
                    memset(by + t * h.width, 0, h.width * sizeof(float));
            transpose(&h, k, turned);
            for (int64_t query = 0; query < h.length; query += TALL)
                score(&h, q, turned, query, weights + query * h.padded);
            transpose(&h, v, turned);
            for (int64_t query = 0; query < h.length; query += TALL) {
                float *own_weights = weights + query * h.padded, *own_scores = scores + query * h.padded;
                const int64_t seen = score(&h, by, turned, query, own_scores);
                back_through_scores(&h, query, seen, logs + head * total_length + h.start, o, by, own_weights,
                                    own_scores);
                for (int64_t i = 0; i < h.width; i += WIDE)
                    tile(by_q + query * h.width + i, h.width, own_scores, h.padded, 1, k + i, h.width, 0,
                         query + TALL, 0);
            }
            add_by_key(&h, scores, q, by_k);
            add_by_key(&h, weights, by, by_v);
            scatter(&h, by_q, 1, rows->scale, by_qkv + head * size, stride);
            if ((head + 1) % group == 0) {
                scatter(&h, by_k, 1, 1, by_qkv + key_at, stride);
                scatter(&h, by_v, 0, 1, by_qkv + value_at, stride);
            }
        }
    }
}

/* out = gate / (1 + e^-gate) * up; n: whole vectors. */
void sortedrl_layers_gate(int64_t n, const float *gate, const float *up, float *out)
{
    for (int64_t i = 0; i < n; i += LANES)
        store(out + i, gated(load(gate + i), load(up + i)));
}

/* The gradients of gate and up; the output is written over its gradient. */
void sortedrl_layers_gate_backward(int64_t n, const float *gate, const float *up, float *by_out, float *by_gate,
                                   float *by_up)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const vec g = load(gate + i), u = load(up + i), by = load(by_out + i);
        const vec open = 1.0f / (1.0f + exponential(-g)), active = g * open;
        store(by_gate + i, by * u * (open + active * (1.0f - open)));
        store(by_up + i, by * active);
        store(by_out + i, active * u);
    }
}

/* The RMS norm of each row of x, [n][size], and the factor of each row; size: whole vectors. */
void sortedrl_layers_norm(int64_t n, int64_t size, float epsilon, const float *x, const float *gain, float *out,
                          float *factors)
{
    for (int64_t row = 0; row < n; row++) {
        const float factor = norm_factor(x + row * size, size, epsilon * size) * sqrtf(size);
        factors[row] = factor;
        for (int64_t i = 0; i < size; i += LANES)
            store(out + row * size + i, load(x + row * size + i) * factor * load(gain + i));
    }
}

/* The gradient of x, by way of the norm and past it (`by_sum`), written over `by_out`; by_gain: to be zero before. */
void sortedrl_layers_norm_backward(int64_t n, int64_t size, const float *x, const float *gain, const float *factors,
                            const float *by_sum, float *by_out, float *by_gain)
{
    for (int64_t row = 0; row < n; row++) {
        const float *from = x + row * size, *past = by_sum + row * size, factor = factors[row];
        float *by = by_out + row * size;
        vec along = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const vec product = load(by + i) * load(from + i) * factor;
            store(by_gain + i, load(by_gain + i) + product);
            along += product * load(gain + i);
        }
        const float mean = total(along) / size * factor;
        for (int64_t i = 0; i < size; i += LANES)
            store(by + i, load(past + i) + (load(by + i) * load(gain + i) - load(from + i) * mean) * factor);
    }
}
