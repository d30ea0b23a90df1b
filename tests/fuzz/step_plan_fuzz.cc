#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "proto/step_plan.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

template <typename Message>
void CheckAgain(const absl::StatusOr<Message>& message, std::span<const std::byte> bytes) {
  if (!message.ok()) {
    DT_CHECK(!message.status().message().empty());
    return;
  }
  std::vector<std::byte> again;
  proto::Encode(*message, again);
  DT_CHECK(again.size() == bytes.size() && std::memcmp(again.data(), bytes.data(), again.size()) == 0);
}

}  // namespace

// One byte says whether a plan or a result follows.
void FuzzStepPlan(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  if (data[0] % 2 == 1) return CheckAgain(proto::DecodeStepResult(bytes), bytes);
  const auto plan = proto::DecodeStepPlan(bytes);
  CheckAgain(plan, bytes);
  if (!plan.ok()) return;
  const auto table =
      proto::AttentionTable::Build({proto::SoftmaxSpec{8, 4, 64, 64, 1, 0}, proto::SoftmaxSpec{8, 4, 64, 64, 1, 512}});
  for (const proto::StepEntry& entry : plan->entries) {
    const bool valid = proto::Validate(entry.placement, *table).ok();
    int appended = 0;
    for (const proto::Shard& shard : entry.placement) {
      const proto::ShardRows rows =
          proto::RowsOf(shard.tokens, 512, entry.ctx_len, static_cast<int>(entry.tokens.size()));
      if (shard.group.value() == 0 && shard.kv_heads.begin == 0) appended += rows.kv_count;
    }
    DT_CHECK(!valid || appended == static_cast<int>(entry.tokens.size()));
  }
}

}  // namespace dovetail::fuzz
