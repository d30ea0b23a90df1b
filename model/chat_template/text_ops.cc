#include "model/chat_template/text_ops.h"

#include <algorithm>

#include "model/chat_template/python_repr.h"
#include "model/chat_template/unicode.h"

namespace dovetail::model::jinja {
namespace {

// The characters that strip() removes.
class StripSet {
 public:
  explicit StripSet(const std::string_view* characters) : is_space_(!characters) {
    for (size_t at = 0; characters && at < characters->size();) {
      const char32_t c = DecodeAt(*characters, at);
      if (c < 128) {
        ascii_[c] = true;
      } else {
        others_.push_back(c);
      }
    }
    std::sort(others_.begin(), others_.end());
  }

  bool Contains(char32_t c) const {
    if (is_space_) return IsSpace(c);
    return c < 128 ? ascii_[c] : std::binary_search(others_.begin(), others_.end(), c);
  }

 private:
  const bool is_space_;
  bool ascii_[128] = {};
  std::vector<char32_t> others_;
};

// As DecodeAt, but without a call for what is ASCII.
char32_t TakeAt(std::string_view bytes, size_t& offset) {
  const auto first = static_cast<unsigned char>(bytes[offset]);
  if (first >= 128) return DecodeAt(bytes, offset);
  ++offset;
  return first;
}

absl::Status AddPiece(Runtime& runtime, std::vector<Text>& pieces, Text piece) {
  if (pieces.size() >= runtime.limits().list_items) return runtime.ChargeItems(pieces.size() + 1);
  DT_RETURN_IF_ERROR(runtime.Charge());
  pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Text>> SplitBySpace(Runtime& runtime, const Text& text, int64_t limit) {
  std::vector<Text> pieces;
  const std::string_view view = text.view();
  size_t begin = std::string_view::npos;  // of the current word
  for (size_t at = 0; at < view.size();) {
    const size_t start = at;
    const bool is_space = IsSpace(DecodeAt(view, at));
    if (!is_space && begin == std::string_view::npos) {
      begin = start;
      if (limit >= 0 && static_cast<int64_t>(pieces.size()) >= limit) {
        DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(begin, view.size())));
        return pieces;
      }
    } else if (is_space && begin != std::string_view::npos) {
      DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(begin, start)));
      begin = std::string_view::npos;
    }
  }
  if (begin != std::string_view::npos) DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(begin, view.size())));
  return pieces;
}

absl::StatusOr<std::vector<Text>> SplitBySpaceFromRight(Runtime& runtime, const Text& text, int64_t limit) {
  std::vector<Text> pieces;
  const std::string_view view = text.view();
  Text rest = Strip(text, Side::kRight);
  while (!rest.empty()) {
    size_t cut = rest.size();
    while (cut > 0) {
      const size_t previous = PreviousOffset(view, cut);
      size_t at = previous;
      if (IsSpace(DecodeAt(view, at))) break;
      cut = previous;
    }
    if (limit >= 0 && static_cast<int64_t>(pieces.size()) >= limit) cut = 0;
    DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, rest.Slice(cut, rest.size())));
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(cut));
    rest = Strip(rest.Slice(0, cut), Side::kRight);
  }
  if (!pieces.empty() && pieces.back().empty()) pieces.pop_back();
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

}  // namespace

Text Strip(const Text& text, Side side, const std::string_view* characters) {
  const StripSet stripped(characters);
  const std::string_view view = text.view();
  size_t begin = 0, end = view.size();
  while (side != Side::kRight && begin < end) {
    size_t next = begin;
    if (!stripped.Contains(TakeAt(view, next))) break;
    begin = next;
  }
  while (side != Side::kLeft && begin < end) {
    const size_t previous = PreviousOffset(view, end);
    size_t at = previous;
    if (!stripped.Contains(TakeAt(view, at))) break;
    end = previous;
  }
  return text.Slice(begin, end);
}

Text MapRuns(const Text& text, std::string (*map)(std::string_view)) {
  Text out;
  out.set_markup(text.is_markup());
  text.ForEachRun([&](std::string_view run, bool is_input) { out.Append(map(run), is_input); });
  return out;
}

Text Capitalize(const Text& text) {
  const size_t first = OffsetOfCodePoint(text.view(), 1);
  Text out = MapRuns(text.Slice(0, first), ToUpper);
  out.Append(MapRuns(text.Slice(first, text.size()), ToLower));
  return out;
}

Text Title(const Text& text) {
  Text out;
  bool in_word = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const bool is_letter = IsAlpha(DecodeAt(text.view(), at));
    const std::string_view bytes = text.view().substr(begin, at - begin);
    out.Append(in_word ? ToLower(bytes) : ToUpper(bytes), text.IsInputAt(begin));
    in_word = is_letter;
  }
  return out;
}

Text EscapeHtml(const Text& text) {
  if (text.is_markup()) return text;
  Text out;
  out.set_markup(true);
  text.ForEachRun([&](std::string_view run, bool is_input) {
    std::string escaped;
    for (char c : run) {
      switch (c) {
        case '&': escaped += "&amp;"; break;
        case '<': escaped += "&lt;"; break;
        case '>': escaped += "&gt;"; break;
        case '\'': escaped += "&#39;"; break;
        case '"': escaped += "&#34;"; break;
        default: escaped += c;
      }
    }
    out.Append(escaped, is_input);
  });
  return out;
}

absl::StatusOr<Text> Replace(Runtime& runtime, const Text& text, std::string_view from, const Text& to, int64_t limit) {
  const std::string_view view = text.view();
  Text out;
  size_t at = 0;
  for (int64_t done = 0; limit < 0 || done < limit; ++done) {
    size_t found = FindBytes(view, from, from.empty() && done > 0 ? at + 1 : at);
    if (from.empty()) {  // Python inserts before every code point and at the end
      found = done == 0          ? 0
              : at < view.size() ? at + CodePointBytes(static_cast<unsigned char>(view[at]))
                                 : std::string_view::npos;
    }
    if (found == std::string_view::npos) break;
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(to.Cost()));
    if (out.size() + to.size() > runtime.string_bytes_max()) return runtime.ChargeString(out.size() + to.size());
    out.Append(text.Slice(at, found));
    out.Append(to);
    at = found + from.size();
  }
  out.Append(text.Slice(at, view.size()));
  return out;
}

absl::StatusOr<std::vector<Text>> Split(Runtime& runtime, const Text& text, const std::string_view* separator,
                                        int64_t limit) {
  if (!separator) return SplitBySpace(runtime, text, limit);
  if (separator->empty()) return InvalidArgument("empty separator");
  std::vector<Text> pieces;
  size_t at = 0;
  while (limit < 0 || static_cast<int64_t>(pieces.size()) < limit) {
    const size_t found = FindBytes(text.view(), *separator, at);
    if (found == std::string_view::npos) break;
    DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(at, found)));
    at = found + separator->size();
  }
  DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(at, text.size())));
  return pieces;
}

absl::StatusOr<std::vector<Text>> SplitFromRight(Runtime& runtime, const Text& text, const std::string_view* separator,
                                                 int64_t limit) {
  if (limit < 0) return Split(runtime, text, separator, limit);
  if (!separator) return SplitBySpaceFromRight(runtime, text, limit);
  if (separator->empty()) return InvalidArgument("empty separator");
  std::vector<Text> pieces;
  size_t end = text.size();
  while (static_cast<int64_t>(pieces.size()) < limit && end >= separator->size()) {
    const size_t found = FindLastBytes(text.view().substr(0, end), *separator);
    DT_RETURN_IF_ERROR(runtime.Charge((end - (found == std::string_view::npos ? 0 : found) + separator->size()) / 16));
    if (found == std::string_view::npos) break;
    DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(found + separator->size(), end)));
    end = found;
  }
  DT_RETURN_IF_ERROR(AddPiece(runtime, pieces, text.Slice(0, end)));
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

absl::StatusOr<std::vector<Text>> SplitLines(Runtime& runtime, const Text& text, bool keep_ends) {
  std::vector<Text> lines;
  const std::string_view view = text.view();
  for (size_t at = 0; at < view.size();) {
    const size_t end = std::min(view.find_first_of("\n\r", at), view.size());
    const size_t next = end == view.size() ? end : end + (view.substr(end).starts_with("\r\n") ? 2 : 1);
    DT_RETURN_IF_ERROR(AddPiece(runtime, lines, text.Slice(at, keep_ends ? next : end)));
    at = next;
  }
  return lines;
}

absl::StatusOr<Value> TextList(Runtime& runtime, std::vector<Text> texts, bool is_tuple) {
  DT_ASSIGN_OR_RETURN(List * list, runtime.NewList(texts.size(), is_tuple));
  for (Text& text : texts) {
    DT_ASSIGN_OR_RETURN(Value value, runtime.NewString(std::move(text)));
    list->items.push_back(std::move(value));
  }
  return Value(list);
}

absl::StatusOr<Text> PadTo(Runtime& runtime, const Text& text, int64_t width, std::string_view fill, bool left,
                           bool right) {
  const auto length = static_cast<int64_t>(CountCodePoints(text.view()));
  if (width <= length) return text;
  const auto missing = static_cast<size_t>(width - length);
  if (missing > runtime.string_bytes_max() / std::max<size_t>(fill.size(), 1)) {
    return runtime.ChargeString(runtime.string_bytes_max() + 1);
  }
  DT_RETURN_IF_ERROR(runtime.ChargeString(text.size() + missing * fill.size()));
  DT_RETURN_IF_ERROR(runtime.Charge(missing / 8));
  const size_t before = !left ? 0 : !right ? missing : missing / 2 + (missing & static_cast<size_t>(width) & 1);
  Text out;
  for (size_t i = 0; i < before; ++i) out.Append(fill, false);
  out.Append(text);
  for (size_t i = before; i < missing; ++i) out.Append(fill, false);
  return out;
}

absl::StatusOr<Value> Join(Runtime& runtime, const std::vector<Value>& items, const Text& separator,
                           bool only_strings) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (only_strings && !items[i].IsString()) {
      return InvalidArgument("sequence item ", i, ": expected str instance, ", TypeName(items[i]), " found");
    }
    if (out.size() + separator.size() > runtime.string_bytes_max())
      return runtime.ChargeString(out.size() + separator.size());
    DT_RETURN_IF_ERROR(runtime.ChargeBytes(separator.Cost()));
    if (i > 0) out.Append(separator);
    if (items[i].IsString()) {
      DT_RETURN_IF_ERROR(runtime.ChargeBytes(items[i].text().Cost()));
      out.Append(items[i].text());
    } else {
      DT_ASSIGN_OR_RETURN(const Text text, ToText(runtime, items[i]));
      out.Append(text);
    }
  }
  return runtime.NewString(std::move(out));
}

}  // namespace dovetail::model::jinja
