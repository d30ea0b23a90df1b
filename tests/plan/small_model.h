#pragma once
#include <cstdint>

#include "base/check.h"
#include "plan/model_work.h"

namespace dovetail::plan {

// Two layers with one product of 1000 weights each, and a head of 500; two attention ops of two query heads and one KV
// head of 64, in bf16: 256 bytes of K and V a token and op.
inline ModelWork SmallModel() {
  const proto::SoftmaxSpec spec{.query_heads = 2, .kv_heads = 1, .key_dim = 64, .value_dim = 64, .scale = 1};
  auto table = proto::AttentionTable::Build({spec, spec});
  DT_CHECK(table.ok());
  ModelWork work;
  work.name = "small";
  work.products = {{.weights = "bf16", .outputs = 100, .inputs = 10, .count = 2},
                   {.weights = "bf16", .outputs = 50, .inputs = 10, .head = true}};
  work.layers = 2;
  work.vocabulary = 50;
  work.max_positions = 4096;
  work.attention = *std::move(table);
  work.kv_block_bytes = 64 * 256;
  return work;
}

}  // namespace dovetail::plan
