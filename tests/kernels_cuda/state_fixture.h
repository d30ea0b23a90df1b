#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/state/cuda_state.h"
#include "tests/kernels/linear_state_fixture.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda::testing {

using kernels::testing::Family;
using kernels::testing::kFamilies;
using kernels::testing::TokenStream;

struct StateOptions {
  int heads = 2;
  size_t piece_bytes = 0;  // 0: a block in one piece
  WireType wire = WireType::kBF16;
  DType state = DType::kF32;
  bool even = true;  // blocks lie evenly spaced; else anywhere
  int conv_width = 0;
  bool normalise = false, rate = false, skip = false;
  int shift = 0;        // bytes before q and before k, a multiple of four: as behind another item's gates
  bool used = false;    // blocks were another sequence's, which had S midway everywhere
  bool sparse = false;  // of the blocks that an item fills only the first, and the last two of all, are kept
};

class StateTest : public CudaTest {
 public:
  using CudaTest::Download;
  using CudaTest::Empty;
  using CudaTest::Upload;
};

// Sequences whose states lie in an arena on a GPU, and what the plain recurrence in double precision gives for them.
class StateSequences {
 public:
  StateSequences(StateTest& test, CudaStream& stream, const Family& family, int key_dim, int value_dim, int rows,
                 int sequences, const StateOptions& options)
      : stream_(stream), options_(options), rows_(rows) {
    for (int i = 0; i < sequences * options.heads; ++i)
      streams_.emplace_back(family, key_dim, value_dim, rows, 100 + i);
    shape_ = streams_[0].shape;
    shape_.state = options.state;
    if (options.conv_width > 0) {
      shape_.history_channels = channels();
      shape_.history = static_cast<DType>(options.wire);
    }
    for (TokenStream& s : streams_) {
      for (std::vector<float>* x : {&s.q, &s.k, &s.v}) *x = FromWireBytes(options.wire, ToWireBytes(options.wire, *x));
    }
    piece_bytes_ = options.piece_bytes > 0 ? options.piece_bytes : LinearStateLayout(shape_).bytes();
    auto launch = StateLaunchFor(shape_, piece_bytes_, options.wire);
    EXPECT_TRUE(launch.ok()) << launch.status();
    launch_ = *launch;
    positions_.assign(sequences, 0);
    MakeConstants();
    MakeArena(test, sequences);
    done_.assign(streams_.size(), std::vector<float>());
  }

  int channels() const { return 2 * shape_.key_dim + shape_.value_dim; }
  int gates() const { return launch_.gates; }

  struct Part {
    int sequence = 0, rows = 0;
  };
  using Op = std::function<absl::Status(CudaStream&, const StateLaunch&)>;
  // Appends the next rows of each part's sequence. `repeat`: as a step that is repeated.
  void Run(StateTest& test, const std::vector<Part>& parts, const Op& op, bool repeat = false) {
    Payload payload;
    for (const Part& part : parts) AddItem(payload, part);
    Upload(test, payload);
    for (int i = 0; i < (repeat ? 2 : 1); ++i) {
      const absl::Status status = op(stream_, launch_);
      ASSERT_TRUE(status.ok()) << status;
    }
    const std::vector<float> out = FromWireBytes(options_.wire, test.Download<std::byte>(*out_));
    size_t at = 0;
    for (const Part& part : parts) {
      for (int row = 0; row < part.rows; ++row)
        for (int head = 0; head < options_.heads; ++head) {
          auto& done = done_[part.sequence * options_.heads + head];
          done.insert(done.end(), out.begin() + at, out.begin() + at + shape_.value_dim);
          at += shape_.value_dim;
        }
      positions_[part.sequence] += part.rows;
    }
    EXPECT_TRUE(at == out.size() || std::isnan(out[at])) << "wrote behind out";
  }
  void Back(int sequence, int rows) {
    positions_[sequence] -= rows;
    for (int head = 0; head < options_.heads; ++head) {
      auto& done = done_[sequence * options_.heads + head];
      done.resize(done.size() - static_cast<size_t>(rows) * shape_.value_dim);
    }
  }

  // The worst difference from the reference over all that was run, over the largest output.
  double WorstError() const {
    double worst = 0, largest = 0;
    for (size_t s = 0; s < streams_.size(); ++s) {
      const std::vector<double> want = Reference(s);
      for (size_t i = 0; i < done_[s].size(); ++i) {
        largest = std::max(largest, std::abs(want[i]));
        const double error = std::abs(done_[s][i] - want[i]);
        worst = error > worst || std::isnan(error) ? error : worst;
        if (std::isnan(error)) return error;
      }
    }
    return worst / largest;
  }

  const StateLaunch& launch() const { return launch_; }
  const std::vector<float>& done(int stream) const { return done_[stream]; }

 private:
  struct Payload {
    std::vector<float> q, k, v, gates;
    std::vector<StateItem> items;
    std::vector<StateUnit> units;
    std::vector<const std::byte*> blocks;
    int64_t out = 0;
  };

  void MakeConstants() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 0.5f);
    const int heads = options_.heads;
    launch_.heads = launch_.model_heads = heads;
    launch_.token_decay = 1;
    launch_.token_rate = shape_.update == StateUpdate::kDelta || options_.rate;
    launch_.gates = (launch_.vector_decay ? shape_.key_dim : 1) + launch_.token_rate;
    launch_.conv_width = options_.conv_width;
    launch_.normalise = options_.normalise;
    launch_.query_scale = options_.normalise ? 0.5f : 1.0f;
    const auto fill = [&](std::vector<float>& out, size_t count) {
      for (size_t i = 0; i < count; ++i) out.push_back(normal(random));
    };
    fill(conv_, static_cast<size_t>(options_.conv_width) * heads * channels());
    fill(conv_bias_, static_cast<size_t>(heads) * channels());
    fill(skip_, heads);
  }

  void MakeArena(StateTest& test, int sequences) {
    blocks_ = rows_ / kStateTokens + 1;
    const int pieces = sequences * blocks_ * options_.heads * launch_.pieces;
    arena_ = test.Empty(pieces * piece_bytes_);
    if (options_.used) arena_ = test.Upload(std::vector<uint32_t>(pieces * piece_bytes_ / sizeof(kMidway), kMidway));
    ids_.resize(pieces);
    std::iota(ids_.begin(), ids_.end(), 0);
    const int per_block = options_.heads * launch_.pieces;
    if (!options_.even) {
      std::shuffle(ids_.begin(), ids_.end(), std::mt19937(3));
    } else {  // each block's pieces from the last to the first, blocks in any order
      std::vector<int> order(sequences * blocks_);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), std::mt19937(3));
      for (size_t b = 0; b < order.size(); ++b)
        for (int i = 0; i < per_block; ++i) ids_[b * per_block + i] = (order[b] + 1) * per_block - 1 - i;
    }
    launch_.even = options_.even;
    launch_.step = -static_cast<int64_t>(piece_bytes_);
    if (options_.conv_width > 0) {
      conv_on_device_ = test.Upload(conv_);
      bias_on_device_ = test.Upload(conv_bias_);
      launch_.conv = As<float>(conv_on_device_);
      launch_.conv_bias = As<float>(bias_on_device_);
    }
    if (options_.skip) {
      skip_on_device_ = test.Upload(skip_);
      launch_.skip = As<float>(skip_on_device_);
    }
  }

  void AddItem(Payload& to, const Part& part) {
    StateItem item;
    item.rows = part.rows;
    item.heads = options_.heads;
    item.first_position = positions_[part.sequence];
    item.first_block = std::max<int64_t>(0, item.first_position / kStateTokens - 1);
    item.table = static_cast<int64_t>(to.blocks.size());
    const int64_t last = (item.first_position + part.rows - 1) / kStateTokens;
    const int per_block = options_.heads * launch_.pieces;
    for (int64_t b = item.first_block; b <= last; ++b) {
      const bool kept = !options_.sparse || b <= item.first_position / kStateTokens || b >= last - 1;
      for (int i = 0; i < (options_.even ? 1 : per_block); ++i) {
        const int id = ids_[(part.sequence * blocks_ + b) * per_block + i];
        to.blocks.push_back(kept ? arena_->data() + id * piece_bytes_ : nullptr);
      }
    }
    const size_t element = BytesOf(options_.wire);
    item.query_offset = to.q.size() * element;
    item.key_offset = to.k.size() * element;
    item.value_offset = to.v.size() * element;  // both get where the payload's parts begin
    item.gate_offset = to.gates.size() * sizeof(float);
    item.out_offset = to.out * element;
    for (int row = 0; row < part.rows; ++row)
      for (int head = 0; head < options_.heads; ++head) AddToken(to, part.sequence, head, item.first_position + row);
    to.out += int64_t{part.rows} * options_.heads * shape_.value_dim;
    for (int head = 0; head < options_.heads; ++head) to.units.push_back({static_cast<int32_t>(to.items.size()), head});
    to.items.push_back(item);
  }

  void AddToken(Payload& to, int sequence, int head, int64_t t) {
    const TokenStream& s = streams_[sequence * options_.heads + head];
    const auto add = [&](std::vector<float>& out, const std::vector<float>& in, int width) {
      out.insert(out.end(), in.begin() + t * width, in.begin() + (t + 1) * width);
    };
    add(to.q, s.q, shape_.key_dim);
    add(to.k, s.k, shape_.key_dim);
    add(to.v, s.v, shape_.value_dim);
    add(to.gates, s.log_decay, launch_.vector_decay ? shape_.key_dim : 1);
    if (launch_.token_rate) to.gates.push_back(s.beta[t]);
  }

  void Upload(StateTest& test, Payload& payload) {
    const WireType wire = options_.wire;
    std::vector<std::byte> query(options_.shift), key_value(options_.shift);
    const auto append = [](std::vector<std::byte>& to, const std::vector<std::byte>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    append(query, ToWireBytes(wire, payload.q));
    append(key_value, ToWireBytes(wire, payload.k));
    const std::vector<std::byte> values = ToWireBytes(wire, payload.v);
    for (StateItem& item : payload.items) {
      item.query_offset += options_.shift;
      item.key_offset += options_.shift;
      item.value_offset += static_cast<int64_t>(key_value.size());
    }
    key_value.insert(key_value.end(), values.begin(), values.end());
    key_value.resize((key_value.size() + 3) / 4 * 4);
    for (StateItem& item : payload.items) item.gate_offset += static_cast<int64_t>(key_value.size());
    const auto* gates = reinterpret_cast<const std::byte*>(payload.gates.data());
    key_value.insert(key_value.end(), gates, gates + payload.gates.size() * sizeof(float));
    query_ = test.Upload(query);
    key_value_ = test.Upload(key_value);
    items_ = test.Upload(payload.items);
    units_ = test.Upload(payload.units);
    table_ = test.Upload(payload.blocks);
    out_ = test.Empty(payload.out * BytesOf(wire) + 16);
    launch_.items = As<StateItem>(items_);
    launch_.units = payload.items.size() % 2 == 0 ? nullptr : As<StateUnit>(units_);
    launch_.unit_count = static_cast<int32_t>(payload.units.size());
    launch_.blocks = As<const std::byte*>(table_);
    launch_.query = query_->data();
    launch_.key_value = key_value_->data();
    launch_.out = out_->data();
    launch_.chunk_end = 0;
    for (const StateItem& item : payload.items) {
      const int64_t last = (item.first_position + item.rows - 1) / kStateTokens;
      launch_.chunk_end = std::max<int32_t>(launch_.chunk_end, last - item.first_position / kStateTokens + 1);
    }
  }

  // What comes out of the convolution, the norms and the rate, and then of the recurrence.
  std::vector<double> Reference(size_t stream) const {
    TokenStream s = streams_[stream];
    const int head = static_cast<int>(stream) % options_.heads, keys = shape_.key_dim, values = shape_.value_dim;
    if (options_.conv_width > 0) {
      Convolve(streams_[stream].q, keys, head, 0, s.q);
      Convolve(streams_[stream].k, keys, head, keys, s.k);
      Convolve(streams_[stream].v, values, head, 2 * keys, s.v);
    }
    std::vector<float> skipped = s.v;
    for (int t = 0; t < rows_; ++t) {
      if (options_.normalise) {
        Normalise(&s.q[t * keys], keys, 0.5);
        Normalise(&s.k[t * keys], keys, 1);
      }
      for (int i = 0; i < values; ++i) {
        skipped[t * values + i] *= options_.skip ? skip_[head] : 0.0f;
        if (options_.rate && shape_.update != StateUpdate::kDelta) s.v[t * values + i] *= s.beta[t];
      }
    }
    std::vector<double> state(static_cast<size_t>(keys) * values);
    std::vector<double> out = kernels::reference::LinearState(shape_, s.Tokens(), state);
    for (size_t i = 0; i < out.size(); ++i) out[i] += skipped[i];
    return out;
  }
  static void Normalise(float* x, int n, double factor) {
    double sum = 1e-6;
    for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    for (int i = 0; i < n; ++i) x[i] = static_cast<float>(x[i] * factor / std::sqrt(sum));
  }
  void Convolve(const std::vector<float>& in, int width, int head, int first, std::vector<float>& out) const {
    for (int t = 0; t < rows_; ++t)
      for (int i = 0; i < width; ++i) {
        double sum = conv_bias_[head * channels() + first + i];
        for (int w = 0; w < options_.conv_width; ++w) {
          const int at = t - options_.conv_width + 1 + w;
          if (at >= 0)
            sum +=
                static_cast<double>(conv_[(w * options_.heads + head) * channels() + first + i]) * in[at * width + i];
        }
        out[t * width + i] = static_cast<float>(sum / (1 + std::exp(-sum)));
      }
  }

  CudaStream& stream_;
  const StateOptions options_;
  const int rows_;
  int blocks_ = 0;
  LinearStateShape shape_;
  size_t piece_bytes_ = 0;
  StateLaunch launch_;
  std::vector<TokenStream> streams_;  // [sequence][head]
  std::vector<int64_t> positions_;
  std::vector<std::vector<float>> done_;
  std::vector<int> ids_;
  std::vector<float> conv_, conv_bias_, skip_;
  std::unique_ptr<Buffer> arena_, conv_on_device_, bias_on_device_, skip_on_device_;
  std::unique_ptr<Buffer> query_, key_value_, items_, units_, table_, out_;
};

}  // namespace dovetail::kernels::cuda::testing
