#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "model/chat_template/runtime.h"

// String operations shared by filters and methods. All keep the flags of the characters they keep; a character they
// change (upper, lower) keeps the flag of the one it came from. Callers charge for the size of `text`; what a result
// has more than that is charged here.
// Errors: kInvalidArgument for an empty separator or an item that is no string; kResourceExhausted for a result beyond
// the limits.
// Threads: as the Runtime: one thread at a time.

namespace dovetail::model::jinja {

enum class Side { kLeft, kRight, kBoth };

// Removes white space, or the code points of *characters, at the given ends.
Text Strip(const Text& text, Side side, const std::string_view* characters = nullptr);
Text MapRuns(const Text& text, std::string (*map)(std::string_view));
// First letter upper, the rest lower; of every word for Title.
Text Capitalize(const Text& text);
Text Title(const Text& text);
// & < > ' " as HTML entities; markup stays as it is. The result is markup.
Text EscapeHtml(const Text& text);
// At most `limit` occurrences; all when negative.
absl::StatusOr<Text> Replace(Runtime& runtime, const Text& text, std::string_view from, const Text& to,
                             int64_t limit = -1);
// str.split: by white space when `separator` is null. At most `limit` cuts when it is not negative.
absl::StatusOr<std::vector<Text>> Split(Runtime& runtime, const Text& text, const std::string_view* separator,
                                        int64_t limit);
absl::StatusOr<std::vector<Text>> SplitFromRight(Runtime& runtime, const Text& text, const std::string_view* separator,
                                                 int64_t limit);
absl::StatusOr<std::vector<Text>> SplitLines(Runtime& runtime, const Text& text, bool keep_ends);
// Moves texts into a list of strings.
absl::StatusOr<Value> TextList(Runtime& runtime, std::vector<Text> texts, bool is_tuple = false);
// `text` padded to `width` code points. Side says where the text stays.
absl::StatusOr<Text> PadTo(Runtime& runtime, const Text& text, int64_t width, std::string_view fill, bool left,
                           bool right);
// Items as strings with `separator` between them.
absl::StatusOr<Value> Join(Runtime& runtime, const std::vector<Value>& items, const Text& separator, bool only_strings);

}  // namespace dovetail::model::jinja
