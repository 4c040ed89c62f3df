// SPDX-License-Identifier: Apache-2.0
// What learning needs besides: gradients of norms and activations, and log-probabilities with theirs.

#include "vectors.h"

// The gradient of rms_norm: dx (count, width) and, unless NULL, parts (threads, width), which sum to the weight's.
void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *scale, float *dx,
                       float *parts, int64_t count, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *part = parts ? parts + t * width : NULL;
        if (part) memset(part, 0, width * sizeof(float));
        for (int64_t r = count * t / threads; r < count * (t + 1) / threads; r++) {
            const float *g = grad + r * width, *row = x + r * width;
            vec dot = {0}, by = all(scale[r]);
            for (int64_t d = 0; d < width; d += LANES) {
                vec gx = load(g + d) * load(row + d);
                dot += gx * load(weight + d);
                if (part) store(part + d, load(part + d) + gx * by);
            }
            vec shared = all(sum_lanes(dot) / width) * by * by * by;
            for (int64_t d = 0; d < width; d += LANES)
                store(dx + r * width + d, load(g + d) * load(weight + d) * by - load(row + d) * shared);
        }
    }
}

// The gradient of silu_times, (count, width) each, all of them dense.
void silu_times_backward(const float *grad, const float *gate, const float *up, float *dgate, float *dup, int64_t count,
                         int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = r * width; d < (r + 1) * width; d += LANES) {
            vec g = load(gate + d), s = sigmoid(g), out = load(grad + d);
            store(dup + d, out * g * s);
            store(dgate + d, out * load(up + d) * s * (all(1.0f) + g * (all(1.0f) - s)));
        }
}

// Log-probabilities ----------------------------------------------------------------------------------------------

// For each row of logits (count, width): top = its largest, log_sum = log Σ e^((logits − top) · factor), and, unless
// NULL, entropy = −Σ p·log p. The largest is taken off first, before anything is rounded at its size. Whatever the
// width; a logit of −∞ is a token that cannot be.
void log_sums(const float *logits, float *top, float *log_sum, float *entropy, int64_t count, int64_t width,
              float factor, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t r = 0; r < count; r++) {
        const float *row = logits + r * width;
        const int64_t whole = width - width % LANES;
        vec most = all(-INFINITY);
        for (int64_t d = 0; d < whole; d += LANES) most = larger(load(row + d), most);
        float largest = max_lanes(most);
        for (int64_t d = whole; d < width; d++) largest = row[d] > largest ? row[d] : largest;
        // Sums of a long row lose digits: blocks of 4096 are summed apart and then in double precision.
        double total = 0, mixed = 0;
        for (int64_t block = 0; block < width; block += 4096) {
            vec sum = {0}, weighted_sum = {0};
            const int64_t end = block + 4096 < width ? block + 4096 : width;
            for (int64_t d = block; d < end; d += LANES) {
                vec x;
                if (d + LANES <= end)
                    x = load(row + d);
                else {
                    x = all(-INFINITY);
                    for (int64_t i = d; i < end; i++) x[i - d] = row[i];
                }
                x = (x - all(largest)) * all(factor);
                vec p = exponential(x);
                sum += p;
                if (entropy) weighted_sum += p * pick(x < all(-87.0f), all(0.0f), x);
            }
            total += sum_lanes(sum), mixed += sum_lanes(weighted_sum);
        }
        top[r] = largest;
        log_sum[r] = (float)log(total);
        if (entropy) entropy[r] = (float)(log(total) - mixed / total);
    }
}

// Turn logits into the gradient of Σ grads[m] · log p(target m), in place. Row r's targets are those of the places
// starts[r] … starts[r+1] of `order`, which lists the m by row.
void log_sums_backward(float *logits, const float *top, const float *log_sum, const float *grads,
                       const int64_t *targets, const int64_t *order, const int64_t *starts, int64_t count,
                       int64_t width, float factor, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t r = 0; r < count; r++) {
        float *row = logits + r * width, sum = 0;
        for (int64_t i = starts[r]; i < starts[r + 1]; i++) sum += grads[order[i]];
        const vec by = all(-sum * factor), most = all(top[r]), off = all(log_sum[r]);
        for (int64_t d = 0; d + LANES <= width; d += LANES)
            store(row + d, by * exponential((load(row + d) - most) * all(factor) - off));
        const int64_t whole = width - width % LANES;
        if (whole < width) {
            vec x = all(-INFINITY);
            for (int64_t d = whole; d < width; d++) x[d - whole] = row[d];
            x = by * exponential((x - most) * all(factor) - off);
            for (int64_t d = whole; d < width; d++) row[d] = x[d - whole];
        }
        for (int64_t i = starts[r]; i < starts[r + 1]; i++) row[targets[order[i]]] += grads[order[i]] * factor;
    }
}
