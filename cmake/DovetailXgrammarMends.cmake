# What is changed in xgrammar's sources before they are compiled, and why. Each change names lines that the file must
# have once, or as often as a last argument says.
function(dovetail_mend_xgrammar FILE LINES MENDED)
  set(TIMES 1)
  if(ARGC GREATER 3)
    set(TIMES ${ARGV3})
  endif()
  get_filename_component(NAME ${FILE} NAME)
  file(READ ${FILE} TEXT)
  string(REPLACE "${LINES}" "" WITHOUT "${TEXT}")
  string(LENGTH "${TEXT}" BEFORE)
  string(LENGTH "${WITHOUT}" AFTER)
  string(LENGTH "${LINES}" EACH)
  math(EXPR REMAINDER "${BEFORE} - ${AFTER} - ${TIMES} * ${EACH}")
  if(NOT REMAINDER EQUAL 0)
    message(FATAL_ERROR "xgrammar's ${NAME} is not the one that is mended here. Expected ${TIMES} times: ${LINES}")
  endif()
  string(REPLACE "${LINES}" "${MENDED}" TEXT "${TEXT}")
  file(WRITE ${FILE} "${TEXT}")
endfunction()

function(dovetail_mend_xgrammar_sources FOLDER)
  # Its strings of a bounded length let control characters, surrogates and overlong forms through. JSON does not.
  dovetail_mend_xgrammar(
    ${FOLDER}/json_schema_converter.cc
    "builder_.AddCharacterClass({{'\"', '\"'}, {'\\\\', '\\\\'}, {'\\r', '\\r'}, {'\\n', '\\n'}}, true)"
    "builder_.AddCharacterClass({{' ', '!'}, {'#', '['}, {']', '~'}, {0x80, 0xd7ff}, {0xe000, 0x10ffff}})")

  # An ASCII character was compared with the lowest byte of a range's ends, so that one up to 0x10ffff had all of them.
  dovetail_mend_xgrammar(
    ${FOLDER}/earley_parser.cc
    [=[    if (static_cast<uint8_t>(sub_sequence[i]) <= ch &&
        ch <= static_cast<uint8_t>(sub_sequence[i + 1])) {
]=]
    [=[    if (sub_sequence[i] <= ch && ch <= sub_sequence[i + 1]) {
]=]
    2)

  # Tokens are parsed one by one for each state, though most of them plainly fit: grammar/xgrammar_masks.h.
  dovetail_mend_xgrammar(${FOLDER}/grammar_compiler.cc [=[#include "fsm.h"
]=] [=[#include "fsm.h"
#include "grammar/xgrammar_masks.h"
]=])
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_compiler.cc
    [=[  std::optional<const DynamicBitset*> definite_accepted_bitset = std::nullopt;
]=]
    [=[  std::optional<const DynamicBitset*> definite_accepted_bitset = std::nullopt;
  dovetail::StateChain chain;
  if (!has_char_budget_rules_) chain = dovetail::ChainFrom(grammar_, init_rule_id_, initial_state_.element_id);
]=])
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_compiler.cc
    [=[      // This optimization is useful for simple self-recursive rules, like string content.
]=]
    [=[      if (chain.Accepts(token)) {
        tmp_accepted_indices_.push_back(i);
        continue;
      }
      // This optimization is useful for simple self-recursive rules, like string content.
]=])

  # Tokens that reach past the end of a rule are parsed at each step of a text, unless the rule is known to end it.
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_compiler.cc
    [=[  auto root_rule_id = compiled_grammar_impl->grammar->GetRootRuleId();
]=]
    [=[  auto root_rule_id = compiled_grammar_impl->grammar->GetRootRuleId();
  const auto ends_text = dovetail::RulesThatEndTheText(compiled_grammar_impl->grammar);
]=])
  dovetail_mend_xgrammar(${FOLDER}/grammar_compiler.cc "rule_id == root_rule_id);"
                         "ends_text[rule_id]);")

  # Or unless it is known what follows. A rule that occurs once, as the last part of another, is followed by what
  # follows that one: so end the rules of {0,n}, each of which ends the one before it.
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[    if (!CanUseDerivedLookahead(rule_id)) {
]=]
    [=[    for (size_t i = 0; i < rule_lookahead_infos_.size() && OnlyEndsAnotherRule(rule_id); ++i)
      rule_id = rule_lookahead_infos_[rule_id].last_in_rule;
    if (!CanUseDerivedLookahead(rule_id) || base_grammar_->GetRule(rule_id).lookahead_assertion_id != -1) {
]=])
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[    int non_last_occurrence_count = 0;
]=]
    [=[    int non_last_occurrence_count = 0;
    int last_occurrence_count = 0;
    int32_t last_in_rule = -1;
]=])
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[  bool CanUseDerivedLookahead(int32_t rule_id) const {
]=]
    [=[  bool OnlyEndsAnotherRule(int32_t rule_id) const {
    const auto& info = rule_lookahead_infos_[rule_id];
    return !info.is_triggered_by_dispatch && info.non_last_occurrence_count == 0 && info.last_occurrence_count == 1;
  }

  bool CanUseDerivedLookahead(int32_t rule_id) const {
]=])
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[          rule_lookahead_infos_[last_element[0]].appears_as_last_in_other_rule = true;
]=]
    [=[          rule_lookahead_infos_[last_element[0]].appears_as_last_in_other_rule = true;
          ++rule_lookahead_infos_[last_element[0]].last_occurrence_count;
          rule_lookahead_infos_[last_element[0]].last_in_rule = i;
]=])

  # In x{200,}, the part without an end comes last. Before the counted part, each x could belong to either, and a text
  # has as many states as the count.
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[  // If we have infinite repetition part, add it to the sequence.
  if (infinite_repetition_id.has_value()) {
    repeated_sequence.push_back(infinite_repetition_id.value());
  }
]=]
    "")
  dovetail_mend_xgrammar(
    ${FOLDER}/grammar_functor.cc
    [=[  // Add the sequence to choices.
]=]
    [=[  if (infinite_repetition_id.has_value()) repeated_sequence.push_back(infinite_repetition_id.value());

  // Add the sequence to choices.
]=])

  # A repeated character of a pattern is counted while a text is written, behind this bound, and each token that has two
  # of them is parsed then. Up to it there is a state for each, which costs little now.
  dovetail_mend_xgrammar(${FOLDER}/fsm_builder.cc "kLargeRepeatThreshold = 128;" "kLargeRepeatThreshold = 512;")
endfunction()
