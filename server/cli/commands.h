#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/api_server.h"
#include "server/cli/engine_flags.h"
#include "server/cli/log_flags.h"
#include "server/cli/trace_flags.h"

// The commands of the `dovetail` binary. Each returns when it is done; errors are printed by main().
// Threads: the main thread only.

namespace dovetail::cli {

struct LogitsFlags {
  EngineFlags engine;
  std::string ids;
  int last = 0;  // 0: all positions
  int greedy = 0;
  std::string out;
};
// Writes the float32 logits [last, vocab] of the last positions as .npy and prints {"greedy_ids": [...]}; with several
// compute workers also how the prompt was divided: "prefill": {"groups", "group_tokens", "bytes" by exchange}.
absl::Status RunLogits(const LogitsFlags& flags);

struct ServeFlags {
  EngineFlags engine;
  ApiFlags api;
  LogFlags log;
  TraceFlags traces;
};
// Serves the OpenAI API, and gRPC where asked, until SIGTERM or SIGINT, then drains.
absl::Status RunServe(const ServeFlags& flags);

struct RunFlags {
  EngineFlags engine;
  std::string prompt;  // empty: a conversation in a terminal, else what standard input has
  std::string chat_template;
  std::optional<float> temperature;  // none: 0 for a prompt, what the model recommends in a conversation
  int max_tokens = 256;
  bool raw = false;  // no chat template
};
// Answers one prompt on stdout as it is generated, or holds a conversation.
absl::Status RunPrompt(const RunFlags& flags);

// Prints what a model holds and what it would need.
absl::Status RunInspect(const std::string& model);

// Prints the devices of this machine that can be used, and why not the rest.
absl::Status RunDevices();

}  // namespace dovetail::cli
