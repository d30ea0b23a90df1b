#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "base/check.h"
#include "proto/frame.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {

// Frames to one attention worker, each a header and payload_bytes of payload. Whatever they say, blocks are never lost
// or doubled.
void FuzzAttentionWorker(const uint8_t* data, size_t size) {
  const auto table =
      proto::AttentionTable::Build({proto::SoftmaxSpec{4, 2, 8, 8, 1, 0}, proto::SoftmaxSpec{4, 2, 8, 8, 1, 100}});
  attention::AttentionWorkerCore core(*table, {WorkerId(7), Epoch(3), /*kv_blocks=*/64, /*micro_batches=*/2});
  std::vector<attention::Action> actions;
  auto bytes = std::as_bytes(std::span(data, size));
  while (bytes.size() >= sizeof(proto::FrameHeader)) {
    proto::FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    bytes = bytes.subspan(sizeof(header));
    const auto payload = bytes.first(std::min<size_t>(bytes.size(), header.payload_bytes));
    bytes = bytes.subspan(payload.size());
    actions.clear();
    core.Handle(attention::ReadFrame(NodeId(1), header, payload), actions);
    const absl::Status invariants = core.CheckInvariants();
    DT_CHECK(invariants.ok(), std::string(invariants.message()));
    for (const attention::Action& action : actions) {
      const auto* prepare = std::get_if<attention::PrepareStep>(&action);
      if (prepare == nullptr) continue;
      for (int group = 0; group < table->group_count(); ++group)
        for (const proto::ShardStep& item :
             core.LayoutOf(prepare->micro_batch, LayerGroup(static_cast<uint16_t>(group))).items)
          for (const attention::BlockSetId set : core.ShardOf(prepare->micro_batch, item).sets)
            if (set != attention::kNoBlockSet)
              for (const attention::KvBlockId block : core.BlocksOf(set)) DT_CHECK(block < 64);
    }
  }
  const auto status = core.status();
  DT_CHECK(status.blocks_in_use + status.blocks_cached + core.sequences().pool().free_blocks() == 64);
}

}  // namespace dovetail::fuzz
