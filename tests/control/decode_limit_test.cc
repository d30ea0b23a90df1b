#include "scheduler/decode_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dovetail::scheduler {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// 128 KiB of K and V a token, as Llama-3-8B.
control::ModelSummary Model() {
  const proto::SoftmaxSpec spec{.query_heads = 32, .kv_heads = 8, .key_dim = 128, .value_dim = 128, .scale = 1};
  control::ModelSummary model;
  model.attention = *proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(32, spec));
  return model;
}

control::Capabilities Host() {
  control::Capabilities has;
  has.device = "cpu";
  has.cores = 4;
  has.memory_bytes_per_s = 15'250'000'000;
  return has;
}

TEST(DecodeLimit, IsTheRateOverWhatATokenReads) {
  EXPECT_EQ(DecodeLimit(Host(), Model(), 4096, /*layers_on_gpu=*/false),
            "; at the 61 GB/s that it reads, at most 454 tokens/s of sequences at 1024 tokens and 114 at 4096");
  EXPECT_EQ(DecodeLimit(Host(), Model(), 512, /*layers_on_gpu=*/false),
            "; at the 61 GB/s that it reads, at most 909 tokens/s of sequences at 512 tokens");
}

TEST(DecodeLimit, SaysWhatHelpsWhereAGpuWaitsForAHost) {
  EXPECT_THAT(DecodeLimit(Host(), Model(), 4096, /*layers_on_gpu=*/true), HasSubstr("--kv-cache-dtype int8"));
  control::ModelSummary narrow = Model();
  narrow.kv_storage = KvStorage::kInt8;
  EXPECT_THAT(DecodeLimit(Host(), narrow, 4096, /*layers_on_gpu=*/true), Not(HasSubstr("--kv-cache-dtype")));
  control::Capabilities gpu = Host();
  gpu.device = "cuda:1";
  EXPECT_THAT(DecodeLimit(gpu, Model(), 4096, /*layers_on_gpu=*/true), Not(HasSubstr("--kv-cache-dtype")));
}

TEST(DecodeLimit, IsNotSaidOfAWorkerWhoseRateIsNotKnown) {
  control::Capabilities has = Host();
  has.memory_bytes_per_s = 0;
  EXPECT_EQ(DecodeLimit(has, Model(), 4096, true), "");
}

}  // namespace
}  // namespace dovetail::scheduler
