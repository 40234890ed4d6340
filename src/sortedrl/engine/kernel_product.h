/* Products with weights in panels, of rows in tiles; a row's sums are the same whatever tile it is in. */

#ifndef KERNEL_PRODUCT_H
#define KERNEL_PRODUCT_H

#include "kernel_vectors.h"

enum {
    PANEL = 16,
    WIDE = 6,    /* rows of a tile: as many sums as there are registers for */
    NARROW = 4,  /* for what would leave a wide one half empty */
    BLOCK = 768, /* inputs whose weights, a panel of them, stay near while all rows are worked on */
    AHEAD = 4,   /* inputs worked on for each line of weights that is fetched meanwhile */
};

static inline int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* A matrix [outputs][inputs] in panels, its columns times `gains` (null: as they are). Outputs that fill up the last
 * panel are left as they are: zero. */
void sortedrl_panels(const float *matrix, const float *gains, int64_t outputs, int64_t inputs, float *target)
{
    for (int64_t o = 0; o < outputs; o += PANEL, target += inputs * PANEL) {
        const int64_t real = outputs - o < PANEL ? outputs - o : PANEL;
        for (int64_t i = 0; i < inputs; i++)
            for (int64_t lane = 0; lane < real; lane++)
                target[i * PANEL + lane] = matrix[(o + lane) * inputs + i] * (gains ? gains[i] : 1);
    }
}

/* Rows of working memory. Those of a tile are read past the last one's content, up to the tile's end. */
struct rows {
    float *start;
    int64_t stride;
};

static inline float *row(struct rows rows, int64_t r) { return rows.start + r * rows.stride; }

/* An odd number of cache lines: rows of a tile do not compete for the same places in a cache. */
static inline int64_t row_stride(int64_t n) { return (panels(n) / PANEL | 1) * PANEL; }

/* The rows of the next tile, of those left: few of the rows computed are nobody's. */
static inline int64_t next_tile(int64_t left) { return left <= NARROW || left == 7 || left == 8 ? NARROW : WIDE; }

/* A tile of rows times a panel: sums = starts + factors x w; either may be null. Weights come from memory once in a
 * pass: those from `next` on are fetched while these are worked on. */
INLINE void tile_product(const float *x, int64_t x_stride, const float *factors, const float *w, const float *next,
                         int64_t inputs, struct rows starts, struct rows sums, const int tile)
{
    vec sum[WIDE][2] = {{{0}}};
    for (int64_t i = 0; i < inputs; i++) {
        const vec w0 = load(w + i * PANEL), w1 = load(w + i * PANEL + LANES);
        __builtin_prefetch(next + i / AHEAD * PANEL);
        for (int t = 0; t < tile; t++) {
            const float value = x[t * x_stride + i];
            sum[t][0] += value * w0;
            sum[t][1] += value * w1;
        }
    }
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

/* y = x w, or y = bias + x w, or y += x w, of one panel, with rows of x times their factors (null: as they are). y
 * begins with the panel's first output, and has `width` of them. */
static void panel_product(struct rows x, const float *factors, const float *w, const float *bias, struct rows y,
                          int64_t num_rows, int64_t inputs, int64_t width, int adds)
{
    const int64_t step = width < PANEL ? inputs : BLOCK; /* sums wait in y, if they fit there */
    float scratch[WIDE * PANEL] = {0};
    for (int64_t block = 0; block < inputs; block += step) {
        const int64_t n = inputs - block < step ? inputs - block : step, fetched = n / AHEAD * PANEL;
        const float *weights = w + block * PANEL, *next = weights + n * PANEL, *end = next + n * PANEL;
        for (int64_t r = 0, tile; r < num_rows; r += tile) {
            tile = next_tile(num_rows - r);
            const int64_t real = num_rows - r < tile ? num_rows - r : tile;
            const int is_whole = real == tile && width >= PANEL;
            const struct rows target = {row(y, r), y.stride}, part = {scratch, PANEL};
            const struct rows sums = is_whole ? target : part;
            struct rows starts = adds || block ? target : (struct rows){(float *)bias, 0};
            if (starts.start && !is_whole) {
                for (int64_t t = 0; t < real; t++)
                    memcpy(row(part, t), row(starts, t), PANEL * sizeof(float));
                starts = part;
            }
            const float *of_rows = factors ? factors + r : 0;
            if (tile == WIDE)
                tile_product(row(x, r) + block, x.stride, of_rows, weights, next, n, starts, sums, WIDE);
            else
                tile_product(row(x, r) + block, x.stride, of_rows, weights, next, n, starts, sums, NARROW);
            for (int64_t t = 0; t < real && !is_whole; t++)
                memcpy(row(target, t), row(part, t), (width < PANEL ? width : PANEL) * sizeof(float));
            next = next + fetched < end ? next + fetched : next;
        }
    }
}

#endif
