#include "server/openai/gbnf.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/openai/api_error.h"
#include "server/openai/gbnf_rules.h"

namespace dovetail::server {
namespace {

using gbnf::kUnbounded;
using gbnf::Part;
using gbnf::Rule;
using gbnf::Sequence;

template <typename Visit>
void ForEachPart(const std::vector<Sequence>& alternatives, const Visit& visit) {
  for (const Sequence& sequence : alternatives)
    for (const Part& part : sequence) {
      visit(part);
      ForEachPart(part.alternatives, visit);
    }
}

// Whether some alternative has nothing but parts of which `holds` says it.
template <typename Holds>
bool SomeHolds(const std::vector<Sequence>& alternatives, const Holds& holds) {
  return std::any_of(alternatives.begin(), alternatives.end(),
                     [&](const Sequence& sequence) { return std::all_of(sequence.begin(), sequence.end(), holds); });
}

// What must hold between the rules of a grammar.
class Checker {
 public:
  Checker(const std::vector<Rule>& rules, const std::string& param)
      : rules_(rules), param_(param), users_(rules.size()), begins_with_(rules.size()), state_(rules.size()) {
    for (size_t i = 0; i < rules.size(); ++i)
      ForEachPart(rules[i].alternatives, [&](const Part& part) {
        if (part.rule >= 0) users_[part.rule].push_back(static_cast<int>(i));
      });
  }

  absl::Status Check() {
    for (const Rule& rule : rules_)
      if (Size(rule.alternatives) > kMaxGbnfParts)
        return At(rule, "has more than ", kMaxGbnfParts, " parts, each counted as often as it is repeated at most");
    const std::vector<bool> ending = Closure([](const Part& part) { return part.min == 0 || !part.terminal.empty(); });
    for (size_t i = 0; i < rules_.size(); ++i)
      if (!ending[i]) return At(rules_[i], "never ends");
    empty_ = Closure([](const Part& part) { return part.min == 0 || part.empty; });
    for (size_t i = 0; i < rules_.size(); ++i) FindBeginnings(rules_[i].alternatives, begins_with_[i]);
    for (size_t i = 0; i < rules_.size(); ++i) DT_RETURN_IF_ERROR(CheckRecursion(static_cast<int>(i)));
    return absl::OkStatus();
  }

 private:
  template <typename... Args>
  absl::Status At(const Rule& rule, const Args&... args) const {
    return BadField(param_, "line ", rule.line, ": the rule ", rule.name, " ", args...);
  }

  static int64_t Size(const std::vector<Sequence>& alternatives) {
    int64_t size = 0;
    for (const Sequence& sequence : alternatives)
      for (const Part& part : sequence) {
        const int64_t one = 1 + Size(part.alternatives);
        size = std::min<int64_t>(size + one * std::max({1, part.min, part.max}), int64_t{1} << 30);
      }
    return size;
  }

  // The parts of which `self` says it, or their rule or group.
  template <typename Self>
  static bool Holds(const Part& part, const std::vector<bool>& known, const Self& self) {
    if (self(part)) return true;
    if (part.rule >= 0) return known[part.rule];
    return part.terminal.empty() &&
           SomeHolds(part.alternatives, [&](const Part& inner) { return Holds(inner, known, self); });
  }

  // The rules with an alternative of such parts alone, by rule.
  template <typename Self>
  std::vector<bool> Closure(const Self& self) const {
    std::vector<bool> known(rules_.size());
    std::vector<int> changed;
    const auto look = [&](int i) {
      if (known[i] || !SomeHolds(rules_[i].alternatives, [&](const Part& part) { return Holds(part, known, self); }))
        return;
      known[i] = true;
      changed.push_back(i);
    };
    for (size_t i = 0; i < rules_.size(); ++i) look(static_cast<int>(i));
    while (!changed.empty()) {
      const int rule = changed.back();
      changed.pop_back();
      for (const int user : users_[rule]) look(user);
    }
    return known;
  }

  // The rules that a text of these may begin with.
  void FindBeginnings(const std::vector<Sequence>& alternatives, std::vector<int>& found) const {
    for (const Sequence& sequence : alternatives)
      for (const Part& part : sequence) {
        if (part.rule >= 0) found.push_back(part.rule);
        FindBeginnings(part.alternatives, found);
        if (!Holds(part, empty_, [](const Part& one) { return one.min == 0 || one.empty; })) break;
      }
  }

  absl::Status CheckRecursion(int i) {
    if (state_[i] == State::kChecked) return absl::OkStatus();
    if (state_[i] == State::kOpen)
      return At(rules_[i], "may begin with itself (left recursion); put something before it");
    state_[i] = State::kOpen;
    for (const int next : begins_with_[i]) DT_RETURN_IF_ERROR(CheckRecursion(next));
    state_[i] = State::kChecked;
    return absl::OkStatus();
  }

  enum class State : uint8_t { kNew, kOpen, kChecked };

  const std::vector<Rule>& rules_;
  const std::string& param_;
  std::vector<std::vector<int>> users_;        // of a rule
  std::vector<bool> empty_;                    // rules that may be no text
  std::vector<std::vector<int>> begins_with_;  // by rule
  std::vector<State> state_;
};

std::string RepetitionOf(const Part& part) {
  if (part.min == 1 && part.max == 1) return "";
  if (part.min == 0 && part.max == 1) return "?";
  if (part.max != kUnbounded) return absl::StrFormat("{%d,%d}", part.min, part.max);
  if (part.min <= 1) return part.min == 0 ? "*" : "+";
  return absl::StrFormat("{%d,}", part.min);
}

// Rules are named by their number: the compiler has names of its own.
std::string Written(const std::vector<Sequence>& alternatives) {
  std::string text;
  for (const Sequence& sequence : alternatives) {
    if (&sequence != &alternatives.front()) text += " | ";
    if (sequence.empty()) text += "\"\"";
    for (const Part& part : sequence) {
      if (&part != &sequence.front()) text += ' ';
      if (!part.terminal.empty()) {
        text += part.terminal;
      } else if (part.rule >= 0) {
        text += absl::StrFormat("r%d", part.rule);
      } else {
        absl::StrAppend(&text, "(", Written(part.alternatives), ")");
      }
      text += RepetitionOf(part);
    }
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> EnforceableRules(const std::vector<Rule>& rules, int root, const std::string& param) {
  DT_RETURN_IF_ERROR(Checker(rules, param).Check());
  std::string written = absl::StrFormat("root ::= r%d\n", root);
  for (size_t i = 0; i < rules.size(); ++i)
    written += absl::StrFormat("r%d ::= %s\n", i, Written(rules[i].alternatives));
  return written;
}

absl::StatusOr<std::string> EnforceableGbnf(const std::string& text, const std::string& param) {
  DT_ASSIGN_OR_RETURN(const std::vector<Rule> rules, gbnf::ReadRules(text, param));
  const auto named_root = [](const Rule& rule) { return rule.name == "root"; };
  const auto root = std::find_if(rules.begin(), rules.end(), named_root);
  if (root == rules.end()) return BadField(param, "has no rule root");
  return EnforceableRules(rules, static_cast<int>(root - rules.begin()), param);
}

}  // namespace dovetail::server
