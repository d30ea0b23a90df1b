#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/kv_storage.h"
#include "proto/attention_spec.h"

namespace dovetail::plan {

// Equal products of a step: y [rows, outputs] = x [rows, inputs] W^T.
struct ModelProduct {
  std::string weights;  // kernels::Name of the format that the device keeps them in
  int64_t outputs = 0, inputs = 0;
  int64_t count = 1;
  int64_t experts = 0, chosen = 0;  // 0: of every row. Else `count` is over all experts, of which a row takes `chosen`
  bool head = false;                // of rows that draw a token only
};

// What a step of a model has to do, on any device.
// Threads: thread-compatible; a value.
struct ModelWork {
  std::string name;
  std::vector<ModelProduct> products;
  int layers = 0;
  int64_t vocabulary = 0;
  int64_t max_positions = 0;
  proto::AttentionTable attention;
  KvStorage kv_storage = KvStorage::kAsSent;
  uint64_t kv_block_bytes = 0;  // 64 tokens x a KV head x an op, in that storage
};

}  // namespace dovetail::plan
