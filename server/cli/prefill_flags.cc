#include "server/cli/prefill_flags.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "scheduler/core/limits.h"

namespace dovetail::cli {
namespace {

int RanksAskedFor(const EngineFlags& flags) {
  return flags.prefill_ranks == "auto" ? 0 : std::atoi(flags.prefill_ranks.c_str());
}

}  // namespace

absl::Status CheckPrefillRanks(const EngineFlags& flags, std::optional<int> compute_workers) {
  const int ranks = RanksAskedFor(flags);
  if (ranks > 1 && !flags.enable_chunked_prefill)
    return InvalidArgument(
        "--prefill-ranks: ", ranks,
        " ranks divide a prompt, which --no-enable-chunked-prefill forbids; take 1 or auto, or leave "
        "chunked prefill on");
  if (!compute_workers || ranks <= *compute_workers) return absl::OkStatus();
  return InvalidArgument("--prefill-ranks: ", ranks, " ranks are more than the ", *compute_workers,
                         " of --compute-workers; ask for at most as many, for auto, or for more compute workers");
}

absl::Status CheckPromptForRanks(const EngineFlags& flags, int64_t tokens) {
  const int ranks = RanksAskedFor(flags);
  const int least = flags.prefill_rank_tokens > 0 ? flags.prefill_rank_tokens : scheduler::kRankTokensOfCpu;
  const int64_t needed = int64_t{ranks} * least;
  if (ranks < 2 || tokens >= needed) return absl::OkStatus();
  return InvalidArgument("--prefill-ranks: ", ranks, " ranks of at least ", least,
                         " tokens (--prefill-rank-tokens) need a prompt of ", needed, ", and this one has ", tokens,
                         "; lower the one or the other");
}

namespace {

absl::Status CheckChain(const EngineFlags& flags, const proto::AttentionTable& table, bool cache_on_its_gpu) {
  if (!table.has_linear())
    return InvalidArgument(
        "--prefill-exchange chain: ranks hand on the states of linear layers, and this model has none; take plane or "
        "gather");
  if (cache_on_its_gpu)
    return InvalidArgument(
        "--prefill-exchange chain: the KV cache lies on the GPU of the compute worker, where linear layers of prompts "
        "run over it without a copy; take plane, or another --attention-device");
  if (flags.linear_prompts != "compute")
    return InvalidArgument(
        "--prefill-exchange chain: the states are those of compute workers, and --linear-prompts attention runs linear "
        "layers elsewhere; take plane, or --linear-prompts compute");
  return absl::OkStatus();
}

// What more a head switch asks of a model.
absl::Status CheckSwitch(const EngineFlags& flags, const proto::AttentionTable& table, bool on_gpu) {
  if (on_gpu && flags.prompt_scratch != "auto" && ParseBytes("--prompt-scratch", flags.prompt_scratch).value_or(1) == 0)
    return InvalidArgument(
        "--prefill-exchange switch: a GPU that attends no prompts has no heads to exchange, and --prompt-scratch is 0; "
        "give it memory, or take plane");
  const int most = proto::MostSwitchRanks(table);
  if (most == 1)
    return InvalidArgument(
        "--prefill-exchange switch: ranks divide the KV heads among each other, and this model has one; take "
        "gather-direct, ring or plane");
  if (const int ranks = RanksAskedFor(flags); most > 0 && ranks > most)
    return InvalidArgument("--prefill-exchange switch: ", ranks,
                           " ranks (--prefill-ranks) cannot each have one of the ", most,
                           " KV heads of this model; ask for at most ", most, ", or take gather-direct or ring");
  return absl::OkStatus();
}

// Of a model whose attention layers are all linear: there is nothing else to switch.
absl::Status CheckLinearSwitch(const EngineFlags& flags, const proto::AttentionTable& table, bool on_gpu) {
  if (on_gpu)
    return InvalidArgument(
        "--prefill-exchange switch: all attention layers of this model are linear, whose heads are exchanged among "
        "compute workers on CPUs only; take chain, or --device cpu");
  if (flags.linear_prompts != "compute")
    return InvalidArgument(
        "--prefill-exchange switch: all attention layers of this model are linear, and --linear-prompts attention runs "
        "these elsewhere; take plane, or --linear-prompts compute");
  const int most = proto::MostLinearSwitchRanks(table), ranks = RanksAskedFor(flags);
  if (most == 1 || ranks > most)
    return InvalidArgument("--prefill-exchange switch: ", std::max(2, ranks), " ranks cannot each have one of the ",
                           most, " heads of this model's linear layers; ",
                           most > 1 ? absl::StrCat("ask for at most ", most, ", or ") : "", "take chain or plane");
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPrefillExchange(const EngineFlags& flags, const proto::AttentionTable& table, bool on_gpu,
                                  bool cache_on_its_gpu) {
  if (flags.prefill_exchange == "chain") return CheckChain(flags, table, cache_on_its_gpu);
  const bool switches = flags.prefill_exchange == "switch";
  const bool asks = flags.prefill_exchange == "pass-q";
  const bool direct = switches || asks || flags.prefill_exchange == "gather-direct" || flags.prefill_exchange == "ring";
  if (!direct && flags.prefill_exchange != "gather") return absl::OkStatus();
  if (on_gpu && asks)
    return InvalidArgument(
        "--prefill-exchange pass-q: compute workers on CPUs only ask each other about earlier tokens; take "
        "gather-direct, or --device cpu");
  if (switches) DT_RETURN_IF_ERROR(CheckSwitch(flags, table, on_gpu));
  if (cache_on_its_gpu)
    return InvalidArgument("--prefill-exchange ", flags.prefill_exchange,
                           ": the KV cache lies on the GPU of the compute worker, where prompts are attended "
                           "without a copy; take plane, or another --attention-device");
  const bool only_linear =
      std::all_of(table.views.begin(), table.views.end(), [](const proto::SoftmaxSpec& spec) { return spec.linear(); });
  if (only_linear && switches) return CheckLinearSwitch(flags, table, on_gpu);
  if (only_linear)
    return InvalidArgument("--prefill-exchange ", flags.prefill_exchange,
                           ": all attention layers of this model are linear; their states cross in any case, and there "
                           "is no K and V to gather; take ",
                           direct ? "chain" : "plane");
  return absl::OkStatus();
}

}  // namespace dovetail::cli
