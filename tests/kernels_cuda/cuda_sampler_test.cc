#include "kernels/cuda/sampling/cuda_sampler.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cpu/ops_table.h"
#include "kernels/reference/sampling.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;

class CudaSamplerTest : public testing::CudaTest {
 protected:
  std::vector<absl::StatusOr<SampleResult>> Draw(const std::vector<float>& logits, int vocab,
                                                 std::span<const CudaSampler::Row> rows) {
    std::vector<absl::StatusOr<SampleResult>> results;
    auto sampler = CudaSampler::Create(device(), static_cast<int32_t>(rows.size()), vocab);
    EXPECT_TRUE(sampler.ok()) << sampler.status();
    const auto d_logits = Upload(logits);
    const absl::Status status = (*sampler)->Enqueue(stream(), As<float>(d_logits), vocab, rows);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(stream().SynchronizeStatus().ok());
    for (size_t i = 0; i < rows.size(); ++i) results.push_back((*sampler)->Result(i));
    return results;
  }
};

// Random parameters of every kind: the token is the reference's.
TEST_F(CudaSamplerTest, DrawsTheTokensOfTheReference) {
  for (const int vocab : {1, 63, 1000, 32003}) {
    std::mt19937_64 random(vocab);
    const auto uniform = [&] { return std::uniform_real_distribution<float>(0, 1)(random); };
    const auto token = [&] { return static_cast<int32_t>(random() % vocab); };
    const int rows = vocab > 10000 ? 24 : 64;
    std::vector<SamplingParams> params(rows);
    std::vector<std::vector<TokenBias>> biases(rows);
    std::vector<std::vector<int32_t>> allowed(rows), banned(rows);
    std::vector<std::vector<TokenCount>> seen(rows);
    std::vector<CudaSampler::Row> batch;
    for (int r = 0; r < rows; ++r) {
      SamplingParams& p = params[r];
      p.temperature = r % 5 == 0 ? 0 : 0.2f + 1.5f * uniform();
      if (r % 2) p.top_k = 1 + static_cast<int>(random() % 60);
      if (r % 3 == 1) p.top_p = 0.05f + 0.9f * uniform();
      if (r % 4 == 2) p.min_p = 0.2f * uniform();
      p.seed = random();
      p.logprobs = r % 2 == 0 ? 0 : -1;
      if (r % 7 == 3) {
        p.repetition_penalty = 1.3f;
        p.presence_penalty = 0.4f;
        p.frequency_penalty = 0.2f;
        std::vector<bool> taken(vocab);
        for (int i = 0; i < 40; ++i) {
          const int32_t id = token();
          if (!taken[id]) seen[r].push_back({id, static_cast<int32_t>(random() % 3)});
          taken[id] = true;
        }
      }
      if (r % 6 == 4) {
        for (int i = 0; i < 5; ++i) biases[r].push_back({token(), 4 * uniform() - 2});
        if (vocab > 60) banned[r] = {token(), token(), biases[r][0].token};
      }
      if (r % 11 == 5) {
        for (int i = 0; i < 9; ++i) allowed[r].push_back(token());
        banned[r].clear();
      }
      p.logit_bias = biases[r];
      p.banned = banned[r];
      p.allowed = allowed[r];
      p.seen = seen[r];
      batch.push_back({&p, static_cast<int64_t>(random() % 100000)});
    }
    std::vector<float> logits = RandomFloats(static_cast<size_t>(rows) * vocab, vocab + 1, -8, 8);
    for (size_t i = 0; i < logits.size(); i += 3) logits[i] = std::round(logits[i] * 2) / 2;  // ties
    const auto results = Draw(logits, vocab, batch);
    int differ = 0;
    for (int r = 0; r < rows; ++r) {
      ASSERT_TRUE(results[r].ok()) << results[r].status() << " row " << r;
      const std::span<const float> row(logits.data() + static_cast<size_t>(r) * vocab, vocab);
      const int32_t want = reference::Sample(row, params[r], batch[r].position);
      if (results[r]->token != want) {
        ++differ;
        std::printf("  vocab %d row %d: %d for %d\n", vocab, r, results[r]->token, want);
      }
      if (params[r].logprobs >= 0) {
        ASSERT_NEAR(results[r]->chosen.logprob, reference::Logprobs(row)[results[r]->token], 2e-5);
        int rank = 0;
        for (const float x : row) rank += x >= row[results[r]->token];
        ASSERT_EQ(results[r]->chosen.rank, rank);
      }
    }
    EXPECT_EQ(differ, 0);
  }
}

TEST_F(CudaSamplerTest, TheSmallestSetOfATiedTopPKeepsTheLowestIds) {
  const int vocab = 100;
  std::vector<float> logits(vocab, 0.0f);
  SamplingParams p{.top_p = 0.095f};  // 10 of 100 equal ones
  std::vector<CudaSampler::Row> rows;
  std::vector<float> all;
  for (int i = 0; i < 200; ++i) {
    rows.push_back({&p, i});
    all.insert(all.end(), logits.begin(), logits.end());
  }
  const auto results = Draw(all, vocab, rows);
  int highest = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_TRUE(results[i].ok());
    ASSERT_EQ(results[i]->token, reference::Sample(logits, p, rows[i].position));
    highest = std::max(highest, results[i]->token);
  }
  EXPECT_EQ(highest, 9);
}

TEST_F(CudaSamplerTest, SaysWhatIsWrongWithARow) {
  const int vocab = 70;
  std::vector<float> logits(3 * vocab, 1.0f);
  logits[5] = NAN;
  SamplingParams plain, nothing;
  const std::vector<int32_t> allowed = {3}, banned = {3};
  nothing.allowed = allowed;
  nothing.banned = banned;
  const CudaSampler::Row rows[] = {{&plain, 0}, {&nothing, 0}, {&plain, 0}};
  const auto results = Draw(logits, vocab, rows);
  EXPECT_EQ(results[0].status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(results[1].status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(results[2].ok());

  auto sampler = CudaSampler::Create(device(), 2, vocab);
  ASSERT_TRUE(sampler.ok());
  const std::vector<int32_t> outside = {70};
  SamplingParams bad;
  bad.banned = outside;
  const CudaSampler::Row row{&bad, 0};
  const absl::Status status = (*sampler)->Enqueue(stream(), nullptr, vocab, {&row, 1});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("sampling row 0: banned token ids: token id 70"), std::string::npos) << status;
}

}  // namespace
}  // namespace dovetail::kernels::cuda
