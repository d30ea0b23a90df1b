#include "base/trace.h"

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace dovetail {

std::vector<Trace::Span> Trace::Spans() const {
  std::vector<Span> spans;
  spans.reserve(spans_.size());
  const size_t first = spans_.size() < kMostSpans ? 0 : next_ % kMostSpans;
  for (size_t i = 0; i < spans_.size(); ++i) spans.push_back(spans_[(first + i) % spans_.size()]);
  return spans;
}

// The array may stay open at its end, so files of several processes can be joined by appending one to the other.
std::string ChromeTrace(const std::vector<const Trace*>& traces) {
  std::string out = "[\n";
  for (const Trace* trace : traces) {
    // Processes of one name are one row of the picture, wherever the file came from.
    uint32_t pid = 2166136261u;
    for (const char c : trace->process()) pid = (pid ^ static_cast<uint8_t>(c)) * 16777619u;
    pid %= 1'000'000;
    absl::StrAppend(&out, R"({"ph":"M","name":"process_name","pid":)", pid, R"(,"args":{"name":")", trace->process(),
                    "\"}},\n");
    for (const Trace::Span& span : trace->Spans()) {
      const int64_t begin_us = absl::ToUnixMicros(span.begin);
      const bool instant = span.duration == absl::ZeroDuration();
      absl::StrAppend(&out, R"({"ph":")", instant ? "i" : "X", R"(","name":")", span.what, R"(","pid":)", pid,
                      R"(,"tid":)", span.micro_batch.value(), R"(,"ts":)", begin_us);
      if (!instant) absl::StrAppend(&out, R"(,"dur":)", absl::ToDoubleMicroseconds(span.duration));
      absl::StrAppend(&out, R"(,"args":{"step":)", span.step.value(), R"(,"op":)", span.op, "}},\n");
    }
  }
  return out;
}

absl::Status WriteChromeTrace(const std::string& path, const std::vector<const Trace*>& traces) {
  if (path.empty()) return absl::OkStatus();
  std::FILE* file = std::fopen(path.c_str(), "w");
  const std::string text = ChromeTrace(traces);
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file == nullptr || std::fclose(file) != 0 || !written)
    return absl::UnavailableError(absl::StrCat("--trace-file: ", path, " cannot be written"));
  return absl::OkStatus();
}

}  // namespace dovetail
