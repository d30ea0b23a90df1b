#include "engine/kv_room.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dovetail::engine {
namespace {

uint64_t MachineBytes() {
  struct sysinfo info;
  return sysinfo(&info) == 0 ? uint64_t{info.totalram} * info.mem_unit : uint64_t{8} << 30;
}

// The cache consists of sets: the blocks that 64 tokens take in all attention ops.
uint64_t SetBytes(const proto::AttentionTable& table, attention::KvStorage storage) {
  return proto::BlocksPerSegment(table) * attention::KvBlockBytes(table, storage);
}

// What a sequence takes, and one to spare.
uint64_t SetsOfSequence(const proto::AttentionTable& table, Position tokens, int max_chunk,
                        proto::LinearPrompts linear) {
  const uint64_t set = proto::BlocksPerSegment(table);
  return (proto::BlocksOfSequence(table, tokens, max_chunk, linear) + set - 1) / set + 1;
}

// The longest sequence of whole blocks that fits into `sets`, below `tokens`; 0: none.
Position LongestWithin(uint64_t sets, const proto::AttentionTable& table, Position tokens, int max_chunk,
                       proto::LinearPrompts linear) {
  Position fits = 0, too_long = proto::SegmentsOf(tokens);
  while (too_long - fits > 1) {
    const Position middle = fits + (too_long - fits) / 2;
    (SetsOfSequence(table, middle * kSegmentTokens, max_chunk, linear) <= sets ? fits : too_long) = middle;
  }
  return fits * kSegmentTokens;
}

}  // namespace

uint64_t DefaultKvCacheBytes(const proto::AttentionTable& table, const scheduler::SchedulerOptions& options,
                             int attention_workers, uint64_t room, attention::KvStorage storage,
                             proto::LinearPrompts linear) {
  const uint64_t set_bytes = SetBytes(table, storage);
  const uint64_t segments = proto::SegmentsOf(options.max_model_len) + 1;
  const uint64_t most = set_bytes * segments * options.max_num_seqs;  // with a snapshot of the states at each segment
  const uint64_t least = set_bytes *
                         SetsOfSequence(table, options.max_model_len, options.max_num_batched_tokens, linear) *
                         attention_workers;
  return std::max(least, std::min(most, room != 0 ? room : MachineBytes() / 4));
}

absl::Status CheckKvCacheBytes(const proto::AttentionTable& table, uint64_t bytes, int attention_workers,
                               attention::KvStorage storage, const std::string& flag) {
  const uint64_t set_bytes = SetBytes(table, storage);
  const uint64_t state_bytes =
      proto::BlocksPerSegment(table, /*states_only=*/true) * attention::KvBlockBytes(table, storage);
  if (bytes / set_bytes / attention_workers >= 2) return absl::OkStatus();
  const std::string states =
      state_bytes == 0 ? "" : absl::StrCat(", ", state_bytes, " of them for linear states (twice, at any length)");
  const std::string each =
      attention_workers == 1 ? "" : absl::StrCat(" over ", attention_workers, " attention workers");
  return ResourceExhausted(flag, ": ", bytes, " bytes", each, " hold less than 128 tokens; this model needs ",
                           set_bytes, " bytes per 64 tokens and worker", states);
}

absl::Status CheckKvRoom(const proto::AttentionTable& table, const scheduler::SchedulerOptions& options,
                         int attention_workers, uint64_t room, attention::KvStorage storage,
                         proto::LinearPrompts linear) {
  const int chunk = options.max_num_batched_tokens;
  const uint64_t set_bytes = SetBytes(table, storage);
  const uint64_t needed = set_bytes * SetsOfSequence(table, options.max_model_len, chunk, linear) * attention_workers;
  if (needed <= room) return absl::OkStatus();
  std::string help;
  const Position fits =
      LongestWithin(room / set_bytes / attention_workers, table, options.max_model_len, chunk, linear);
  if (fits > 0) help = absl::StrCat("--max-model-len ", fits, " fits, ");
  if (storage == attention::KvStorage::kAsSent && !table.has_linear())
    help += "--kv-cache-dtype fp8_e4m3 takes half of it, ";
  return ResourceExhausted("the device has ", room >> 10, " KiB left for the KV cache, and one sequence of ",
                           options.max_model_len, " tokens needs ", needed >> 10, " KiB; ", help, "or divide it over ",
                           (needed + room - 1) / std::max<uint64_t>(room, 1),
                           " attention workers with as much memory each (dovetail up --attention-devices)");
}

}  // namespace dovetail::engine
