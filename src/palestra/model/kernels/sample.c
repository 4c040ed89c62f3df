// SPDX-License-Identifier: Apache-2.0
// One token for each draw, by the inverse of a row's cumulative distribution, and its log-probability.

#include "vectors.h"

#define BLOCK 256 // tokens whose masses are summed apart: a sum over short blocks is quicker to search, and rounds less

// e^((x − top) · factor) of the eight logits from d on, 0 behind the row's end
static inline vec masses(const float *row, int64_t d, int64_t width, float top, float factor) {
    vec x = all(-INFINITY);
    if (d + LANES <= width)
        x = load(row + d);
    else
        for (int64_t i = d; i < width; i++) x[i - d] = row[i];
    return exponential((x - all(top)) * all(factor)); // the largest is taken off before anything is rounded at its size
}

static float largest(const float *row, int64_t width) {
    const int64_t whole = width - width % LANES;
    vec most = all(-INFINITY);
    for (int64_t d = 0; d < whole; d += LANES) most = larger(load(row + d), most);
    float top = max_lanes(most);
    for (int64_t d = whole; d < width; d++) top = row[d] > top ? row[d] : top;
    return top;
}

// The first token at which the share of the mass so far exceeds u, or the likeliest where u is negative.
static int64_t token_at(const float *row, const float *sums, int64_t width, float top, float factor, double total,
                        float u) {
    if (u < 0) {
        for (int64_t d = 0; d < width; d++)
            if (row[d] == top) return d;
        return 0;
    }
    const double target = u * total;
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    double before = 0;
    int64_t block = 0;
    while (block < blocks - 1 && before + sums[block] <= target) before += sums[block++];
    const int64_t end = (block + 1) * BLOCK < width ? (block + 1) * BLOCK : width;
    int64_t likeliest = block * BLOCK; // of the block: a rounded sum may end before the target
    for (int64_t d = block * BLOCK; d < end; d += LANES) {
        const vec mass = masses(row, d, width, top, factor);
        for (int64_t i = 0; i < LANES && d + i < end; i++) {
            before += mass[i];
            if (before > target && mass[i] > 0) return d + i;
            if (row[d + i] > row[likeliest]) likeliest = d + i;
        }
    }
    return likeliest;
}

// logits (count, width), factors (count,): 1/temperature of each row. sums (count, blocks) and top (count,): room.
// Draw n < draws is of row rows[n] with u[n] in [0, 1), or negative for the likeliest: tokens, logprobs (draws,).
void draw(const float *logits, const float *factors, float *top, float *sums, const int64_t *rows, const float *u,
          int64_t *tokens, float *logprobs, int64_t count, int64_t width, int64_t draws, int threads) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < count; r++) {
            const float *row = logits + r * width;
            top[r] = largest(row, width);
            for (int64_t b = 0; b < blocks; b++) {
                vec sum = {0};
                for (int64_t d = b * BLOCK; d < (b + 1) * BLOCK && d < width; d += LANES)
                    sum += masses(row, d, width, top[r], factors[r]);
                sums[r * blocks + b] = sum_lanes(sum);
            }
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < draws; n++) {
            const int64_t r = rows[n];
            double total = 0;
            for (int64_t b = 0; b < blocks; b++) total += sums[r * blocks + b];
            tokens[n] = token_at(logits + r * width, sums + r * blocks, width, top[r], factors[r], total, u[n]);
            logprobs[n] = (logits[r * width + tokens[n]] - top[r]) * factors[r] - (float)log(total);
        }
    }
}
