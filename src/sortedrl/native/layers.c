/* The parts of a Llama layer other than its large matrix products, forward and backward, on one thread.
 *
 * `learner/native_layers.py` compiles and calls it. Attention is computed row by row, where a row is a sample with its
 * prompt: its tokens are gathered from the packed tokens and rotated to their positions, and the results are written
 * back to the packed tokens. Siblings share the tokens of their prompt and compute the same results there. Only one of
 * them, the owner, receives the gradient of these results; gradients of shared keys and values add up.
 *
 * Shapes: a row's tokens and a head's numbers are padded with zeros to whole tiles, [tokens][head size], or transposed
 * [head size][tokens]. Scores are [queries][keys], and zero where a key comes after its query.
 */

#include "vectors.h"

enum { TALL = 4, WIDE = 16 }; /* size of a tile: as many sums at once as there are registers */

struct rows {
    int64_t num_rows, heads, kv_heads, head_dim;
    const int32_t *edges;           /* where each row's tokens begin and end in `index` */
    const int64_t *index, *owner;   /* the packed token of each row's token; the owner's position in `index` */
    const float *cosines, *sines;   /* [packed tokens][head size] */
    float scale;
};

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* One tile of y[r][c] = sum over t in [first, last) of w[r][t] * x[t][c], or of y += that sum if `adds`. */
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

/* One head of a row: which tokens it has, and its padded sizes. */
struct head {
    const struct rows *rows;
    int64_t start, length, padded, width; /* width: the head's size, padded */
};

static int64_t floats(const struct head *h) { return h->padded * h->width; }

/* Copy the head's numbers of each token from `x`, where tokens are `stride` apart, times `factor`; apply the rotary
 * embedding if `rotates`. */
static void gather(const struct head *h, const float *x, int64_t stride, int rotates, float factor, float *out)
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
            to[i] = rotates ? a * c[i] - b * s[i] : a;
            to[half + i] = rotates ? b * c[i] + a * s[i] : b;
        }
    }
}

/* The backward pass of `gather`: adds gradients to those of the packed tokens. */
static void scatter(const struct head *h, const float *grad, int rotates, float factor, float *grad_x, int64_t stride)
{
    const int64_t size = h->rows->head_dim, half = size / 2;
    for (int64_t t = 0; t < h->length; t++) {
        const int64_t token = h->rows->index[h->start + t];
        const float *c = h->rows->cosines + token * size, *s = h->rows->sines + token * size;
        const float *from = grad + t * h->width;
        float *to = grad_x + token * stride;
        for (int64_t i = 0; i < half; i++) {
            const float a = from[i] * factor, b = from[half + i] * factor;
            to[i] += rotates ? a * c[i] + b * s[i] : a;
            to[half + i] += rotates ? b * c[i] - a * s[i] : b;
        }
    }
}

static void transpose(const struct head *h, const float *x, float *out)
{
    for (int64_t t = 0; t < h->padded; t++)
        for (int64_t i = 0; i < h->width; i++)
            out[i * h->padded + t] = x[t * h->width + i];
}

/* Scores of TALL queries with all keys up to their own positions. Returns the number of these keys, in whole tiles. */
static int64_t score(const struct head *h, const float *queries, const float *keys, int64_t query, float *scores)
{
    const int64_t seen = round_up(query + TALL, WIDE);
    for (int64_t key = 0; key < seen; key += WIDE)
        tile(scores + key, h->padded, queries + query * h->width, h->width, 1, keys + key, h->padded, 0,
             h->rows->head_dim, 0);
    return seen;
}

/* Softmax over the scores of one query's first keys, in place; other keys get weight 0. Returns the scores'
 * logsumexp. */
static float softmax(float *scores, int64_t num_keys, int64_t seen)
{
    for (int64_t i = num_keys; i < seen; i++)
        scores[i] = -INFINITY;
    vec tops = load(scores), sums = {0};
    for (int64_t i = LANES; i < seen; i += LANES)
        tops = pick((ivec)(load(scores + i) > tops), load(scores + i), tops);
    const float top = lane_max(tops);
    for (int64_t i = 0; i < seen; i += LANES) {
        const vec weight = exponential(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    const float sum = lane_sum(sums);
    for (int64_t i = 0; i < seen; i += LANES)
        store(scores + i, load(scores + i) / sum);
    for (int64_t i = num_keys; i < seen; i++)
        scores[i] = 0;
    return top + logf(sum);
}

static float *allocate(float **memory, int64_t n)
{
    float *start = *memory;
    *memory += n;
    return start;
}

static struct head head_of(const struct rows *rows, int64_t row)
{
    const int64_t start = rows->edges[row], length = rows->edges[row + 1] - start;
    return (struct head){rows, start, length, round_up(length, WIDE), round_up(rows->head_dim, WIDE)};
}

/* The size of the working memory for the longest row, counted in floats. */
int64_t sortedrl_layers_memory(const struct rows *rows, int64_t longest)
{
    const int64_t padded = round_up(longest, WIDE);
    return 9 * padded * round_up(rows->head_dim, WIDE) + 2 * padded * padded;
}

/* qkv: [tokens][heads + 2 kv_heads][head_dim]. out: [tokens][heads][head_dim]. logs: [heads][tokens of all rows]. */
void sortedrl_layers_attend(const struct rows *rows, const float *qkv, float *out, float *logs, float *memory)
{
    const int64_t size = rows->head_dim, heads = rows->heads, group = heads / rows->kv_heads;
    const int64_t stride = (heads + 2 * rows->kv_heads) * size, total_length = rows->edges[rows->num_rows];
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const struct head h = head_of(rows, row);
        const int64_t n = floats(&h);
        float *end = memory, *q = allocate(&end, n), *k = allocate(&end, n), *v = allocate(&end, n);
        float *keys = allocate(&end, n);
        float *weights = allocate(&end, TALL * h.padded), *attended = allocate(&end, TALL * h.width);
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
                    const float sum = softmax(weights + r * h.padded, query + r + 1, seen);
                    if (query + r < h.length)
                        logs[head * total_length + h.start + query + r] = sum;
                }
                for (int64_t i = 0; i < h.width; i += WIDE)
                    tile(attended + i, h.width, weights, h.padded, 1, v + i, h.width, 0, query + TALL, 0);
                for (int r = 0; r < TALL && query + r < h.length; r++)
                    memcpy(out + (rows->index[h.start + query + r] * heads + head) * size, attended + r * h.width,
                           size * sizeof(float));
            }
        }
    }
}

/* For TALL queries: turns scores in `weights` into weights, and the weights' gradients in `scores` into the scores'. */
static void back_through_scores(const struct head *h, int64_t query, int64_t seen, const float *logs, const float *out,
                                const float *grad_out, float *weights, float *scores)
{
    for (int r = 0; r < TALL; r++) {
        float *weight = weights + r * h->padded, *score = scores + r * h->padded, along = 0;
        const int64_t last = query + r < h->length ? query + r + 1 : 0;
        for (int64_t i = 0; i < h->width; i++)
            along += out[(query + r) * h->width + i] * grad_out[(query + r) * h->width + i];
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

/* sums[key] += weights[query][key] * summed[query], over all queries that attend to the key. */
static void add_by_key(const struct head *h, const float *weights, const float *summed, float *sums)
{
    const int64_t end = round_up(h->length, TALL);
    for (int64_t key = 0; key < h->length; key += TALL)
        for (int64_t i = 0; i < h->width; i += WIDE)
            tile(sums + key * h->width + i, h->width, weights + key, 1, h->padded, summed + i, h->width, key, end, 1);
}

/* The gradient of `qkv`, which must be zero before the call, from the gradient of `out`. */
void sortedrl_layers_attend_backward(const struct rows *rows, const float *qkv, const float *out, const float *logs,
                                     const float *grad_out, float *grad_qkv, float *memory)
{
    const int64_t size = rows->head_dim, heads = rows->heads, kv_heads = rows->kv_heads, group = heads / kv_heads;
    const int64_t stride = (heads + 2 * kv_heads) * size, total_length = rows->edges[rows->num_rows];
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const struct head h = head_of(rows, row);
        const int64_t n = floats(&h);
        float *end = memory, *q = allocate(&end, n), *k = allocate(&end, n), *v = allocate(&end, n);
        float *o = allocate(&end, n), *grad = allocate(&end, n), *transposed = allocate(&end, n);
        float *grad_q = allocate(&end, n), *grad_k = allocate(&end, n);
        float *grad_v = allocate(&end, n), *weights = allocate(&end, h.padded * h.padded), *scores = end;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t key_at = (heads + head / group) * size, value_at = key_at + kv_heads * size;
            if (head % group == 0) {
                gather(&h, qkv + key_at, stride, 1, 1, k);
                gather(&h, qkv + value_at, stride, 0, 1, v);
                memset(grad_k, 0, n * sizeof(float));
                memset(grad_v, 0, n * sizeof(float));
            }
            gather(&h, qkv + head * size, stride, 1, rows->scale, q);
            gather(&h, out + head * size, heads * size, 0, 1, o);
            gather(&h, grad_out + head * size, heads * size, 0, 1, grad);
            for (int64_t t = 0; t < h.length; t++)
                if (rows->owner[rows->index[h.start + t]] != h.start + t)
                    memset(grad + t * h.width, 0, h.width * sizeof(float));
            transpose(&h, k, transposed);
            for (int64_t query = 0; query < h.length; query += TALL)
                score(&h, q, transposed, query, weights + query * h.padded);
            transpose(&h, v, transposed);
            for (int64_t query = 0; query < h.length; query += TALL) {
                float *own_weights = weights + query * h.padded, *own_scores = scores + query * h.padded;
                const int64_t seen = score(&h, grad, transposed, query, own_scores);
                back_through_scores(&h, query, seen, logs + head * total_length + h.start, o, grad, own_weights,
                                    own_scores);
                for (int64_t i = 0; i < h.width; i += WIDE)
                    tile(grad_q + query * h.width + i, h.width, own_scores, h.padded, 1, k + i, h.width, 0,
                         query + TALL, 0);
            }
            add_by_key(&h, scores, q, grad_k);
            add_by_key(&h, weights, grad, grad_v);
            scatter(&h, grad_q, 1, rows->scale, grad_qkv + head * size, stride);
            if ((head + 1) % group == 0) {
                scatter(&h, grad_k, 1, 1, grad_qkv + key_at, stride);
                scatter(&h, grad_v, 0, 1, grad_qkv + value_at, stride);
            }
        }
    }
}

/* out = gate / (1 + e^-gate) * up; n is a multiple of LANES. */
void sortedrl_layers_gate(int64_t n, const float *gate, const float *up, float *out)
{
    for (int64_t i = 0; i < n; i += LANES)
        store(out + i, gated_silu(load(gate + i), load(up + i)));
}

/* The gradients of gate and up. The forward output is recomputed and overwrites its gradient. */
void sortedrl_layers_gate_backward(int64_t n, const float *gate, const float *up, float *grad_out, float *grad_gate,
                                   float *grad_up)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const vec g = load(gate + i), u = load(up + i), grad = load(grad_out + i);
        const vec sigmoid = 1.0f / (1.0f + exponential(-g)), silu = g * sigmoid;
        store(grad_gate + i, grad * u * (sigmoid + silu * (1.0f - sigmoid)));
        store(grad_up + i, grad * silu);
        store(grad_out + i, silu * u);
    }
}

typedef uint16_t low; /* a bfloat16: the upper half of a float */
typedef low low_vec __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t bits_vec __attribute__((vector_size(32)));

static inline vec load_low(const low *p)
{
    return (vec)(__builtin_convertvector(*(const low_vec *)p, bits_vec) << 16);
}

/* Rounds to the nearest, to even in between. NaN stays NaN. */
static inline void store_low(low *p, vec x)
{
    const bits_vec bits = (bits_vec)x, is_nan = (bits_vec)(x != x);
    const bits_vec rounded = bits + 0x7fff + ((bits >> 16) & 1);
    *(low_vec *)p = __builtin_convertvector(((rounded & ~is_nan) | (0x7fc00000 & is_nan)) >> 16, low_vec);
}

/* The same as `gate` in bfloat16. A row of `inner` is gate and up, `size` numbers each, a multiple of LANES; rows of
 * `out` are `stride` apart. */
void sortedrl_layers_gate_low(int64_t n, int64_t size, const low *inner, int64_t stride, low *out)
{
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const low *gate = inner + 2 * row * size + i;
            store_low(out + row * stride + i, gated_silu(load_low(gate), load_low(gate + size)));
        }
}

/* The gradient of `inner`, in bfloat16, from that of `out` in float32, [n][size]. */
void sortedrl_layers_gate_low_backward(int64_t n, int64_t size, const low *inner, const float *grad_out,
                                       low *grad_inner)
{
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t at = 2 * row * size + i;
            const vec g = load_low(inner + at), u = load_low(inner + at + size), grad = load(grad_out + row * size + i);
            const vec sigmoid = 1.0f / (1.0f + exponential(-g)), silu = g * sigmoid;
            store_low(grad_inner + at, grad * u * (sigmoid + silu * (1.0f - sigmoid)));
            store_low(grad_inner + at + size, grad * silu);
        }
}

/* The RMS norm of each row of x, [n][size], and the factor of each row; size is a multiple of LANES. */
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

/* The gradient of x, through the norm and through the residual connection (`grad_sum`); overwrites `grad_out`.
 * `grad_gain` must be zero before the call. */
void sortedrl_layers_norm_backward(int64_t n, int64_t size, const float *x, const float *gain, const float *factors,
                                   const float *grad_sum, float *grad_out, float *grad_gain)
{
    for (int64_t row = 0; row < n; row++) {
        const float *from = x + row * size, *residual = grad_sum + row * size, factor = factors[row];
        float *grad = grad_out + row * size;
        vec along = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            const vec product = load(grad + i) * load(from + i) * factor;
            store(grad_gain + i, load(grad_gain + i) + product);
            along += product * load(gain + i);
        }
        const float mean = lane_sum(along) / size * factor;
        for (int64_t i = 0; i < size; i += LANES)
            store(grad + i, load(residual + i) + (load(grad + i) * load(gain + i) - load(from + i) * mean) * factor);
    }
}
