#pragma once
#include <vector>

#include "base/ids.h"
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/thoughts.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

// How grammars spell this model's marks. The model outlives it.
// Threads: pure.
MarkSpeller MarksOf(const ServedModel& model);

// The special tokens that the parsers of these formats read as text, in order.
// Null: no format.
std::vector<TokenId> MarkTokens(const ServedModel& model, const CallFormat* calls, const ThoughtFormat* thoughts);

}  // namespace dovetail::server
