/* Matrix products: tiles of rows times panels of weights, both as floats or both in fixed point. The tiles here are for
 * AVX2 and plain C; those for AVX-512 are in wide_product.h, and the processor decides at run time.
 *
 * Guarantees: a row's sums are the same to the last bit in every tile size and on every kind of vectors. */

#ifndef KERNEL_PRODUCT_H
#define KERNEL_PRODUCT_H

#include "fixed_point.h"
#include "wide_vectors.h"

enum {
    PANEL = 16,
    LARGE_TILE = 6, /* rows of a tile: as many sums as there are registers */
    SMALL_TILE = 4, /* used where a large tile would be half empty */
    MAX_TILE = 8,   /* the most rows of any tile, those of wide_product.h included */
    BLOCK = 768,    /* inputs per block: its weights in a panel stay in the cache while all rows are multiplied */
    MAX_SHARES = 4, /* tiles that share the fetching of the next weights */
    MAX_PANELS = 2, /* the most panels of a tile */
};

_Static_assert(BLOCK % SPAN == 0 && SPAN % PANEL == 0 && PANEL / 2 % MAX_SHARES == 0,
               "a block must be whole spans, a span whole panels, half a panel whole groups of MAX_SHARES");

/* A span of inputs in fixed point, of a row and of a panel. */
struct row_span {
    float step;
    int32_t numbers[PAIRS];
};

struct panel_span {
    float steps[PANEL];
    int32_t numbers[PAIRS][PANEL];
};

/* A storage format: how many inputs are stored as one unit, the unit's size in a row and in a panel (counted in
 * floats), and how many inputs share a cache line of weights. */
struct form {
    int64_t inputs, in_row, in_panel, in_line;
};

static const struct form FLOATS = {1, 1, PANEL, 1};
static const struct form FIXED = {SPAN, sizeof(struct row_span) / 4, sizeof(struct panel_span) / 4, 2};

static inline int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

static int64_t spans(int64_t n) { return (n + SPAN - 1) / SPAN; }

/* The size of a panel, counted in floats. */
int64_t sortedrl_panel_size(int64_t inputs, int64_t is_fixed)
{
    return is_fixed ? spans(inputs) * FIXED.in_panel : inputs * FLOATS.in_panel;
}

/* Store a value; returns whether it differs from the one before in any bit. */
static inline int64_t overwrite(float *target, float value)
{
    uint32_t before, after;
    memcpy(&before, target, sizeof before);
    memcpy(&after, &value, sizeof after);
    *target = value;
    return before != after;
}

/* Convert the weights of one output to fixed point; returns whether any number has changed. */
static int64_t output_to_fixed(const float *weights, const float *gains, int64_t inputs, struct panel_span *panel,
                               int64_t lane)
{
    int64_t has_changed = 0;
    for (int64_t i = 0; i < inputs; i += SPAN, panel++) {
        const int64_t n = inputs - i < SPAN ? inputs - i : SPAN;
        float span[SPAN];
        int32_t numbers[PAIRS];
        for (int64_t k = 0; k < n; k++)
            span[k] = weights[i + k] * (gains ? gains[i + k] : 1);
        memset(span + n, 0, (panels(n) - n) * sizeof *span);
        has_changed |= overwrite(panel->steps + lane, to_fixed(span, panels(n), numbers));
        for (int64_t k = 0; k < panels(n) / 2; k++) {
            has_changed |= panel->numbers[k][lane] != numbers[k];
            panel->numbers[k][lane] = numbers[k];
        }
    }
    return has_changed;
}

/* Store a matrix [outputs][inputs] as panels, with its columns multiplied by `gains` (may be null). Missing outputs of
 * the last panel are not written: they must be zero already. Returns whether any weight differs from what was stored
 * before. */
int64_t sortedrl_panels(const float *matrix, const float *gains, int64_t outputs, int64_t inputs, int64_t is_fixed,
                        float *target)
{
    int64_t has_changed = 0;
    for (int64_t o = 0; o < outputs; o += PANEL, target += sortedrl_panel_size(inputs, is_fixed)) {
        const int64_t real = outputs - o < PANEL ? outputs - o : PANEL;
        if (is_fixed)
            for (int64_t lane = 0; lane < real; lane++)
                has_changed |= output_to_fixed(matrix + (o + lane) * inputs, gains, inputs, (struct panel_span *)target, lane);
        else
            for (int64_t i = 0; i < inputs; i++)
                for (int64_t lane = 0; lane < real; lane++)
                    has_changed |= overwrite(target + i * PANEL + lane,
                                             matrix[(o + lane) * inputs + i] * (gains ? gains[i] : 1));
    }
    return has_changed;
}

/* Convert a row of n inputs, a multiple of PANEL, times a factor, to fixed point. */
static void row_to_fixed(const float *x, int64_t n, float factor, struct row_span *target)
{
    for (int64_t i = 0; i < n; i += SPAN, target++)
        target->step = to_fixed(x + i, n - i < SPAN ? n - i : SPAN, target->numbers) * factor;
}

/* Rows of working memory. A tile may read rows past the last one with content, so these must be allocated. */
struct rows {
    float *start;
    int64_t stride;
};

static inline float *row(struct rows rows, int64_t r) { return rows.start + r * rows.stride; }

/* An odd number of cache lines, so that the rows of a tile fall into different cache sets. */
static inline int64_t row_stride(int64_t n) { return (panels(n) / PANEL | 1) * PANEL; }

/* A block of one or two panels, whose outputs are neighbours. `second` is `first` where there is one. */
struct weights {
    const float *first, *second;
};

/* The weights of the next block, which are fetched into the cache while this one is multiplied: a pass reads weights
 * from memory once. The tiles of a block share the work: each fetches one line for `1 << shift` lines that it reads. */
struct ahead {
    struct weights next;
    int64_t shift;
};

/* For `num` panels, one or two. */
INLINE void fetch_ahead(struct ahead ahead, int64_t line, const int num)
{
    __builtin_prefetch(ahead.next.first + (line >> ahead.shift) * PANEL, 0, 2);
    if (num == 2)
        __builtin_prefetch(ahead.next.second + (line >> ahead.shift) * PANEL, 0, 2);
}

/* The same for the MAX_SHARES lines from `line` on, without a fetch for each: with many rows it would slow the products. */
INLINE void fetch_group_ahead(struct ahead ahead, int64_t line, const int num)
{
    for (int64_t k = 0; k < MAX_SHARES; k += 1 << ahead.shift)
        fetch_ahead(ahead, line + k, num);
}

/* Sums of a tile of rows times a panel. */
INLINE void float_sums(const float *x, int64_t stride, const float *w, struct ahead ahead, int64_t inputs,
                       vec sum[LARGE_TILE][2], const int tile)
{
    for (int64_t i = 0; i < inputs; i++) {
        const vec w0 = load(w + i * PANEL), w1 = load(w + i * PANEL + LANES);
        fetch_ahead(ahead, i, 1);
        for (int t = 0; t < tile; t++) {
            const float value = x[t * stride + i];
            sum[t][0] += value * w0;
            sum[t][1] += value * w1;
        }
    }
}

/* The span that is `room` floats further. */
static inline const struct row_span *span_of(const struct row_span *x, int64_t room)
{
    return (const struct row_span *)((const float *)x + room);
}

INLINE void fixed_sums(const struct row_span *x, int64_t stride, const struct panel_span *w, struct ahead ahead,
                       int64_t inputs, vec sum[LARGE_TILE][2], const int tile)
{
    for (int64_t left = inputs / 2, line = 0; left > 0; left -= PAIRS, x++, w++) {
        const int64_t num = left < PAIRS ? left : PAIRS;
        ivec exact[LARGE_TILE][2] = {{{0}}};
        for (int64_t i = 0; i < num; i += MAX_SHARES, line += MAX_SHARES) {
            fetch_group_ahead(ahead, line, 1);
            for (int64_t k = i; k < i + MAX_SHARES; k++) {
                const ivec w0 = *(const pairs *)w->numbers[k], w1 = *(const pairs *)(w->numbers[k] + LANES);
                for (int t = 0; t < tile; t++) {
                    const ivec value = (ivec){0} + span_of(x, t * stride)->numbers[k];
                    exact[t][0] = add_products(exact[t][0], value, w0);
                    exact[t][1] = add_products(exact[t][1], value, w1);
                }
            }
        }
        for (int t = 0; t < tile; t++)
            for (int half = 0; half < 2; half++)
                sum[t][half] += __builtin_convertvector(exact[t][half], vec) *
                                (span_of(x, t * stride)->step * load(w->steps + half * LANES));
    }
}

/* sums = starts + factors * x * w for a tile and a panel; `starts` and `factors` may be null. */
INLINE void tile_product(const float *x, int64_t x_stride, const float *factors, struct weights w, struct ahead ahead,
                         int64_t inputs, struct rows starts, struct rows sums, const int tile, const int is_fixed)
{
    vec sum[LARGE_TILE][2] = {{{0}}};
    for (int t = 0; t < tile; t++)
        __builtin_prefetch(row(sums, t), 1); /* so that they are in the cache when they are written */
    if (is_fixed)
        fixed_sums((const struct row_span *)x, x_stride, (const struct panel_span *)w.first, ahead, inputs, sum, tile);
    else
        float_sums(x, x_stride, w.first, ahead, inputs, sum, tile);
    for (int t = 0; t < tile; t++)
        for (int half = 0; half < 2; half++) {
            vec y = sum[t][half];
            if (factors)
                y = y * factors[t];
            if (starts.start)
                y = y + load(row(starts, t) + half * LANES);
            store(row(sums, t) + half * LANES, y);
        }
}

/* A separate function for each kind, because compilers run out of registers in a common one. */
#define TILE(name, tile, is_fixed)                                                                                     \
    static __attribute__((noinline)) void name(const float *x, int64_t x_stride, const float *factors,                 \
                                               struct weights w, struct ahead ahead, int64_t inputs,                   \
                                               struct rows starts, struct rows sums)                                   \
    {                                                                                                                  \
        tile_product(x, x_stride, factors, w, ahead, inputs, starts, sums, tile, is_fixed);                            \
    }

TILE(small_floats, SMALL_TILE, 0)
TILE(large_floats, LARGE_TILE, 0)
TILE(small_fixed, SMALL_TILE, 1)
TILE(large_fixed, LARGE_TILE, 1)

#include "wide_product.h"

/* The functions for tiles of many and of few rows, how many these are, and how many panels a tile has. */
struct tiles {
    __typeof__(&large_floats) large, small;
    int64_t large_rows, small_rows, num_panels;
};

/* The tiles for a product with `most` panels, one or two. */
static struct tiles choose_tiles(int64_t most, int is_fixed)
{
#if HAS_WIDE_VECTORS
    if (has_wide_vectors() && most == 2)
        return is_fixed
                   ? (struct tiles){large_wide_fixed_of_two, small_wide_fixed_of_two, LARGE_WIDE_TILE, SMALL_TILE, 2}
                   : (struct tiles){large_wide_floats_of_two, small_wide_floats_of_two, LARGE_WIDE_TILE, SMALL_TILE, 2};
    if (has_wide_vectors())
        return is_fixed ? (struct tiles){large_wide_fixed, small_wide_fixed, LARGE_WIDE_TILE, SMALL_TILE, 1}
                        : (struct tiles){large_wide_floats, small_wide_floats, LARGE_WIDE_TILE, SMALL_TILE, 1};
#endif
    return is_fixed ? (struct tiles){large_fixed, small_fixed, LARGE_TILE, SMALL_TILE, 1}
                    : (struct tiles){large_floats, small_floats, LARGE_TILE, SMALL_TILE, 1};
}

/* The size of the next tile when `left` rows remain, chosen so that few empty rows are computed. */
static inline int64_t next_tile(const struct tiles *tiles, int64_t left)
{
    const int is_two_small = left > tiles->large_rows && left <= 2 * tiles->small_rows;
    return left <= tiles->small_rows || is_two_small ? tiles->small_rows : tiles->large_rows;
}

static inline struct weights further(struct weights w, int64_t room)
{
    return (struct weights){w.first + room, w.second + room};
}

/* y = x w, y = bias + x w or y += x w (see `panel_product` below) for the panels of one tile. `after`: the weights that
 * are multiplied next, which are only fetched into the cache. */
static void tiles_product(const struct tiles *tiles, struct rows x, const float *factors, struct weights w,
                          struct weights after, const float *bias, struct rows y, int64_t num_rows, int64_t inputs,
                          int64_t width, int adds, int is_fixed)
{
    const struct form form = is_fixed ? FIXED : FLOATS;
    const int64_t full = tiles->num_panels * PANEL;
    const int64_t step = width < full ? inputs : BLOCK; /* y holds sums of blocks if all panels of a tile have room */
    const int64_t num_tiles = (num_rows + tiles->large_rows - 1) / tiles->large_rows;
    const int64_t shift = num_tiles >= MAX_SHARES ? 2 : num_tiles >= 2 ? 1 : 0;
    float scratch[MAX_TILE * MAX_PANELS * PANEL] = {0};
    for (int64_t block = 0; block < inputs; block += step) {
        const int64_t n = inputs - block < step ? inputs - block : step, fetched = (n / form.in_line >> shift) * PANEL;
        const struct weights here = further(w, block / form.inputs * form.in_panel);
        const int is_last = block + n == inputs;
        const struct weights next = is_last ? after : further(here, n / form.inputs * form.in_panel);
        const int64_t most = n / form.in_line * PANEL; /* of the next weights, so many floats are fetched */
        int64_t ahead = 0;
        for (int64_t r = 0, tile; r < num_rows; r += tile) {
            tile = next_tile(tiles, num_rows - r);
            const int64_t real = num_rows - r < tile ? num_rows - r : tile;
            const int is_whole = real == tile && width >= full;
            const struct rows target = {row(y, r), y.stride}, part = {scratch, full};
            const struct rows sums = is_whole ? target : part;
            struct rows starts = adds || block ? target : (struct rows){(float *)bias, 0};
            if (starts.start && !is_whole) {
                for (int64_t t = 0; t < real; t++)
                    memcpy(row(part, t), row(starts, t), full * sizeof(float));
                starts = part;
            }
            const float *of_rows = factors ? factors + r : 0, *start = row(x, r) + block / form.inputs * form.in_row;
            (tile == tiles->large_rows ? tiles->large : tiles->small)(
                start, x.stride, of_rows, here, (struct ahead){further(next, ahead), shift}, n, starts, sums);
            for (int64_t t = 0; t < real && !is_whole; t++)
                memcpy(row(target, t), row(part, t), (width < full ? width : full) * sizeof(float));
            ahead = ahead + fetched < most ? ahead + fetched : ahead;
        }
    }
}

/* One or two panels whose outputs are neighbours, and the panels that are multiplied after them. */
struct piece {
    struct weights w, after;
    int64_t num;
};

/* y = x w, or y = bias + x w, or y += x w (`adds`) for the panels of a piece, where rows of x are multiplied by
 * `factors` (may be null). y starts at the first panel's first output and has `width` outputs from there. */
static void panel_product(struct rows x, const float *factors, struct piece piece, const float *bias, struct rows y,
                          int64_t num_rows, int64_t inputs, int64_t width, int adds, int is_fixed)
{
    const int64_t most = width < piece.num * PANEL ? 1 : piece.num;
    const struct tiles tiles = choose_tiles(most, is_fixed);
    inputs = is_fixed ? panels(inputs) : inputs; /* padded with zeros to whole pairs and cache lines */
    if (tiles.num_panels == piece.num) {
        tiles_product(&tiles, x, factors, piece.w, piece.after, bias, y, num_rows, inputs, width, adds, is_fixed);
        return;
    }
    const struct weights first = {piece.w.first, piece.w.first}, second = {piece.w.second, piece.w.second};
    tiles_product(&tiles, x, factors, first, second, bias, y, num_rows, inputs, width, adds, is_fixed);
    tiles_product(&tiles, x, factors, second, piece.after, bias ? bias + PANEL : 0,
                  (struct rows){y.start + PANEL, y.stride}, num_rows, inputs, width - PANEL, adds, is_fixed);
}

#endif
