#include "base/trace_context.h"

#include <random>

#include "absl/strings/str_format.h"

namespace dovetail {
namespace {

// False: not all of them are lower-case hexadecimal digits.
bool ReadHex(std::string_view digits, uint64_t& value) {
  value = 0;
  for (const char c : digits) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return false;
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  return true;
}

}  // namespace

std::optional<TraceContext> ParseTraceparent(std::string_view header) {
  constexpr size_t kSize = 55;
  if (header.size() < kSize || header[2] != '-' || header[35] != '-' || header[52] != '-') return std::nullopt;
  TraceContext context;
  uint64_t version = 0, flags = 0;
  const bool good = ReadHex(header.substr(0, 2), version) && ReadHex(header.substr(3, 16), context.trace_high) &&
                    ReadHex(header.substr(19, 16), context.trace_low) && ReadHex(header.substr(36, 16), context.span) &&
                    ReadHex(header.substr(53, 2), flags);
  const bool ends = header.size() == kSize || (version > 0 && header[kSize] == '-');
  if (!good || !ends || version == 0xff || (context.trace_high | context.trace_low) == 0 || context.span == 0)
    return std::nullopt;
  context.sampled = (flags & 1) != 0;
  return context;
}

std::string TraceIdText(const TraceContext& context) {
  return absl::StrFormat("%016x%016x", context.trace_high, context.trace_low);
}
std::string SpanIdText(uint64_t span) { return absl::StrFormat("%016x", span); }

uint64_t NewSpanId() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  uint64_t id = 0;
  while (id == 0) id = random();
  return id;
}

}  // namespace dovetail
