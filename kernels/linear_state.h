#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/op_context.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels {

// The one operator behind every linear-attention family: per head a state S [key_dim, value_dim] and, per token,
//   S_t = (diag(w_t) + b_t c_t^T) S_{t-1} + k_t v_t^T        o_t = S_t^T q_t
//   kAdd      no b, c. Lightning, RetNet, GLA, Mamba-2 (q = C, k = B, v = dt x).
//   kDelta    b = -beta k, c = w * k, and v -> beta v: gated DeltaNet (scalar w), KDA (vector w).
//   kRankOne  b and c are given: RWKV-7. Needs a vector decay.
// Decays travel as logarithms g = ln w <= 0; w is e^g, and 0 below e^-87.3. A scalar is one per token; a vector has one
// per token and key channel.
enum class DecayForm : uint8_t { kScalar = 0, kVector = 1 };
enum class StateUpdate : uint8_t { kAdd = 0, kDelta = 1, kRankOne = 2 };

struct LinearStateShape {
  int key_dim = 0;    // 1..256
  int value_dim = 0;  // 1..256
  DecayForm decay = DecayForm::kScalar;
  StateUpdate update = StateUpdate::kAdd;
  DType state = DType::kF32;  // of S at rest: f32, or bf16 (rounded at every boundary)
  // What a short convolution before the operator must remember: the inputs of this many channels, stored with S for
  // each token of a block (in the type they came in). 0: there is none. LinearState neither reads nor writes them.
  int history_channels = 0;
  DType history = DType::kF32;

  absl::Status Validate() const;
  bool operator==(const LinearStateShape&) const = default;
};

// What a state block of one head holds: S after its 64 tokens (written when the last of them arrives) and the tokens
// themselves. Rows of sections lie one after the other in pieces of `piece_bytes`; none straddles two pieces.
//   state        [key_dim] rows of value_stride elements
//   keys         [64] rows of key_stride
//   values       [64] rows of value_stride: v, or u = beta (v - S^T (w k)) of a delta rule
//   decays       scalar: one row of 64; vector: [64] rows of key_stride: w
//   rank_keys, rank_values   with kRankOne: b, and S^T c
//   history      [64] rows of history_channels
// Threads: thread-compatible; a value.
class LinearStateLayout {
 public:
  enum Section { kState, kKeys, kValues, kDecays, kRankKeys, kRankValues, kHistory, kSections };
  static constexpr int kTokens = kSegmentTokens;
  static constexpr int kMaxRows = 256;  // of a section

  explicit LinearStateLayout(const LinearStateShape& shape);

  int rows(Section section) const { return sections_[section].rows; }
  size_t row_bytes(Section section) const { return sections_[section].row_bytes; }
  size_t bytes() const;                  // in one piece
  int pieces(size_t piece_bytes) const;  // 0: a row does not fit
  // Fills `out` with the rows of a section.
  void Rows(Section section, std::byte* const* pieces, size_t piece_bytes, std::byte** out) const;
  // Fills out[s] with those of every section s up to `last`.
  void RowsUpTo(Section last, std::byte* const* pieces, size_t piece_bytes, std::byte** const* out) const;

 private:
  struct Extent {
    int rows = 0;
    size_t row_bytes = 0;  // a multiple of 64
  };
  std::array<Extent, kSections> sections_;
};

// The consecutive new tokens of one head of one sequence. All inputs f32; steps are floats from token to token.
struct LinearStateItem {
  const float* q = nullptr;          // [rows][key_dim]
  const float* k = nullptr;          // [rows][key_dim]
  const float* v = nullptr;          // [rows][value_dim]
  const float* log_decay = nullptr;  // [rows] or [rows][key_dim]; null with a scalar form: constant_log_decay
  const float* beta = nullptr;       // [rows], kDelta
  const float* b = nullptr;          // [rows][key_dim], kRankOne
  const float* c = nullptr;          // [rows][key_dim], kRankOne
  float* o = nullptr;                // [rows][value_dim]
  int64_t q_step = 0, k_step = 0, v_step = 0, decay_step = 0, beta_step = 0, b_step = 0, c_step = 0, o_step = 0;
  float constant_log_decay = 0;
  int rows = 0;
  int64_t first_position = 0;

  // State blocks [first_block, first_block + blocks) of the head: piece p of block n is
  // pieces[(n - first_block) * pieces_per_block + p], null for a block that is not kept. Needed: the block before that
  // of first_position (unless that is block 0), the block of first_position if it is not its first token, and the block
  // of the last new token. Others are written where they are kept.
  std::byte* const* pieces = nullptr;
  int pieces_per_block = 1;
  size_t piece_bytes = 0;
  int64_t first_block = 0;
  int64_t blocks = 0;
};

// Bytes of scratch for these items; 0 where no item runs over a block that is not kept.
size_t LinearStateScratchBytes(const LinearStateShape& shape, std::span<const LinearStateItem> items);

// Appends the tokens of each item to its open state block and computes their o, in one blocked algorithm for decode,
// verification and prefill: o comes from S at the last boundary (a multiple of 64 positions) and from the tokens since,
// in token order; S is advanced at boundaries only. So appending is idempotent: a repeated step overwrites tokens with
// themselves and reads nothing it wrote, and a step that is taken back inside [first_position, ..) leaves what is
// before it as it was, as long as the block before is kept.
//
// Numbers: a token's o depends on the tokens before it and on nothing else: not on chunking, other items, the pool or
// the ISA.
// Errors:  kInvalidArgument naming the item, before anything is written; kResourceExhausted for too little scratch
// (64-byte aligned).
// Threads: runs on the caller and the pool, returns when done. An item is a unit of work.
// Memory:  allocates nothing.
// Cost:    per token 2 key_dim value_dim FLOP and the bytes of S once per 16 tokens, plus the open block; per block S
// written once and 2 * 64 key_dim value_dim FLOP.
// Oracle:  reference/linear_state.h.
// Source:  Yang et al. 2024 (gated delta networks), Dao & Gu 2024 (state space duality), Qin et al. 2024 (lightning).
absl::Status LinearState(const OpContext& context, const LinearStateShape& shape,
                         std::span<const LinearStateItem> items, std::span<std::byte> scratch);

}  // namespace dovetail::kernels
