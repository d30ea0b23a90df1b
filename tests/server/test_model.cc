#include "tests/server/test_model.h"

#include <utility>

#include "base/check.h"
#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/chat_renderer.h"

namespace dovetail::server::test {

std::shared_ptr<ServedModel> TestModel(int max_model_len, const std::vector<std::string>& more_control_tokens) {
  model::TokenizerData data;
  for (int byte = 0; byte < 256; ++byte) {
    data.tokens.push_back(model::SpellingOfBytes(std::string(1, static_cast<char>(byte))));
    data.types.push_back(model::TokenType::kNormal);
  }
  for (const char* special : {"<bos>", "<eos>", "<turn>", "<pad>"}) {
    data.tokens.push_back(special);
    data.types.push_back(model::TokenType::kControl);
  }
  for (const char* merged : {"the", "th"}) {
    data.tokens.push_back(merged);
    data.types.push_back(model::TokenType::kNormal);
  }
  for (const std::string& control : more_control_tokens) {
    data.tokens.push_back(control);
    data.types.push_back(model::TokenType::kControl);
  }
  data.merges = {{'t', 'h'}, {kThe + 1, 'e'}};
  data.pre_tokenizer = model::PreTokenizer::kGpt2;
  data.prefix_ids = {kBos};
  data.special.bos = kBos;
  data.special.eos = kEos;
  auto tokenizer = model::Tokenizer::Create(data);
  DT_CHECK(tokenizer.ok(), std::string(tokenizer.status().message()));

  auto served = std::make_shared<ServedModel>();
  served->names = {"bytes", "bytes-alias"};
  served->tokenizer = *std::move(tokenizer);
  auto chat = MakeChatRenderer(
      {"{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
       "%}<turn>assistant:{% endif %}",
       "", "<bos>", "<eos>"});
  DT_CHECK(chat.ok(), std::string(chat.status().message()));
  served->chat = *std::move(chat);
  served->calls = &HermesFormat();
  served->max_model_len = max_model_len;
  served->vocab_size = served->tokenizer->vocab_size();
  served->hidden_size = 4;
  served->end_token_ids = {kEos};
  served->created = 1700000000;
  return served;
}

std::shared_ptr<ServedModel> ModelWithGrammars(std::function<void()> begins, int max_model_len) {
  auto served = TestModel(max_model_len);
  served->grammars = std::make_shared<grammar::GrammarEngine>(
      [tokenizer = served->tokenizer, begins = std::move(begins)]() -> absl::StatusOr<std::vector<std::string>> {
        begins();
        std::vector<std::string> texts(tokenizer->vocab_size());
        for (TokenId id = 0; id < tokenizer->vocab_size(); ++id)
          if (!tokenizer->IsSpecial(id)) texts[id] = tokenizer->TokenText(id);
        return texts;
      },
      served->vocab_size);
  return served;
}

std::shared_ptr<ServedModel> FillInModel() {
  return TestModel(4096, {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>"});
}

}  // namespace dovetail::server::test
