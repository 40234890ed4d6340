/* The forward pass of a Llama model, from tokens to logits. Each thread makes one call per pass.
 *
 * `kernel.py` compiles it; `engine/local/native_decoder.py` lays out the weights and calls it. With torch, a small
 * model spends most of a step on the overhead of calls; here only arithmetic remains.
 * Guarantees: every token is computed by the same operations in the same order, whatever other tokens share the call,
 * however many calls there are, and however many threads. Rows are computed in tiles of several sizes, with the same
 * sums per row in all of them. So an answer does not depend on its neighbours, and prefill and decode agree to the last bit.
 *
 * All threads run the same code, each on its share of outputs or rows. They wait for each other where one needs
 * another's results. A thread that has finished its share takes work from the others' shares, so that a slow processor
 * does not delay the call.
 *
 * Shapes: weights are stored in panels of 16 outputs, [outputs / 16][inputs][16]; keys in blocks of 8 positions,
 * [positions / 8][head size][8]; values as [positions][head size]. Rows of working memory are padded with zeros to
 * whole panels. Products use floats, or fixed point if the model's weights do; everything else is computed in floats.
 */

#include <sched.h>

#include "attention.h"
#include "draw.h"
#include "product.h"

enum {
    CHUNK = 96,   /* tokens that are computed together */
    SPINS = 2000, /* iterations after which a waiting thread yields its processor */
    MAX_THREADS = 64,
};

struct layer {
    const float *qkv, *qkv_bias, *q_gain, *k_gain; /* bias and gains are null if the model has none */
    const float *out, *gate_up, *down;
};

struct model {
    int64_t num_layers, size, inner, heads, kv_heads, head_dim, vocab;
    int64_t slots, positions;           /* of the cache; positions is a multiple of the block size */
    int64_t is_fixed;                   /* the weights are in fixed point, except for the embedding */
    float floor, head_floor, scale;     /* size * eps of the norms; factor of attention scores */
    const struct layer *layers;
    const float *embedding, *head;
    const float *cosines, *sines;       /* [positions][head size / 2] */
    float *cache;                       /* [layers][keys, values][slots][kv heads][positions][head size] */
    float *hidden;                      /* [slots][positions][size]: a token's input of layer `first_late`; may be null */
    int64_t first_late;                 /* tokens that start late start here */
};

/* The threads of one call. They wait until all have arrived; the last one to arrive starts the next phase. Once the
 * group is abandoned, because a thread was interrupted, no thread waits any more. */
struct thread_group {
    int64_t arrived, phase, is_abandoned;
    struct {
        int64_t line[8]; /* only the first is used; the rest fills the cache line, so that counters do not share one */
    } taken[MAX_THREADS]; /* how much of each thread's share is taken */
};

struct thread {
    struct thread_group *group;
    int64_t rank, size;
};

static void wait_for_all(const struct thread *self)
{
    const int64_t phase = __atomic_load_n(&self->group->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&self->group->arrived, 1, __ATOMIC_ACQ_REL) == self->size) {
        for (int64_t rank = 0; rank < self->size; rank++)
            __atomic_store_n(self->group->taken[rank].line, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&self->group->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&self->group->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t spins = 0; __atomic_load_n(&self->group->phase, __ATOMIC_ACQUIRE) == phase; spins++)
        if (spins > SPINS) {
            if (__atomic_load_n(&self->group->is_abandoned, __ATOMIC_ACQUIRE))
                return;
            sched_yield(); /* another thread may need this processor */
        }
}

/* A thread's share of `num` rows or pieces: neighbours, because consecutive tokens write to the same lines of keys. */
struct share {
    int64_t start, end;
};

static inline struct share share_of(int64_t num, int64_t rank, int64_t size)
{
    return (struct share){num * rank / size, num * (rank + 1) / size};
}

/* The next of `num` pieces of work in this phase: from this thread's share first, then from the others'; -1 if all are
 * taken. */
static int64_t next_piece(const struct thread *self, int64_t num)
{
    if (self->size == 1) { /* without locked instructions and divisions, which a short piece would feel */
        int64_t *taken = self->group->taken[0].line;
        return *taken < num ? (*taken)++ : -1;
    }
    for (int64_t k = 0; k < self->size; k++) {
        const int64_t owner = (self->rank + k) % self->size;
        const struct share share = share_of(num, owner, self->size);
        int64_t *taken = self->group->taken[owner].line;
        if (share.start + __atomic_load_n(taken, __ATOMIC_RELAXED) < share.end) {
            const int64_t piece = share.start + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (piece < share.end)
                return piece;
        }
    }
    return -1;
}

/* Working memory: rows of a chunk, which all threads share, and the thread's own part. */
struct work {
    struct rows x, qkv, heads, inner;
    struct rows fixed; /* input of the next product, in fixed point */
    struct rows gates_ups; /* a panel of gates, then one of ups */
    float *scores, *factors;
};

static float *allocate(float **memory, int64_t n)
{
    float *start = *memory;
    *memory += panels(n);
    return start;
}

static struct rows allocate_rows(float **memory, int64_t size)
{
    const int64_t stride = row_stride(size);
    return (struct rows){allocate(memory, (CHUNK + MAX_TILE) * stride), stride};
}

static int64_t lay_out_memory(const struct model *m, int64_t rank, float *memory, struct work *w)
{
    float *end = memory;
    w->x = allocate_rows(&end, m->size);
    w->qkv = allocate_rows(&end, (m->heads + 2 * m->kv_heads) * m->head_dim);
    w->heads = allocate_rows(&end, m->heads * m->head_dim);
    w->inner = allocate_rows(&end, m->inner);
    const int64_t widest = m->inner > m->heads * m->head_dim ? m->inner : m->heads * m->head_dim;
    w->fixed = allocate_rows(&end, m->is_fixed ? spans(widest > m->size ? widest : m->size) * FIXED.in_row : 0);
    for (int64_t own = 0; own <= rank; own++) {
        w->gates_ups = allocate_rows(&end, 2 * PANEL);
        w->scores = allocate(&end, GROUP * m->positions);
        w->factors = allocate(&end, CHUNK + MAX_TILE);
    }
    return end - memory;
}

/* Whether products use AVX-512 with VNNI: this processor has them, and the compiler knows them. */
int64_t sortedrl_has_wide_vectors(void) { return has_wide_vectors(); }

/* The size of the working memory for this number of threads, counted in floats. */
int64_t sortedrl_memory(const struct model *m, int64_t num_threads)
{
    struct work w;
    return lay_out_memory(m, num_threads - 1, 0, &w);
}

/* The input of a product: rows, as floats or in fixed point, and the norm's factor per row (null: no norm). */
struct operand {
    struct rows rows;
    const float *factors;
    int64_t num_rows, inputs;
};

static struct operand operand(const struct model *m, const struct thread *self, struct work *w, struct rows rows,
                              int64_t num_rows, int64_t inputs, int is_normed)
{
    if (!m->is_fixed) {
        for (int64_t r = 0; r < num_rows && is_normed; r++)
            w->factors[r] = norm_factor(row(rows, r), panels(inputs), m->floor);
        return (struct operand){rows, is_normed ? w->factors : 0, num_rows, inputs};
    }
    const struct share own = share_of(num_rows, self->rank, self->size);
    for (int64_t r = own.start; r < own.end; r++) {
        const float factor = is_normed ? norm_factor(row(rows, r), panels(inputs), m->floor) : 1;
        row_to_fixed(row(rows, r), panels(inputs), factor, (struct row_span *)row(w->fixed, r));
    }
    wait_for_all(self);
    return (struct operand){w->fixed, 0, num_rows, inputs};
}

static void product(const struct model *m, const struct thread *self, struct operand x, const float *w,
                    const float *bias, struct rows y, int64_t outputs, int adds)
{
    const int64_t num = panels(outputs) / PANEL, size = sortedrl_panel_size(x.inputs, m->is_fixed);
    for (int64_t i; (i = next_piece(self, (num + 1) / 2)) >= 0;) {
        const int64_t p = 2 * i;
        const float *first = w + p * size, *after = first + 2 * size;
        const struct piece piece = p + 1 < num ? (struct piece){{first, first + size}, {after, after + size}, 2}
                                               : (struct piece){{first, first}, {first, first}, 1};
        const struct rows part = {y.start + p * PANEL, y.stride};
        panel_product(x.rows, x.factors, piece, bias ? bias + p * PANEL : 0, part, x.num_rows, x.inputs,
                      outputs - p * PANEL, adds, m->is_fixed);
    }
}

/* Rotate the queries and keys of a token to its position, and store its keys and values in the cache. */
static void rotate_and_cache(const struct model *m, const struct layer *layer, float *q, float *keys, float *values,
                             int64_t slot, int64_t p)
{
    const int64_t d = m->head_dim, per_head = m->positions * d;
    const float *cosines = m->cosines + p * (d / 2), *sines = m->sines + p * (d / 2);
    float *k = q + m->heads * d, *v = k + m->kv_heads * d;
    for (int64_t h = 0; h < m->heads; h++)
        rotate(q + h * d, d, cosines, sines, layer->q_gain, m->head_floor);
    for (int64_t i = 0; i < m->heads * d; i++)
        q[i] *= m->scale;
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const int64_t offset = (slot * m->kv_heads + h) * per_head;
        float *block = keys + offset + p / LANES * LANES * d + p % LANES;
        rotate(k + h * d, d, cosines, sines, layer->k_gain, m->head_floor);
        for (int64_t i = 0; i < d; i++)
            block[i * LANES] = k[h * d + i];
        memcpy(values + offset + p * d, v + h * d, d * sizeof(float));
    }
}

/* How many tokens from row r on attend together: consecutive ones of a sequence, which share their keys, as far as a
 * group has room. 0 if the row belongs to the tokens of an earlier one. */
static int64_t tokens_together(int64_t r, int64_t rows, const int64_t *slots, const int64_t *positions, int64_t most)
{
#define CONTINUES(r) (slots[r] == slots[(r) - 1] && positions[r] == positions[(r) - 1] + 1 && positions[r] % most)
    if (r && CONTINUES(r))
        return 0;
    int64_t num = 1;
    while (r + num < rows && CONTINUES(r + num))
        num++;
    return num;
#undef CONTINUES
}

/* Queries, keys and values of all rows; keys and values go to the cache. */
static void cache_layer(const struct model *m, const struct layer *layer, const struct thread *self, struct work *w,
                        float *keys, float *values, int64_t rows, const int64_t *slots, const int64_t *positions)
{
    const int64_t d = m->head_dim;
    const struct share own = share_of(rows, self->rank, self->size);
    const struct operand x = operand(m, self, w, w->x, rows, m->size, 1);
    product(m, self, x, layer->qkv, layer->qkv_bias, w->qkv, panels((m->heads + 2 * m->kv_heads) * d), 0);
    wait_for_all(self);
    for (int64_t r = own.start; r < own.end; r++)
        rotate_and_cache(m, layer, row(w->qkv, r), keys, values, slots[r], positions[r]);
    wait_for_all(self);
}

static void attention_layer(const struct model *m, const struct layer *layer, const struct thread *self, struct work *w,
                            const float *keys, const float *values, int64_t rows, const int64_t *slots,
                            const int64_t *positions)
{
    const int64_t d = m->head_dim, per_head = m->positions * d, sharing = m->heads / m->kv_heads;
    const int64_t num = rows * m->kv_heads;
    for (int64_t i; (i = next_piece(self, num)) >= 0;) {
        const int64_t then = i + 1 < num ? i + 1 : i;
        const int64_t r = i / m->kv_heads, h = i % m->kv_heads, start = (slots[r] * m->kv_heads + h) * per_head;
        const int64_t next = (slots[then / m->kv_heads] * m->kv_heads + then % m->kv_heads) * per_head;
        const int64_t tokens = tokens_together(r, rows, slots, positions, sharing < GROUP ? GROUP / sharing : 1);
        struct query queries[GROUP];
        for (int64_t q = 0, group = 0; q < tokens * sharing; q++) {
            const int64_t of = r + q / sharing, first = (h * sharing + q % sharing) * d;
            queries[group++] = (struct query){row(w->qkv, of) + first, row(w->heads, of) + first, positions[of] + 1};
            if (group == GROUP || q + 1 == tokens * sharing) {
                attend(queries, group, keys + start, values + start, keys + next, d, w->scores, m->positions);
                group = 0;
            }
        }
    }
    wait_for_all(self);
    const struct operand heads = operand(m, self, w, w->heads, rows, m->heads * d, 0);
    product(m, self, heads, layer->out, 0, w->x, panels(m->size), 1);
    wait_for_all(self);
}

static void mlp_layer(const struct model *m, const struct layer *layer, const struct thread *self, struct work *w,
                      int64_t rows)
{
    const int64_t num = panels(m->inner) / PANEL, size = sortedrl_panel_size(m->size, m->is_fixed);
    const struct operand x = operand(m, self, w, w->x, rows, m->size, 1);
    for (int64_t p; (p = next_piece(self, num)) >= 0;) {
        const float *gate = layer->gate_up + p * size, *up = gate + num * size;
        const struct piece piece = {{gate, up}, {gate + size, up + size}, 2};
        for (int64_t r = 0; r < rows; r++) /* other threads have read these lines, which takes long to write to */
            __builtin_prefetch(row(w->inner, r) + p * PANEL, 1);
        panel_product(x.rows, x.factors, piece, 0, w->gates_ups, rows, m->size, 2 * PANEL, 0, m->is_fixed);
        for (int64_t r = 0; r < rows; r++) {
            const float *gates = row(w->gates_ups, r), *ups = gates + PANEL;
            for (int64_t i = 0; i < PANEL; i += LANES)
                store(row(w->inner, r) + p * PANEL + i, gated_silu(load(gates + i), load(ups + i)));
        }
    }
    wait_for_all(self);
    const struct operand inner = operand(m, self, w, w->inner, rows, m->inner, 0);
    product(m, self, inner, layer->down, 0, w->x, panels(m->size), 1);
    wait_for_all(self);
}

/* Tokens of a chunk that the next layer computes: `num` rows with their slots and positions. */
struct tokens {
    int64_t num, slots[CHUNK], positions[CHUNK];
};

/* Go on with the `num` tokens `wanted[k] - start` alone: move their rows to the front. */
static void keep_wanted(const struct model *m, const struct thread *self, struct work *w, struct tokens *tokens,
                        const int64_t *wanted, int64_t start, int64_t num)
{
    for (int64_t k = 0; k < num; k++) { /* ascending: no row is overwritten before it is moved */
        const int64_t r = wanted[k] - start;
        tokens->slots[k] = tokens->slots[r];
        tokens->positions[k] = tokens->positions[r];
        if (self->rank == 0 && k != r) {
            memcpy(row(w->x, k), row(w->x, r), panels(m->size) * sizeof(float));
            memcpy(row(w->qkv, k), row(w->qkv, r), m->heads * m->head_dim * sizeof(float)); /* queries are first */
        }
    }
    tokens->num = num;
    wait_for_all(self);
}

/* Logits of the first `num` rows of x. */
static void head_rows(const struct model *m, const struct thread *self, struct work *w, int64_t num, float *logits)
{
    const struct rows y = {logits, m->vocab};
    product(m, self, operand(m, self, w, w->x, num, m->size, 1), m->head, 0, y, m->vocab, 0);
}

static float *hidden_of(const struct model *m, int64_t slot, int64_t position)
{
    return m->hidden + (slot * m->positions + position) * m->size;
}

/* Compute the logits of the `wanted` tokens (indices in ascending order), or of all tokens if `wanted` is null. Tokens
 * of one sequence must be in order and continue what the cache holds. Tokens from index `num_early` on start late: the
 * first layers have seen them before, so `hidden` and the cache of these layers hold what they computed. Called by
 * `size` threads, each with its rank. */
void sortedrl_forward(const struct model *m, float *memory, struct thread_group *group, int64_t rank, int64_t size,
                      int64_t num_tokens, int64_t num_early, const int64_t *tokens, const int64_t *slots,
                      const int64_t *positions, int64_t num_wanted, const int64_t *wanted, float *logits)
{
    struct work w;
    lay_out_memory(m, rank, memory, &w);
    const struct thread self = {group, rank, size};
    const int64_t half_layer = m->slots * m->kv_heads * m->positions * m->head_dim;
    int64_t done = 0; /* number of wanted tokens that are computed */
    for (int64_t start = 0; start < num_tokens; start += CHUNK) {
        const int64_t rows = num_tokens - start < CHUNK ? num_tokens - start : CHUNK;
        const int64_t before = num_early < start ? 0 : num_early - start, early = before < rows ? before : rows;
        int64_t num = wanted ? 0 : rows; /* wanted tokens of this chunk */
        while (wanted && done + num < num_wanted && wanted[done + num] < start + rows)
            num++;
        struct tokens here;
        memcpy(here.slots, slots + start, rows * sizeof *slots);
        memcpy(here.positions, positions + start, rows * sizeof *positions);
        const struct share own = share_of(rows, rank, size);
        for (int64_t r = own.start; r < own.end; r++)
            memcpy(row(w.x, r),
                   r < early ? m->embedding + tokens[start + r] * m->size
                             : hidden_of(m, slots[start + r], positions[start + r]),
                   m->size * sizeof(float));
        wait_for_all(&self);
        for (int64_t l = early ? 0 : m->first_late; l < m->num_layers; l++) {
            float *keys = m->cache + 2 * l * half_layer;
            here.num = l < m->first_late ? early : rows;
            for (int64_t r = own.start; r < own.end && r < early && m->hidden && l == m->first_late; r++)
                memcpy(hidden_of(m, slots[start + r], positions[start + r]), row(w.x, r), m->size * sizeof(float));
            cache_layer(m, m->layers + l, &self, &w, keys, keys + half_layer, here.num, here.slots, here.positions);
            /* Of the other tokens, the last layer has to compute only keys and values. */
            if (num < rows && l + 1 == m->num_layers && l >= m->first_late)
                keep_wanted(m, &self, &w, &here, wanted + done, start, num);
            attention_layer(m, m->layers + l, &self, &w, keys, keys + half_layer, here.num, here.slots,
                            here.positions);
            mlp_layer(m, m->layers + l, &self, &w, here.num);
        }
        if (num < rows && m->first_late >= m->num_layers)
            keep_wanted(m, &self, &w, &here, wanted + done, start, num);
        if (num)
            head_rows(m, &self, &w, num, logits + done * m->vocab);
        done += num;
        wait_for_all(&self);
    }
}
