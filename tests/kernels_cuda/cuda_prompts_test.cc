#include "kernels/cuda/cuda_prompts.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

class CudaPromptsTest : public testing::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    auto prompts = CudaPrompts::Create(device());
    if (!prompts.ok()) GTEST_SKIP() << "needs cuDNN: " << prompts.status().message();
    prompts_ = *std::move(prompts);
  }
  std::vector<float> Noise(size_t count, WireType type) {
    std::vector<float> values(count);
    for (float& v : values) v = std::uniform_real_distribution<float>(-1, 1)(random_);
    return testing::FromWireBytes(type, testing::ToWireBytes(type, values));
  }

  std::mt19937_64 random_{7};
  std::unique_ptr<CudaPrompts> prompts_;
};

struct Case {
  CudaPrompts::Shape shape;
  std::vector<int> tokens;
  int gap = 0;  // rows of others between two prompts
};

// One row of one head in double.
std::vector<double> Expected(const Case& c, const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v, int64_t first_row, int row, int head) {
  const int dim = c.shape.key_dim, kv_head = head / (c.shape.q_heads / c.shape.kv_heads);
  std::vector<double> scores(row + 1), out(c.shape.value_dim, 0.0);
  double top = -INFINITY, sum = 0;
  for (int t = 0; t <= row; ++t) {
    const float* a = q.data() + ((first_row + row) * c.shape.q_heads + head) * dim;
    const float* b = k.data() + ((first_row + t) * c.shape.kv_heads + kv_head) * dim;
    double dot = 0;
    for (int i = 0; i < dim; ++i) dot += double{a[i]} * b[i];
    scores[t] = dot * c.shape.scale;
    top = std::max(top, scores[t]);
  }
  for (int t = 0; t <= row; ++t) {
    const double weight = std::exp(scores[t] - top);
    const float* b = v.data() + ((first_row + t) * c.shape.kv_heads + kv_head) * c.shape.value_dim;
    sum += weight;
    for (int i = 0; i < c.shape.value_dim; ++i) out[i] += weight * b[i];
  }
  for (double& x : out) x /= sum;
  return out;
}

TEST_F(CudaPromptsTest, RaggedPromptsAreTheReferences) {
  const float scale = 0.125f;
  const std::vector<Case> cases = {
      {{8, 2, 128, 128, WireType::kBF16, scale}, {48, 200, 1, 333}},
      {{9, 3, 64, 64, WireType::kBF16, scale}, {65}, 0},
      {{4, 4, 128, 128, WireType::kF16, scale}, {129, 64, 500}, 3},
      {{6, 1, 96, 96, WireType::kBF16, scale}, {77, 130}, 1},
  };
  for (const Case& c : cases) {
    int64_t rows = 0;
    std::vector<CudaPrompts::Item> items;
    std::vector<int64_t> first;
    for (const int tokens : c.tokens) {
      first.push_back(rows);
      items.push_back({tokens, rows * c.shape.q_heads * c.shape.key_dim, rows * c.shape.kv_heads * c.shape.key_dim,
                       rows * c.shape.kv_heads * c.shape.value_dim, rows * c.shape.q_heads * c.shape.value_dim});
      rows += tokens + c.gap;
    }
    const auto q = Noise(rows * c.shape.q_heads * c.shape.key_dim, c.shape.type);
    const auto k = Noise(rows * c.shape.kv_heads * c.shape.key_dim, c.shape.type);
    const auto v = Noise(rows * c.shape.kv_heads * c.shape.value_dim, c.shape.type);
    const auto q_there = Upload(testing::ToWireBytes(c.shape.type, q));
    const auto k_there = Upload(testing::ToWireBytes(c.shape.type, k));
    const auto v_there = Upload(testing::ToWireBytes(c.shape.type, v));
    const size_t o_bytes = rows * c.shape.q_heads * c.shape.value_dim * 2;
    const auto o_there = Empty(o_bytes);
    CudaPrompts::Batch batch(device());
    const auto taken = prompts_->Prepare(stream(), c.shape, items, batch);
    ASSERT_TRUE(taken.ok()) << taken.status();
    ASSERT_TRUE(*taken) << "cuDNN attends heads of " << c.shape.key_dim;
    ASSERT_TRUE(prompts_->Run(stream(), c.shape, batch, q_there->data(), k_there->data(), v_there->data(),
                              o_there->data()).ok());
    const auto o = testing::FromWireBytes(c.shape.type, Download<std::byte>(*o_there));
    double worst = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      for (int row = 0; row < items[i].tokens; row += row < 70 ? 1 : 37) {
        const int head = static_cast<int>(random_() % c.shape.q_heads);
        const auto want = Expected(c, q, k, v, first[i], row, head);
        const float* got = o.data() + ((first[i] + row) * c.shape.q_heads + head) * c.shape.value_dim;
        for (int d = 0; d < c.shape.value_dim; ++d) {
          ASSERT_TRUE(std::isfinite(got[d])) << "prompt " << i << " row " << row;
          worst = std::max(worst, std::abs(got[d] - want[d]));
        }
      }
      for (int row = items[i].tokens; row < items[i].tokens + c.gap; ++row)
        EXPECT_TRUE(std::isnan(o[(first[i] + row) * c.shape.q_heads * c.shape.value_dim])) << "others' rows";
    }
    RecordProperty("worst", std::to_string(worst));
    EXPECT_LE(worst, 8e-3) << c.shape.key_dim;  // weights and outputs of 8 bits, |v| <= 1
  }
}

TEST_F(CudaPromptsTest, NoPromptsAreAnEmptyBatch) {
  CudaPrompts::Batch batch(device());
  const CudaPrompts::Shape shape{8, 2, 128, 128, WireType::kBF16, 0.1f};
  ASSERT_TRUE(prompts_->Prepare(stream(), shape, {}, batch).ok());
  EXPECT_TRUE(batch.empty());
  EXPECT_TRUE(prompts_->Run(stream(), shape, batch, nullptr, nullptr, nullptr, nullptr).ok());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
