// SPDX-License-Identifier: Apache-2.0
// A pass through a decoder's layers, and its parts: attention over slots, norms, activations (products: product.c).
//
// With a few dozen rows, torch's small operations and what calls them take longer than the products between them. Every
// function has a plain equivalent in torch, which is used where this cannot be compiled, and tests hold the two
// together. Arrays are float32. A row's arithmetic has one order, whatever rows stand beside it and however many
// threads there are, so its bits depend on nothing else.

#include "product.h"

// Attention over slots ------------------------------------------------------------------------------------------

// Scores of one query (D,) with eight keys (8, D): eight sums at once, then their lanes side by side.
static inline vec eight_scores(const float *query, const float *keys, int64_t width) {
    vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, s5 = {0}, s6 = {0}, s7 = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec q = load(query + d);
        const float *k = keys + d;
        s0 += q * load(k), s1 += q * load(k + width), s2 += q * load(k + 2 * width), s3 += q * load(k + 3 * width);
        k += 4 * width;
        s4 += q * load(k), s5 += q * load(k + width), s6 += q * load(k + 2 * width), s7 += q * load(k + 3 * width);
    }
#define EVENS(a, b) __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODDS(a, b) __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
    vec a = EVENS(s0, s1) + ODDS(s0, s1), b = EVENS(s2, s3) + ODDS(s2, s3);
    vec c = EVENS(s4, s5) + ODDS(s4, s5), d = EVENS(s6, s7) + ODDS(s6, s7);
    vec e = LOW(a, b) + HIGH(a, b), f = LOW(c, d) + HIGH(c, d);
    return __builtin_shufflevector(e, f, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(e, f, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Keys or values of one row: those before `split`, a multiple of 8, and all from there on.
typedef struct {
    const float *before, *after;
    int64_t split;
} parts_t;

// out (8·count,) = Σ weights[k] · values[k] for k from..to, the values of `width` floats each from the offset on
static inline __attribute__((always_inline)) void weighted(float *out, const float *weights, parts_t values,
                                                           int64_t offset, int64_t from, int64_t to, int64_t width,
                                                           float factor, const int count) {
    vec sums[8];
    for (int i = 0; i < count; i++) sums[i] = all(0.0f);
    int64_t k = from;
    for (int part = 0; part < 2; part++) {
        const float *v = (part ? values.after : values.before) + offset;
        for (int64_t end = part || to < values.split ? to : values.split; k < end; k++) {
            vec w = all(weights[k]);
            for (int i = 0; i < count; i++) sums[i] += w * load(v + k * width + i * LANES);
        }
    }
    for (int i = 0; i < count; i++) store(out + i * LANES, sums[i] * all(factor));
}

// One query against the keys from..last of its slot; scores: room for last + 8.
static void attend_one(float *out, const float *query, parts_t keys, parts_t values, float *scores, int64_t from,
                       int64_t last, int64_t width, int64_t value_width) {
    int64_t first = from - from % LANES, end = last + 1;
    vec top = all(-FLT_MAX);
    for (int64_t k = first; k < end; k += LANES) {
        vec s = eight_scores(query, (k < keys.split ? keys.before : keys.after) + k * width, width);
        if (k < from || k + LANES > end)
            for (int i = 0; i < LANES; i++)
                if (k + i < from || k + i >= end) s[i] = -FLT_MAX;
        top = larger(top, s);
        store(scores + k, s);
    }
    vec most = all(max_lanes(top)), total = {0};
    for (int64_t k = first; k < end; k += LANES) {
        vec w = exponential(load(scores + k) - most);
        total += w;
        store(scores + k, w);
    }
    float factor = 1.0f / sum_lanes(total);
    for (int64_t d = 0; d < value_width;) {
        int64_t left = value_width - d;
        if (left >= 64)
            weighted(out + d, scores, values, d, from, end, value_width, factor, 8), d += 64;
        else if (left >= 32)
            weighted(out + d, scores, values, d, from, end, value_width, factor, 4), d += 32;
        else if (left >= 16)
            weighted(out + d, scores, values, d, from, end, value_width, factor, 2), d += 16;
        else
            weighted(out + d, scores, values, d, from, end, value_width, factor, 1), d += LANES;
    }
}

// x (D,) made into unit root mean square and weighted (unless weight is NULL), then turned by the angles of its
// position: halves (a, b) → (a·cos − b·sin, b·cos + a·sin).
static inline void turn(float *out, const float *x, const float *weight, float epsilon, const float *cosines,
                        const float *sines, int64_t width, float scale) {
    if (weight) {
        vec squares = {0};
        for (int64_t d = 0; d < width; d += LANES) squares += load(x + d) * load(x + d);
        vec by = all(1.0f / sqrtf(sum_lanes(squares) / width + epsilon));
        for (int64_t d = 0; d < width; d += LANES) store(out + d, load(weight + d) * (load(x + d) * by));
        x = out;
    }
    for (int64_t d = 0, half = width / 2; d < half; d++) {
        float a = x[d], b = x[d + half];
        out[d] = (a * cosines[d] - b * sines[d]) * scale;
        out[d + half] = (b * cosines[d + half] + a * sines[d + half]) * scale;
    }
}

// Rows' queries, keys and values, as they lie in memory: one row or one head further is so many floats.
typedef struct {
    const float *query, *key, *value;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
} rows_t;

// By what queries and keys are turned: cosines, sines (rows, width); the weights (width,) of a norm before it, or NULL.
typedef struct {
    const float *cosines, *sines, *query_norm, *key_norm;
    float epsilon;
} turn_t;

// Keys and values of a layer, (slots, key heads, capacity, width), and who may look how far back (0: all the way).
typedef struct {
    float *keys, *values;
    int64_t capacity, heads, key_heads, width, value_width, window;
    float scale;
} slots_t;

// What is written where, w < writes: row written[w] (NULL: w), to a slot and a place; and where each of `count` rows
// attends, up to its position. The first `prefix` keys are read in prefix_slot, which holds the same.
typedef struct {
    const int64_t *written, *write_slot, *write_place, *slot, *position, *prefix_slot, *prefix;
    int64_t writes, count;
} pass_t;

static float *room_for_scores(const pass_t *pass, int64_t width) {
    int64_t longest = 0;
    for (int64_t r = 0; r < pass->count; r++) longest = pass->position[r] > longest ? pass->position[r] : longest;
    return malloc((longest + 1 + 2 * LANES + width) * sizeof(float));
}

static void attend_together(const rows_t *rows, const slots_t *slots, const turn_t *turns, const pass_t *pass,
                            float *out, float *room) {
    const int64_t width = slots->width, value_width = slots->value_width, key_heads = slots->key_heads;
    const int64_t group = slots->heads / key_heads, count = pass->count;
#pragma omp for schedule(static)
    for (int64_t w = 0; w < pass->writes; w++) {
        int64_t r = pass->written ? pass->written[w] : w;
        for (int64_t h = 0; h < key_heads; h++) {
            int64_t at = (pass->write_slot[w] * key_heads + h) * slots->capacity + pass->write_place[w];
            const float *key = rows->key + r * rows->key_row + h * rows->key_head;
            if (turns)
                turn(slots->keys + at * width, key, turns->key_norm, turns->epsilon, turns->cosines + r * width,
                     turns->sines + r * width, width, 1.0f);
            else
                memcpy(slots->keys + at * width, key, width * sizeof(float));
            const float *value = rows->value + r * rows->value_row + h * rows->value_head;
            memcpy(slots->values + at * value_width, value, value_width * sizeof(float));
        }
    }
    float *query = room, *scores = room + width;
#pragma omp for schedule(dynamic, 8)
    for (int64_t task = 0; task < count * key_heads; task++) {
        int64_t h = task / count, r = task % count; // rows of one slot and head after one another: their keys are near
        int64_t at = (pass->slot[r] * key_heads + h) * slots->capacity, last = pass->position[r];
        int64_t before = (pass->prefix_slot[r] * key_heads + h) * slots->capacity,
                split = pass->prefix[r] / LANES * LANES;
        const parts_t keys = {slots->keys + before * width, slots->keys + at * width, split};
        const parts_t values = {slots->values + before * value_width, slots->values + at * value_width, split};
        int64_t from = slots->window && last >= slots->window ? last - slots->window + 1 : 0;
        for (int64_t g = h * group; g < (h + 1) * group; g++) {
            const float *q = rows->query + r * rows->query_row + g * rows->query_head;
            if (turns)
                turn(query, q, turns->query_norm, turns->epsilon, turns->cosines + r * width, turns->sines + r * width,
                     width, slots->scale);
            else
                for (int64_t d = 0; d < width; d++) query[d] = q[d] * slots->scale;
            attend_one(out + (r * slots->heads + g) * value_width, query, keys, values, scores, from, last, width,
                       value_width);
        }
    }
}

// Write rows' keys and values into their slots, then let every row attend: out (count, heads, value_width). turns may
// be NULL. Returns 0, or 1 when there is no memory.
int attend(const rows_t *rows, const slots_t *slots, const turn_t *turns, const pass_t *pass, float *out, int threads) {
    int failed = 0;
    float **rooms = calloc(threads, sizeof(float *));
    for (int t = 0; rooms && t < threads; t++)
        if (!(rooms[t] = room_for_scores(pass, slots->width))) failed = 1;
    if (rooms && !failed) {
#pragma omp parallel num_threads(threads)
        attend_together(rows, slots, turns, pass, out, rooms[omp_get_thread_num()]);
    }
    for (int t = 0; rooms && t < threads; t++) free(rooms[t]);
    free(rooms);
    return failed || !rooms;
}

// Norms and activations ------------------------------------------------------------------------------------------

// x (count, width) += added (unless NULL), then as rms_norm below.
static void norm_together(float *x, const float *added, const float *weight, float *out, float *scale, int64_t count,
                          int64_t width, float epsilon) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++) {
        float *row = x + r * width;
        vec squares = {0};
        for (int64_t d = 0; d < width; d += LANES) {
            vec v = load(row + d);
            if (added) v += load(added + r * width + d), store(row + d, v);
            squares += v * v;
        }
        float by = 1.0f / sqrtf(sum_lanes(squares) / width + epsilon);
        if (scale) scale[r] = by;
        for (int64_t d = 0; d < width; d += LANES)
            store(out + r * width + d, load(weight + d) * (load(row + d) * all(by)));
    }
}

// out = weight · x / √(mean x² + epsilon), (count, width); scale (count,): that 1/√, or NULL.
void rms_norm(float *x, const float *weight, float *out, float *scale, int64_t count, int64_t width, float epsilon,
              int threads) {
#pragma omp parallel num_threads(threads)
    norm_together(x, NULL, weight, out, scale, count, width, epsilon);
}

// A row of gate and up begins `stride` floats after the one before.
static void gate_together(const float *gate, const float *up, float *out, int64_t count, int64_t width,
                          int64_t stride) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < width; d += LANES) {
            vec g = load(gate + r * stride + d);
            store(out + r * width + d, g * sigmoid(g) * load(up + r * stride + d));
        }
}

// out (count, width) = silu(gate) · up.
void silu_times(const float *gate, const float *up, float *out, int64_t count, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    gate_together(gate, up, out, count, width, width);
}

// A decoder's layers ---------------------------------------------------------------------------------------------

// Packed weights, and the weights of norms.
typedef struct {
    const float *norm, *mlp_norm;
    packed_t qkv, mixed, gate_up, down;
    turn_t turns;
    slots_t slots;
} layer_t;

// Let x (count, hidden) go through the layers, all in one parallel region: threads meet after each part and no layer
// waits for Python. inner: how wide the gated part is. Returns 0, or 1 when there is no memory.
int decode(const layer_t *layers, int64_t number, const pass_t *pass, float *x, int64_t hidden, int64_t inner,
           float epsilon, int threads) {
    const slots_t *any = &layers->slots;
    const int64_t count = pass->count, mixed = any->heads * any->width, shared = any->key_heads * any->width;
    const int64_t widest = 2 * inner > mixed + 2 * shared ? 2 * inner : mixed + 2 * shared;
    const int64_t narrow = inner > mixed ? inner : mixed;
    float *normed = malloc(count * (2 * hidden + widest + narrow) * sizeof(float));
    float **rooms = calloc(threads, sizeof(float *));
    int failed = !normed || !rooms;
    for (int t = 0; !failed && t < threads; t++)
        if (!(rooms[t] = room_for_scores(pass, any->width))) failed = 1;
    if (!failed) {
        float *added = normed + count * hidden, *wide = added + count * hidden, *inside = wide + count * widest;
#pragma omp parallel num_threads(threads)
        for (int64_t i = 0; i < number; i++) {
            const layer_t *layer = layers + i;
            const int64_t stride = mixed + 2 * shared, width = any->width;
            const rows_t rows = {wide,   wide + mixed, wide + mixed + shared, stride, width, stride, width,
                                 stride, width};
            norm_together(x, i ? added : NULL, layer->norm, normed, NULL, count, hidden, epsilon);
            multiply_together(normed, layer->qkv, wide, count, hidden, stride);
            attend_together(&rows, &layer->slots, &layer->turns, pass, inside, rooms[omp_get_thread_num()]);
            multiply_together(inside, layer->mixed, added, count, mixed, hidden);
            norm_together(x, added, layer->mlp_norm, normed, NULL, count, hidden, epsilon);
            multiply_together(normed, layer->gate_up, wide, count, hidden, 2 * inner);
            gate_together(wide, wide + inner, inside, count, inner, 2 * inner);
            multiply_together(inside, layer->down, added, count, inner, hidden);
        }
        for (int64_t i = 0; i < count * hidden; i++) x[i] += added[i];
    }
    for (int t = 0; rooms && t < threads; t++) free(rooms[t]);
    free(rooms), free(normed);
    return failed;
}
