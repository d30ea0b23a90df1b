#pragma once
#include "proto/attention_spec.h"

namespace dovetail::compute {

// Attention of 4 query and 2 KV heads of 8 elements, over all tokens.
inline proto::SoftmaxSpec SmallSpec() {
  proto::SoftmaxSpec spec;
  spec.query_heads = 4;
  spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 8;
  spec.scale = 1;
  return spec;
}

}  // namespace dovetail::compute
