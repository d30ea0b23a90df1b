#include "attention_worker/core/state_snapshot.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace dovetail::attention {

StateSnapshot SnapshotOf(const proto::ShardStep& item, uint64_t model, int op, int pieces, uint64_t block_bytes) {
  StateSnapshot snapshot;
  snapshot.model = model;
  snapshot.op = static_cast<uint32_t>(op);
  snapshot.head_begin = item.kv_heads.begin;
  snapshot.head_end = item.kv_heads.end;
  snapshot.pieces = static_cast<uint32_t>(pieces);
  snapshot.first_block = item.ctx_len / kSegmentTokens;
  snapshot.blocks = (item.ctx_len + item.q_len - 1) / kSegmentTokens + 1 - snapshot.first_block;
  snapshot.block_bytes = block_bytes;
  return snapshot;
}

absl::Status CheckSnapshot(std::span<const std::byte> bytes, const StateSnapshot& expected) {
  StateSnapshot found;
  if (bytes.size() < sizeof(found)) return InvalidArgument("snapshot of a state: ", bytes.size(), " bytes");
  std::memcpy(&found, bytes.data(), sizeof(found));
  if (found.magic != StateSnapshot::kMagic) return InvalidArgument("snapshot of a state: this is none");
  if (found.version != StateSnapshot::kVersion)
    return InvalidArgument("snapshot of a state: version ", found.version, "; this worker knows ",
                           StateSnapshot::kVersion, ": run one build on all workers");
  if (found.model != expected.model)
    return InvalidArgument("snapshot of a state of model ", absl::StrCat(absl::Hex(found.model)),
                           "; this worker serves model ", absl::StrCat(absl::Hex(expected.model)));
  if (found != expected)
    return InvalidArgument("snapshot of a state: op ", found.op, ", heads ", found.head_begin, "..", found.head_end,
                           ", blocks ", found.first_block, "+", found.blocks, " of ", found.pieces, " x ",
                           found.block_bytes, " bytes; expected op ", expected.op, ", heads ", expected.head_begin,
                           "..", expected.head_end, ", blocks ", expected.first_block, "+", expected.blocks, " of ",
                           expected.pieces, " x ", expected.block_bytes);
  if (bytes.size() != expected.payload_bytes())
    return InvalidArgument("snapshot of a state: ", bytes.size(), " bytes, not ", expected.payload_bytes());
  return absl::OkStatus();
}

}  // namespace dovetail::attention
