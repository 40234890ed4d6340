/* Tiles of matrix products for processors with AVX-512: vectors of sixteen floats, which is one panel's width.
 *
 * `product.h` uses them if the processor has these instructions, which it asks at run time: the file is compiled for
 * AVX2, and only the functions here may use more. Fixed point needs VNNI as well, whose one instruction multiplies
 * pairs and adds them.
 * Guarantees: a row's sums are the same to the last bit as in the tiles of `product.h`. Each output has its own lane,
 * and adds the same products in the same order.
 */

#ifndef KERNEL_WIDE_PRODUCT_H
#define KERNEL_WIDE_PRODUCT_H

#if HAS_WIDE_VECTORS
enum { LARGE_WIDE_TILE = 8 }; /* rows of a tile: enough sums that none waits for the one before */

typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t wide_ints __attribute__((vector_size(64)));
typedef wide_ints wide_pairs __attribute__((aligned(4), may_alias));

_Static_assert(sizeof(wide) == PANEL * sizeof(float) && (int)LARGE_WIDE_TILE <= (int)MAX_TILE,
               "a vector must hold a panel's outputs, and rows past the last one must be allocated");

WIDE_INLINE void wide_float_sums(const float *x, int64_t stride, const float *w, struct ahead ahead, int64_t inputs,
                                 wide sum[LARGE_WIDE_TILE], const int tile)
{
    for (int64_t i = 0; i < inputs; i++) {
        const wide weights = *(const wide *)(w + i * PANEL);
        fetch_ahead(ahead, i);
        for (int t = 0; t < tile; t++)
            sum[t] += x[t * stride + i] * weights;
    }
}

WIDE_INLINE void wide_fixed_sums(const struct row_span *x, int64_t stride, const struct panel_span *w,
                                 struct ahead ahead, int64_t inputs, wide sum[LARGE_WIDE_TILE], const int tile)
{
    for (int64_t left = inputs / 2, line = 0; left > 0; left -= PAIRS, x++, w++) {
        const int64_t num = left < PAIRS ? left : PAIRS;
        wide_ints exact[LARGE_WIDE_TILE] = {{0}};
        for (int64_t i = 0; i < num; i += MAX_SHARES, line += MAX_SHARES) {
            fetch_group_ahead(ahead, line);
            for (int64_t k = i; k < i + MAX_SHARES; k++) {
                const wide_ints weights = *(const wide_pairs *)w->numbers[k];
                for (int t = 0; t < tile; t++) {
                    const wide_ints value = (wide_ints){0} + span_of(x, t * stride)->numbers[k];
                    __asm__("vpdpwssd %2, %1, %0" : "+v"(exact[t]) : "v"(value), "v"(weights));
                }
            }
        }
        for (int t = 0; t < tile; t++)
            sum[t] += __builtin_convertvector(exact[t], wide) *
                      (span_of(x, t * stride)->step * *(const wide *)w->steps);
    }
}

/* As `tile_product` in product.h. */
WIDE_INLINE void wide_tile_product(const float *x, int64_t x_stride, const float *factors, const float *w,
                                   struct ahead ahead, int64_t inputs, struct rows starts, struct rows sums,
                                   const int tile, const int is_fixed)
{
    wide sum[LARGE_WIDE_TILE]; /* set one by one: compilers would clear the array with a slow instruction */
    for (int t = 0; t < tile; t++) {
        sum[t] = (wide){0};
        __builtin_prefetch(row(sums, t), 1);
    }
    if (is_fixed)
        wide_fixed_sums((const struct row_span *)x, x_stride, (const struct panel_span *)w, ahead, inputs, sum, tile);
    else
        wide_float_sums(x, x_stride, w, ahead, inputs, sum, tile);
    for (int t = 0; t < tile; t++) {
        wide y = sum[t];
        if (factors)
            y = y * factors[t];
        if (starts.start)
            y = y + *(const wide *)row(starts, t);
        *(wide *)row(sums, t) = y;
    }
}

#define WIDE_TILE(name, tile, is_fixed)                                                                                \
    static WIDE_TARGET void name(const float *x, int64_t x_stride, const float *factors, const float *w,               \
                                 struct ahead ahead, int64_t inputs, struct rows starts, struct rows sums)             \
    {                                                                                                                  \
        wide_tile_product(x, x_stride, factors, w, ahead, inputs, starts, sums, tile, is_fixed);                       \
    }

WIDE_TILE(small_wide_floats, SMALL_TILE, 0)
WIDE_TILE(large_wide_floats, LARGE_WIDE_TILE, 0)
WIDE_TILE(small_wide_fixed, SMALL_TILE, 1)
WIDE_TILE(large_wide_fixed, LARGE_WIDE_TILE, 1)

#endif

#endif
