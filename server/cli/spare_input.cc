#include "server/cli/spare_input.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"

namespace dovetail::cli {
namespace {

constexpr const char* kServe = "serve";

absl::StatusOr<std::optional<SpareOrder>> OrderIn(const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  SpareOrder order;
  if (words.size() > 1) order.name = words[1];
  uint64_t bytes = 0;
  if (words.size() > 2 && absl::SimpleAtoi(words[2], &bytes) && bytes > 0) order.kv_bytes = bytes;
  if (words.front() == kServe && !order.name.empty() && words.size() <= (order.kv_bytes ? 3u : 2u)) return order;
  return InvalidArgument("--spare: standard input says '", line, "'; write `serve NAME` or `serve NAME KV_BYTES`");
}

}  // namespace

std::string ServeLine(const SpareOrder& order) {
  return absl::StrCat(kServe, " ", order.name, order.kv_bytes ? absl::StrCat(" ", *order.kv_bytes) : "");
}

SpareInput::SpareInput(int file) : file_(file), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { DT_CHECK(stop_ >= 0); }

SpareInput::~SpareInput() { close(stop_); }

void SpareInput::Stop() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_, &one, sizeof(one));
}

// False: nothing more will come.
bool SpareInput::ReadMore(std::string& text) const {
  while (true) {
    pollfd files[2] = {{file_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (poll(files, 2, -1) < 0 && errno != EINTR) return false;
    if (files[1].revents != 0) return false;
    if (files[0].revents == 0) continue;
    char bytes[kMostServeLineBytes];
    const ssize_t count = read(file_, bytes, sizeof(bytes));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count > 0) text.append(bytes, static_cast<size_t>(count));
    return count > 0;
  }
}

absl::StatusOr<std::optional<SpareOrder>> SpareInput::Wait() {
  std::string text;
  while (true) {
    if (const size_t end = text.find('\n'); end != std::string::npos) return OrderIn(text.substr(0, end));
    if (text.size() >= kMostServeLineBytes)
      return InvalidArgument("--spare: standard input brings more than ", kMostServeLineBytes,
                             " bytes without the end of a line; write `serve NAME` or `serve NAME KV_BYTES`");
    if (!ReadMore(text)) return std::nullopt;
  }
}

}  // namespace dovetail::cli
