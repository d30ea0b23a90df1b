#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/attention/merge_partials.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/products/cuda_weights.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/sampling/sample.h"
#include "kernels/merge_partials.h"
#include "kernels/paged_attention.h"
#include "kernels/reference/activation.h"
#include "kernels/reference/gemm.h"
#include "kernels/reference/rms_norm.h"
#include "kernels/reference/rope.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;
using testing::FromWireBytes;
using testing::ToWireBytes;

constexpr WireType kWires[] = {WireType::kF32, WireType::kF16, WireType::kBF16};

// Half a unit in the last place of a wire type, relative.
double Rounding(WireType type) { return type == WireType::kBF16 ? 0x1p-8 : type == WireType::kF16 ? 0x1p-11 : 2e-6; }

class CudaOpsTest : public testing::CudaTest {
 protected:
  std::unique_ptr<Buffer> UploadWire(WireType type, std::vector<float>& x) {
    const std::vector<std::byte> bytes = ToWireBytes(type, x);
    x = FromWireBytes(type, bytes);
    return Upload(bytes);
  }
};

TEST_F(CudaOpsTest, RmsNormAddsTheResidualFirst) {
  for (const WireType type : kWires) {
    for (const int size : {2, 64, 130, 576, 4096, 8200}) {
      for (const bool with_residual : {false, true}) {
        const int rows = 3, step = size + (size % 8 == 0 ? 8 : 6);
        std::vector<float> x = RandomFloats(rows * step, size, -4, 4), r = RandomFloats(rows * size, size + 1);
        const std::vector<float> w = RandomFloats(size, size + 2);
        const auto dx = UploadWire(type, x), dr = UploadWire(type, r), dw = Upload(w);
        const auto out = Empty(rows * size * testing::BytesOf(type) + 16);
        RmsNormLaunch args{.x = dx->data(),
                           .residual = with_residual ? dr->data() : nullptr,
                           .weight = As<float>(dw),
                           .out = out->data(),
                           .x_step = step,
                           .residual_step = size,
                           .out_step = size,
                           .x_type = type,
                           .out_type = type,
                           .eps = 1e-5f,
                           .rows = rows,
                           .size = size};
        ASSERT_TRUE(RmsNorm(stream(), args).ok());
        const auto got = FromWireBytes(type, Download<std::byte>(*out)),
                   x_now = FromWireBytes(type, Download<std::byte>(*dx));
        for (int row = 0; row < rows; ++row) {
          for (int i = 0; i < size; ++i) {
            const float sum = x[row * step + i] + (with_residual ? r[row * size + i] : 0.0f);
            ASSERT_LE(std::abs(x_now[row * step + i] - sum), std::abs(sum) * Rounding(type)) << size;
          }
          const auto want = reference::RmsNorm({x_now.data() + row * step, size_t(size)}, {}, w, 1e-5);
          for (int i = 0; i < size; ++i) {
            ASSERT_LE(std::abs(got[row * size + i] - want[i]), std::abs(want[i]) * (Rounding(type) + 2e-6) + 1e-7)
                << size;
          }
        }
        ASSERT_TRUE(std::isnan(got[rows * size])) << "wrote behind out";
      }
    }
  }
}

TEST_F(CudaOpsTest, ActivationsAgreeWithTheReference) {
  for (const WireType type : kWires) {
    for (const int gelu : {0, 1}) {
      for (const int size : {778, 784}) {
        const int rows = 3;
        std::vector<float> gate = RandomFloats(rows * size, 1, -12, 12), up = RandomFloats(rows * size, 2, -3, 3);
        const auto dg = UploadWire(type, gate), du = UploadWire(type, up),
                   out = Empty(rows * size * testing::BytesOf(type));
        ActivationLaunch args{.gate = dg->data(),
                              .up = du->data(),
                              .out = out->data(),
                              .gate_step = size,
                              .up_step = size,
                              .out_step = size,
                              .type = type,
                              .gelu = gelu,
                              .rows = rows,
                              .size = size};
        ASSERT_TRUE(GatedActivation(stream(), args).ok());
        const auto got = FromWireBytes(type, Download<std::byte>(*out));
        for (int i = 0; i < rows * size; ++i) {
          const double want = gelu ? reference::GeluMul(gate[i], up[i]) : reference::SiluMul(gate[i], up[i]);
          ASSERT_LE(std::abs(got[i] - want), std::max(std::abs(want), 1e-3) * (Rounding(type) + 4e-6))
              << gate[i] << " " << up[i];
        }
      }
    }
  }
}

TEST_F(CudaOpsTest, EmbeddingsAreRowsTimesAFactor) {
  const int vocab = 50, size = 66;
  std::vector<float> table = RandomFloats(vocab * size, 3);
  const std::vector<int32_t> ids = {49, 0, 7, 7};
  const auto dt = UploadWire(WireType::kBF16, table), di = Upload(ids), out = Empty(ids.size() * size * 4);
  EmbedLaunch args{.table = dt->data(),
                   .ids = As<int32_t>(di),
                   .out = out->data(),
                   .table_type = WireType::kBF16,
                   .out_type = WireType::kF32,
                   .factor = 3,
                   .rows = 4,
                   .size = size};
  ASSERT_TRUE(Embed(stream(), args).ok());
  const auto got = Download<float>(*out);
  for (size_t r = 0; r < ids.size(); ++r) {
    for (int i = 0; i < size; ++i) ASSERT_EQ(got[r * size + i], table[ids[r] * size + i] * 3);
  }
}

// Norm, rope and append of random rows of several sequences, against the references; nothing else in the blocks
// changes.
TEST_F(CudaOpsTest, KvAppendNormsRotatesAndStores) {
  struct Case {
    KvType type;
    int key_dim, value_dim, rotary;
    bool norm;
  };
  for (const Case& c : {Case{KvType::kBF16, 64, 64, 64, false}, Case{KvType::kBF16, 128, 128, 128, true},
                        Case{KvType::kE4M3, 120, 72, 60, true}, Case{KvType::kF16, 80, 80, 80, false},
                        Case{KvType::kE4M3, 128, 128, 128, false}, Case{KvType::kBF16, 256, 8, 0, false},
                        Case{KvType::kE4M3, 120, 72, 48, true}, Case{KvType::kF16, 200, 256, 64, true},
                        Case{KvType::kBF16, 40, 24, 32, true}}) {
    const int q_heads = c.key_dim == 40 ? 61 : 6,  // more than a thread block takes
        kv_heads = 2, width = q_heads * c.key_dim + kv_heads * (c.key_dim + c.value_dim);
    const CudaKvLayout layout{c.key_dim, c.value_dim, c.type};
    const std::vector<int32_t> positions = {0, 63, 64, 65, 130, 5}, row_items = {0, 0, 0, 0, 0, 1};
    const int rows = static_cast<int>(positions.size()), segments = 3;
    std::vector<float> qkv = RandomFloats(rows * width, 9, -3, 3);
    const auto d_qkv = UploadWire(WireType::kBF16, qkv);
    const std::vector<float> q_norm = RandomFloats(c.key_dim, 10, 0.5, 2), k_norm = RandomFloats(c.key_dim, 11, 0.5, 2);
    std::vector<float> inv_freq;
    for (int i = 0; i < c.rotary / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / c.rotary));
    const auto d_qn = Upload(q_norm), d_kn = Upload(k_norm), d_pos = Upload(positions), d_items_of = Upload(row_items);
    const auto d_freq = Upload(inv_freq);
    const auto cos = Empty(rows * inv_freq.size() * 4 + 4), sin = Empty(rows * inv_freq.size() * 4 + 4);
    RopeTableLaunch table{.positions = As<int32_t>(d_pos),
                          .inv_freq = As<float>(d_freq),
                          .cos = As<float>(cos),
                          .sin = As<float>(sin),
                          .multiplier = 1.25f,
                          .rows = rows,
                          .count = static_cast<int32_t>(inv_freq.size())};
    if (c.rotary > 0) {
      ASSERT_TRUE(RopeTable(stream(), table).ok());
    }

    const size_t blocks = 2 * kv_heads * segments, offset = 256;
    const auto memory = Empty(blocks * layout.bytes() + offset);
    std::vector<const std::byte*> pointers;
    for (size_t b = 0; b < blocks; ++b) pointers.push_back(memory->data() + b * layout.bytes());
    const auto d_pointers = Upload(pointers);
    std::vector<DeviceAttentionItem> items(2);
    for (int i = 0; i < 2; ++i) {
      items[i].blocks = As<const std::byte* const>(d_pointers) + i * kv_heads * segments;
      items[i].head_step = segments;
      items[i].kv_heads = kv_heads;
    }
    const auto d_items = Upload(items);
    const auto q_out = Empty(rows * q_heads * c.key_dim * 2);
    KvAppendLaunch args{.qkv = d_qkv->data(),
                        .qkv_step = width,
                        .type = WireType::kBF16,
                        .q_out = q_out->data(),
                        .q_out_step = q_heads * c.key_dim,
                        .q_norm = c.norm ? As<float>(d_qn) : nullptr,
                        .k_norm = c.norm ? As<float>(d_kn) : nullptr,
                        .norm_eps = 1e-6f,
                        .cos = c.rotary > 0 ? As<float>(cos) : nullptr,
                        .sin = c.rotary > 0 ? As<float>(sin) : nullptr,
                        .rotary = c.rotary,
                        .rows = rows,
                        .q_heads = q_heads,
                        .kv_heads = kv_heads,
                        .positions = As<int32_t>(d_pos),
                        .row_items = As<int32_t>(d_items_of),
                        .items = As<DeviceAttentionItem>(d_items),
                        .kv_offset = offset,
                        .layout = layout,
                        .key_scale = c.type == KvType::kE4M3 ? 0.5f : 1.0f,
                        .value_scale = c.type == KvType::kE4M3 ? 2.0f : 1.0f};
    const absl::Status status = KvAppend(stream(), args);
    ASSERT_TRUE(status.ok()) << status;
    const auto q_got = FromWireBytes(WireType::kBF16, Download<std::byte>(*q_out));
    const auto kv = Download<std::byte>(*memory);
    std::vector<bool> written(kv.size(), false);
    const double rounding = c.type == KvType::kE4M3 ? 0x1p-4 : c.type == KvType::kF16 ? 0x1p-11 : 0x1p-8;
    const double smallest = c.type == KvType::kE4M3 ? 0x1p-9 : 1e-6;

    const auto expected = [&](int row, int head, bool is_q) {
      const float* x = qkv.data() + row * width + (is_q ? head : q_heads + head) * c.key_dim;
      std::vector<float> v(x, x + c.key_dim);
      if (c.norm) {
        const auto normed = reference::RmsNorm(v, {}, is_q ? q_norm : k_norm, 1e-6);
        v.assign(normed.begin(), normed.end());
      }
      return reference::Rope(v, positions[row], inv_freq, 1.25);
    };
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < q_heads; ++head) {
        const auto want = expected(row, head, true);
        for (int i = 0; i < c.key_dim; ++i) {
          const float got = q_got[(row * q_heads + head) * c.key_dim + i];
          ASSERT_LE(std::abs(got - want[i]), std::abs(want[i]) * 0x1p-8 + 1e-5)
              << "q row " << row << " head " << head << " dim " << i;
        }
      }
      for (int head = 0; head < kv_heads; ++head) {
        const size_t block =
            offset + ((row_items[row] * kv_heads + head) * segments + positions[row] / 64) * layout.bytes();
        const int t = positions[row] % 64;
        const auto want = expected(row, head, false);
        for (int i = 0; i < layout.key_row_bytes() / layout.element_bytes(); ++i) {
          const size_t at = block + layout.key_offset(t, i);
          const double target = i < c.key_dim ? want[i] / args.key_scale : 0;
          ASSERT_LE(std::abs(testing::LoadKv(c.type, kv.data() + at) - target), std::abs(target) * rounding + smallest)
              << "k " << i;
          for (int b = 0; b < layout.element_bytes(); ++b) written[at + b] = true;
        }
        const float* v = qkv.data() + row * width + (q_heads + kv_heads) * c.key_dim + head * c.value_dim;
        for (int i = 0; i < c.value_dim; ++i) {
          const size_t at = block + layout.value_offset(t, i);
          const double target = v[i] / args.value_scale;
          ASSERT_LE(std::abs(testing::LoadKv(c.type, kv.data() + at) - target), std::abs(target) * rounding + smallest)
              << "v " << i;
          for (int b = 0; b < layout.element_bytes(); ++b) written[at + b] = true;
        }
      }
    }
    for (size_t i = 0; i < kv.size(); ++i) {
      if (!written[i]) {
        ASSERT_EQ(kv[i], std::byte{0xff}) << "wrote outside the tokens";
      }
    }
  }
}

// On their way to another device q, k and v are rows, normed and rotated; there k and v come in rows of their own.
TEST_F(CudaOpsTest, KvAppendWritesRowsAndTakesThem) {
  const int rows = 5, q_heads = 4, kv_heads = 2, key_dim = 64, value_dim = 32;
  const int q = q_heads * key_dim, k = kv_heads * key_dim, v = kv_heads * value_dim, width = q + k + v;
  const CudaKvLayout layout{key_dim, value_dim, KvType::kBF16};
  std::vector<float> qkv = RandomFloats(rows * width, 21, -3, 3);
  const std::vector<float> k_norm = RandomFloats(key_dim, 22, 0.5, 2);
  const auto d_qkv = UploadWire(WireType::kBF16, qkv), d_kn = Upload(k_norm);
  const auto q_out = Empty(rows * q * 2), k_out = Empty(rows * k * 2), v_out = Empty(rows * v * 2);
  KvAppendLaunch split{.qkv = d_qkv->data(),
                       .qkv_step = width,
                       .q_out = q_out->data(),
                       .q_out_step = q,
                       .k_out = k_out->data(),
                       .v_out = v_out->data(),
                       .k_out_step = k,
                       .v_out_step = v,
                       .k_norm = As<float>(d_kn),
                       .norm_eps = 1e-6f,
                       .rows = rows,
                       .q_heads = q_heads,
                       .kv_heads = kv_heads,
                       .layout = layout};
  ASSERT_TRUE(KvAppend(stream(), split).ok());
  const auto q_got = FromWireBytes(WireType::kBF16, Download<std::byte>(*q_out));
  const auto k_got = FromWireBytes(WireType::kBF16, Download<std::byte>(*k_out));
  const auto v_got = FromWireBytes(WireType::kBF16, Download<std::byte>(*v_out));
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < q; ++i) ASSERT_EQ(q_got[row * q + i], qkv[row * width + i]);
    for (int i = 0; i < v; ++i) ASSERT_EQ(v_got[row * v + i], qkv[row * width + q + k + i]);
    for (int head = 0; head < kv_heads; ++head) {
      const std::span<const float> x(qkv.data() + row * width + q + head * key_dim, key_dim);
      const auto want = reference::RmsNorm(x, {}, k_norm, 1e-6);
      for (int i = 0; i < key_dim; ++i)
        ASSERT_LE(std::abs(k_got[row * k + head * key_dim + i] - want[i]), std::abs(want[i]) * 0x1p-8 + 1e-6);
    }
  }

  const auto memory = Empty(kv_heads * layout.bytes());
  std::vector<const std::byte*> pointers;
  for (int head = 0; head < kv_heads; ++head) pointers.push_back(memory->data() + head * layout.bytes());
  const auto d_pointers = Upload(pointers);
  std::vector<DeviceAttentionItem> items(1);
  items[0].blocks = As<const std::byte* const>(d_pointers);
  items[0].head_step = 1;
  const auto d_items = Upload(items), d_of = Upload(std::vector<int32_t>(rows, 0));
  const auto d_pos = Upload(std::vector<int32_t>{7, 8, 9, 40, 63});
  KvAppendLaunch append{.qkv = k_out->data(),
                        .qkv_step = k,
                        .v = v_out->data(),
                        .v_step = v,
                        .rows = rows,
                        .kv_heads = kv_heads,
                        .positions = As<int32_t>(d_pos),
                        .row_items = As<int32_t>(d_of),
                        .items = As<DeviceAttentionItem>(d_items),
                        .layout = layout};
  ASSERT_TRUE(KvAppend(stream(), append).ok());
  const auto kv = Download<std::byte>(*memory);
  const std::vector<int> positions = {7, 8, 9, 40, 63};
  for (int row = 0; row < rows; ++row) {
    for (int head = 0; head < kv_heads; ++head) {
      const std::byte* block = kv.data() + head * layout.bytes();
      for (int i = 0; i < key_dim; ++i)
        ASSERT_EQ(testing::LoadKv(KvType::kBF16, block + layout.key_offset(positions[row], i)),
                  k_got[row * k + head * key_dim + i]);
      for (int i = 0; i < value_dim; ++i)
        ASSERT_EQ(testing::LoadKv(KvType::kBF16, block + layout.value_offset(positions[row], i)),
                  v_got[row * v + head * value_dim + i]);
    }
  }
  EXPECT_EQ(
      KvAppend(stream(), {.qkv = k_out->data(), .k_out = k_out->data(), .rows = 1, .kv_heads = 1, .layout = layout})
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaOpsTest, CombineAddsScalesAndConverts) {
  const int n = 1026;
  for (const WireType a_type : kWires) {
    for (const WireType out_type : kWires) {
      for (const bool with_b : {false, true}) {
        std::vector<float> a = RandomFloats(n, 31, -4, 4), b = RandomFloats(n, 32, -4, 4);
        const auto da = UploadWire(a_type, a), db = UploadWire(WireType::kF32, b);
        const auto out = Empty(n * testing::BytesOf(out_type));
        const CombineLaunch args{.a = da->data(),
                                 .b = with_b ? db->data() : nullptr,
                                 .out = out->data(),
                                 .a_type = a_type,
                                 .b_type = WireType::kF32,
                                 .out_type = out_type,
                                 .a_factor = 0.75f,
                                 .b_factor = -1.5f,
                                 .count = n};
        ASSERT_TRUE(Combine(stream(), args).ok());
        const auto got = FromWireBytes(out_type, Download<std::byte>(*out));
        for (int i = 0; i < n; ++i) {
          const double want = 0.75 * a[i] - (with_b ? 1.5 * b[i] : 0);
          ASSERT_LE(std::abs(got[i] - want), std::abs(want) * Rounding(out_type) + 2e-6) << i;
        }
      }
    }
  }
  EXPECT_EQ(Combine(stream(), {.count = 3}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Combine(stream(), {.count = 2}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaOpsTest, RandomNumbersRepeatThemselvesAndFillTheirRange) {
  const int n = 1 << 16;
  const auto one = Empty(n * 4), same = Empty(n * 4), other = Empty(n * 4);
  const auto fill = [&](Buffer& out, uint64_t seed) {
    ASSERT_TRUE(
        FillRandom(stream(), {.out = out.data(), .type = WireType::kF32, .range = 0.5f, .seed = seed, .count = n})
            .ok());
  };
  fill(*one, 7);
  fill(*same, 7);
  fill(*other, 8);
  const auto x = Download<float>(*one);
  EXPECT_EQ(x, Download<float>(*same));
  EXPECT_NE(x, Download<float>(*other));
  double sum = 0, squares = 0;
  for (const float v : x) {
    ASSERT_LE(std::abs(v), 0.5f);
    sum += v;
    squares += static_cast<double>(v) * v;
  }
  EXPECT_LE(std::abs(sum / n), 0.005);
  EXPECT_NEAR(squares / n, 0.25 / 3, 0.002);  // evenly spread
}

TEST_F(CudaOpsTest, PartialsMergeToTheWhole) {
  const int rows = 4, heads = 3, dim = 72;
  const std::vector<int32_t> first = {0, 1, 4, 4, 6}, order = {5, 0, 3, 1, 2, 4};
  const int nodes = 6;
  std::vector<float> o = RandomFloats(nodes * heads * dim, 1), ml = RandomFloats(nodes * heads * 2, 2, 0.5, 4);
  for (int h = 0; h < heads; ++h) {  // one that saw nothing
    ml[(3 * heads + h) * 2] = -INFINITY;
    ml[(3 * heads + h) * 2 + 1] = 0;
    for (int i = 0; i < dim; ++i) o[(3 * heads + h) * dim + i] = 0;
  }
  const std::vector<float> sinks = RandomFloats(heads, 3, -2, 2);
  const auto d_o = Upload(o), d_ml = Upload(ml), d_first = Upload(first), d_order = Upload(order),
             d_sinks = Upload(sinks);
  for (const bool with_sinks : {false, true}) {
    const auto out = Empty(rows * heads * dim * 4);
    MergeLaunch args{.partial_o = As<float>(d_o),
                     .partial_ml = As<float>(d_ml),
                     .first = As<int32_t>(d_first),
                     .order = As<int32_t>(d_order),
                     .sinks = with_sinks ? As<float>(d_sinks) : nullptr,
                     .o = out->data(),
                     .o_row_step = heads * dim,
                     .o_type = WireType::kF32,
                     .rows = rows,
                     .heads = heads,
                     .value_dim = dim};
    ASSERT_TRUE(MergePartials(stream(), args).ok());
    const auto got = Download<float>(*out);
    for (int row = 0; row < rows; ++row) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < dim; ++i) {
          double l = with_sinks ? std::exp(double{sinks[h]}) : 0, sum = 0;
          for (int n = first[row]; n < first[row + 1]; ++n) {
            const int at = order[n] * heads + h;
            l += std::exp(double{ml[at * 2]}) * ml[at * 2 + 1];
            sum += std::exp(double{ml[at * 2]}) * o[at * dim + i];
          }
          const double want = l > 0 ? sum / l : 0;
          ASSERT_NEAR(got[(row * heads + h) * dim + i], want, 2e-6);
        }
      }
    }
  }
}

TEST_F(CudaOpsTest, GemmThroughCublasLt) {
  auto gemm = CudaGemm::Create(device());
  if (!gemm.ok() && absl::IsFailedPrecondition(gemm.status()))
    GTEST_SKIP() << "needs cuBLASLt: " << gemm.status().message();
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  for (const auto& [m, n, k] : {std::tuple{1, 64, 64}, {3, 576, 192}, {16, 1536, 576}, {130, 200, 72}}) {
    for (const bool f32 : {false, true}) {
      for (const bool accumulate : {false, true}) {
        std::vector<float> x = RandomFloats(m * k, 1), w = RandomFloats(n * k, 2), y0 = RandomFloats(m * n, 3);
        const WireType y_type = f32 ? WireType::kF32 : WireType::kBF16;
        const auto dx = UploadWire(WireType::kBF16, x), dw = UploadWire(WireType::kBF16, w),
                   dy = UploadWire(y_type, y0);
        const GemmCall call{.x = dx->data(),
                            .w = dw->data(),
                            .y = dy->data(),
                            .bias = nullptr,
                            .m = m,
                            .n = n,
                            .k = k,
                            .x_stride = k,
                            .w_stride = k,
                            .y_stride = n,
                            .type = GemmType::kBF16,
                            .y_is_f32 = f32,
                            .accumulate = accumulate};
        const absl::Status status = (*gemm)->Run(stream(), call);
        ASSERT_TRUE(status.ok()) << status;
        const auto got = FromWireBytes(y_type, Download<std::byte>(*dy));
        const auto want = reference::Gemm(x, w, m, n, k);
        for (int i = 0; i < m * n; ++i) {
          const double target = want[i] + (accumulate ? y0[i] : 0.0f);
          const double roundings =
              std::abs(target) + (accumulate ? std::abs(want[i]) : 0.0);  // of the sum, of the product
          ASSERT_LE(std::abs(got[i] - target), roundings * Rounding(y_type) + 2e-5 * std::sqrt(k))
              << m << " " << n << " " << k << ": " << got[i] << " for " << want[i] << " + " << accumulate << " * "
              << y0[i];
        }
      }
    }
  }
}

TEST_F(CudaOpsTest, AProductThatOnlyChoosesItsAlgorithmComputesNothing) {
  auto gemm = CudaGemm::Create(device());
  if (!gemm.ok() && absl::IsFailedPrecondition(gemm.status())) {
    GTEST_SKIP() << "needs cuBLASLt: " << gemm.status().message();
  }
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  const int64_t n = 64, k = 128;
  for (const int64_t m : {1, 8, 16, 200, 300}) {  // kernels of our own, and cuBLASLt's with and without a choice
    std::vector<float> x = RandomFloats(m * k, 5), w = RandomFloats(n * k, 6);
    const auto dx = UploadWire(WireType::kBF16, x), dw = UploadWire(WireType::kBF16, w);
    const std::vector<float> before(static_cast<size_t>(m * n), 7.0f);
    const auto dy = Upload(before);
    GemmCall call{.x = dx->data(), .w = dw->data(), .y = dy->data(), .m = m, .n = n, .k = k, .x_stride = k};
    call.w_stride = k;
    call.y_stride = n;
    call.type = GemmType::kBF16;
    call.y_is_f32 = 1;
    call.only_choose = 1;
    ASSERT_EQ((*gemm)->Run(stream(), call), absl::OkStatus());
    EXPECT_EQ(Download<float>(*dy), before) << m;
    call.only_choose = 0;
    ASSERT_EQ((*gemm)->Run(stream(), call), absl::OkStatus());
    EXPECT_NE(Download<float>(*dy).back(), 7.0f) << m;
  }
}

// Every file format, dequantised once: the product is that of the dequantised rows, rounded to bf16.
TEST_F(CudaOpsTest, QuantisedWeightsAreDequantisedWhenTheyAreLoaded) {
  auto gemm = CudaGemm::Create(device());
  if (!gemm.ok() && absl::IsFailedPrecondition(gemm.status())) {
    GTEST_SKIP() << "needs cuBLASLt: " << gemm.status().message();
  }
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  const int64_t m = 3, n = 40, k = 512;
  for (const RowFormat format : {RowFormat::kF32, RowFormat::kF16, RowFormat::kBF16, RowFormat::kQ4_0, RowFormat::kQ4_1,
                                 RowFormat::kQ8_0, RowFormat::kQ4_K, RowFormat::kQ6_K}) {
    const size_t row_bytes = RowBytes(format, k);
    std::vector<std::byte> file(n * row_bytes);
    std::mt19937_64 random(static_cast<int>(format));
    for (std::byte& b : file) b = static_cast<std::byte>(random() & 0x3b);  // scales stay small and finite
    const auto row_at = [&](int64_t row) -> const std::byte* { return file.data() + row * row_bytes; };
    const RowSource source{.format = format, .rows = n, .cols = k, .row_at = row_at};
    auto weights = CudaWeights::Load(device(), source, WireType::kBF16);
    ASSERT_TRUE(weights.ok()) << weights.status();
    std::vector<float> w =
        FromWireBytes(WireType::kBF16, ToWireBytes(WireType::kBF16, reference::DequantizeAll(source)));
    std::vector<float> x = RandomFloats(m * k, 5);
    const auto dx = UploadWire(WireType::kBF16, x), dy = Empty(m * n * 4);
    const absl::Status status = (*gemm)->Run(stream(), {.x = dx->data(),
                                                        .w = weights->data(),
                                                        .y = dy->data(),
                                                        .bias = nullptr,
                                                        .m = m,
                                                        .n = n,
                                                        .k = k,
                                                        .x_stride = k,
                                                        .w_stride = k,
                                                        .y_stride = n,
                                                        .type = GemmType::kBF16,
                                                        .y_is_f32 = true,
                                                        .accumulate = false});
    ASSERT_TRUE(status.ok()) << status;
    const auto got = Download<float>(*dy);
    const auto want = reference::Gemm(x, w, m, n, k);
    double scale = 1e-30;
    for (const float v : w) scale = std::max(scale, std::abs(static_cast<double>(v)));
    for (int64_t i = 0; i < m * n; ++i) {
      ASSERT_LE(std::abs(got[i] - want[i]), 2e-6 * scale * k) << Info(format).name << " " << i;
    }
  }
  const RowSource odd{
      .format = RowFormat::kQ8_0, .rows = 1, .cols = 33, .row_at = [](int64_t) -> const std::byte* { return nullptr; }};
  EXPECT_EQ(CudaWeights::Load(device(), odd, WireType::kBF16).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaOpsTest, RefuseOddSizesAndMissingPointers) {
  EXPECT_EQ(RmsNorm(stream(), {.rows = 1, .size = 3}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RmsNorm(stream(), {.rows = 1, .size = 4}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GatedActivation(stream(), {.rows = 70000, .size = 4}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(KvAppend(stream(), {.rows = 1, .q_heads = 1, .kv_heads = 1, .layout = {60, 64, KvType::kBF16}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Sample(stream(), {.step = 3, .rows = 1, .vocab = 4}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
