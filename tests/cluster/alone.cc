#include "tests/cluster/alone.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"

namespace dovetail::test {

engine::Engine& Alone::Engine() {
  if (engine_ != nullptr) return *engine_;
  auto model = TestModel::Load(path_, model::WeightFormat::kF32, {.threads = 1});
  DT_CHECK(model.ok(), std::string(model.status().message()));
  model_ = *std::move(model);
  engine::EmbeddedClusterOptions options =
      ClusterOptionsFor(*model_, storage_ == KvStorage::kAsSent ? DType::kF32 : DType::kBF16);
  options.kv_storage = storage_;
  options.state_dtype = state_;
  options.scheduler.max_num_seqs = 1;
  options.scheduler.enable_prefix_caching = false;
  auto engine = StartCluster(*model_, options);
  DT_CHECK(engine.ok(), std::string(engine.status().message()));
  engine_ = *std::move(engine);
  return *engine_;
}

void Alone::Expect(const requests::GenerationRequest& request, const cli::CollectingSink& sink, bool cancelled) {
  EXPECT_EQ(sink.protocol_errors(), 0);
  for (int i = 0; i < request.choices; ++i) {
    requests::GenerationRequest single = request;
    single.choices = 1;
    single.sampling.seed += static_cast<uint64_t>(i);
    const auto alone = Generate(Engine(), single);
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(sink.pooled(), (*alone)->pooled());
    const cli::CollectingSink::Choice& expected = (*alone)->choices()[0];
    const cli::CollectingSink::Choice& choice = sink.choices()[i];
    ASSERT_EQ(choice.tokens.size(), choice.logits.size());
    if (!cancelled) {
      ASSERT_EQ(choice.tokens, expected.tokens) << "choice " << i;
    }
    ASSERT_LE(choice.tokens.size(), expected.tokens.size());
    for (size_t token = 0; token < choice.tokens.size(); ++token) {
      ASSERT_EQ(choice.tokens[token], expected.tokens[token]) << "choice " << i << " token " << token;
      ASSERT_EQ(choice.logits[token].size(), expected.logits[token].size());
      ASSERT_EQ(std::memcmp(choice.logits[token].data(), expected.logits[token].data(),
                            expected.logits[token].size() * sizeof(float)),
                0)
          << "logits of choice " << i << " token " << token;
    }
  }
}

}  // namespace dovetail::test
