#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/openai/served_model.h"

namespace dovetail::server::test {

inline constexpr TokenId kBos = 256, kEos = 257, kTurn = 258, kThe = 260;

// A model of bytes: token i < 256 is the byte i, then <bos>, <eos>, <turn>, <pad>, and the merged token "the". Its chat
// template is "<turn>ROLE:CONTENT" for each message, and "<turn>assistant:" at the end.
std::shared_ptr<ServedModel> TestModel(int max_model_len = 4096,
                                       const std::vector<std::string>& more_control_tokens = {});  // from 262 on

// With an engine that compiles grammars; `begins` is called when a grammar is compiled, on the thread that does.
std::shared_ptr<ServedModel> ModelWithGrammars(
    std::function<void()> begins = [] {}, int max_model_len = 4096);

// With the five tokens, from 262 on, with which a text is filled in: before, behind, between, a file, the end.
std::shared_ptr<ServedModel> FillInModel();

}  // namespace dovetail::server::test
