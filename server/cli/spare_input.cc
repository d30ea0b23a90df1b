#include "server/cli/spare_input.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/check.h"

namespace dovetail::cli {
namespace {

constexpr const char* kServe = "serve ";

absl::StatusOr<std::optional<std::string>> NameIn(const std::string& line) {
  const std::string serve = kServe;
  if (line.size() > serve.size() && line.starts_with(serve)) return line.substr(serve.size());
  return InvalidArgument("--spare: standard input says '", line, "'; write `serve NAME`");
}

}  // namespace

std::string ServeLine(const std::string& name) { return kServe + name; }

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

absl::StatusOr<std::optional<std::string>> SpareInput::Wait() {
  std::string text;
  while (true) {
    if (const size_t end = text.find('\n'); end != std::string::npos) return NameIn(text.substr(0, end));
    if (text.size() >= kMostServeLineBytes)
      return InvalidArgument("--spare: standard input brings more than ", kMostServeLineBytes,
                             " bytes without the end of a line; write `serve NAME`");
    if (!ReadMore(text)) return std::nullopt;
  }
}

}  // namespace dovetail::cli
