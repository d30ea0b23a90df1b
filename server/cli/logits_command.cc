#include <cstdio>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/cli/commands.h"
#include "server/cli/compute_devices.h"
#include "server/cli/generation.h"
#include "server/cli/prefill_flags.h"
#include "server/cli/role.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kStatisticsFollow = absl::Seconds(5);  // a request's end, at the most

absl::StatusOr<std::vector<TokenId>> ParseIds(const std::string& text) {
  std::vector<TokenId> ids;
  for (const auto piece : absl::StrSplit(text, ',')) {
    TokenId id;
    if (!absl::SimpleAtoi(piece, &id))
      return InvalidArgument("--ids: '", std::string(piece), "' is no token id; write them as 1,2,3");
    ids.push_back(id);
  }
  return ids;
}

// NumPy's format 1.0: magic, version, header length, a Python dict padded to 64 bytes, then the data.
absl::Status WriteNpy(const std::string& path, const std::vector<float>& values, size_t rows, size_t cols) {
  std::string header = absl::StrCat("{'descr': '<f4', 'fortran_order': False, 'shape': (", rows, ", ", cols, "), }");
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  const auto length = static_cast<uint16_t>(header.size());
  std::ofstream out(path, std::ios::binary);
  out.write("\x93NUMPY\x01\x00", 8);
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out << header;
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  out.close();
  if (!out) return absl::UnavailableError(absl::StrCat("--out: cannot write ", path));
  return absl::OkStatus();
}

// How the prompt got over several compute workers: the engine's statistics once the request has ended.
std::string PrefillJson(engine::EmbeddedCluster& cluster) {
  scheduler::SchedulerStats stats = cluster.stats().scheduler;
  const absl::Time give_up = absl::Now() + kStatisticsFollow;
  while ((stats.steps == 0 || stats.running_sequences > 0) && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
    stats = cluster.stats().scheduler;
  }
  return absl::StrCat(
      ", \"prefill\": {\"groups\": ", stats.prefill_groups, ", \"group_tokens\": ", stats.prefill_group_tokens,
      ", \"bytes\": {\"plane\": ", stats.prefix_asked_bytes, ", \"gather\": ", stats.prefix_gathered_bytes,
      ", \"state\": ", stats.prefix_state_bytes, ", \"chain\": ", stats.prefix_chain_bytes,
      ", \"gather-direct\": ", stats.prefix_direct_bytes, ", \"ring\": ", stats.prefix_ring_bytes,
      ", \"switch\": ", stats.prefix_switch_bytes, ", \"pass-q\": ", stats.prefix_pass_q_bytes, "}}");
}

}  // namespace

absl::Status RunLogits(const LogitsFlags& flags) {
  BeginRole("logits");
  DT_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, ParseIds(flags.ids));
  if (flags.last < 0 || flags.last > static_cast<int>(ids.size()))
    return InvalidArgument("--last: ", flags.last, " is outside 0..", ids.size(), ", the number of ids");
  DT_ASSIGN_OR_RETURN(const int compute_workers, ComputeWorkersOf(flags.engine));
  DT_RETURN_IF_ERROR(CheckPrefillRanks(flags.engine, compute_workers));
  DT_RETURN_IF_ERROR(CheckPromptForRanks(flags.engine, static_cast<int64_t>(ids.size())));
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, {}));
  requests::GenerationRequest request;
  request.tenant = "logits";
  request.prompt = ids;
  request.sampling.temperature = 0;
  request.max_tokens = std::max(1, flags.greedy);
  request.logits_last = flags.last == 0 ? static_cast<int>(ids.size()) : flags.last;
  const int rows = request.logits_last;
  auto sink = std::make_shared<CollectingSink>();
  DT_RETURN_IF_ERROR(engine.cluster->Submit(std::move(request), sink).status());
  DT_RETURN_IF_ERROR(sink->WaitForEnd());
  const size_t vocab = static_cast<size_t>(engine.model->config().vocab_size);
  if (sink->prompt_logits().size() != rows * vocab)
    return Internal("logits: expected ", rows, " x ", vocab, " values, got ", sink->prompt_logits().size());
  if (!flags.out.empty()) DT_RETURN_IF_ERROR(WriteNpy(flags.out, sink->prompt_logits(), rows, vocab));
  if (flags.out.empty()) std::fprintf(stderr, "the logits were not written: --out FILE.npy does\n");
  std::vector<TokenId> greedy = sink->choices()[0].tokens;
  greedy.resize(std::min<size_t>(greedy.size(), flags.greedy));
  const std::string prefill = compute_workers > 1 ? PrefillJson(*engine.cluster) : "";
  std::printf("{\"greedy_ids\": [%s]%s}\n", absl::StrJoin(greedy, ", ").c_str(), prefill.c_str());
  return absl::OkStatus();
}

}  // namespace dovetail::cli
