// SPDX-License-Identifier: Apache-2.0
// What the kernels are written in: vectors of eight floats, which compilers turn into whatever the processor has.
#pragma once

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8 // floats in a vector; widths are multiples of it
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline vec load(const float *x) { return *(const vec *)x; }
static inline void store(float *x, vec v) { *(vec *)x = v; }
static inline vec all(float x) { return x - (vec){0}; }
static inline vec pick(ints where, vec a, vec b) { return (vec)((where & (ints)a) | (~where & (ints)b)); }
static inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

static inline float sum_lanes(vec v) {
    vec a = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    vec b = a + __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return b[0] + b[1];
}

static inline float max_lanes(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// e^x to about an ulp: 2^n · e^r with |r| ≤ ln(2)/2, the series for e^r cut after r^7. Below -87 it is 0.
static inline vec exponential(vec x) {
    vec clamped = pick(x < all(-87.0f), all(-87.0f), pick(x > all(88.0f), all(88.0f), x));
    vec n = clamped * all(1.44269504f) + all(12582912.0f); // the large number rounds to the nearest integer
    ints bits = (ints)n;
    n = n - all(12582912.0f);
    vec r = clamped - n * all(0.693145752f) - n * all(1.42860677e-6f);
    vec p = all(1.0f / 5040) * r + all(1.0f / 720);
    p = p * r + all(1.0f / 120);
    p = p * r + all(1.0f / 24);
    p = p * r + all(1.0f / 6);
    p = p * r + all(0.5f);
    p = p * r + all(1.0f);
    p = p * r + all(1.0f);
    ints power = (bits - (int32_t)0x4B400000 + 127) << 23;
    vec result = p * (vec)power;
    return pick(x < all(-87.0f), all(0.0f), result);
}

static inline vec sigmoid(vec x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }
