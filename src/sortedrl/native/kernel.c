/* A forward pass of a Llama as one call of each thread: from tokens to logits.
 *
 * `kernel.py` compiles it, `local/native_decoder.py` lays out weights for it and calls it. A small model spends a step of torch calls
 * on calling; here nothing but arithmetic is left. What it keeps true: every token is computed by the same operations in
 * the same order, whichever others share the call, in however many calls they come and by however many threads. Rows
 * are worked on in tiles of six or four, a row by the same sums in either. So an answer does not depend on its
 * neighbours, and a prefill gives what decoding gives, to the last bit.
 *
 * Threads run the same code, each on its share of outputs or rows, and meet wherever one needs what another has made.
 * Who is done first takes from the shares of others: a processor that is slower for a while holds nobody up.
 *
 * Shapes: weights lie in panels of 16 outputs, [outputs / 16][inputs][16]; keys in blocks of 8 positions,
 * [positions / 8][head size][8]; values as [positions][head size]. Rows of working memory are as long as whole panels,
 * and zero past their content. Products are of floats or, where the model's weights are, in fixed point; all else is
 * computed in floats.
 */

#include <sched.h>

#include "attention.h"
#include "draw.h"
#include "product.h"

enum {
    CHUNK = 96,   /* rows of working memory */
    SPINS = 2000, /* before a thread that waits lets others have the processor */
    MAX_THREADS = 64,
};

struct layer {
    const float *qkv, *qkv_bias, *q_gain, *k_gain; /* no bias, no gains: null */
    const float *out, *gate_up, *down;
};

struct model {
    int64_t num_layers, size, inner, heads, kv_heads, head_dim, vocab;
    int64_t slots, positions;           /* of the cache; positions are whole blocks */
    int64_t is_fixed;                   /* weights, and so products; not the embedding */
    float floor, head_floor, scale;     /* size * eps of the norms, and the factor of attention scores */
    const struct layer *layers;
    const float *embedding, *head;
    const float *cosines, *sines;       /* [positions][head size / 2] */
    float *cache;                       /* [layers][keys, values][slots][kv heads][positions][head size] */
};

/* Where threads wait for each other: the last to arrive begins the next turn. One that is `left` waits for nobody. */
struct team {
    int64_t arrived, turn, left;
    struct {
        int64_t line[8]; /* the first counts; a line of its own, which others seldom touch */
    } taken[MAX_THREADS]; /* of each one's share */
};

struct place {
    struct team *team;
    int64_t rank, size;
};

static void meet(const struct place *at)
{
    const int64_t turn = __atomic_load_n(&at->team->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&at->team->arrived, 1, __ATOMIC_ACQ_REL) == at->size) {
        for (int64_t rank = 0; rank < at->size; rank++)
            __atomic_store_n(at->team->taken[rank].line, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&at->team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&at->team->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t spins = 0; __atomic_load_n(&at->team->turn, __ATOMIC_ACQUIRE) == turn; spins++)
        if (spins > SPINS) {
            if (__atomic_load_n(&at->team->left, __ATOMIC_ACQUIRE))
                return;
            sched_yield(); /* the others may be waiting for this processor */
        }
}

/* The next of `num` pieces of work between two meetings, of this thread's share, then of others'; -1: all are taken. */
static int64_t next_piece(const struct place *at, int64_t num)
{
    for (int64_t k = 0; k < at->size; k++) {
        const int64_t of = (at->rank + k) % at->size, start = num * of / at->size, end = num * (of + 1) / at->size;
        int64_t *taken = at->team->taken[of].line;
        if (start + __atomic_load_n(taken, __ATOMIC_RELAXED) < end) {
            const int64_t piece = start + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (piece < end)
                return piece;
        }
    }
    return -1;
}

/* Working memory: rows of a chunk, which threads share, and what each has for itself. */
struct work {
    struct rows x, qkv, heads, inner;
    struct rows fixed; /* what is multiplied next */
    struct rows gates, ups;
    float *scores, *factors;
};

static float *take(float **memory, int64_t n)
{
    float *start = *memory;
    *memory += panels(n);
    return start;
}

static struct rows take_rows(float **memory, int64_t size)
{
    const int64_t stride = row_stride(size);
    return (struct rows){take(memory, (CHUNK + WIDE) * stride), stride};
}

static int64_t lay_out(const struct model *m, int64_t rank, float *memory, struct work *w)
{
    float *end = memory;
    w->x = take_rows(&end, m->size);
    w->qkv = take_rows(&end, (m->heads + 2 * m->kv_heads) * m->head_dim);
    w->heads = take_rows(&end, m->heads * m->head_dim);
    w->inner = take_rows(&end, m->inner);
    const int64_t widest = m->inner > m->heads * m->head_dim ? m->inner : m->heads * m->head_dim;
    w->fixed = take_rows(&end, m->is_fixed ? spans(widest > m->size ? widest : m->size) * FIXED.in_row : 0);
    for (int64_t own = 0; own <= rank; own++) {
        w->gates = take_rows(&end, PANEL);
        w->ups = take_rows(&end, PANEL);
        w->scores = take(&end, GROUP * m->positions);
        w->factors = take(&end, CHUNK + WIDE);
    }
    return end - memory;
}

/* Floats of working memory for so many threads. */
int64_t sortedrl_memory(const struct model *m, int64_t num_threads)
{
    struct work w;
    return lay_out(m, num_threads - 1, 0, &w);
}

/* What a product reads: rows, as they are or in fixed point, and the factors by which they are normed (null: not). */
struct operand {
    struct rows rows;
    const float *factors;
    int64_t num_rows, inputs;
};

static struct operand operand(const struct model *m, const struct place *at, struct work *w, struct rows rows,
                              int64_t num_rows, int64_t inputs, int is_normed)
{
    if (!m->is_fixed) {
        for (int64_t r = 0; r < num_rows && is_normed; r++)
            w->factors[r] = norm_factor(row(rows, r), panels(inputs), m->floor);
        return (struct operand){rows, is_normed ? w->factors : 0, num_rows, inputs};
    }
    for (int64_t r = at->rank; r < num_rows; r += at->size) {
        const float factor = is_normed ? norm_factor(row(rows, r), panels(inputs), m->floor) : 1;
        fix_row(row(rows, r), panels(inputs), factor, (struct row_span *)row(w->fixed, r));
    }
    meet(at);
    return (struct operand){w->fixed, 0, num_rows, inputs};
}

static void product(const struct model *m, const struct place *at, struct operand x, const float *w, const float *bias,
                    struct rows y, int64_t outputs, int adds)
{
    const int64_t num = panels(outputs) / PANEL, size = sortedrl_panel_size(x.inputs, m->is_fixed);
    for (int64_t p; (p = next_piece(at, num)) >= 0;) {
        const struct rows part = {y.start + p * PANEL, y.stride};
        panel_product(x.rows, x.factors, w + p * size, bias ? bias + p * PANEL : 0, part, x.num_rows, x.inputs,
                      outputs - p * PANEL, adds, m->is_fixed);
    }
}

/* Queries and keys turned to their positions; keys and values into the cache. */
static void place_row(const struct model *m, const struct layer *layer, float *q, float *keys, float *values,
                      int64_t slot, int64_t p)
{
    const int64_t d = m->head_dim, per_head = m->positions * d;
    const float *cosines = m->cosines + p * (d / 2), *sines = m->sines + p * (d / 2);
    float *k = q + m->heads * d, *v = k + m->kv_heads * d;
    for (int64_t h = 0; h < m->heads; h++)
        turn(q + h * d, d, cosines, sines, layer->q_gain, m->head_floor);
    for (int64_t i = 0; i < m->heads * d; i++)
        q[i] *= m->scale;
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const int64_t at = (slot * m->kv_heads + h) * per_head;
        float *block = keys + at + p / LANES * LANES * d + p % LANES;
        turn(k + h * d, d, cosines, sines, layer->k_gain, m->head_floor);
        for (int64_t i = 0; i < d; i++)
            block[i * LANES] = k[h * d + i];
        memcpy(values + at + p * d, v + h * d, d * sizeof(float));
    }
}

static void attention_layer(const struct model *m, const struct layer *layer, const struct place *at, struct work *w,
                            float *keys, float *values, int64_t rows, const int64_t *slots, const int64_t *positions)
{
    const int64_t d = m->head_dim, per_head = m->positions * d, sharing = m->heads / m->kv_heads;
    const int64_t num = rows * m->kv_heads;
    const struct operand x = operand(m, at, w, w->x, rows, m->size, 1);
    product(m, at, x, layer->qkv, layer->qkv_bias, w->qkv, panels((m->heads + 2 * m->kv_heads) * d), 0);
    meet(at);
    for (int64_t r = at->rank; r < rows; r += at->size)
        place_row(m, layer, row(w->qkv, r), keys, values, slots[r], positions[r]);
    meet(at);
    for (int64_t i; (i = next_piece(at, num)) >= 0;) {
        const int64_t then = i + 1 < num ? i + 1 : i;
        const int64_t r = i / m->kv_heads, h = i % m->kv_heads, start = (slots[r] * m->kv_heads + h) * per_head;
        const int64_t next = (slots[then / m->kv_heads] * m->kv_heads + then % m->kv_heads) * per_head;
        for (int64_t g = 0; g < sharing; g += GROUP) {
            const int64_t first = (h * sharing + g) * d, group = sharing - g < GROUP ? sharing - g : GROUP;
            attend(row(w->qkv, r) + first, keys + start, values + start, keys + next, positions[r] + 1, d, w->scores,
                   m->positions, row(w->heads, r) + first, group);
        }
    }
    meet(at);
    const struct operand heads = operand(m, at, w, w->heads, rows, m->heads * d, 0);
    product(m, at, heads, layer->out, 0, w->x, panels(m->size), 1);
    meet(at);
}

static void mlp_layer(const struct model *m, const struct layer *layer, const struct place *at, struct work *w,
                      int64_t rows)
{
    const int64_t num = panels(m->inner) / PANEL, size = sortedrl_panel_size(m->size, m->is_fixed);
    const struct operand x = operand(m, at, w, w->x, rows, m->size, 1);
    for (int64_t p; (p = next_piece(at, num)) >= 0;) {
        const float *gate = layer->gate_up + p * size, *up = gate + num * size;
        panel_product(x.rows, x.factors, gate, 0, w->gates, rows, m->size, PANEL, 0, m->is_fixed);
        panel_product(x.rows, x.factors, up, 0, w->ups, rows, m->size, PANEL, 0, m->is_fixed);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < PANEL; i += LANES)
                store(row(w->inner, r) + p * PANEL + i, gated(load(row(w->gates, r) + i), load(row(w->ups, r) + i)));
    }
    meet(at);
    const struct operand inner = operand(m, at, w, w->inner, rows, m->inner, 0);
    product(m, at, inner, layer->down, 0, w->x, panels(m->size), 1);
    meet(at);
}

/* Logits of `num` rows of x: of the wanted ones less `start`, or of the first. */
static void head_rows(const struct model *m, const struct place *at, struct work *w, const int64_t *wanted,
                      int64_t start, int64_t num, float *logits)
{
    if (wanted) {
        for (int64_t r = 0; r < num && at->rank == 0; r++) /* ascending: none is overwritten before it is moved */
            memmove(row(w->x, r), row(w->x, wanted[r] - start), panels(m->size) * sizeof(float));
        meet(at);
    }
    const struct rows y = {logits, m->vocab};
    product(m, at, operand(m, at, w, w->x, num, m->size, 1), m->head, 0, y, m->vocab, 0);
}

/* Tokens at positions of slots to logits of the wanted ones, ascending, or of all where `wanted` is null. A sequence's
 * tokens come in their order, behind what the cache holds of it. Called by `size` threads, each with its rank. */
void sortedrl_forward(const struct model *m, float *memory, struct team *team, int64_t rank, int64_t size,
                      int64_t num_tokens, const int64_t *tokens, const int64_t *slots, const int64_t *positions,
                      int64_t num_wanted, const int64_t *wanted, float *logits)
{
    struct work w;
    lay_out(m, rank, memory, &w);
    const struct place at = {team, rank, size};
    const int64_t half_layer = m->slots * m->kv_heads * m->positions * m->head_dim;
    int64_t done = 0; /* of the wanted */
    for (int64_t start = 0; start < num_tokens; start += CHUNK) {
        const int64_t rows = num_tokens - start < CHUNK ? num_tokens - start : CHUNK;
        for (int64_t r = rank; r < rows; r += size)
            memcpy(row(w.x, r), m->embedding + tokens[start + r] * m->size, m->size * sizeof(float));
        meet(&at);
        for (int64_t l = 0; l < m->num_layers; l++) {
            float *keys = m->cache + 2 * l * half_layer;
            attention_layer(m, m->layers + l, &at, &w, keys, keys + half_layer, rows, slots + start,
                            positions + start);
            mlp_layer(m, m->layers + l, &at, &w, rows);
        }
        int64_t num = wanted ? 0 : rows;
        while (wanted && done + num < num_wanted && wanted[done + num] < start + rows)
            num++;
        if (num)
            head_rows(m, &at, &w, wanted ? wanted + done : 0, start, num, logits + done * m->vocab);
        done += num;
        meet(&at);
    }
}
