#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "model/chat_template/builtin_templates.h"
#include "model/chat_template/chat_template.h"
#include "model/chat_template/template_source.h"

namespace dovetail::model {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

RenderInputs Inputs(ordered_json messages) {
  RenderInputs inputs;
  inputs.messages = std::move(messages);
  inputs.bos_token = "<s>";
  inputs.eos_token = "</s>";
  return inputs;
}

absl::StatusOr<RenderedPrompt> RenderBuiltin(const std::string& name, const RenderInputs& inputs) {
  const auto source = BuiltinTemplate(name);
  EXPECT_TRUE(source.ok()) << source.status();
  const auto parsed = ChatTemplate::Parse(*source);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed->Render(inputs);
}

TEST(BuiltinTemplates, EachWritesItsFormat) {
  const RenderInputs inputs = Inputs(ordered_json::parse(R"([
      {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
      {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "2+2?"}]}])"));
  const std::pair<const char*, const char*> formats[] = {
      {"chatml",
       "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
       "<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n"},
      {"llama3",
       "<s><|start_header_id|>system<|end_header_id|>\n\nBe "
       "brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n1+1?"
       "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|><|start_header_id|>user<|end_header_id|>"
       "\n\n"
       "and 2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
      {"gemma",
       "<s><start_of_turn>user\nBe "
       "brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n<start_of_turn>user\n"
       "and 2+2?<end_of_turn>\n<start_of_turn>model\n"},
      {"mistral", "<s>[INST] Be brief.\n\n1+1?[/INST] 2</s>[INST] and 2+2?[/INST]"},
      {"llama2", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n1+1? [/INST] 2 </s><s>[INST] and 2+2? [/INST]"},
      {"zephyr",
       "<|system|>\nBe brief.</s>\n<|user|>\n1+1?</s>\n<|assistant|>\n2</s>\n<|user|>\nand 2+2?</s>\n<|assistant|>\n"},
      {"phi3",
       "<|system|>\nBe brief.<|end|>\n<|user|>\n1+1?<|end|>\n<|assistant|>\n2<|end|>\n<|user|>\nand 2+2?<|end|>\n"
       "<|assistant|>\n"},
  };
  EXPECT_EQ(std::size(formats), BuiltinTemplateNames().size());
  for (const auto& [name, text] : formats) {
    const auto prompt = RenderBuiltin(name, inputs);
    ASSERT_TRUE(prompt.ok()) << name << ": " << prompt.status();
    EXPECT_EQ(prompt->Text(), text) << name;
  }
}

TEST(BuiltinTemplates, RefuseWhatTheyCannotSay) {
  const auto image = Inputs(ordered_json::parse(R"([{"role": "user", "content": [{"type": "image_url"}]}])"));
  for (const std::string& name : BuiltinTemplateNames()) {
    const auto prompt = RenderBuiltin(name, image);
    EXPECT_THAT(std::string(prompt.status().message()), HasSubstr("only text content is supported")) << name;
  }
  const auto twice =
      Inputs(ordered_json::parse(R"([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])"));
  for (const char* name : {"gemma", "mistral", "llama2"}) {
    EXPECT_THAT(std::string(RenderBuiltin(name, twice).status().message()), HasSubstr("roles must alternate")) << name;
  }
  EXPECT_THAT(std::string(BuiltinTemplate("nope").status().message()), HasSubstr("chatml, llama3"));
}

TEST(BuiltinTemplates, AreChosenByTheSpecialTokensOfTheVocabulary) {
  const auto choose = [](std::set<std::string> tokens) {
    return BuiltinTemplateFor([&](std::string_view token) { return tokens.count(std::string(token)) > 0; });
  };
  EXPECT_EQ(choose({"<|im_start|>", "<|im_end|>"}), "chatml");
  EXPECT_EQ(choose({"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}), "llama3");
  EXPECT_EQ(choose({"<start_of_turn>", "<end_of_turn>"}), "gemma");
  EXPECT_EQ(choose({"[INST]", "[/INST]"}), "mistral");
  EXPECT_EQ(choose({"<|user|>", "<|assistant|>", "<|end|>"}), "phi3");
  EXPECT_EQ(choose({"<|user|>", "<|assistant|>"}), "zephyr");
  EXPECT_EQ(choose({"<|im_start|>"}), std::nullopt);
  EXPECT_EQ(choose({}), std::nullopt);
}

TEST(TemplateSource, ReadsAStringAListAndAnObject) {
  const auto one =
      ReadTokenizerConfigTemplates(R"({"chat_template": "T", "bos_token": {"content": "<b>"}, "eos_token": "<e>"})");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(*SelectTemplate(*one, false), "T");
  EXPECT_EQ(*SelectTemplate(*one, true), "T");
  EXPECT_EQ(one->bos_token, "<b>");
  EXPECT_EQ(one->eos_token, "<e>");

  const auto several = ReadTokenizerConfigTemplates(
      R"({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}], "bos_token": null})");
  EXPECT_EQ(*SelectTemplate(*several, false), "D");
  EXPECT_EQ(*SelectTemplate(*several, true), "U");
  EXPECT_EQ(several->bos_token, std::nullopt);

  EXPECT_EQ(*SelectTemplate(*ReadTokenizerConfigTemplates(R"({"chat_template": {"rag": "R"}})"), true), "R");
}

TEST(TemplateSource, AFileOfItsOwnReplacesTheConfigs) {
  auto sources = *ReadTokenizerConfigTemplates(R"({"chat_template": "old"})");
  sources.Set("default", "new");
  EXPECT_EQ(sources.templates.size(), 1u);
  EXPECT_EQ(*SelectTemplate(sources, false), "new");
}

TEST(TemplateSource, SaysWhatIsMissingOrWrong) {
  EXPECT_THAT(std::string(SelectTemplate({}, false).status().message()), HasSubstr("--chat-template"));
  EXPECT_THAT(std::string(SelectTemplate({{{"a", ""}, {"b", ""}}, {}, {}}, false).status().message()),
              HasSubstr("a, b"));
  for (const char* json : {"[]", "{", R"({"chat_template": 5})", R"({"chat_template": [{"name": "x"}]})",
                           R"({"chat_template": {"x": 1}})", R"({"bos_token": 3})"}) {
    EXPECT_EQ(ReadTokenizerConfigTemplates(json).status().code(), absl::StatusCode::kInvalidArgument) << json;
  }
}

TEST(ContinueFinalMessage, EndsThePromptInsideTheLastMessage) {
  RenderInputs inputs =
      Inputs(ordered_json::parse(R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}])"));
  inputs.add_generation_prompt = false;
  inputs.continue_final_message = true;
  EXPECT_EQ(RenderBuiltin("chatml", inputs)->Text(), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, ");
  EXPECT_EQ(RenderBuiltin("llama2", inputs)->Text(), "<s>[INST] Hi [/INST] Sure, ")
      << "the format's own space stands for the trimmed one";
  inputs.messages.back()["content"] = "Sure,\n\n";
  EXPECT_EQ(RenderBuiltin("llama2", inputs)->Text(), "<s>[INST] Hi [/INST] Sure,")
      << "the template trimmed the message";
}

TEST(ContinueFinalMessage, RefusesContradictionsAndInvisibleMessages) {
  RenderInputs inputs = Inputs(ordered_json::parse(R"([{"role": "user", "content": "Hi"}])"));
  inputs.continue_final_message = true;
  EXPECT_THAT(std::string(RenderBuiltin("chatml", inputs).status().message()), HasSubstr("exclude each other"));
  inputs.add_generation_prompt = false;
  const auto blind = ChatTemplate::Parse("nothing");
  EXPECT_THAT(std::string(blind->Render(inputs).status().message()),
              HasSubstr("does not show the text of the last message"));
  inputs.messages = ordered_json::array();
  EXPECT_EQ(RenderBuiltin("chatml", inputs).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RenderInputs, ArgumentsOfTheRequestReachTheTemplateButReplaceNothing) {
  RenderInputs inputs = Inputs(ordered_json::array());
  inputs.extra = {{"enable_thinking", false}};
  const auto parsed = ChatTemplate::Parse("{{ enable_thinking }}{{ tools }}{{ documents }}{{ nothing is defined }}");
  EXPECT_EQ(parsed->Render(inputs)->Text(), "FalseNoneNoneFalse");
  for (const char* name : {"messages", "tools", "bos_token", "raise_exception", "namespace"}) {
    inputs.extra = {{name, 1}};
    EXPECT_THAT(std::string(parsed->Render(inputs).status().message()), HasSubstr(name));
  }
  inputs.extra = ordered_json::array();
  EXPECT_FALSE(parsed->Render(inputs).ok());
  inputs.extra = nullptr;
  inputs.messages = "text";
  EXPECT_FALSE(parsed->Render(inputs).ok());
}

TEST(RenderInputs, TheClockIsGivenWithItsZone) {
  RenderInputs inputs;
  inputs.now = absl::FromCivil(absl::CivilSecond(2026, 1, 2, 23, 30, 0), absl::UTCTimeZone());
  inputs.time_zone = absl::FixedTimeZone(3600);
  EXPECT_EQ(ChatTemplate::Parse("{{ strftime_now('%d %B %Y %H:%M') }}")->Render(inputs)->Text(),
            "03 January 2026 00:30");
}

TEST(RenderInputs, BrokenUtf8IsRefused) {
  RenderInputs inputs;
  inputs.messages = {{{"role", "user"}, {"content", "\xff"}}};
  const auto status = ChatTemplate::Parse("{{ messages }}")->Render(inputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("messages: a string of the conversation is not valid UTF-8"));
}

}  // namespace
}  // namespace dovetail::model
