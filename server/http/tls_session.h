#pragma once
#include <openssl/ssl.h>

#include <cstddef>
#include <memory>
#include <string>

#include "server/metrics/http_stats.h"

namespace dovetail::server {

// TLS on one connected, non-blocking socket, from the server's side. Nothing blocks: what cannot go on says what the
// caller must wait for, and is called again.
// Threads: thread-compatible.
class TlsSession {
 public:
  enum class Outcome {
    kDone,
    kWaitRead,   // until the socket is readable
    kWaitWrite,  // until it is writable
    kEnd,        // the client sends nothing more
    kPlainHttp,  // of the handshake: the client does not speak TLS, but HTTP
    kFailed,     // the connection is of no use any more
  };
  struct Result {
    Outcome outcome = Outcome::kDone;
    size_t bytes = 0;
  };

  // The socket stays the caller's, and outlives this.
  TlsSession(std::shared_ptr<SSL_CTX> context, int socket);
  ~TlsSession();

  struct Failure {
    TlsFailure why = TlsFailure::kOther;
    std::string what;  // in OpenSSL's words; nothing of the client's is in it
  };

  Outcome Handshake();
  // After it ended with kPlainHttp, kEnd or kFailed.
  const Failure& failure() const { return failure_; }
  Result Read(char* data, size_t room);
  // After kWaitWrite again with the same bytes, at this or another address.
  Result Write(const char* data, size_t size);
  bool HasUnread() const;  // bytes that came already: the socket need not become readable
  void SendEnd();          // if the socket takes it; nothing may be written afterwards

 private:
  Outcome OutcomeOf(int result);
  Failure FailureOf(unsigned long error) const;

  const std::shared_ptr<SSL_CTX> context_;
  SSL* const ssl_;
  Failure failure_;
  bool usable_ = false;  // shaken hands, not failed, not ended
};

}  // namespace dovetail::server
