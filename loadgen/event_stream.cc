#include "loadgen/event_stream.h"

namespace dovetail::loadgen {

void EventStream::TakeLine(std::string_view line, const std::function<void(std::string_view)>& take) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  if (line.empty()) {
    if (has_data_) take(data_);
    data_.clear();
    has_data_ = false;
    return;
  }
  if (line.substr(0, 5) != "data:") return;
  line.remove_prefix(5);
  if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
  if (has_data_) data_ += '\n';
  data_.append(line);
  has_data_ = true;
}

absl::Status EventStream::Add(std::string_view bytes, const std::function<void(std::string_view)>& take) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    const std::string_view part = bytes.substr(0, end);
    if (line_.size() + data_.size() + part.size() > kMaxEventBytes)
      return DataLoss("an event of the stream has more than ", kMaxEventBytes >> 20, " MiB");
    if (end == std::string_view::npos) {
      line_.append(part);
      break;
    }
    if (line_.empty()) {
      TakeLine(part, take);
    } else {
      line_.append(part);
      TakeLine(line_, take);
      line_.clear();
    }
    bytes.remove_prefix(end + 1);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::loadgen
