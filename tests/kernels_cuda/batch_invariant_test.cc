#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"
#include "tests/kernels_cuda/attention_fixture.h"
#include "tests/kernels_cuda/gemm_fixture.h"

// What --deterministic stands on: rows that have the same bits alone and among others, of attention
// (CudaAttention::Kernel::kBatchInvariant) and of products (GemmCall::in_order).

namespace dovetail::kernels::cuda {
namespace {

using testing::As;
using testing::Case;
using testing::ToWireBytes;

class InvariantAttentionTest : public testing::AttentionTest {
 protected:
  // Rows [first, first + rows) of a sequence.
  struct Rows {
    int sequence = 0, first = 0, rows = 1;
  };
  using Bits = std::map<std::pair<int, int>, std::vector<std::byte>>;  // by sequence and row

  void SetUp() override {
    AttentionTest::SetUp();
    if (IsSkipped()) return;
    const CudaKvLayout layout{64, 64, KvType::kBF16};
    const DeviceLimits limits = device().limits();
    if (!device().library()->prefill_takes(&layout, WireType::kBF16, 0, &limits))
      GTEST_SKIP() << "needs a GPU with wgmma, and code for it";
  }

  void Place(const Case& c, const std::vector<int>& lengths) {
    case_ = c;
    sequences_.clear();
    queries_.clear();
    for (size_t i = 0; i < lengths.size(); ++i) {
      sequences_.push_back(Make(c, {.q_rows = lengths[i], .sinks = i == 1}, 700 + i));
      queries_.push_back(Upload(ToWireBytes(c.wire, sequences_.back().q)));
    }
    arena_ = PlaceBlocks(c, sequences_, 7);
  }

  // Adds what these rows are in one step.
  void Attend(const std::vector<Rows>& step, Bits& bits) {
    const int64_t row = int64_t{case_.kv_heads} * case_.group * case_.key_dim;
    std::vector<CudaAttentionItem> items;
    int64_t rows = 0;
    for (const Rows& part : step) rows += part.rows;
    const auto q = Empty(rows * row * 2), o = Empty(rows * row * 2);
    rows = 0;
    for (const Rows& part : step) {
      const testing::AttentionTest::Sequence& s = sequences_[part.sequence];
      EXPECT_TRUE(stream()
                      .Copy(q->data() + rows * row * 2, queries_[part.sequence]->data() + part.first * row * 2,
                            part.rows * row * 2)
                      .ok());
      items.push_back({.q_rows = part.rows,
                       .kv_heads = case_.kv_heads,
                       .first_position = part.first,
                       .token_end = part.first + part.rows,
                       .q_offset = rows * row,
                       .q_row_step = row,
                       .o_offset = rows * row,
                       .o_row_step = row,
                       .blocks = As<const std::byte* const>(s.device_table),
                       .head_step = s.segments,
                       .sinks = s.spec.sinks ? As<const float>(s.device_sinks) : nullptr});
      rows += part.rows;
    }
    const CudaAttentionShape shape{.group = case_.group,
                                   .window = case_.window,
                                   .layout = {case_.key_dim, case_.value_dim, case_.type},
                                   .q_type = case_.wire,
                                   .o_type = case_.wire,
                                   .scale = 1 / std::sqrt(static_cast<float>(case_.key_dim)),
                                   .arena = arena_->data(),
                                   .arena_bytes = arena_->size_bytes()};
    CudaAttention attention(device(), CudaAttention::Kernel::kBatchInvariant);
    ASSERT_EQ(attention.Plan(stream(), shape, items), absl::OkStatus());
    ASSERT_EQ(attention.Run(stream(), shape, {.q = q->data(), .o = o->data()}), absl::OkStatus());
    const std::vector<std::byte> got = Download<std::byte>(*o);
    passes_ = std::max(passes_, attention.prefill_plan().passes.size());
    auto at = got.begin();
    for (const Rows& part : step)
      for (int i = 0; i < part.rows; ++i, at += row * 2) bits[{part.sequence, part.first + i}] = {at, at + row * 2};
  }

  void ExpectSameBits(const Bits& whole, const Bits& some) {
    for (const auto& [which, bits] : some)
      ASSERT_TRUE(bits == whole.at(which)) << "sequence " << which.first << " row " << which.second;
  }

  // A step of all rows; the rows in parts of a length, with rows of others; single rows, with single rows of others.
  void Check(const Case& c) {
    SCOPED_TRACE(absl::StrCat("dim ", c.key_dim, " window ", c.window, " type ", static_cast<int>(c.type)));
    const std::vector<int> lengths = {2200, 150, 700};
    Place(c, lengths);
    Bits whole;
    Attend({{0, 0, 2200}, {1, 0, 150}, {2, 0, 700}}, whole);
    for (const int length : {257, 64, 1}) {
      Bits parts;
      std::mt19937_64 random(length);
      for (int first = 0; first < 2200; first += length == 1 ? 71 : length) {
        std::vector<Rows> step = {{0, first, std::min(length, 2200 - first)}};
        for (const int other : {1, 2})
          if (random() % 2 == 0) step.push_back({other, static_cast<int>(random() % (lengths[other] - 1)), 1});
        Attend(step, parts);
      }
      ExpectSameBits(whole, parts);
    }
  }

  Case case_;
  std::vector<Sequence> sequences_;
  std::vector<std::unique_ptr<Buffer>> queries_;
  std::unique_ptr<Buffer> arena_;
  size_t passes_ = 0;
};

TEST_F(InvariantAttentionTest, RowsOfWindowsAndSinks) {
  for (const int window : {0, 70, 2060}) {
    Case c;
    c.group = 2, c.kv_heads = 1, c.window = window;
    Check(c);
  }
}

TEST_F(InvariantAttentionTest, EveryHeadSizeAndType) {
  for (const int dim : {64, 80, 96, 128, 256}) {
    for (const KvType type : {KvType::kBF16, KvType::kF16, KvType::kE4M3}) {
      Case c;
      c.group = 4, c.kv_heads = 2, c.key_dim = c.value_dim = dim, c.type = type;
      c.wire = type == KvType::kF16 ? WireType::kF16 : WireType::kBF16;
      c.window = dim == 96 || dim == 256 ? 333 : 0;
      Check(c);
    }
  }
}

class InOrderProductTest : public testing::GemmTest {
 protected:
  struct Shape {
    int n = 64, k = 64, parts = 1;
    bool f32 = false, bias = false, bf16 = true;
    bool adds = false;  // to what is there
  };
  static constexpr int kRows = 300;

  // y of rows [first, first + m) of x.
  std::vector<std::byte> Multiply(const Shape& shape, int first, int m) {
    const size_t element = shape.f32 ? 4 : 2;
    const auto y = Empty(shape.parts * size_t(m) * shape.n * element);
    if (shape.adds)
      EXPECT_TRUE(
          stream().Copy(y->data(), before_->data() + size_t(first) * shape.n * 4, size_t(m) * shape.n * 4).ok());
    GemmCall call{};
    call.x = x_->data() + size_t(first) * shape.k * 2;
    call.w = w_->data();
    call.y = y->data();
    call.bias = shape.bias ? bias_->data() : nullptr;
    call.m = m, call.n = shape.n, call.k = shape.k;
    call.x_stride = call.w_stride = shape.k;
    call.y_stride = shape.n;
    call.type = shape.bf16 ? GemmType::kBF16 : GemmType::kF16;
    call.y_is_f32 = shape.f32;
    call.accumulate = shape.adds;
    if (shape.parts > 1) call.parts = shape.parts, call.part_step = int64_t{m} * shape.n;
    call.in_order = 1;
    EXPECT_EQ(gemm_->Run(stream(), call), absl::OkStatus());
    return Download<std::byte>(*y);
  }

  void Check(const Shape& shape) {
    SCOPED_TRACE(absl::StrCat(shape.n, " x ", shape.k, " in ", shape.parts, shape.bias ? " with bias" : "",
                              shape.adds ? " added" : ""));
    const WireType wire = shape.bf16 ? WireType::kBF16 : WireType::kF16;
    x_ = Upload(ToWireBytes(wire, kernels::testing::RandomFloats(size_t{kRows} * shape.k, 1)));
    w_ = Upload(ToWireBytes(wire, kernels::testing::RandomFloats(size_t(shape.n) * shape.k, 2, -0.1, 0.1)));
    bias_ = Upload(ToWireBytes(shape.f32 ? WireType::kF32 : wire, kernels::testing::RandomFloats(shape.n, 3)));
    before_ = Upload(kernels::testing::RandomFloats(size_t{kRows} * shape.n, 4));
    const std::vector<std::byte> all = Multiply(shape, 0, kRows);
    const size_t row = size_t(shape.n) * (shape.f32 ? 4 : 2);
    for (const auto& [first, m] : {std::pair{0, 1},
                                   {7, 1},
                                   {3, 2},
                                   {0, 7},
                                   {290, 8},
                                   {5, 9},
                                   {0, 16},
                                   {1, 33},
                                   {64, 64},
                                   {2, 65},
                                   {100, 128},
                                   {10, 129},
                                   {50, 200},
                                   {0, 256},
                                   {30, 257}}) {
      const std::vector<std::byte> some = Multiply(shape, first, m);
      for (int part = 0; part < shape.parts; ++part) {
        const auto theirs = all.begin() + int64_t(row) * (int64_t{part} * kRows + first);
        ASSERT_TRUE(std::equal(theirs, theirs + int64_t(row) * m, some.begin() + int64_t(row) * part * m))
            << m << " rows from " << first << ", part " << part;
      }
    }
  }

  std::unique_ptr<Buffer> x_, w_, bias_, before_;
};

TEST_F(InOrderProductTest, RowsHaveTheSameBitsAmongAnyNumber) {
  Check({.n = 96, .k = 128});
  Check({.n = 64, .k = 512, .f32 = true});
  Check({.n = 128, .k = 512, .parts = 2, .f32 = true});
  Check({.n = 104, .k = 192, .bias = true});
  Check({.n = 64, .k = 136, .f32 = true, .bias = true, .bf16 = false});
  Check({.n = 97, .k = 128, .f32 = true});
  Check({.n = 64, .k = 256, .f32 = true, .adds = true});
}

// Sizes of models: which algorithms there are depends on them. Emulated GPUs leave it out (tests/emulated_gpu).
TEST_F(InOrderProductTest, OfTheSizesOfModels) {
  Check({.n = 6144, .k = 4096});
  Check({.n = 4096, .k = 14336, .parts = 2, .f32 = true});
  Check({.n = 4096, .k = 14336, .f32 = true});
  Check({.n = 28672, .k = 4096, .bf16 = false});
  Check({.n = 49152, .k = 576, .f32 = true});
  Check({.n = 1152, .k = 896, .bias = true});
  Check({.n = 2048, .k = 4096, .f32 = true, .adds = true});
  Check({.n = 4096, .k = 14336, .f32 = true, .adds = true});
}

// The first half of a gated MLP in one kernel, and as a product and an activation.
TEST_F(InOrderProductTest, AGatedProductIsItsTwoSteps) {
  for (const bool gelu : {false, true}) {
    const int m = 100, n = 12288, k = 192;
    const auto x = Upload(ToWireBytes(WireType::kBF16, kernels::testing::RandomFloats(m * k, 1))),
               w = Upload(ToWireBytes(WireType::kBF16, kernels::testing::RandomFloats(2 * n * k, 2, -0.5, 0.5)));
    const auto at_once = Empty(size_t{m} * n * 2), halves = Empty(size_t{2} * m * n * 2),
               after = Empty(size_t{m} * n * 2);
    GatedProductCall call{.x = x->data(),
                          .w = w->data(),
                          .y = at_once->data(),
                          .m = m,
                          .n = n,
                          .k = k,
                          .x_stride = k,
                          .w_stride = k,
                          .y_stride = n,
                          .type = GemmType::kBF16,
                          .gelu = gelu,
                          .rounds_halves = 1};
    const auto done = GatedProduct(stream(), call);
    ASSERT_TRUE(done.ok()) << done.status();
    if (!*done) GTEST_SKIP() << "needs a GPU with wgmma";
    GemmCall product{};
    product.x = x->data(), product.w = w->data(), product.y = halves->data();
    product.m = m, product.n = 2 * n, product.k = k;
    product.x_stride = product.w_stride = k, product.y_stride = 2 * n;
    product.in_order = 1;
    ASSERT_EQ(gemm_->Run(stream(), product), absl::OkStatus());
    ActivationLaunch activation;
    activation.gate = halves->data();
    activation.up = halves->data() + n * 2;
    activation.out = after->data();
    activation.gate_step = activation.up_step = 2 * n;
    activation.out_step = n;
    activation.type = WireType::kBF16;
    activation.gelu = gelu;
    activation.rows = m;
    activation.size = n;
    ASSERT_EQ(GatedActivation(stream(), activation), absl::OkStatus());
    EXPECT_TRUE(Download<uint16_t>(*at_once) == Download<uint16_t>(*after));
  }
}

class InOrderExpertsTest : public testing::CudaTest {
 protected:
  static constexpr int kExperts = 16, kChosen = 4;
};

// Tiles of every size, with and without an activation.
TEST_F(InOrderExpertsTest, TilesOfEverySizeGiveTheSameBits) {
  const int rows = 400, pairs = rows * kChosen;
  const auto groups = GroupsProducts(stream());
  ASSERT_TRUE(groups.ok()) << groups.status();
  for (const auto& [n, k, gated] :
       {std::tuple{128, 64, false}, {256, 192, true}, {512, 1024, true}, {96, 200, false}}) {
    const auto x = Upload(ToWireBytes(WireType::kBF16, kernels::testing::RandomFloats(size_t(rows) * k, 1)));
    const auto w =
        Upload(ToWireBytes(WireType::kBF16, kernels::testing::RandomFloats(size_t(kExperts) * n * k, 2, -0.2, 0.2)));
    std::vector<int32_t> chosen;
    std::mt19937 random(3);
    for (int row = 0; row < rows; ++row) {
      const auto first = static_cast<int32_t>(random());
      for (int s = 0; s < kChosen; ++s) chosen.push_back(static_cast<int32_t>((uint32_t(first) + 5 * s) % kExperts));
    }
    const auto expert = Upload(chosen);
    const int width = gated ? n / 2 : n;
    std::vector<std::vector<uint16_t>> want;
    for (const int tile_rows : {kFewTileRows, kMoreTileRows, kManyTileRows, kGroupedTileRows}) {
      if (tile_rows == kGroupedTileRows && (!*groups || !FitsGroupedTiles(n, k))) continue;
      const int32_t most = MostExpertTiles(pairs, kExperts, tile_rows);
      const auto slot = Empty(pairs * 4), member = Empty(pairs * 4), tiles = Empty(most * sizeof(ExpertTile)),
                 y = Empty(size_t(pairs) * width * 2);
      ASSERT_EQ(PlaceExperts(stream(), {.expert = As<int32_t>(expert),
                                        .slot = As<int32_t>(slot),
                                        .member = As<int32_t>(member),
                                        .tiles = As<ExpertTile>(tiles),
                                        .pairs = pairs,
                                        .chosen = kChosen,
                                        .experts = kExperts,
                                        .tile_rows = tile_rows,
                                        .most_tiles = most}),
                absl::OkStatus());
      ExpertGemmLaunch product;
      product.x = x->data(), product.w = w->data(), product.y = y->data();
      product.member = As<int32_t>(member), product.tiles = As<ExpertTile>(tiles);
      product.most_tiles = most, product.tile_rows = tile_rows;
      product.n = n, product.k = k, product.experts = kExperts;
      product.activation = gated ? ExpertActivation::kSilu : ExpertActivation::kNone;
      ASSERT_EQ(MultiplyExperts(stream(), product), absl::OkStatus());
      const std::vector<uint16_t> got = Download<uint16_t>(*y);
      const std::vector<int32_t> slots = Download<int32_t>(*slot);
      std::vector<std::vector<uint16_t>> by_pair;
      for (const int32_t at : slots) by_pair.emplace_back(got.begin() + at * width, got.begin() + (at + 1) * width);
      if (want.empty()) want = by_pair;
      ASSERT_TRUE(by_pair == want) << "tiles of " << tile_rows << " rows, " << n << " x " << k;
    }
  }
}

TEST_F(InOrderExpertsTest, ARowIsRoutedAloneAsAmongOthers) {
  const int rows = 300, hidden = 256, experts = 128, chosen = 8;
  const auto x = Upload(kernels::testing::RandomFloats(size_t(rows) * hidden, 1, -3, 3)),
             norm = Upload(kernels::testing::RandomFloats(hidden, 2, 0.5, 1.5)),
             router = Upload(kernels::testing::RandomFloats(size_t(experts) * hidden, 3));
  const auto route = [&](int first, int count) {
    const auto expert = Empty(count * chosen * 4), weight = Empty(count * chosen * 4), h = Empty(count * hidden * 2);
    RouteLaunch launch;
    launch.x = As<float>(x) + first * hidden, launch.norm = As<float>(norm), launch.router = As<float>(router);
    launch.expert = As<int32_t>(expert), launch.weight = As<float>(weight), launch.h = h->data();
    launch.eps = 1e-6f;
    launch.rows = count, launch.hidden = hidden, launch.experts = experts, launch.chosen = chosen;
    EXPECT_EQ(RouteExperts(stream(), launch), absl::OkStatus());
    return std::tuple(Download<int32_t>(*expert), Download<uint32_t>(*weight), Download<uint16_t>(*h));
  };
  const auto [experts_of, weights_of, h_of] = route(0, rows);
  const auto is_part = [](const auto& some, const auto& all, int first, int width) {
    return std::equal(some.begin(), some.end(), all.begin() + first * width);
  };
  for (const auto& [first, count] :
       {std::pair{0, 1}, {7, 1}, {3, 2}, {10, 8}, {0, 16}, {20, 17}, {1, 40}, {64, 64}, {5, 128}, {30, 256}}) {
    const auto [some_experts, some_weights, some_h] = route(first, count);
    EXPECT_TRUE(is_part(some_experts, experts_of, first, chosen)) << count << " rows";
    EXPECT_TRUE(is_part(some_weights, weights_of, first, chosen)) << count << " rows";
    EXPECT_TRUE(is_part(some_h, h_of, first, hidden)) << count << " rows";
  }
}

}  // namespace
}  // namespace dovetail::kernels::cuda
