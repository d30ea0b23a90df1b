#include "model/tokenizer/stop_strings.h"

#include <algorithm>
#include <utility>

#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

std::vector<uint16_t> Borders(const std::string& text) {
  std::vector<uint16_t> failure(text.size() + 1, 0);
  for (size_t length = 2; length <= text.size(); ++length) {
    uint16_t border = failure[length - 1];
    while (border > 0 && text[border] != text[length - 1]) border = failure[border];
    if (text[border] == text[length - 1]) ++border;
    failure[length] = border;
  }
  return failure;
}

}  // namespace

absl::StatusOr<StopMatcher> StopMatcher::Create(std::vector<std::string> stop_strings, bool include_stop) {
  if (stop_strings.size() > kMaxStopStrings) {
    return InvalidArgument("stop: ", stop_strings.size(), " strings exceed the limit of ", kMaxStopStrings);
  }
  StopMatcher matcher;
  matcher.include_stop_ = include_stop;
  for (size_t i = 0; i < stop_strings.size(); ++i) {
    std::string& text = stop_strings[i];
    if (text.empty()) return InvalidArgument("stop[", i, "]: an empty string matches everywhere; leave it out");
    if (text.size() > kMaxStopStringBytes) {
      return InvalidArgument("stop[", i, "]: ", text.size(), " bytes exceed the limit of ", kMaxStopStringBytes);
    }
    if (ValidUtf8Prefix(text) != text.size()) return InvalidArgument("stop[", i, "]: not valid UTF-8");
    std::vector<uint16_t> failure = Borders(text);
    matcher.patterns_.push_back({std::move(text), std::move(failure)});
  }
  return matcher;
}

void StopMatcher::Advance(char byte) {
  for (size_t i = 0; i < patterns_.size(); ++i) {
    Pattern& pattern = patterns_[i];
    uint16_t& matched = pattern.matched;
    while (matched > 0 && pattern.text[matched] != byte) matched = pattern.failure[matched];
    if (pattern.text[matched] == byte) ++matched;
    if (matched < pattern.text.size()) continue;
    const StopMatch found{static_cast<int>(i), total_ - matched, total_};
    if (!match_.has_value() || found.begin < match_->begin) match_ = found;
  }
}

std::string StopMatcher::Push(std::string_view text) {
  if (match_.has_value()) return {};
  for (const char byte : text) {
    held_.push_back(byte);
    ++total_;
    Advance(byte);
    if (!match_.has_value()) continue;
    const size_t held_from = total_ - held_.size();
    std::string shown = held_.substr(0, (include_stop_ ? match_->end : match_->begin) - held_from);
    held_.clear();
    return shown;
  }
  size_t keep = 0;
  for (const Pattern& pattern : patterns_) keep = std::max<size_t>(keep, pattern.matched);
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopMatcher::PushUnwatched(std::string_view text) {
  if (match_.has_value()) return {};
  for (Pattern& pattern : patterns_) pattern.matched = 0;
  total_ += text.size();
  std::string shown = std::exchange(held_, {});
  shown.append(text);
  return shown;
}

std::string StopMatcher::Finish() {
  if (match_.has_value()) return {};
  for (Pattern& pattern : patterns_) pattern.matched = 0;
  return std::exchange(held_, {});
}

}  // namespace dovetail::model
