#include <cstdio>
#include <ctime>
#include <utility>

#include "model/tokenizer/detokenizer.h"
#include "server/cli/commands.h"
#include "server/cli/generation.h"
#include "server/cli/model_text.h"

namespace dovetail::cli {

absl::Status RunPrompt(const RunFlags& flags) {
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_ASSIGN_OR_RETURN(const auto served, MakeServedModel(*engine.model->checkpoint, "", flags.chat_template, engine.max_model_len));
  if (served->tokenizer == nullptr)
    return InvalidArgument(engine.model->checkpoint->name(), ": holds no tokenizer; `dovetail logits` takes token ids");
  std::vector<TokenId> prompt;
  if (served->chat && !flags.raw) {
    server::ChatPrompt chat;
    chat.messages = server::Json::array({{{"role", "user"}, {"content", flags.prompt}}});
    DT_ASSIGN_OR_RETURN(const auto rendered, served->chat(chat));
    std::vector<model::PromptPart> parts;
    for (const server::RenderedPart& part : rendered) parts.push_back({part.text, part.is_input});
    DT_ASSIGN_OR_RETURN(prompt, served->tokenizer->EncodeParts(parts));
  } else {
    DT_ASSIGN_OR_RETURN(prompt, served->tokenizer->Encode(flags.prompt));
  }
  scheduler::GenerationRequest request;
  request.tenant = "terminal";
  request.prompt = std::move(prompt);
  request.sampling.temperature = flags.temperature;
  request.sampling.seed = flags.engine.seed;
  request.max_tokens = flags.max_tokens;
  request.stop_token_ids = served->end_token_ids;
  auto sink = std::make_shared<CollectingSink>();
  DT_RETURN_IF_ERROR(engine.cluster->Submit(std::move(request), sink).status());
  sink->StreamTokens([&, text = model::IncrementalDetokenizer(*served->tokenizer, {})](TokenId token) mutable {
    std::fputs(std::string(text.Push(token)).c_str(), stdout);
    std::fflush(stdout);
  });
  DT_RETURN_IF_ERROR(sink->WaitForEnd());
  std::printf("\n");
  return absl::OkStatus();
}

}  // namespace dovetail::cli
