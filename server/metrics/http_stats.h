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

// Why a TLS handshake failed: it took too long; the client closed the connection; it spoke HTTP, or something that is
// no TLS; it shares no version, cipher or ALPN protocol with this server; its certificate is missing or not accepted;
// it said that it does not go on (mostly as it does not trust this server's certificate); anything else.
enum class TlsFailure { kTimeout, kClientLeft, kPlainHttp, kNoTls, kNothingShared, kClientCertificate, kAlert, kOther };
inline constexpr std::array<const char*, 8> kTlsFailures = {
    "timeout", "client_left", "plain_http", "no_tls", "nothing_shared", "client_certificate", "alert", "other"};

// What the connections of a server are doing now, and what they have counted since it started.
// Threads: thread-compatible; a value.
struct HttpStats {
  int connections = 0;
  int max_connections = 0;
  int active_requests = 0;
  int requests_to_read = 0;                                     // wait for a worker that parses and tokenises
  int64_t certificate_end = 0;                                  // of --ssl-certfile, in seconds since 1970; 0: none
  size_t body_bytes = 0;                                        // held by bodies that are read, or wait to be parsed
  std::array<uint64_t, kBodyRefusals.size()> bodies_refused{};  // by BodyRefusal
  std::array<uint64_t, kForRoom.size()> ended_for_room{};       // by ForRoom
  std::array<uint64_t, kTlsFailures.size()> tls_failures{};     // by TlsFailure
};

}  // namespace dovetail::server
