#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace dovetail::server {

enum class BodyRefusal { kTooLarge, kNoRoom, kTooSlow };
inline constexpr std::array<const char*, 3> kBodyRefusals = {"too_large", "no_room", "too_slow"};

// What the connections of a server are doing now, and what they have counted since it started. A value.
struct HttpStats {
  int connections = 0;
  int active_requests = 0;
  size_t body_bytes = 0;                                        // held by bodies that are read, or wait to be parsed
  std::array<uint64_t, kBodyRefusals.size()> bodies_refused{};  // by BodyRefusal
};

}  // namespace dovetail::server
