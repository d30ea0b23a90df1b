#include "server/cli/deterministic_flags.h"

#include <algorithm>

#include "engine/device_choice.h"

namespace dovetail::cli {
namespace {

bool AttendsOnCpu(const RunningEngine& engine,
                  const std::vector<engine::EmbeddedClusterOptions::AttentionPlace>& places) {
  const auto is_cpu = [](kernels::Device& device) { return engine::AsGpu(device) == nullptr; };
  if (engine.attention_device != nullptr && is_cpu(*engine.attention_device)) return true;
  return std::any_of(places.begin(), places.end(), [&](const auto& place) { return is_cpu(*place.device); });
}

}  // namespace

void AddDeterministicFlag(CLI::App& command, EngineFlags& flags) {
  command
      .add_flag(
          "--deterministic,!--no-deterministic", flags.deterministic,
          "On GPUs, a request's tokens do not depend on what else runs, how its prompt is cut, or which worker "
          "it is on; for models without linear layers, on GPUs of compute capability 9.0. On CPUs it is always so "
          "[off]")
      ->group("Device");
}

absl::Status CheckDeterministic(const EngineFlags& flags, bool attends_on_cpu) {
  if (!flags.deterministic) return absl::OkStatus();
  const auto bad = [](const auto&... words) { return InvalidArgument("--deterministic: ", words...); };
  if (attends_on_cpu)
    return bad("layers run on a GPU and attention on CPUs, which sum in another order; attend on GPUs");
  if (flags.placement != "request" && flags.placement != "heads")
    return bad("--placement ", flags.placement,
               " may divide a sequence's tokens, and what is put together of parts has other bits; take request or "
               "heads");
  if (flags.prefill_ranks != "auto" && flags.prefill_ranks != "1")
    return bad("--prefill-ranks ", flags.prefill_ranks, ": what ranks put together has other bits; take 1");
  if (flags.gpu_weights == "keep")
    return bad("--gpu-weights keep: kernels for 4 and 8 bits depend on the number of rows; take dequantise");
  return absl::OkStatus();
}

absl::Status CheckDeterministicPlaces(const EngineFlags& flags, const RunningEngine& engine,
                                      const std::vector<engine::EmbeddedClusterOptions::AttentionPlace>& places) {
  if (engine::AsGpu(*engine.device) == nullptr) return absl::OkStatus();
  return CheckDeterministic(flags, AttendsOnCpu(engine, places));
}

}  // namespace dovetail::cli
