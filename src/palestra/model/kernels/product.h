// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vectors.h"

// A weight as `pack` lays it out, in float32 or, narrow, in bfloat16; its bias in float32, or NULL.
typedef struct {
    const void *weight;
    const float *bias;
    int64_t narrow;
} packed_t;

// All threads of a parallel region together: out (count, width) = x (count, depth) · weightᵀ + bias.
void multiply_together(const float *x, packed_t by, float *out, int64_t count, int64_t depth, int64_t width);
