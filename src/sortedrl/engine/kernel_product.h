/* Products with weights in panels, for rows packed in tiles; a row's sums are the same whatever tile it is in. */

#ifndef KERNEL_PRODUCT_H
#define KERNEL_PRODUCT_H

#include "kernel_vectors.h"

enum {
    PANEL = 16,
    WIDE = 6,    /* rows of a tile: as many sums as there are registers for */
    NARROW = 4,  /* for what would leave a wide one half empty */
    BLOCK = 288, /* inputs whose weights, a panel of them, stay in the nearest cache */
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

/* The rows of the next tile, of those left: few of the rows computed are nobody's. */
static inline int64_t next_tile(int64_t left) { return left <= NARROW || left == 7 || left == 8 ? NARROW : WIDE; }

/* Rows times their factors (null: as they are) as products read them; a tile that is not full is filled with zeros. */
static void pack(const float *x, int64_t stride, const float *factors, int64_t rows, int64_t inputs, float *packed)
{
    for (int64_t r = 0, tile; r < rows; r += tile) {
        tile = next_tile(rows - r);
        for (int64_t t = 0; t < tile; t++) {
            const float *row = x + (r + t) * stride;
            float *target = packed + r * inputs + t;
            if (r + t < rows) {
                const float factor = factors ? factors[r + t] : 1;
                for (int64_t i = 0; i < inputs; i++)
                    target[i * tile] = row[i] * factor;
            } else
                for (int64_t i = 0; i < inputs; i++)
                    target[i * tile] = 0;
        }
    }
}

INLINE void tile_product(const float *x, const float *w, int64_t inputs, vec (*sum)[2], const int tile)
{
    for (int64_t i = 0; i < inputs; i++) {
        const vec w0 = load(w + i * PANEL), w1 = load(w + i * PANEL + LANES);
        for (int t = 0; t < tile; t++) {
            const float value = x[i * tile + t];
            sum[t][0] += value * w0;
            sum[t][1] += value * w1;
        }
    }
}

/* y = x w, or y = bias + x w, or y += x w, of one panel: y begins with its first output, and has `width` of them. */
static void panel_product(const float *x, const float *w, const float *bias, float *y, int64_t y_stride, int64_t rows,
                          int64_t inputs, int64_t width, int adds)
{
    const int64_t step = width < PANEL ? inputs : BLOCK; /* sums wait in y, if they fit there */
    for (int64_t block = 0; block < inputs; block += step) {
        const int64_t n = inputs - block < step ? inputs - block : step;
        const float *weights = w + block * PANEL, *next = weights + n * PANEL;
        for (int64_t r = 0, tile; r < rows; r += tile) {
            tile = next_tile(rows - r);
            const int64_t real = rows - r < tile ? rows - r : tile;
            /* Weights come from memory once in a pass: the next block's, while this one is worked on. */
            for (int64_t line = r * n / rows; line < (r + real) * n / rows; line++)
                __builtin_prefetch(next + line * PANEL);
            vec sum[WIDE][2] = {{{0}}};
            for (int64_t t = 0; t < real && (adds || block || bias); t++) {
                const float *start = adds || block ? y + (r + t) * y_stride : bias;
                sum[t][0] = load(start);
                sum[t][1] = load(start + LANES);
            }
            if (tile == WIDE)
                tile_product(x + r * inputs + block * WIDE, weights, n, sum, WIDE);
            else
                tile_product(x + r * inputs + block * NARROW, weights, n, sum, NARROW);
            for (int64_t t = 0; t < real; t++)
                memcpy(y + (r + t) * y_stride, sum[t], (width < PANEL ? width : PANEL) * sizeof(float));
        }
    }
}

#endif
