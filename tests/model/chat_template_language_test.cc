#include <gtest/gtest.h>

#include "model/chat_template/chat_template.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

// Small templates of our own, one a feature, with the text that Jinja2 3.1.2 in its immutable sandbox gives for each,
// or the error that it raises (tests/data/chat_templates/language.json).

namespace dovetail::model {
namespace {

using nlohmann::ordered_json;

const absl::Time kNow = absl::FromCivil(absl::CivilSecond(2026, 1, 2, 3, 4, 5), absl::UTCTimeZone());

class Language : public ::testing::TestWithParam<std::string> {};

TEST_P(Language, RendersAsJinjaDoes) {
  const auto data = ordered_json::parse(test::ReadFile(test::ProjectData("chat_templates/language.json")));
  RenderInputs inputs;
  for (const auto& [name, value] : data["context"].items()) {
    if (name == "messages") {
      inputs.messages = value;
    } else {
      inputs.extra[name] = value;
    }
  }
  inputs.now = kNow;
  for (const auto& row : data["groups"][GetParam()]) {
    const std::string source = row["template"];
    SCOPED_TRACE(source);
    const auto parsed = ChatTemplate::Parse(source);
    const auto prompt = parsed.ok() ? parsed->Render(inputs) : absl::StatusOr<RenderedPrompt>(parsed.status());
    if (row.contains("error")) {
      EXPECT_FALSE(prompt.ok()) << "gave '" << prompt->Text() << "' instead of " << row["error"];
      EXPECT_EQ(prompt.status().code(), absl::StatusCode::kInvalidArgument) << prompt.status();
    } else {
      EXPECT_TRUE(prompt.ok()) << prompt.status();
      if (prompt.ok()) {
        EXPECT_EQ(prompt->Text(), row["text"].get<std::string>());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ChatTemplate, Language,
                         ::testing::Values("statements", "whitespace", "expressions", "filters", "tests", "methods"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace dovetail::model
