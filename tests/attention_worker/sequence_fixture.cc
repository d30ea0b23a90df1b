#include "tests/attention_worker/sequence_fixture.h"

#include "gtest/gtest.h"

namespace dovetail::attention::testing {

proto::AttentionTable FullTable() { return *proto::AttentionTable::Build({Spec(2), Spec(2)}); }

proto::AttentionTable MixedTable() { return *proto::AttentionTable::Build({Spec(2), Spec(1, 100), Spec(2)}); }

proto::Shard ShardOf(int group, proto::HeadRange heads, proto::TokenRange tokens) {
  return proto::Shard{LayerGroup(static_cast<uint16_t>(group)), kWorker, kEpoch, heads, tokens};
}

std::vector<proto::Shard> WholeShards(const proto::AttentionTable& table) {
  const proto::Placement placement = proto::WholePlacement(table, kWorker, kEpoch);
  return {placement.begin(), placement.end()};
}

std::vector<proto::BlockHash> Hashes(int version, int count) { return HashesBetween(version, 0, count); }

std::vector<proto::BlockHash> HashesBetween(int version, int first, int end) {
  std::vector<proto::BlockHash> hashes;
  for (int block = first; block < end; ++block)
    hashes.push_back({static_cast<uint64_t>(version), static_cast<uint64_t>(block) + 1});
  return hashes;
}

std::vector<uint32_t> Driver::Open(uint64_t id, std::vector<proto::BlockHash> hashes) {
  const auto opened = sequences_.Open({SequenceId(id), WholeShards(table_), std::move(hashes)});
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened.ok() ? (*opened)->resumable : std::vector<uint32_t>{};
}

absl::Status Driver::Step(uint64_t id, Position ctx_len, int q_len, std::vector<proto::BlockHash> hashes) {
  SequenceState* sequence = sequences_.Find(SequenceId(id));
  if (sequence == nullptr) return NotFound("sequence ", id);
  DT_RETURN_IF_ERROR(sequences_.Commit(*sequence, ctx_len, hashes));
  const auto growth = SequenceTable::Growth::OfStep(*sequence, q_len);
  const int64_t blocks = sequences_.BlocksToAppend({&growth, 1});
  if (!sequences_.MakeRoom(blocks)) return ResourceExhausted(blocks, " blocks");
  copies.clear();
  sequences_.Append(growth, copies);
  return absl::OkStatus();
}

void Driver::Release(uint64_t id, Position ctx_len, std::vector<proto::BlockHash> hashes) {
  sequences_.Release({SequenceId(id), ctx_len, std::move(hashes)});
}

void Driver::Cache(uint64_t id, int version, int tokens) {
  Open(id);
  EXPECT_TRUE(Step(id, 0, tokens).ok());
  Release(id, tokens, Hashes(version, tokens / kSegmentTokens));
}

}  // namespace dovetail::attention::testing
