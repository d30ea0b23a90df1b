#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/status.h"
#include "model/config.h"
#include "model/formats/ggml_types.h"

namespace dovetail::model {

class GgufFile;
class SafetensorsFile;

// Rows of a fused tensor: logical row r is stored row first + group * stride + r % rows, its group being r / rows /
// repeat, modulo `wrap` if that is not 0; rows = 0: r.
struct RowPattern {
  int64_t rows = 0;
  int64_t stride = 0;
  int64_t first = 0;
  int64_t repeat = 1;  // logical groups that read the same stored one
  int64_t wrap = 0;    // stored groups, which are read again from the first one on
  int64_t SourceRow(int64_t r) const {
    if (rows == 0) return r;
    const int64_t group = r / rows / repeat;
    return first + (wrap > 0 ? group % wrap : group) * stride + r % rows;
  }
};

// How a weight lies in its stored tensors.
enum class TensorLayout {
  kRows,
  kJoined,   // rows, of several tensors one after the other
  kColumns,  // transposed: logical row r is stored column SourceRow(r), over stored rows [first_row, first_row + cols);
             // of quantised blocks read as f32
  kMxfp4,    // rows as transformers stores MXFP4: one tensor of codes, 32 in 16 bytes, and one of scales
  kE4M3,     // rows of E4M3 bytes with a scale for each, or one for all; read as bf16
};

// Where one weight of the model lies, by its canonical name. Logical row r, of `cols` elements, is stored row first_row
// + SourceRow(r) of the stored tensor; `bytes` are the stored rows [first_row, first_row + rows), row_bytes each, in
// stored order. Vectors (norms, biases) have cols = 1 and rows = their length. Views the Checkpoint that gave it.
struct TensorSource {
  std::string_view file;         // base name
  std::string_view stored_name;  // in that file
  GgmlType type = GgmlType::kF32;
  int64_t rows = 0, cols = 0;
  int64_t row_bytes = 0;
  std::span<const std::byte> bytes;
  // GGUF's llama-like files interleave the two halves of each head's rows in Q and K: > 0 is the number of rows of one
  // head, 0 = stored as is.
  int64_t interleaved_head_rows = 0;
  RowPattern pattern;
  float add = 0;  // added to every value: 1 where the file holds w of (1 + w)
  TensorLayout layout = TensorLayout::kRows;
  std::vector<std::span<const std::byte>> more;  // kJoined: the parts after `bytes`; kMxfp4: the scales
  int64_t stored_cols = 0;                       // kColumns
  GgmlType stored_type = GgmlType::kF32;         // kColumns: of `bytes`
  std::vector<float> scales;                     // kE4M3: of all rows of `bytes`, or of each

  // Whether logical row r lies in `bytes` at SourceRow(r) * row_bytes.
  bool has_rows() const { return layout == TensorLayout::kRows; }
  // The bytes of logical row r, in `type`, to out [row_bytes].
  void CopyRow(int64_t r, std::byte* out) const;
  // All of them.
  std::vector<std::byte> CopyRows() const;
  // kE4M3: the codes of logical row r [cols], and what they are to be multiplied by.
  std::span<const std::byte> E4M3Row(int64_t r, float& scale) const;

  // The stored row that holds logical row r: hf[h, i + s * d/2] = gguf[h, 2i + s].
  int64_t SourceRow(int64_t r) const;
  // SourceRow of every row, for packers that take raw block rows; empty when rows are stored in order.
  std::vector<int32_t> RowOrder() const;
  // Logical rows [first, first + count) as f32: dequantised, put in order, `add` applied. out.size() == count * cols.
  void ReadRows(int64_t first, int64_t count, std::span<float> out) const;
  std::vector<float> ReadAll() const;
};

// A tensor as the file has it, for inspection.
struct StoredTensor {
  std::string_view file, name;
  std::string_view type;       // "Q4_K", "BF16", ...
  std::vector<int64_t> shape;  // outermost first
  int64_t elements = 0;
  int64_t bytes = 0;
};

// A model's configuration and weights, whatever they are stored as. Weights are mapped, not read.
//
// Canonical names (N = 0 .. layers - 1; H hidden, I intermediate, n_h heads, n_kv KV heads, d key_dim, dv value_dim):
//   embed.weight                        [vocab, H]
//   layers.N.input_norm.weight          [H]         before attention
//   layers.N.attn.q_proj.weight         [n_h d, H]
//   layers.N.attn.k_proj.weight         [n_kv d, H]
//   layers.N.attn.v_proj.weight         [n_kv dv, H]
//   layers.N.attn.o_proj.weight         [H, n_h dv]
//   layers.N.attn.{q,k}_norm.weight     [d]         with qk_norm
//   layers.N.post_attn_norm.weight      [H]         with post_norms: after attention, before the residual sum
//   layers.N.pre_mlp_norm.weight        [H]         HF's post_attention_layernorm where there are two norms
//   layers.N.mlp.{gate,up}_proj.weight  [I, H]
//   layers.N.mlp.down_proj.weight       [H, I]
//   layers.N.post_mlp_norm.weight       [H]         with post_norms
//   layers.N.attn.{q,k,v,o}_proj.bias, layers.N.mlp.{gate,up,down}_proj.bias   where the config says so
// Of layers with linear states, instead of attn.*: layers.N.state.*, and of layers with experts, instead of mlp.*:
// layers.N.router.*, layers.N.experts.E.*, layers.N.shared_expert.* (checkpoint_tensors_hybrid.cc).
//   final_norm.weight                   [H]
//   lm_head.weight                      [vocab, H]  embed.weight again when tied
//   layers.N.attn.sinks                 [n_h]       with sinks
// Phi-3's fused qkv_proj and gate_up_proj appear as row ranges of one stored tensor under these names.
// Threads: immutable.
class Checkpoint {
 public:
  enum class Format { kGguf, kSafetensors };

  virtual ~Checkpoint() = default;

  const ModelConfig& config() const { return config_; }
  virtual Format format() const = 0;

  // The weight called `canonical`. kNotFound for a name that this model does not have; every name that the config asks
  // for is there.
  absl::StatusOr<TensorSource> Find(std::string_view canonical) const;
  // All canonical names, in the order of use.
  const std::vector<std::string>& names() const { return names_; }

  // Every tensor that the files hold, used or not, in file order.
  virtual std::vector<StoredTensor> stored_tensors() const = 0;
  // Oddities that do not stop the model from working: one line each, at most kMaxWarnings.
  const std::vector<std::string>& warnings() const { return warnings_; }
  static constexpr size_t kMaxWarnings = 16;

  // The GGUF file, for its tokenizer and chat template; null for a Hugging Face folder.
  virtual const GgufFile* gguf() const { return nullptr; }
  // The folder with tokenizer.json and its kin, or that the GGUF file lies in.
  const std::filesystem::path& folder() const { return folder_; }
  void set_folder(std::filesystem::path folder) { folder_ = std::move(folder); }
  // What to call the model in texts: the base name of the file or folder.
  const std::string& name() const { return name_; }

 protected:
  friend class CheckpointBuilder;
  ModelConfig config_;
  std::filesystem::path folder_;
  std::string name_;
  std::vector<std::string> names_;
  std::vector<TensorSource> sources_;  // of names_
  absl::flat_hash_map<std::string, size_t> index_;
  std::vector<std::string> warnings_;
};

// Opens a .gguf file, a folder with config.json and safetensors, or a folder with exactly one GGUF model. Everything is
// checked here: that each weight exists, in a type that is read and in the shape that the config asks for.
// Errors: those of the readers and of ConfigFrom*; kInvalidArgument naming file, tensor, expected and found shape;
// kNotFound when the path holds no model.
// Threads: thread-safe; blocks on files.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenCheckpoint(const std::filesystem::path& path);

}  // namespace dovetail::model
