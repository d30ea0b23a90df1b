#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"

namespace dovetail::model {

// Another way in which a format holds a weight.
struct StoredPlace {
  std::vector<std::string> names;  // kJoined: in order; kMxfp4: codes and scales; else one
  TensorLayout layout = TensorLayout::kRows;
  RowPattern pattern;  // within the stored rows (kColumns: columns)
  int64_t stored_rows = 0;
  int64_t first_row = 0;    // kColumns, of one matrix among several
  int64_t stored_cols = 0;  // kColumns
};

// One weight that a model needs, and where each format keeps it: rows [first_row, first_row + rows) of a stored tensor
// of stored_rows rows.
struct TensorNeed {
  std::string canonical;
  std::string hf, gguf;  // stored names
  int64_t rows = 0;
  int64_t cols = 0;  // 0 = a vector of `rows` elements
  int64_t first_row = 0;
  int64_t stored_rows = 0;
  bool norm = false;                  // HF may hold w of (1 + w)
  int64_t interleaved_head_rows = 0;  // in GGUF
  RowPattern pattern;                 // within the stored tensor; first_row is then 0
  bool flattened = false;             // stored with more dimensions: all but the last count as rows
  std::vector<StoredPlace> others;    // of Hugging Face folders: tried in order where `hf` is not there
  std::vector<StoredPlace> in_gguf;   // tried in order; empty: `gguf`, as described here
};

// Every weight of the model, in the order of use (checkpoint.h lists the canonical names).
// Threads: pure.
std::vector<TensorNeed> TensorsOf(const ModelConfig& config);

// The weights of one layer of a model with linear states or experts.
// Threads: pure.
bool IsHybrid(const ModelConfig& config);
void AppendHybridLayer(const ModelConfig& config, size_t layer, std::vector<TensorNeed>& needs);

// Stored tensors that are known not to be weights, or that the config reader has already used.
bool IsIgnoredTensor(const ModelConfig& config, std::string_view stored_name);

}  // namespace dovetail::model
