#include "model/tokenizer/tokenizer_json_parse.h"

#include <optional>

#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {
namespace {

using nlohmann::json;
using Event = json::parse_event_t;

constexpr int kMaxDepth = 32;

// Watches the parser's events. Depth 1 is the document, 2 the "model" object, 3 the tables in it, 4 a merge of two
// strings.
class TableTaker {
 public:
  explicit TableTaker(ParsedTokenizerJson& parsed) : parsed_(parsed) {}

  // Whether the parser keeps what the event is about. What is not kept is freed at once.
  bool operator()(int depth, Event event, json& value) {
    if (!error_.empty()) return false;
    if (depth > kMaxDepth) return Fail("nested deeper than 32 levels");
    if (event == Event::key) return OnKey(depth, value);
    if (table_ == Table::kVocabulary) return OnVocabulary(depth, event, value);
    if (table_ == Table::kMerges) return OnMerges(depth, event, value);
    return true;
  }

  const std::string& error() const { return error_; }

 private:
  enum class Table { kNone, kVocabulary, kMerges };

  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  bool OnKey(int depth, const json& key) {
    const std::string& name = key.get_ref<const std::string&>();
    if (depth == 1) in_model_ = name == "model";
    if (depth == 2 && in_model_)
      table_ = name == "vocab" ? Table::kVocabulary : name == "merges" ? Table::kMerges : Table::kNone;
    if (depth <= 2) return true;
    if (table_ == Table::kVocabulary && depth == 3) {
      key_ = name;
      return false;  // the entry goes to `vocabulary`, not into the tree
    }
    return true;
  }

  bool OnVocabulary(int depth, Event event, const json& value) {
    if (depth == 2) {  // the table itself
      if (event != Event::object_start && event != Event::object_end) return Fail("model.vocab: not an object");
      if (event == Event::object_end) table_ = Table::kNone;
      return true;
    }
    if (event != Event::value || !value.is_number_integer())
      return Fail("model.vocab: " + QuoteToken(key_) + " has no integer id");
    if (parsed_.vocabulary.size() >= kMaxVocabularyTokens) return Fail("model.vocab: more than 1048576 tokens");
    parsed_.vocabulary.emplace_back(std::move(key_), value.get<int64_t>());
    return true;  // its key was not kept, so neither is it
  }

  bool OnMerges(int depth, Event event, json& value) {
    if (depth == 2) {
      if (event != Event::array_start && event != Event::array_end) return Fail("model.merges: not an array");
      if (event == Event::array_end) table_ = Table::kNone;
      return true;
    }
    if (depth == 3 && event == Event::value) return AddSpelledMerge(value);
    if (depth == 3 && event == Event::array_start) return true;
    if (depth == 3 && event == Event::array_end) return AddPairMerge(value);
    if (depth == 4 && event == Event::value && value.is_string()) return true;
    return Fail("model.merges: entry " + std::to_string(parsed_.merges.size()) +
                " is neither \"a b\" nor [\"a\", \"b\"]");
  }

  bool AddSpelledMerge(const json& value) {
    const std::string spelled = value.is_string() ? value.get<std::string>() : std::string();
    const size_t space = spelled.empty() ? std::string::npos : spelled.find(' ', 1);
    if (space == std::string::npos || space + 1 == spelled.size()) {
      return Fail("model.merges: entry " + std::to_string(parsed_.merges.size()) + " is not two tokens and a space");
    }
    return AddMerge(spelled.substr(0, space), spelled.substr(space + 1));
  }

  bool AddPairMerge(const json& value) {
    if (!value.is_array() || value.size() != 2) {
      return Fail("model.merges: entry " + std::to_string(parsed_.merges.size()) + " is not a pair");
    }
    return AddMerge(value[0].get<std::string>(), value[1].get<std::string>());
  }

  bool AddMerge(std::string left, std::string right) {
    if (parsed_.merges.size() >= kMaxMerges) return Fail("model.merges: more than 4194304 merges");
    parsed_.merges.emplace_back(std::move(left), std::move(right));
    return false;  // taken: nothing stays in the tree
  }

  ParsedTokenizerJson& parsed_;
  Table table_ = Table::kNone;
  bool in_model_ = false;
  std::string key_;
  std::string error_;
};

// nlohmann's messages quote what was last read, which may be long.
std::string Shorten(std::string_view message) { return std::string(message.substr(0, 160)); }

}  // namespace

absl::StatusOr<ParsedTokenizerJson> ParseTokenizerJson(std::string_view name, std::string_view text) {
  ParsedTokenizerJson parsed;
  TableTaker taker(parsed);
  const std::string file(name);
  try {
    parsed.rest = json::parse(text, [&](int depth, Event event, json& value) { return taker(depth, event, value); });
  } catch (const json::exception& error) {
    return InvalidArgument(file, ": not JSON: ", Shorten(error.what()));
  }
  if (!taker.error().empty()) return InvalidArgument(file, ": ", taker.error());
  if (!parsed.rest.is_object()) return InvalidArgument(file, ": not a JSON object");
  return parsed;
}

absl::StatusOr<json> ParseConfigJson(std::string_view name, std::string_view text) {
  const std::string file(name);
  bool deep = false;
  json parsed;
  try {
    parsed = json::parse(text, [&](int depth, Event, json&) { return !(deep = deep || depth > kMaxDepth); });
  } catch (const json::exception& error) {
    return InvalidArgument(file, ": not JSON: ", Shorten(error.what()));
  }
  if (deep) return InvalidArgument(file, ": nested deeper than ", kMaxDepth, " levels");
  if (!parsed.is_object()) return InvalidArgument(file, ": not a JSON object");
  return parsed;
}

}  // namespace dovetail::model
