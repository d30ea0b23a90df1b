#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/activation.h"
#include "kernels/convert.h"
#include "kernels/kv_append.h"
#include "kernels/reference/activation.h"
#include "kernels/reference/rms_norm.h"
#include "kernels/reference/rope.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "tests/kernels/attention_fixture.h"

namespace dovetail::kernels::testing {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Runs a body on both ISAs and on pools of 1 and 3 threads.
template <typename Body>
void OnEveryContext(Body&& body) {
  for (const Isa isa : TestableIsas()) {
    for (const int threads : {1, 3}) {
      ThreadPool pool({.threads = threads});
      SCOPED_TRACE(::testing::Message() << Name(isa) << ", " << threads << " threads");
      body(OpContext{&pool, &SelectOps(isa)});
    }
  }
}

TEST(RmsNorm, AgreesWithTheReferenceAndAddsTheResidualFirst) {
  OnEveryContext([](const OpContext& context) {
    for (const int n : {1, 7, 16, 64, 130, 576, 2049, 8192}) {
      for (const bool with_residual : {false, true}) {
        const int rows = 5, vectors = n <= 130 ? 3 : 1, width = n * vectors;
        const auto x0 = RandomFloats(rows * (width + 3), n, -4, 4), r = RandomFloats(rows * width, n + 1),
                   w = RandomFloats(n, n + 2);
        Guarded<float> x(x0.size()), out(rows * width);
        std::copy(x0.begin(), x0.end(), x.data());
        const RmsNormArgs args{.x = x.data(),
                               .residual = with_residual ? r.data() : nullptr,
                               .weight = w.data(),
                               .eps = 1e-5f,
                               .rows = rows,
                               .vectors = vectors,
                               .size = n,
                               .out = out.data(),
                               .x_step = width + 3};
        ASSERT_TRUE(RmsNorm(context, args).ok());
        ASSERT_TRUE(x.Intact() && out.Intact());
        for (int row = 0; row < rows; ++row) {
          for (int v = 0; v < vectors; ++v) {
            const size_t at = row * (width + 3) + v * n, dense = row * width + v * n;
            const std::span<const float> residual(r.data() + dense, with_residual ? n : 0);
            const auto expected = reference::RmsNorm({x0.data() + at, size_t(n)}, residual, w, 1e-5f);
            double largest = 0, worst = 0;
            for (int i = 0; i < n; ++i) {
              largest = std::max(largest, std::abs(expected[i]));
              worst = std::max(worst, std::abs(out[dense + i] - expected[i]));
              EXPECT_EQ(x[at + i], with_residual ? x0[at + i] + r[dense + i] : x0[at + i]);
            }
            EXPECT_LE(worst, Budget("rms_norm", "f32") * largest) << n;
          }
        }
      }
    }
  });
}

TEST(RmsNorm, OfARowDoesNotDependOnTheOthers) {
  OnEveryContext([](const OpContext& context) {
    const int n = 576, rows = 100;
    auto x = RandomFloats(rows * n, 3);
    const auto w = RandomFloats(n, 4);
    std::vector<float> together(rows * n), alone(n);
    ASSERT_TRUE(
        RmsNorm(context,
                {.x = x.data(), .weight = w.data(), .eps = 1e-5f, .rows = rows, .size = n, .out = together.data()})
            .ok());
    for (const int row : {0, 37, 99}) {
      ASSERT_TRUE(
          RmsNorm(
              context,
              {.x = x.data() + row * n, .weight = w.data(), .eps = 1e-5f, .rows = 1, .size = n, .out = alone.data()})
              .ok());
      EXPECT_EQ(std::memcmp(alone.data(), together.data() + row * n, n * sizeof(float)), 0);
    }
  });
}

TEST(Rope, AgreesWithTheReferenceAtLargePositionsAndRoundsToTheWireType) {
  OnEveryContext([](const OpContext& context) {
    struct Dims {
      int head_dim, rotary;
    };
    for (const Dims d : {Dims{64, 64}, Dims{8, 8}, Dims{128, 96}, Dims{256, 64}, Dims{10, 6}, Dims{64, 0}}) {
      const int rows = 4, heads = 3, half = d.rotary / 2;
      const std::vector<int32_t> positions = {0, 1, 8191, 131071};
      std::vector<float> inv_freq(half), cos(rows * half), sin(rows * half);
      for (int i = 0; i < half; ++i) inv_freq[i] = std::pow(10000.0f, -2.0f * i / d.rotary);
      ComputeRopeTable(context, positions, inv_freq, 1.25f, cos.data(), sin.data());
      const auto x = RandomFloats(rows * heads * d.head_dim, d.head_dim);
      for (const DType dtype : kTypes) {
        Guarded<std::byte> out(x.size() * SizeOf(dtype));
        ASSERT_TRUE(Rope(context, {.x = x.data(),
                                   .rows = rows,
                                   .heads = heads,
                                   .head_dim = d.head_dim,
                                   .rotary = d.rotary,
                                   .cos = cos.data(),
                                   .sin = sin.data(),
                                   .dtype = dtype,
                                   .out = out.data()})
                        .ok());
        ASSERT_TRUE(out.Intact());
        for (int row = 0; row < rows; ++row) {
          for (int head = 0; head < heads; ++head) {
            const size_t at = (row * heads + head) * size_t(d.head_dim);
            const auto expected = reference::Rope({x.data() + at, size_t(d.head_dim)}, positions[row], inv_freq, 1.25);
            const double rounding = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
            for (int i = 0; i < d.head_dim; ++i) {
              const float got = KvBlockLayout::LoadElement(dtype, out.data() + (at + i) * SizeOf(dtype));
              EXPECT_NEAR(got, expected[i], 2 * Budget("rope", "f32") + rounding * std::abs(expected[i]) + 1e-7);
            }
          }
        }
      }
    }
  });
}

TEST(Rope, WithoutATableOnlyRounds) {
  OnEveryContext([](const OpContext& context) {
    const auto x = RandomFloats(2 * 24, 3);
    std::vector<BF16> out(x.size());
    ASSERT_TRUE(Rope(context, {.x = x.data(),
                               .rows = 2,
                               .heads = 3,
                               .head_dim = 8,
                               .rotary = 8,
                               .dtype = DType::kBF16,
                               .out = out.data()})
                    .ok());
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(out[i].bits, ToBF16(x[i]).bits);
  });
}

TEST(Activation, AgreesWithTheReferenceFromDeepNegativeToLargePositive) {
  OnEveryContext([](const OpContext& context) {
    for (const int n : {1, 15, 16, 100, 1536, 20000}) {
      auto gate = RandomFloats(3 * n, n, -12, 12);
      gate[0] = -60;
      gate[n - 1] = 60;
      const auto up = RandomFloats(3 * n, n + 1);
      Guarded<float> out(3 * n);
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        ASSERT_TRUE(GatedActivation(context, {.activation = activation,
                                              .gate = gate.data(),
                                              .up = up.data(),
                                              .out = out.data(),
                                              .rows = 3,
                                              .size = n})
                        .ok());
        ASSERT_TRUE(out.Intact());
        for (int i = 0; i < 3 * n; ++i) {
          const bool silu = activation == Activation::kSilu;
          const double expected = silu ? reference::SiluMul(gate[i], up[i]) : reference::GeluMul(gate[i], up[i]);
          const double size = silu ? std::abs(expected) : std::max(std::abs(expected), 1e-3);
          ASSERT_NEAR(out[i], expected, Budget(silu ? "silu_mul" : "gelu_mul", "f32") * size) << gate[i];
        }
      }
    }
  });
}

TEST(Activation, SquaresWhatIsPositiveWhenGateAndUpAreTheSame) {
  OnEveryContext([](const OpContext& context) {
    for (const int n : {1, 17, 3000}) {
      const auto x = RandomFloats(n, n, -3, 3);
      Guarded<float> out(n);
      ASSERT_TRUE(GatedActivation(context, {.activation = Activation::kRelu,
                                            .gate = x.data(),
                                            .up = x.data(),
                                            .out = out.data(),
                                            .rows = 1,
                                            .size = n})
                      .ok());
      ASSERT_TRUE(out.Intact());
      for (int i = 0; i < n; ++i) ASSERT_EQ(out[i], x[i] > 0 ? x[i] * x[i] : 0.0f);
    }
  });
}

TEST(Activation, OfNothingIsAProduct) {
  OnEveryContext([](const OpContext& context) {
    const int n = 1003;
    const auto gate = RandomFloats(n, 5), up = RandomFloats(n, 6);
    Guarded<float> out(n);
    ASSERT_TRUE(GatedActivation(context, {.activation = Activation::kIdentity,
                                          .gate = gate.data(),
                                          .up = up.data(),
                                          .out = out.data(),
                                          .rows = 1,
                                          .size = n})
                    .ok());
    ASSERT_TRUE(out.Intact());
    for (int i = 0; i < n; ++i) ASSERT_EQ(out[i], gate[i] * up[i]);
  });
}

TEST(Activation, ClampsGateAndUpForGptOss) {
  OnEveryContext([](const OpContext& context) {
    for (const int n : {1, 15, 100, 2880}) {
      auto gate = RandomFloats(n, n, -20, 20);
      const auto up = RandomFloats(n, n + 1, -12, 12);
      Guarded<float> out(n);
      ASSERT_TRUE(GatedActivation(context, {.activation = Activation::kClampedSwiglu,
                                            .gate = gate.data(),
                                            .up = up.data(),
                                            .out = out.data(),
                                            .rows = 1,
                                            .size = n})
                      .ok());
      ASSERT_TRUE(out.Intact());
      for (int i = 0; i < n; ++i) {
        const double expected = reference::ClampedSwiglu(gate[i], up[i]);
        ASSERT_NEAR(out[i], expected, Budget("clamped_swiglu", "f32") * std::max(std::abs(expected), 1e-3))
            << gate[i] << " " << up[i];
      }
    }
  });
}

TEST(RmsNorm, CanGiveEveryVectorItsOwnWeights) {
  OnEveryContext([](const OpContext& context) {
    const int vectors = 3, size = 20, rows = 2;
    auto x = RandomFloats(rows * vectors * size, 1);
    const auto weight = RandomFloats(vectors * size, 2);
    Guarded<float> out(rows * vectors * size);
    ASSERT_TRUE(RmsNorm(context, {.x = x.data(),
                                  .weight = weight.data(),
                                  .weight_each = true,
                                  .eps = 1e-5f,
                                  .rows = rows,
                                  .vectors = vectors,
                                  .size = size,
                                  .out = out.data()})
                    .ok());
    ASSERT_TRUE(out.Intact());
    for (int v = 0; v < vectors; ++v) {  // as if each were alone
      std::vector<float> alone(size);
      ASSERT_TRUE(RmsNorm(context, {.x = x.data() + v * size,
                                    .weight = weight.data() + v * size,
                                    .eps = 1e-5f,
                                    .rows = 1,
                                    .size = size,
                                    .out = alone.data()})
                      .ok());
      for (int i = 0; i < size; ++i) ASSERT_EQ(out[v * size + i], alone[i]);
    }
  });
}

TEST(Activation, OfInfinitiesAndHugeValuesStaysANumber) {
  OnEveryContext([](const OpContext& context) {
    const float gate[] = {-INFINITY, INFINITY, -1e30f, 1e30f, 0.0f};
    const float up[] = {1, 1, 1, 1, 1};
    float out[5];
    ASSERT_TRUE(GatedActivation(context, {.gate = gate, .up = up, .out = out, .rows = 1, .size = 5}).ok());
    EXPECT_EQ(out[1], INFINITY);
    EXPECT_EQ(out[3], 1e30f);
    EXPECT_EQ(out[4], 0.0f);
    EXPECT_NEAR(out[2], 0.0, 1e-7);  // e^-88.3 is the smallest factor
  });
}

TEST(AddAndScale, AreExact) {
  OnEveryContext([](const OpContext& context) {
    const int n = 10001;
    const auto a = RandomFloats(n, 1), b = RandomFloats(n, 2);
    Guarded<float> sum(n), scaled(n);
    ASSERT_TRUE(Add(context, a.data(), b.data(), sum.data(), n).ok());
    ASSERT_TRUE(Scale(context, a.data(), 24.0f, scaled.data(), n).ok());
    ASSERT_TRUE(sum.Intact() && scaled.Intact());
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(sum[i], a[i] + b[i]);
      ASSERT_EQ(scaled[i], a[i] * 24.0f);
    }
  });
}

TEST(Convert, GivesTheBitsOfTheScalarConversions) {
  OnEveryContext([](const OpContext& context) {
    auto x = RandomFloats(70001, 7, -70000, 70000);
    const float special[] = {0.0f,     -0.0f, INFINITY, -INFINITY, NAN,         65504.0f,
                             65520.0f, 1e-8f, 6e-8f,    3.3e38f,   1.00390625f, 1.01171875f};
    std::copy(std::begin(special), std::end(special), x.begin() + 3);
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const int n : {1, 15, 17, 70001}) {
        Guarded<uint16_t> out(n);
        Guarded<float> back(n);
        FromFloat(context, dtype, x.data(), out.data(), {.size = n});
        ToFloat(context, dtype, out.data(), back.data(), {.size = n});
        ASSERT_TRUE(out.Intact() && back.Intact());
        for (int i = 0; i < n; ++i) {
          const uint16_t expected = dtype == DType::kF16 ? ToF16(x[i]).bits : ToBF16(x[i]).bits;
          ASSERT_EQ(out[i], expected) << x[i];
          ASSERT_EQ(Bits(back[i]), Bits(dtype == DType::kF16 ? ToFloat(F16{expected}) : ToFloat(BF16{expected})));
        }
      }
    }
  });
}

TEST(Exp, IsWithinItsBudgetAndExactWhereItMatters) {
  for (const Isa isa : TestableIsas()) {
    const OpsTable& table = SelectOps(isa);
    const auto x = RandomFloats(2000000, 11, -87.3f, 88.3f);
    std::vector<float> y(x.size());
    table.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(double{x[i]});
      const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
      worst = std::max(worst, std::abs(y[i] - exact) / ulp);
    }
    EXPECT_LE(worst, Budget("exp", "f32"));
    printf("exp %s: worst error %.3f ulp\n", std::string(Name(isa)).c_str(), worst);
    const float edge[] = {0.0f, -INFINITY, -88.0f, -1e30f, NAN};
    float out[5];
    table.exp(edge, out, 5);
    EXPECT_EQ(out[0], 1.0f);
    EXPECT_EQ(out[1], 0.0f);
    EXPECT_EQ(out[2], 0.0f);
    EXPECT_EQ(out[3], 0.0f);
    EXPECT_TRUE(std::isnan(out[4]));
  }
}

TEST(KvAppend, PutsEveryElementWhereTheLayoutSaysAndNothingElse) {
  OnEveryContext([](const OpContext& context) {
    for (const DType dtype : kTypes) {
      const AttentionShape shape{.group = 1, .key_dim = 12, .value_dim = 20, .scale = 1, .dtype = dtype};
      const TestSequence sequence(shape, 2, 200, 5);
      TestShard shard(sequence, 0, 2, 64, 200);
      shard.Append(context, 70, 150);  // from inside one block, over a whole one, into a third
      const KvBlockLayout layout = shape.layout();
      for (int64_t t = 64; t < 200; ++t) {
        for (int head = 0; head < 2; ++head) {
          const std::byte* block = shard.table().block(head, static_cast<int32_t>(t / 64));
          for (int i = 0; i < 20; ++i) {
            const float v = layout.Value(block, t % 64, i);
            const float k = i < 12 ? layout.Key(block, t % 64, i) : 0;
            if (t < 70 || t >= 150) {
              ASSERT_TRUE(std::isnan(v) && (i >= 12 || std::isnan(k))) << t;
            } else {
              ASSERT_EQ(v, KvBlockLayout::LoadElement(dtype, sequence.v(t, head) + i * SizeOf(dtype)));
              if (i < 12) {
                ASSERT_EQ(k, KvBlockLayout::LoadElement(dtype, sequence.k(t, head) + i * SizeOf(dtype)));
              }
            }
          }
        }
      }
    }
  });
}

// Of as many rows as a step of decodes has, with a prompt between and one that appends nothing.
TEST(KvAppend, WritesForManySequencesWhatItWritesForEachAlone) {
  constexpr int kSequences = 40;
  OnEveryContext([](const OpContext& context) {
    const AttentionShape shape{.group = 1, .key_dim = 64, .value_dim = 32, .scale = 1, .dtype = DType::kBF16};
    std::vector<std::unique_ptr<TestSequence>> sequences;
    std::vector<std::unique_ptr<TestShard>> together, alone;
    std::vector<KvAppendItem> items;
    for (int s = 0; s < kSequences; ++s) {
      const int64_t from = (s * 37) % 130, rows = s == 11 ? 150 : s == 12 ? 0 : 1;
      sequences.push_back(std::make_unique<TestSequence>(shape, 3, from + rows + 1, s));
      const auto shard = [&] { return std::make_unique<TestShard>(*sequences.back(), 0, 3, 0, from + rows + 1); };
      together.push_back(shard());
      alone.push_back(shard());
      items.push_back(together.back()->AppendItem(from, from + rows));
      alone.back()->Append(context, from, from + rows);
    }
    ASSERT_TRUE(KvAppend(context, shape.layout(), items).ok());
    for (int s = 0; s < kSequences; ++s)
      EXPECT_TRUE(std::ranges::equal(together[s]->memory(), alone[s]->memory())) << "sequence " << s;
  });
}

TEST(KvBlockLayout, GivesEveryElementItsOwnPlace) {
  for (const DType dtype : kTypes) {
    const KvBlockLayout layout{.key_dim = 10, .value_dim = 18, .dtype = dtype};
    std::vector<bool> used(layout.bytes());
    const auto claim = [&](size_t offset) {
      for (size_t b = offset; b < offset + SizeOf(dtype); ++b) {
        ASSERT_LT(b, used.size());
        ASSERT_FALSE(used[b]);
        used[b] = true;
      }
    };
    for (int t = 0; t < 64; ++t) {
      for (int i = 0; i < 10; ++i) claim(layout.key_offset(t, i));
      for (int i = 0; i < 18; ++i) claim(layout.value_offset(t, i));
    }
    EXPECT_EQ(layout.bytes() % 64, 0u);
  }
  EXPECT_EQ((KvBlockLayout{.key_dim = 64, .value_dim = 64}.bytes()), 16384u);
  EXPECT_FALSE((KvBlockLayout{.key_dim = 258, .value_dim = 64}.Validate().ok()));
}

}  // namespace
}  // namespace dovetail::kernels::testing
