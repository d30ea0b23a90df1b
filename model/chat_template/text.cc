#include "model/chat_template/text.h"

#include <algorithm>

namespace dovetail::model::jinja {

bool Text::IsInputAt(size_t offset) const {
  const auto flips = std::upper_bound(switches_.begin(), switches_.end(), offset) - switches_.begin();
  return first_is_input_ != (flips % 2 == 1);
}

void Text::Append(std::string_view bytes, bool is_input) {
  if (bytes.empty()) return;
  if (empty()) {
    first_is_input_ = is_input;
    switches_.clear();
  } else if (LastIsInput() != is_input) {
    switches_.push_back(size());
  }
  bytes_.append(bytes);
}

void Text::Append(const Text& other) {
  if (&other == this) return Append(Text(other));
  other.ForEachRun([this](std::string_view run, bool is_input) { Append(run, is_input); });
}

Text Text::Slice(size_t begin, size_t end) const {
  end = std::min(end, size());
  Text out;
  out.is_markup_ = is_markup_;
  if (begin >= end) return out;
  out.Append(view().substr(begin, end - begin), IsInputAt(begin));
  auto first = std::upper_bound(switches_.begin(), switches_.end(), begin);
  for (; first != switches_.end() && *first < end; ++first) out.switches_.push_back(*first - begin);
  return out;
}

}  // namespace dovetail::model::jinja
