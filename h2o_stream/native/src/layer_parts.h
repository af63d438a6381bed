// Small parts of a layer that a step and a prompt share.

#pragma once

#include "norm_rope.h"
#include "threads.h"

// Elements of the vector that the queries, keys and values of a layer are in.
inline int64_t qkv_size(const Layer& layer) {
  int64_t size = 0;
  for (int64_t i = 0; i < layer.qkv_count; ++i) size = std::max(size, layer.qkv_columns[i] + layer.qkv[i].rows);
  for (int64_t i = 0; i < layer.latent_count; ++i) {
    size = std::max(size, layer.latent[i].to + layer.latent[i].matrix.rows);
  }
  return size;
}

// Bounds a range of queries, keys and values.
inline void clip(const Layer& layer, Range range, float* x) {
  const float most = float(layer.qkv_clip);
  if (most == 0) return;
  for (int64_t i = range.begin; i < range.end; ++i) x[i] = std::max(-most, std::min(x[i], most));
}

inline void scale(double factor, int64_t size, float* x) {
  if (factor == 1) return;
  for (int64_t i = 0; i < size; ++i) x[i] *= float(factor);
}

// Multiplies a range of x by the token's embedding for a layer, see `Model`; `embedding` and `projection` are `size`
// elements of what the two matrices give.
inline void multiply_by_embedding(const Model& model, const float* embedding, const float* projection, int64_t size,
                                  Range range, float* x) {
  const float factor = float(model.layer_projection_scale), embedding_factor = float(model.layer_embedding_scale);
  Norm norm = model.layer_projection_norm;
  norm.epsilon /= model.layer_projection_scale * model.layer_projection_scale;  // it is of unscaled elements
  const Moments found = moments(norm, projection, size);
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float normed = norm.kind == kNoNorm ? factor * projection[i] : (projection[i] - found.mean) * found.factor;
    const float weighted = normed * (norm.weight ? norm.weight[i] : 1.f) + (norm.bias ? norm.bias[i] : 0.f);
    x[i] *= (weighted + embedding_factor * embedding[i]) * float(model.layer_input_scale);
  }
}
