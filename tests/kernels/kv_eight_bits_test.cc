#include "kernels/kv_eight_bits.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/reference/paged_attention.h"
#include "tests/kernels/attention_fixture.h"

namespace dovetail::kernels::testing {
namespace {

using ::testing::HasSubstr;

AttentionShape ShapeOf(KvStorage storage, int group = 4, int key_dim = 64, int value_dim = 48, int window = 0) {
  return {.group = group,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(key_dim)),
          .window = window,
          .dtype = DType::kBF16,
          .storage = storage};
}

constexpr KvStorage kEightBits[] = {KvStorage::kE4M3, KvStorage::kInt8};

TEST(KvEightBits, AnE4M3CodeIsTheNearestNumberAndNeverBecomesAnotherOne) {
  for (int code = 0; code < 256; ++code) {
    const float x = FromE4M3(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(x)) << code;
      EXPECT_EQ(ToE4M3(x) & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(ToE4M3(x), code);
    EXPECT_EQ(ToFloat(ToBF16(x)), x) << "not a bfloat16: " << code;
    if ((code & 0x7f) >= 0x7e) continue;
    const float next = FromE4M3(static_cast<uint8_t>(code + 1)), middle = (x + next) / 2;
    EXPECT_EQ(ToE4M3(middle), code % 2 == 0 ? code : code + 1) << "ties go to even";
    EXPECT_EQ(ToE4M3(x + (middle - x) * 0.99f), code);
    EXPECT_EQ(ToE4M3(next - (next - middle) * 0.99f), code + 1);
  }
  EXPECT_EQ(FromE4M3(ToE4M3(1e9f)), 448);
  EXPECT_EQ(FromE4M3(ToE4M3(-std::numeric_limits<float>::infinity())), -448);
  EXPECT_EQ(FromE4M3(ToE4M3(0x1p-11f)), 0);
}

// Every largest element of an octave, and some octaves from the smallest to the largest; every code.
TEST(KvEightBits, AnInt8RowIsStoredAgainAsItWasAlsoAfterBeingABfloat16) {
  for (const int exponent : {-75, -60, -13, -1, 0, 3, 90, 127}) {
    for (int mantissa = 0; mantissa < 128; ++mantissa) {
      const auto largest = BF16{static_cast<uint16_t>((exponent + 127) << 7 | mantissa)};
      const float scale = Int8ScaleOf({&largest, 1});
      int8_t most = 0;
      ToInt8({&largest, 1}, scale, &most);
      ASSERT_GE(most, 102) << "no more than a fifth of the codes is given away";
      std::vector<BF16> row;
      for (int code = -most; code <= most; ++code) row.push_back(FromInt8(static_cast<int8_t>(code), scale));
      ASSERT_EQ(Bits(Int8ScaleOf(row)), Bits(scale)) << exponent << " " << mantissa;
      ASSERT_EQ(ToFloat(ToBF16(scale)), scale) << "scales are held in bfloat16";
      std::vector<int8_t> again(row.size());
      ToInt8(row, scale, again.data());
      for (int code = -most; code <= most; ++code) ASSERT_EQ(again[code + most], code) << exponent << " " << mantissa;
    }
  }
}

TEST(KvEightBits, AnInt8CodeIsTheNearestOne) {
  const std::vector<float> x = RandomFloats(4096, 3, -5, 5);
  std::vector<BF16> row(x.size());
  for (size_t i = 0; i < x.size(); ++i) row[i] = ToBF16(x[i]);
  const float scale = Int8ScaleOf(row);
  std::vector<int8_t> codes(row.size());
  ToInt8(row, scale, codes.data());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_LE(std::abs(double{ToFloat(row[i])} - static_cast<double>(codes[i]) * scale), scale * 0.5000001) << i;
}

TEST(KvEightBits, RowsOfNothingAreZeroAndRowsThatAreNotFiniteStayNoNumber) {
  const BF16 zero{}, tiny = ToBF16(0x1p-84f), bad = ToBF16(std::numeric_limits<float>::infinity());
  EXPECT_EQ(Int8ScaleOf({&zero, 1}), 0x1p-82f);
  EXPECT_EQ(Int8ScaleOf({&tiny, 1}), 0x1p-82f);
  EXPECT_TRUE(std::isnan(Int8ScaleOf({&bad, 1})));
  const BF16 row[] = {ToBF16(1), ToBF16(std::numeric_limits<float>::quiet_NaN())};
  EXPECT_TRUE(std::isnan(Int8ScaleOf(row)));
  int8_t code = 5;
  ToInt8({&zero, 1}, Int8ScaleOf({&zero, 1}), &code);
  EXPECT_EQ(code, 0);
}

TEST(KvBlockLayout, EightBitsTakeHalfOfBfloat16AndTheirScales) {
  const KvBlockLayout wide{128, 128, DType::kBF16}, e4m3{128, 128, DType::kBF16, KvStorage::kE4M3},
      int8{128, 128, DType::kBF16, KvStorage::kInt8};
  EXPECT_EQ(e4m3.bytes() * 2, wide.bytes());
  EXPECT_EQ(int8.bytes() * 2, wide.bytes() + 2 * 2 * 64 * 2);
  for (const KvStorage storage : kEightBits) {
    const KvBlockLayout layout{10, 18, DType::kBF16, storage};
    std::vector<int> used(layout.bytes());
    for (int t = 0; t < 64; ++t) {
      for (int i = 0; i < 10; ++i) ++used.at(layout.key_offset(t, i));
      for (int i = 0; i < 18; ++i) ++used.at(layout.value_offset(t, i));
      if (storage != KvStorage::kInt8) continue;
      for (const size_t at : {layout.key_scale_offset(t), layout.value_scale_offset(t)})
        ++used.at(at), ++used.at(at + 1);
    }
    for (const int count : used) EXPECT_LE(count, 1);
    EXPECT_EQ(layout.bytes() % 64, 0u);
  }
  EXPECT_THAT(std::string((KvBlockLayout{64, 64, DType::kF32, KvStorage::kInt8}).Validate().message()),
              HasSubstr("int8 holds rows of bfloat16, and these are float32"));
}

// Also of part of a block, and again over what is there.
TEST(KvAppend, EightBitRowsAreReadBackAndWrittenAgainWithTheSameBytes) {
  ThreadPool pool({.threads = 2});
  const OpContext context{&pool, &SelectOps(Isa::kAvx2)};
  for (const KvStorage storage : kEightBits) {
    const AttentionShape shape = ShapeOf(storage);
    const KvBlockLayout layout = shape.layout();
    const TestSequence sequence(shape, 2, 200, 7);
    TestShard first(sequence, 0, 2, 0, 200), second(sequence, 0, 2, 0, 200);
    first.Append(context, 5, 170);
    std::vector<std::byte> k(size_t{165} * 2 * 64 * 2), v(size_t{165} * 2 * 48 * 2);
    for (int t = 5; t < 170; ++t)
      for (int head = 0; head < 2; ++head)
        layout.ReadRow(first.table().block(head, t / 64), t % 64, k.data() + ((t - 5) * 2 + head) * 64 * 2,
                       v.data() + ((t - 5) * 2 + head) * 48 * 2);
    KvAppendItem item = second.AppendItem(5, 170);
    item.k = k.data();
    item.v = v.data();
    item.k_row_step = item.v_row_step = 0;
    ASSERT_TRUE(KvAppend(context, layout, {&item, 1}).ok());
    EXPECT_TRUE(std::ranges::equal(first.memory(), second.memory())) << Name(storage);
    ASSERT_TRUE(KvAppend(context, layout, {&item, 1}).ok());
    EXPECT_TRUE(std::ranges::equal(first.memory(), second.memory())) << Name(storage);
  }
}

// The bits of one item over the shape's blocks.
std::vector<std::byte> Attended(const OpContext& context, const TestSequence& sequence, TestShard& shard,
                                int64_t position, int rows) {
  AttentionItem item = shard.Item(position, rows);
  std::vector<std::byte> out(static_cast<size_t>(rows) * sequence.heads() * sequence.shape().value_dim * 2);
  item.o = out.data();
  RunAttention(context, sequence.shape(), {&item, 1});
  return out;
}

TEST(KvEightBits, RowsOfAPromptHaveTheBitsThatEachHasAloneOnAnyNumberOfThreads) {
  ThreadPool one({.threads = 1}), three({.threads = 3});
  for (const KvStorage storage : kEightBits) {
    for (const int window : {0, 70}) {
      const AttentionShape shape = ShapeOf(storage, 5, 64, 48, window);
      const TestSequence sequence(shape, 2, 400, 11);
      for (const Isa isa : TestableIsas()) {
        const OpContext single{&one, &SelectOps(isa)}, many{&three, &SelectOps(isa)};
        TestShard shard(sequence, 0, 2, 0, 400);
        shard.Append(single, 0, 400);
        const std::vector<std::byte> all = Attended(many, sequence, shard, 300, 100);
        const size_t row_bytes = all.size() / 100;
        for (int row = 0; row < 100; row += 9) {
          const std::vector<std::byte> alone = Attended(single, sequence, shard, 300 + row, 1);
          EXPECT_TRUE(std::ranges::equal(alone, std::span(all).subspan(row * row_bytes, row_bytes)))
              << Name(storage) << " " << Name(isa) << " row " << row << " window " << window;
        }
      }
    }
  }
}

TEST(KvEightBits, Int8HasTheSameBitsOnEveryIsa) {
  ThreadPool pool({.threads = 1});
  const AttentionShape shape = ShapeOf(KvStorage::kInt8, 7, 96, 64);
  const TestSequence sequence(shape, 2, 300, 13);
  std::vector<std::byte> first;
  for (const Isa isa : TestableIsas()) {
    const OpContext context{&pool, &SelectOps(isa)};
    TestShard shard(sequence, 0, 2, 0, 300);
    shard.Append(context, 0, 300);
    const std::vector<std::byte> out = Attended(context, sequence, shard, 200, 100);
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << Name(isa);
  }
}

TEST(KvEightBits, E4M3HasTheBitsOfBfloat16BlocksThatHoldTheSameNumbers) {
  ThreadPool pool({.threads = 2});
  const AttentionShape narrow = ShapeOf(KvStorage::kE4M3, 3, 96, 40), wide = ShapeOf(KvStorage::kAsSent, 3, 96, 40);
  const TestSequence sequence(narrow, 1, 250, 17), same(wide, 1, 250, 17);
  for (const Isa isa : TestableIsas()) {
    const OpContext context{&pool, &SelectOps(isa)};
    TestShard codes(sequence, 0, 1, 0, 250), numbers(same, 0, 1, 0, 250);
    codes.Append(context, 0, 250);
    for (int t = 0; t < 250; ++t) {
      std::byte* const block = numbers.table().block(0, t / 64);
      std::vector<std::byte> k(96 * 2), v(40 * 2);
      narrow.layout().ReadRow(codes.table().block(0, t / 64), t % 64, k.data(), v.data());
      for (int i = 0; i < 96; ++i) std::memcpy(block + wide.layout().key_offset(t % 64, i), k.data() + 2 * i, 2);
      for (int i = 0; i < 40; ++i) std::memcpy(block + wide.layout().value_offset(t % 64, i), v.data() + 2 * i, 2);
    }
    EXPECT_EQ(Attended(context, sequence, codes, 100, 150), Attended(context, same, numbers, 100, 150)) << Name(isa);
  }
}

// Against attention over the rows as they were sent: what a cache of 8 bits costs.
TEST(KvEightBits, AttentionStaysWithinItsBudgetOfTheRowsThatWereSent) {
  ThreadPool pool({.threads = 2});
  for (const KvStorage storage : kEightBits) {
    const std::string_view name = storage == KvStorage::kE4M3 ? "e4m3" : "int8";
    double worst = 0;
    for (const int64_t position : {0, 40, 777}) {
      const AttentionShape shape = ShapeOf(storage, 4, 128, 128), exact = ShapeOf(KvStorage::kAsSent, 4, 128, 128);
      const TestSequence sequence(shape, 2, position + 1, 19), sent(exact, 2, position + 1, 19);
      const OpContext context{&pool, &SelectOps(TestableIsas().back())};
      TestShard shard(sequence, 0, 2, 0, position + 1), rows(sent, 0, 2, 0, position + 1);
      shard.Append(context, 0, position + 1);
      rows.Append(context, 0, position + 1);
      const std::vector<std::byte> out = Attended(context, sequence, shard, position, 1);
      for (int head = 0; head < sequence.heads(); ++head) {
        const auto expected = reference::AttentionRow(exact, rows.Item(position, 1), 0, head, nullptr);
        for (int i = 0; i < 128; ++i) {
          const double got = KvBlockLayout::LoadElement(DType::kBF16, out.data() + (head * 128 + i) * 2);
          const double error = std::abs(got - expected[i]);
          if (!(error <= worst)) worst = error;
        }
      }
    }
    printf("%s against the rows that were sent: worst error %.3g\n", std::string(name).c_str(), worst);
    EXPECT_LE(worst, Budget("paged_attention.rows", name));
  }
}

TEST(KvEightBits, ARowThatIsNoNumberMakesResultsThatAreNone) {
  ThreadPool pool({.threads = 1});
  for (const KvStorage storage : kEightBits) {
    for (const Isa isa : TestableIsas()) {
      for (const bool in_key : {true, false}) {
        const OpContext context{&pool, &SelectOps(isa)};
        const AttentionShape shape = ShapeOf(storage);
        const TestSequence sequence(shape, 1, 70, 23);
        TestShard shard(sequence, 0, 1, 0, 70);
        shard.Append(context, 0, 70);
        std::vector<BF16> k(64, ToBF16(1)), v(48, ToBF16(1));
        (in_key ? k[5] : v[5]) = ToBF16(std::numeric_limits<float>::quiet_NaN());
        KvAppendItem item = shard.AppendItem(3, 4);
        item.k = k.data();
        item.v = v.data();
        ASSERT_TRUE(KvAppend(context, shape.layout(), {&item, 1}).ok());
        const std::vector<std::byte> out = Attended(context, sequence, shard, 69, 1);
        EXPECT_TRUE(std::isnan(KvBlockLayout::LoadElement(DType::kBF16, out.data() + 5 * 2)))
            << Name(storage) << " " << Name(isa) << (in_key ? " key" : " value");
      }
    }
  }
}

}  // namespace
}  // namespace dovetail::kernels::testing
