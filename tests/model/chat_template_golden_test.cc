#include <gtest/gtest.h>

#include "model/chat_template/chat_template.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

// 44 published chat templates x 6 conversations against texts rendered by Jinja2 3.1.2 with transformers' settings.

namespace dovetail::model {
namespace {

using nlohmann::ordered_json;

RenderInputs InputsOf(const ordered_json& conversation) {
  RenderInputs inputs;
  inputs.messages = conversation["messages"];
  const ordered_json undefined(ordered_json::value_t::discarded);
  inputs.tools = conversation.contains("tools") ? conversation["tools"] : undefined;
  inputs.documents = undefined;
  inputs.add_generation_prompt = conversation.value("add_generation_prompt", true);
  inputs.bos_token = "<s>";
  inputs.eos_token = "</s>";
  inputs.now = absl::FromCivil(absl::CivilSecond(2026, 1, 2, 3, 4, 5), absl::UTCTimeZone());
  return inputs;
}

TEST(ChatTemplateGolden, EveryPublishedTemplateRendersEveryConversationAsJinjaDoes) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "chat-templates");
  const auto golden = ordered_json::parse(test::ReadFile(folder / "golden_renders.json"));
  int texts = 0, errors = 0;
  size_t most_steps = 0;
  for (const auto& [name, expected] : golden["expected"].items()) {
    const auto parsed = ChatTemplate::Parse(test::ReadFile(folder / name));
    ASSERT_TRUE(parsed.ok()) << name << ": " << parsed.status();
    for (const auto& [conversation, want] : expected.items()) {
      SCOPED_TRACE(name + " / " + conversation);
      size_t steps = 0;
      const auto prompt = parsed->Render(InputsOf(golden["conversations"][conversation]), &steps);
      most_steps = std::max(most_steps, steps);
      if (want.contains("error")) {
        EXPECT_FALSE(prompt.ok()) << prompt->Text();
        EXPECT_EQ(prompt.status().code(), absl::StatusCode::kInvalidArgument);
        ++errors;
        continue;
      }
      EXPECT_TRUE(prompt.ok()) << prompt.status();
      if (!prompt.ok()) continue;
      EXPECT_EQ(prompt->Text(), want["text"].get<std::string>());
      ++texts;
    }
  }
  EXPECT_EQ(texts, 253);
  EXPECT_EQ(errors, 11);
  EXPECT_LT(most_steps, 8'000u) << "the step budget leaves real templates too little room";
}

}  // namespace
}  // namespace dovetail::model
