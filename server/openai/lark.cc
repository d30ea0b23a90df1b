#include "server/openai/lark.h"

#include <string_view>
#include <utility>
#include <vector>

#include "grammar/grammar_engine.h"
#include "server/openai/api_error.h"
#include "server/openai/gbnf.h"
#include "server/openai/lark_reader.h"
#include "server/openai/lark_regex.h"

namespace dovetail::server {
namespace {

using gbnf::Part;
using gbnf::Rule;
using gbnf::Sequence;

// a: a x | y is a: y x*, of any x and y.
void EndLeftRecursion(Rule& rule, int index) {
  const auto begins_with_itself = [index](const Sequence& sequence) {
    return !sequence.empty() && sequence[0].rule == index && sequence[0].min == 1 && sequence[0].max == 1;
  };
  Part begin, more;
  for (Sequence& sequence : rule.alternatives) {
    if (!begins_with_itself(sequence)) {
      begin.alternatives.push_back(std::move(sequence));
      continue;
    }
    sequence.erase(sequence.begin());
    if (!sequence.empty()) more.alternatives.push_back(std::move(sequence));
  }
  more.min = 0;
  more.max = gbnf::kUnbounded;
  if (begin.alternatives.empty()) {  // it never ends, which is found later
    begin.rule = index;
    more.alternatives.clear();
  }
  rule.alternatives = {{std::move(begin)}};
  if (!more.alternatives.empty()) rule.alternatives[0].push_back(std::move(more));
}

absl::Status CheckSize(const std::string& text, const std::string& param) {
  if (text.size() <= grammar::kMaxSourceBytes) return absl::OkStatus();
  return BadField(param, text.size(), " bytes; at most ", grammar::kMaxSourceBytes, " are allowed");
}

}  // namespace

absl::StatusOr<std::string> EnforceableLark(const std::string& text, const std::string& param,
                                            gbnf::Spelling spelling) {
  DT_RETURN_IF_ERROR(CheckSize(text, param));
  DT_ASSIGN_OR_RETURN(lark::Grammar grammar, lark::ReadGrammar(text, param, spelling));
  for (size_t i = 0; i < grammar.rules.size(); ++i) {
    Rule& rule = grammar.rules[i];
    const int index = static_cast<int>(i);
    for (const Sequence& sequence : rule.alternatives)
      if (!sequence.empty() && sequence[0].rule == index && sequence[0].min == 1 && sequence[0].max == 1) {
        EndLeftRecursion(rule, index);
        break;
      }
  }
  return EnforceableRules(grammar.rules, grammar.root, param);
}

absl::StatusOr<std::string> EnforceableLarkRegex(const std::string& pattern, const std::string& param,
                                                 gbnf::Spelling spelling) {
  DT_RETURN_IF_ERROR(CheckSize(pattern, param));
  std::string_view whole = pattern;
  if (whole.starts_with('^')) whole.remove_prefix(1);
  if (whole.ends_with('$') && !whole.ends_with("\\$")) whole.remove_suffix(1);
  auto part = lark::PartOfRegex(whole, "", spelling);
  if (!part.ok()) return BadField(param, std::string(part.status().message()));
  return EnforceableRules({{.name = "regex", .alternatives = {{*std::move(part)}}, .line = 1}}, 0, param);
}

}  // namespace dovetail::server
