#include "server/http/tls_session.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/check.h"

namespace dovetail::server {
namespace {

// OpenSSL's own socket BIO writes with write(), which raises SIGPIPE for a client that has left.
int SocketOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

int WriteSocket(BIO* bio, const char* data, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t sent = send(SocketOf(bio), data, static_cast<size_t>(size), MSG_NOSIGNAL);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int ReadSocket(BIO* bio, char* data, int room) {
  BIO_clear_retry_flags(bio);
  const ssize_t got = recv(SocketOf(bio), data, static_cast<size_t>(room), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
  if (got == 0) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  return static_cast<int>(got);
}

long ControlSocket(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_FLUSH) return 1;
  if (command == BIO_CTRL_EOF) return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0;
  return 0;
}

BIO_METHOD* MakeSocketMethod() {
  BIO_METHOD* method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket without SIGPIPE");
  BIO_meth_set_write(method, WriteSocket);
  BIO_meth_set_read(method, ReadSocket);
  BIO_meth_set_ctrl(method, ControlSocket);
  return method;
}

BIO* NewSocketBio(int socket) {
  static BIO_METHOD* const method = MakeSocketMethod();  // for as long as any session may use it: the process
  BIO* bio = BIO_new(method);
  DT_CHECK(bio != nullptr, "out of memory");
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  BIO_set_init(bio, 1);
  return bio;
}

}  // namespace

TlsSession::TlsSession(std::shared_ptr<SSL_CTX> context, int socket)
    : context_(std::move(context)), ssl_(SSL_new(context_.get())) {
  DT_CHECK(ssl_ != nullptr, "out of memory");
  BIO* bio = NewSocketBio(socket);
  SSL_set_bio(ssl_, bio, bio);  // takes it over
  SSL_set_accept_state(ssl_);
}

TlsSession::~TlsSession() { SSL_free(ssl_); }

TlsSession::Outcome TlsSession::OutcomeOf(int result) {
  switch (SSL_get_error(ssl_, result)) {
    case SSL_ERROR_NONE: return Outcome::kDone;
    case SSL_ERROR_WANT_READ: return Outcome::kWaitRead;
    case SSL_ERROR_WANT_WRITE: return Outcome::kWaitWrite;
    case SSL_ERROR_ZERO_RETURN: return Outcome::kEnd;
    default: break;
  }
  usable_ = false;
  const bool plain = ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST;
  ERR_clear_error();
  return plain ? Outcome::kPlainHttp : Outcome::kFailed;
}

TlsSession::Outcome TlsSession::Handshake() {
  ERR_clear_error();
  const Outcome outcome = OutcomeOf(SSL_do_handshake(ssl_));
  if (outcome == Outcome::kDone) usable_ = true;
  return outcome;
}

TlsSession::Result TlsSession::Read(char* data, size_t room) {
  ERR_clear_error();
  const int got = SSL_read(ssl_, data, static_cast<int>(std::min<size_t>(room, INT_MAX)));
  if (got > 0) return {Outcome::kDone, static_cast<size_t>(got)};
  return {OutcomeOf(got), 0};
}

TlsSession::Result TlsSession::Write(const char* data, size_t size) {
  ERR_clear_error();
  const int sent = SSL_write(ssl_, data, static_cast<int>(std::min<size_t>(size, INT_MAX)));
  if (sent > 0) return {Outcome::kDone, static_cast<size_t>(sent)};
  return {OutcomeOf(sent), 0};
}

bool TlsSession::HasUnread() const { return SSL_pending(ssl_) > 0; }

void TlsSession::SendEnd() {
  if (!usable_) return;
  usable_ = false;
  ERR_clear_error();
  SSL_shutdown(ssl_);
  ERR_clear_error();
}

}  // namespace dovetail::server
