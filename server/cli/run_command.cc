#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "model/tokenizer/detokenizer.h"
#include "server/cli/commands.h"
#include "server/cli/generation.h"
#include "server/cli/model_text.h"
#include "server/cli/role.h"

namespace dovetail::cli {

absl::Status RunPrompt(const RunFlags& flags) {
  BeginRole("run");
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_ASSIGN_OR_RETURN(const auto served,
                      MakeServedModel(*engine.model->checkpoint,
                                      {.chat_template = flags.chat_template, .max_model_len = engine.max_model_len}));
  if (served->tokenizer == nullptr)
    return InvalidArgument(engine.model->checkpoint->name(), ": holds no tokenizer; `dovetail logits` takes token ids");
  std::vector<TokenId> prompt;
  if (served->chat && !flags.raw) {
    server::ChatPrompt chat;
    chat.messages = server::Json::array({{{"role", "user"}, {"content", flags.prompt}}});
    DT_ASSIGN_OR_RETURN(const auto parts, served->chat(chat));
    DT_ASSIGN_OR_RETURN(prompt, served->tokenizer->EncodeParts(parts));
  } else {
    DT_ASSIGN_OR_RETURN(prompt, served->tokenizer->Encode(flags.prompt));
  }
  requests::GenerationRequest request;
  request.tenant = "terminal";
  request.prompt = std::move(prompt);
  request.sampling.temperature = flags.temperature;
  request.sampling.seed = flags.engine.seed ? *flags.engine.seed : std::random_device()();
  const int64_t room = engine.max_model_len - static_cast<int64_t>(request.prompt.size());
  request.max_tokens = static_cast<int>(std::clamp<int64_t>(flags.max_tokens, 1, std::max<int64_t>(room, 1)));
  request.stop_token_ids = served->end_token_ids;
  auto sink = std::make_shared<CollectingSink>();
  DT_RETURN_IF_ERROR(engine.cluster->Submit(std::move(request), sink).status());
  model::IncrementalDetokenizer text(*served->tokenizer, {});
  sink->StreamTokens([&](TokenId token) {
    std::fputs(std::string(text.Push(token)).c_str(), stdout);
    std::fflush(stdout);
  });
  DT_RETURN_IF_ERROR(sink->WaitForEnd());
  std::printf("%s\n", std::string(text.Flush()).c_str());
  return absl::OkStatus();
}

}  // namespace dovetail::cli
