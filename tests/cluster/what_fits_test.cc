#include <gtest/gtest.h>

#include "compute_worker/cuda/cuda_model.h"
#include "engine/kv_room.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// What is said where a device's memory does not do: what is needed, what is there, and what would fit.

namespace dovetail::test {
namespace {

std::string Refusal(uint64_t room, int attention_workers = 1) {
  const auto path = WriteTinyModel({}, TempFolder());  // 16 KiB of K and V for 64 tokens in bf16
  const auto model = TestModel::Load(path, model::WeightFormat::kF32, {.threads = 1});
  EXPECT_TRUE(model.ok()) << model.status();
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, DType::kBF16);
  options.attention_workers = attention_workers;
  options.kv_room = [room] { return room; };
  const auto cluster = StartCluster(**model, options);
  if (cluster.ok()) return "";
  EXPECT_TRUE(absl::IsResourceExhausted(cluster.status())) << cluster.status();
  return std::string(cluster.status().message());
}

TEST(WhatFits, AKvCacheThatDoesNotHoldOneSequenceNamesLengthTypeAndWorkersThatWould) {
  EXPECT_EQ(Refusal(100 << 10),
            "the device has 100 KiB left for the KV cache, and one sequence of 1024 tokens needs 272 KiB; "
            "--max-model-len 320 fits, --kv-cache-dtype fp8_e4m3 takes half of it, or divide it over 3 attention "
            "workers with as much memory each (dovetail up --attention-devices)");
  EXPECT_EQ(Refusal(17 * 16 << 10), "") << "one sequence, exactly";
  EXPECT_NE(Refusal(17 * 16 << 10, 2), "") << "each of two workers may hold one";
}

TEST(WhatFits, AModelOfStatesAloneFitsAtAnyLength) {
  proto::LinearSpec state;
  state.heads = 4;
  state.key_dim = 16;
  state.value_dim = 16;
  state.blocks_per_head = 1;
  proto::LinearConstants constants;
  constants.log_decay.assign(4, -0.1f);
  const auto table = *proto::AttentionTable::Build({state}, {constants});
  scheduler::SchedulerOptions options;
  options.max_num_batched_tokens = 512;
  options.max_num_seqs = 4;
  options.max_model_len = 4096;
  const uint64_t sequence = engine::DefaultKvCacheBytes(table, options, 1, /*room=*/1);
  options.max_model_len = 1 << 20;
  EXPECT_EQ(engine::DefaultKvCacheBytes(table, options, 1, /*room=*/1), sequence);
  EXPECT_EQ(engine::DefaultKvCacheBytes(table, options, 3, /*room=*/1), 3 * sequence) << "one for each worker";
  EXPECT_EQ(engine::DefaultKvCacheBytes(table, options, 1, 100 * sequence), 100 * sequence) << "the rest for snapshots";
  EXPECT_LT(engine::DefaultKvCacheBytes(table, options, 1, /*room=*/1, attention::KvStorage::kAsSent,
                                        proto::LinearPrompts::kOnComputeWorkers),
            sequence)
      << "of a step's states only those are held that are left";
  EXPECT_TRUE(engine::CheckKvRoom(table, options, 1, sequence).ok());
  const absl::Status refused = engine::CheckKvRoom(table, options, 1, sequence / 2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << "less than one sequence";
  EXPECT_NE(refused.message().find("--max-model-len 384 fits"), absl::string_view::npos) << refused;
}

TEST(WhatFits, WeightsThatDoNotFitSayWhichTypeWould) {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  EXPECT_EQ(compute::WeightsThatFit(16 * kGiB, false, 10 * kGiB, 24 * kGiB),
            "the weights need 16384 MiB in 16 bits, and 10240 of 24576 MiB are free (others use the rest); take a file "
            "in 8 bits with --gpu-weights keep (about 8704 MiB), a smaller model, another GPU or --device cpu");
  EXPECT_EQ(compute::WeightsThatFit(160 * kGiB, false, 60 * kGiB, 80 * kGiB),
            "the weights need 163840 MiB in 16 bits, and 61440 of 81920 MiB are free; take a file in 4 bits with "
            "--gpu-weights keep (about 46080 MiB), a smaller model, another GPU or --device cpu");
  EXPECT_EQ(compute::WeightsThatFit(20 * kGiB, true, 10 * kGiB, 12 * kGiB),
            "the weights need 20480 MiB as the file has them, and 10240 of 12288 MiB are free; take a smaller model, "
            "another GPU or --device cpu");
}

}  // namespace
}  // namespace dovetail::test
