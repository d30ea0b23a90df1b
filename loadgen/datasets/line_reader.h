#pragma once
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"

namespace dovetail::loadgen {

// The lines of a text file, plain or gzip (told by its first two bytes), without holding more of it than a line.
// Decompression is ISA-L's, which the project links already.
// Threads: thread-compatible.
class LineReader {
 public:
  static constexpr size_t kMaxLineBytes = size_t{64} << 20;

  // kNotFound or kInvalidArgument names `path`.
  static absl::StatusOr<std::unique_ptr<LineReader>> Open(const std::string& path);
  ~LineReader();

  // The next line without its end ("\n" or "\r\n"); nullopt at the end of the file. kDataLoss: damaged gzip, or a line
  // beyond kMaxLineBytes; the message names the path and the line.
  absl::StatusOr<std::optional<std::string>> Next();

  int64_t line() const { return line_; }  // the number of the line that came last, from 1
  // "requests.jsonl: line 7"
  std::string Place() const;

 private:
  struct Inflater;
  LineReader(std::string path, std::ifstream file);
  absl::Status Fill();  // appends to buffer_, or sets ended_

  std::string path_;
  std::ifstream file_;
  std::unique_ptr<Inflater> inflater_;  // null: plain text
  std::string buffer_;
  size_t at_ = 0;  // of buffer_, not yet returned
  bool ended_ = false;
  int64_t line_ = 0;
};

}  // namespace dovetail::loadgen
