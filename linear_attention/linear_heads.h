#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kernels/device.h"
#include "kernels/linear_state.h"
#include "kernels/op_context.h"
#include "linear_attention/packed_state.h"
#include "proto/attention_spec.h"

namespace dovetail::linear_attention {

// The consecutive new tokens of one head of one sequence: what crosses the wire for them, and its state blocks.
//   Shapes:  q, k [rows][key_dim], v, o [rows][value_dim], wire type; gates [rows][LinearSpec::gates()], f32
//   Units:   *_step: bytes from token to token, and floats for gate_step
struct LinearHead {
  int head = 0;  // of the model
  Position first_position = 0;
  int rows = 0;
  const std::byte *q = nullptr, *k = nullptr, *v = nullptr;
  std::byte* o = nullptr;
  const float* gates = nullptr;
  int64_t q_step = 0, k_step = 0, v_step = 0, o_step = 0, gate_step = 0;
  // State blocks [first_block, first_block + blocks): piece p of block n is
  // pieces[(n - first_block) * LinearSpec::blocks_per_head + p]; null for a block that is not kept. Which are needed:
  // kernels::LinearStateItem, and of those before first_position what the convolution looks back at.
  std::byte* const* pieces = nullptr;
  int64_t first_block = 0;
  int64_t blocks = 0;
};

// The first block that a head's tokens from `position` on need, and how many from there to the one of token end - 1.
int64_t FirstBlock(Position position);
int64_t BlocksTo(Position position, Position end);

// Runs the heads of an op of linear attention on a CPU, from the wire to the wire: convolution, norms, gates, state.
// Attention workers and compute workers both do, with the same bits.
//   Ownership: scratch memory is its own; all that a head points to is the caller's
//   Errors:    those of kernels::LinearState; kResourceExhausted from Prepare: no memory
//   Threads:   thread-compatible; Run uses the context's pool, and allocates nothing that Prepare has not grown
class LinearHeads {
 public:
  explicit LinearHeads(kernels::Device& device) : device_(device) {}

  struct Limits {
    size_t heads = 0;
    int64_t rows = 0;   // of all heads together
    size_t unkept = 0;  // heads that run over blocks that are not kept
  };
  absl::Status Prepare(const proto::LinearSpec& spec, const Limits& limits);

  // kInternal: more than Prepare was told.
  absl::Status Run(const kernels::OpContext& context, const proto::LinearSpec& spec,
                   const proto::LinearConstants& constants, std::span<const LinearHead> heads, size_t piece_bytes);

 private:
  struct View;
  struct Floats {
    float* inputs = nullptr;    // [rows][channels]: q, k and v side by side
    float* prepared = nullptr;  // [rows][channels], after the convolution
    float* o = nullptr;         // [rows][value_dim]
  };

  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  absl::Status LayOut(const View& view);
  void PrepareHead(const View& view, const LinearHead& head, const Floats& floats);
  void Convolve(const View& view, const LinearHead& head, const Floats& floats);
  void ApplyGates(const View& view, const LinearHead& head, const Floats& floats);
  void FinishHead(const View& view, const LinearHead& head, const Floats& floats) const;
  static kernels::LinearStateItem ItemOf(const View& view, const LinearHead& head, const Floats& floats);
  static std::byte* HistoryRow(const View& view, const LinearHead& head, Position position);

  kernels::Device& device_;
  std::vector<Floats> of_heads_;
  std::vector<kernels::LinearStateItem> items_;
  std::unique_ptr<kernels::Buffer> floats_, scratch_;
};

}  // namespace dovetail::linear_attention
