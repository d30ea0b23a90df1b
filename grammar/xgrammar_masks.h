#pragma once

// Included by xgrammar's grammar_compiler.cc, which computes for each state of a grammar which tokens may follow
// (cmake/DovetailXgrammarMends.cmake). It parses every token of the vocabulary for that, some 20 ms a state, and leaves
// tokens that reach past the end of a rule to be parsed again whenever a text comes to that state. A string of at most
// n characters has n states. The functions below save most of that work.
//
// `Grammar` is xgrammar::Grammar after its optimizer: `complete_fsm` numbers the states of all rules together.
// Errors:  none. Where nothing is known, a chain has length 0 and a rule does not end the text.
// Threads: pure.

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace dovetail {

// ASCII characters, any `length` of which lead from a state through as many others.
struct StateChain {
  std::bitset<128> characters;
  size_t length = 0;

  bool Accepts(const std::string& token) const {
    if (token.empty() || token.size() > length) return false;
    return std::all_of(token.begin(), token.end(), [this](char c) {
      return static_cast<unsigned char>(c) < characters.size() && characters[static_cast<unsigned char>(c)];
    });
  }
};

inline constexpr size_t kLongestChain = 128;  // longer tokens are parsed

// The state that most characters lead to, with these; length 0 where only rules begin.
template <typename Fsm>
std::pair<int, StateChain> MostLeadTo(const Fsm& fsm, int state) {
  std::map<int, std::bitset<128>> targets;
  for (const auto& edge : fsm.GetEdges(state)) {
    if (!edge.IsCharRange()) continue;
    for (int c = edge.min; c <= edge.max && c < 128; ++c) targets[edge.target].set(c);
  }
  std::pair<int, StateChain> most = {state, {}};
  for (const auto& [target, characters] : targets)
    if (characters.count() > most.second.characters.count()) most = {target, {characters, 1}};
  return most;
}

// A rule that begins in `state`; -1: none does.
template <typename Fsm>
int32_t RuleThatBeginsIn(const Fsm& fsm, int state) {
  int32_t rule = -1;
  for (const auto& edge : fsm.GetEdges(state))
    if (edge.IsRuleRef()) rule = edge.GetRefRuleId();
  return rule;
}

// Every token that the chain accepts may follow in the state. Tokens that it does not accept may follow, too.
template <typename Grammar>
StateChain ChainFrom(const Grammar& grammar, int32_t rule, int state) {
  StateChain chain;
  const auto& fsm = grammar->complete_fsm;
  for (size_t steps = 0; chain.length < kLongestChain && steps < 4 * kLongestChain; ++steps) {
    // The end of such a rule depends on more than its states.
    if (grammar->GetRule(rule).is_lazy || grammar->GetSuffixStopInfo(rule) != nullptr) return chain;
    const auto [target, next] = MostLeadTo(fsm, state);
    if (next.length == 0) {
      rule = RuleThatBeginsIn(fsm, state);
      if (rule < 0 || !grammar->per_rule_fsms[rule].has_value()) return chain;
      state = grammar->per_rule_fsms[rule]->GetFsm().GetStart();
      continue;
    }
    if (chain.length == 0) chain.characters = next.characters;
    if ((chain.characters & ~next.characters).any()) return chain;
    ++chain.length;
    state = target;
  }
  return chain;
}

// By rule: whether the text ends wherever the rule does, so that no token may reach past its end. True of a rule that
// stands only at the end of such rules.
template <typename Grammar>
std::vector<bool> RulesThatEndTheText(const Grammar& grammar) {
  const auto& fsm = grammar->complete_fsm;
  std::vector<bool> ends(grammar->NumRules(), true);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t rule = 0; rule < ends.size(); ++rule) {
      std::unordered_set<int> states;
      grammar->per_rule_fsms[rule]->GetFsm().GetReachableStates(&states);
      for (const int state : states) {
        for (const auto& edge : fsm.GetEdges(state)) {
          if (!edge.IsRuleRef() && !edge.IsRepeatRef()) continue;
          const bool last = edge.IsRuleRef() && ends[rule] && fsm.GetEdges(edge.target).size() == 0;
          const int32_t begins =
              edge.IsRuleRef() ? edge.GetRefRuleId() : fsm.GetRepeatEdgeInfo(edge.GetAuxIndex()).RuleId();
          if (last || !ends[begins]) continue;
          ends[begins] = false;
          changed = true;
        }
      }
    }
  }
  return ends;
}

}  // namespace dovetail
