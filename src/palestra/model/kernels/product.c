// SPDX-License-Identifier: Apache-2.0
// Products of a few rows, or many, with a weight that was laid out for them once.
//
// A weight is read a panel at a time, PANEL outputs that are computed together, and every panel goes by all rows while
// it is in the nearest cache. One in bfloat16 is widened as it is read, so it takes half the memory and half the way
// from there, and rows are float32 as ever: what a processor without products in bfloat16 does best with it.

#include "product.h"

#ifndef PANEL
#ifdef __AVX512F__
#define PANEL 32 // outputs that are computed together: two of the processor's vectors
#else
#define PANEL 16
#endif
#endif
typedef float half __attribute__((vector_size(2 * PANEL), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(2 * PANEL), aligned(4), may_alias));

int panel(void) { return PANEL; }

// packed (panels, depth, PANEL) = weight (width, depth), PANEL outputs at a time, with zeros behind the last. In bfloat16
// an output of the left half is followed by its neighbour in the right half, so that both are widened from one word.
void pack(const void *weight, void *packed, int64_t width, int64_t depth, int narrow, int threads) {
    const int64_t panels = (width + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t o = p * PANEL; o < (p + 1) * PANEL; o++) {
                const int64_t from = o * depth + k, to = (p * depth + k) * PANEL, i = o % PANEL, middle = PANEL / 2;
                if (narrow)
                    ((uint16_t *)packed)[to + i % middle * 2 + i / middle] =
                        o < width ? ((const uint16_t *)weight)[from] : 0;
                else
                    ((float *)packed)[to + i] = o < width ? ((const float *)weight)[from] : 0;
            }
}

// `rows` rows of x (·, depth) times one panel (depth, PANEL) of a weight. ahead: what is needed soon and may still lie in
// memory, asked for `pace` bytes at a time, as quickly as the sums go.
static inline __attribute__((always_inline)) void tile(const float *x, const void *weight, const float *bias,
                                                       float *out, int64_t depth, int64_t width, int64_t kept,
                                                       const char *ahead, int64_t pace, const int rows,
                                                       const int narrow) {
    half left[6], right[6];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        left[r] = bias ? *(const half *)bias : (half){0};
        right[r] = bias ? *(const half *)(bias + PANEL / 2) : (half){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        half a, b;
        if (narrow) { // bfloat16 is the upper half of a float32: nothing is rounded here
            words both = *(const words *)((const uint16_t *)weight + k * PANEL);
            a = (half)(both << 16), b = (half)(both & 0xFFFF0000u);
        } else {
            const half *both = (const half *)((const float *)weight + k * PANEL);
            a = both[0], b = both[1];
        }
        __builtin_prefetch(ahead + k * pace, 0, 2);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            half by = x[r * depth + k] - (half){0};
            left[r] += by * a, right[r] += by * b;
        }
    }
    for (int r = 0; r < rows; r++) {
        float sums[PANEL];
        *(half *)sums = left[r], *(half *)(sums + PANEL / 2) = right[r];
        memcpy(out + r * width, sums, kept * sizeof(float));
    }
}

// All threads of a parallel region together: out (count, width) = x (count, depth) · weightᵀ + bias.
void multiply_together(const float *x, packed_t by, float *out, int64_t count, int64_t depth, int64_t width) {
    const int64_t panels = (width + PANEL - 1) / PANEL, line = PANEL * (by.narrow ? 2 : 4), size = depth * line;
    // So many rows stay in the second cache while the panels go by.
    const int64_t fit = (1 << 16) / depth / 6 * 6, block = fit > 24 ? fit : 24, blocks = (count + block - 1) / block;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t p = task % panels, first = task / panels * block,
                      end = first + block < count ? first + block : count;
        const char *weight = (const char *)by.weight + p * size;
        const float *bias = by.bias ? by.bias + p * PANEL : NULL;
        const int64_t kept = width - p * PANEL < PANEL ? width - p * PANEL : PANEL;
        // While the first rows wait for this panel, the others fetch the one that this thread most likely gets next.
        const int64_t next = p + omp_get_num_threads() < panels ? p + omp_get_num_threads() : p;
        const int64_t others = (end - first - 1) / 6, pace = others ? (line + others - 1) / others : line;
        const char *ahead = weight + 32 * line;
        for (int64_t r = first, rows; r < end; r += rows) {
            const int64_t left = end - r;
            rows = left > 8 || left == 6 ? 6 : left > 4 && left != 5 ? 4 : left; // fours are as quick, twos are not
            const int64_t step = r == first ? line : pace;
            const float *from = x + r * depth;
            float *to = out + r * width + p * PANEL;
#define TILE(n)                                                                                                        \
    case n:                                                                                                            \
        if (by.narrow)                                                                                                 \
            tile(from, weight, bias, to, depth, width, kept, ahead, step, n, 1);                                       \
        else                                                                                                           \
            tile(from, weight, bias, to, depth, width, kept, ahead, step, n, 0);                                       \
        break;
            switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
            ahead = r == first ? (const char *)by.weight + next * size : ahead + depth * pace;
        }
    }
}

void product(const float *x, const packed_t *by, float *out, int64_t count, int64_t depth, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    multiply_together(x, *by, out, count, depth, width);
}
