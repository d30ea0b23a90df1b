#pragma once
#include <cmath>
#include <initializer_list>
#include <random>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/linear_state.h"
#include "kernels/reference/linear_state.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/oracle.h"

namespace dovetail::kernels::testing {

// Token streams as the families make them: decays, norms and gates in the ranges of real models. `budget` is the error
// that the blocked form may have against double precision, relative to the largest output of a stream of 330 tokens:
// about twice the worst that was measured, 2.3e-6 (a delta rule that never forgets; with decays below 7e-7).
struct Family {
  std::string_view name;
  DecayForm decay;
  StateUpdate update;
  float slowest, fastest;  // of -log decay
  bool unit_keys;          // l2-normalised q and k
  double budget;
};

inline constexpr Family kFamilies[] = {
    {"Lightning", DecayForm::kScalar, StateUpdate::kAdd, 0.05f, 0.05f, false, 4e-6},
    {"Mamba2", DecayForm::kScalar, StateUpdate::kAdd, 1e-3f, 3.0f, false, 4e-6},
    {"RetNet", DecayForm::kScalar, StateUpdate::kAdd, 0.003f, 0.003f, false, 4e-6},
    {"GLA", DecayForm::kVector, StateUpdate::kAdd, 1e-3f, 0.3f, false, 4e-6},
    {"GatedDeltaNet", DecayForm::kScalar, StateUpdate::kDelta, 1e-3f, 5.0f, true, 4e-6},
    {"DeltaNet", DecayForm::kScalar, StateUpdate::kDelta, 0.0f, 0.0f, true, 4e-6},
    {"KDA", DecayForm::kVector, StateUpdate::kDelta, 1e-3f, 5.0f, true, 4e-6},
    {"RWKV7", DecayForm::kVector, StateUpdate::kRankOne, 1e-3f, 0.6f, true, 4e-6},
};

struct TokenStream {
  LinearStateShape shape;
  int rows;
  std::vector<float> q, k, v, log_decay, beta, b, c;

  TokenStream(const Family& family, int key_dim, int value_dim, int rows, uint32_t seed)
      : shape{key_dim, value_dim, family.decay, family.update, DType::kF32}, rows(rows) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const auto fill = [&](std::vector<float>& out, int width, bool unit) {
      out.resize(static_cast<size_t>(rows) * width);
      for (float& x : out) x = normal(random);
      for (int t = 0; unit && t < rows; ++t) {
        double sum = 1e-6;
        for (int i = 0; i < width; ++i) sum += out[t * width + i] * out[t * width + i];
        for (int i = 0; i < width; ++i) out[t * width + i] /= static_cast<float>(std::sqrt(sum));
      }
    };
    fill(q, key_dim, family.unit_keys);
    fill(k, key_dim, family.unit_keys);
    fill(v, value_dim, false);
    fill(c, key_dim, true);
    b.resize(c.size());
    beta.resize(rows);
    for (float& x : beta) x = uniform(random);
    for (size_t i = 0; i < b.size(); ++i) b[i] = -c[i] * beta[i / key_dim];
    log_decay.resize(static_cast<size_t>(rows) * (family.decay == DecayForm::kVector ? key_dim : 1));
    for (float& g : log_decay)
      g = family.slowest == family.fastest
              ? -family.slowest
              : -family.slowest * std::pow(family.fastest / family.slowest, uniform(random));
  }

  reference::LinearStateTokens Tokens() const {
    return {rows, q.data(), k.data(), v.data(), log_decay.data(), beta.data(), b.data(), c.data()};
  }

  LinearStateItem Item(int64_t first, int count) const {
    const int keys = shape.key_dim, values = shape.value_dim;
    const int decays = shape.decay == DecayForm::kVector ? keys : 1;
    LinearStateItem item;
    item.q = q.data() + first * keys;
    item.k = k.data() + first * keys;
    item.v = v.data() + first * values;
    item.b = b.data() + first * keys;
    item.c = c.data() + first * keys;
    item.log_decay = log_decay.data() + first * decays;
    item.beta = beta.data() + first;
    item.q_step = item.k_step = item.b_step = item.c_step = keys;
    item.v_step = values;
    item.decay_step = decays;
    item.beta_step = 1;
    item.rows = count;
    return item;
  }
};

// Eight state blocks of one head, in pieces; begins as NaN, so that reading what was not written shows.
class StateMemory {
 public:
  explicit StateMemory(const LinearStateShape& shape, size_t piece_bytes = 0)
      : shape_(shape),
        layout_(shape),
        piece_bytes_(piece_bytes != 0 ? piece_bytes : layout_.bytes()),
        pieces_per_block_(layout_.pieces(piece_bytes_)),
        memory_(kBlocks * pieces_per_block_ * piece_bytes_ / 4 + 16, std::nanf("")) {
    std::byte* begin = reinterpret_cast<std::byte*>(memory_.data());
    for (int p = 0; p < kBlocks * pieces_per_block_; ++p) pieces_.push_back(begin + p * piece_bytes_);
  }

  void Drop(std::initializer_list<int> blocks) {
    for (const int block : blocks)
      for (int p = 0; p < pieces_per_block_; ++p) pieces_[block * pieces_per_block_ + p] = nullptr;
  }

  LinearStateItem Attach(LinearStateItem item, int64_t position, float* o, int64_t o_step) const {
    item.first_position = position;
    item.o = o;
    item.o_step = o_step;
    item.pieces = pieces_.data();
    item.pieces_per_block = pieces_per_block_;
    item.piece_bytes = piece_bytes_;
    item.blocks = kBlocks;
    return item;
  }

  // [key_dim][value_dim] of an f32 state.
  std::vector<float> StateAfterBlock(int block) const {
    std::byte* rows[LinearStateLayout::kMaxRows];
    layout_.Rows(LinearStateLayout::kState, pieces_.data() + block * pieces_per_block_, piece_bytes_, rows);
    std::vector<float> state;
    for (int i = 0; i < shape_.key_dim; ++i) {
      const float* row = reinterpret_cast<const float*>(rows[i]);
      state.insert(state.end(), row, row + shape_.value_dim);
    }
    return state;
  }

 private:
  static constexpr int kBlocks = 8;
  const LinearStateShape shape_;
  const LinearStateLayout layout_;
  const size_t piece_bytes_;
  const int pieces_per_block_;
  std::vector<float> memory_;
  std::vector<std::byte*> pieces_;
};

// Tokens [at, at + rows) of the stream; o [all rows][value_dim] gets theirs.
inline void RunRows(Isa isa, const TokenStream& stream, StateMemory& memory, int64_t at, int rows,
                    std::vector<float>& o) {
  ThreadPool pool({.threads = 2});
  const OpContext context{&pool, &SelectOps(isa)};
  const int values = stream.shape.value_dim;
  const LinearStateItem item = memory.Attach(stream.Item(at, rows), at, o.data() + at * values, values);
  std::vector<std::byte> scratch(LinearStateScratchBytes(stream.shape, {&item, 1}));
  ASSERT_TRUE(LinearState(context, stream.shape, {&item, 1}, scratch).ok())
      << LinearState(context, stream.shape, {&item, 1}, scratch);
}

inline std::vector<float> RunTokens(Isa isa, const TokenStream& stream, StateMemory& memory,
                                    const std::vector<int>& chunks) {
  std::vector<float> o(static_cast<size_t>(stream.rows) * stream.shape.value_dim);
  int64_t at = 0;
  for (const int rows : chunks) {
    RunRows(isa, stream, memory, at, rows, o);
    at += rows;
  }
  return o;
}

}  // namespace dovetail::kernels::testing
