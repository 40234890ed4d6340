/* Tiles of matrix products for processors with AVX-512: vectors of sixteen floats, which is one panel's width.
 *
 * `product.h` uses them if the processor has these instructions, which it asks at run time: the file is compiled for
 * AVX2, and only the functions here may use more. Fixed point needs VNNI as well, whose one instruction multiplies
 * pairs and adds them. A tile multiplies its rows with two panels where there are two: each number of a row is then
 * loaded once for both, and a processor that starts two products per cycle has enough sums to go on with.
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

WIDE_INLINE void wide_float_sums(const float *x, int64_t stride, struct weights w, struct ahead ahead, int64_t inputs,
                                 wide sum[][2], const int tile, const int num)
{
    for (int64_t i = 0; i < inputs; i++) {
        fetch_ahead(ahead, i, num);
        const wide w0 = *(const wide *)(w.first + i * PANEL), w1 = *(const wide *)(w.second + i * PANEL);
        for (int t = 0; t < tile; t++) {
            const float value = x[t * stride + i];
            sum[t][0] += value * w0;
            if (num == 2)
                sum[t][1] += value * w1;
        }
    }
}

WIDE_INLINE void wide_fixed_sums(const struct row_span *x, int64_t stride, struct weights w, struct ahead ahead,
                                 int64_t inputs, wide sum[][2], const int tile, const int num)
{
    const struct panel_span *first = (const struct panel_span *)w.first, *second = (const struct panel_span *)w.second;
    for (int64_t left = inputs / 2, line = 0; left > 0; left -= PAIRS, x++, first++, second++) {
        const int64_t pairs_here = left < PAIRS ? left : PAIRS;
        wide_ints exact[LARGE_WIDE_TILE][2];
        for (int t = 0; t < tile; t++)
            exact[t][0] = exact[t][1] = (wide_ints){0};
        for (int64_t i = 0; i < pairs_here; i += MAX_SHARES, line += MAX_SHARES) {
            fetch_group_ahead(ahead, line, num);
            for (int64_t k = i; k < i + MAX_SHARES; k++) {
                const wide_ints w0 = *(const wide_pairs *)first->numbers[k], w1 = *(const wide_pairs *)second->numbers[k];
                for (int t = 0; t < tile; t++) {
                    const wide_ints value = (wide_ints){0} + span_of(x, t * stride)->numbers[k];
                    __asm__("vpdpwssd %2, %1, %0" : "+v"(exact[t][0]) : "v"(value), "v"(w0));
                    if (num == 2)
                        __asm__("vpdpwssd %2, %1, %0" : "+v"(exact[t][1]) : "v"(value), "v"(w1));
                }
            }
        }
        for (int t = 0; t < tile; t++) {
            const float step = span_of(x, t * stride)->step;
            sum[t][0] += __builtin_convertvector(exact[t][0], wide) * (step * *(const wide *)first->steps);
            if (num == 2)
                sum[t][1] += __builtin_convertvector(exact[t][1], wide) * (step * *(const wide *)second->steps);
        }
    }
}

/* As `tile_product` in product.h, for `num` panels, one or two. */
WIDE_INLINE void wide_tile_product(const float *x, int64_t x_stride, const float *factors, struct weights w,
                                   struct ahead ahead, int64_t inputs, struct rows starts, struct rows sums,
                                   const int tile, const int num, const int is_fixed)
{
    wide sum[LARGE_WIDE_TILE][2]; /* set one by one: compilers would clear the array with a slow instruction */
    for (int t = 0; t < tile; t++) {
        sum[t][0] = sum[t][1] = (wide){0};
        for (int p = 0; p < num; p++)
            __builtin_prefetch(row(sums, t) + p * PANEL, 1);
    }
    if (is_fixed)
        wide_fixed_sums((const struct row_span *)x, x_stride, w, ahead, inputs, sum, tile, num);
    else
        wide_float_sums(x, x_stride, w, ahead, inputs, sum, tile, num);
    for (int t = 0; t < tile; t++)
        for (int p = 0; p < num; p++) {
            wide y = sum[t][p];
            if (factors)
                y = y * factors[t];
            if (starts.start)
                y = y + *(const wide *)(row(starts, t) + p * PANEL);
            *(wide *)(row(sums, t) + p * PANEL) = y;
        }
}

#define WIDE_TILE(name, tile, num, is_fixed)                                                                           \
    static WIDE_TARGET void name(const float *x, int64_t x_stride, const float *factors, struct weights w,             \
                                 struct ahead ahead, int64_t inputs, struct rows starts, struct rows sums)             \
    {                                                                                                                  \
        wide_tile_product(x, x_stride, factors, w, ahead, inputs, starts, sums, tile, num, is_fixed);                  \
    }

WIDE_TILE(small_wide_floats, SMALL_TILE, 1, 0)
WIDE_TILE(large_wide_floats, LARGE_WIDE_TILE, 1, 0)
WIDE_TILE(small_wide_fixed, SMALL_TILE, 1, 1)
WIDE_TILE(large_wide_fixed, LARGE_WIDE_TILE, 1, 1)
WIDE_TILE(small_wide_floats_of_two, SMALL_TILE, 2, 0)
WIDE_TILE(large_wide_floats_of_two, LARGE_WIDE_TILE, 2, 0)
WIDE_TILE(small_wide_fixed_of_two, SMALL_TILE, 2, 1)
WIDE_TILE(large_wide_fixed_of_two, LARGE_WIDE_TILE, 2, 1)

#endif

#endif
