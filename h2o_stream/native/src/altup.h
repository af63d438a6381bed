// Versions of the residual stream that are updated in turns (AltUp), and residuals of low rank (LAuReL).
//
// Small functions of one token; what needs products of matrices are members of `Step` and `Prompt` (altup.cpp).

#pragma once

#include "abi.h"

namespace altup {

// Predicts the versions [n][hidden_size] of a token before a layer; writes the active one to x.
void predict(const Model& model, const Layer& layer, float* versions, float* x);

// Corrects them by what the layer has made of the active one, x; writes what its embedding gate reads to x.
void correct(const Model& model, const Layer& layer, float* versions, float* x);

// Adds a layer's embedding, normed, to all but the first. `scratch` has room for `hidden_size` numbers.
void add_embedding(const Model& model, const Layer& layer, const float* delta, float* versions, float* scratch);

// Writes the first versions of a token with the embedding x; `projected` [n - 1][hidden_size] is what `to_versions`
// give.
void split(const Model& model, const float* projected, const float* x, float* versions);

// Writes their mean to x; `projected` is what `from_versions` give.
void merge(const Model& model, const float* projected, const float* versions, float* x);

// x += y + norm(delta) for y = before_attention(x) and what `Laurel::right` gives. `scratch` is as above.
void add_laurel(const Model& model, const Layer& layer, const float* y, const float* delta, float* x, float* scratch);

}  // namespace altup
