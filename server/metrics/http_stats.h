#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace dovetail::server {

enum class BodyRefusal { kTooLarge, kNoRoom, kTooSlow };
inline constexpr std::array<const char*, 3> kBodyRefusals = {"too_large", "no_room", "too_slow"};

// Why a connection ended while all places were taken: its request found none, a newer one came that may be a probe, or
// it was idle and a request needed its place.
enum class ForRoom { kRefused, kDisplaced, kIdle };
inline constexpr std::array<const char*, 3> kForRoom = {"refused", "displaced", "idle"};

// What the connections of a server are doing now, and what they have counted since it started. A value.
struct HttpStats {
  int connections = 0;
  int max_connections = 0;
  int active_requests = 0;
  size_t body_bytes = 0;                                        // held by bodies that are read, or wait to be parsed
  std::array<uint64_t, kBodyRefusals.size()> bodies_refused{};  // by BodyRefusal
  std::array<uint64_t, kForRoom.size()> ended_for_room{};       // by ForRoom
};

}  // namespace dovetail::server
