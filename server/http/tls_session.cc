#include "server/http/tls_session.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509_vfy.h>
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
  const unsigned long error = ERR_peek_error();
  ERR_clear_error();
  if (!SSL_is_init_finished(ssl_)) failure_ = FailureOf(error);
  return ERR_GET_REASON(error) == SSL_R_HTTP_REQUEST ? Outcome::kPlainHttp : Outcome::kFailed;
}

TlsSession::Failure TlsSession::FailureOf(unsigned long error) const {
  if (error == 0) return {TlsFailure::kClientLeft, "the client closed the connection"};
  const char* const text = ERR_reason_error_string(error);
  const std::string what = text == nullptr ? "unknown error" : text;
  if (ERR_GET_LIB(error) != ERR_LIB_SSL) return {TlsFailure::kOther, what};
  const int reason = ERR_GET_REASON(error);
  if (reason >= SSL_AD_REASON_OFFSET) return {TlsFailure::kAlert, what};
  switch (reason) {
    case SSL_R_UNEXPECTED_EOF_WHILE_READING: return {TlsFailure::kClientLeft, what};
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST: return {TlsFailure::kPlainHttp, what};
    case SSL_R_WRONG_VERSION_NUMBER:  // the first bytes are those of no record
    case SSL_R_PACKET_LENGTH_TOO_LONG:
    case SSL_R_BAD_RECORD_TYPE:
    case SSL_R_UNEXPECTED_MESSAGE: return {TlsFailure::kNoTls, what};
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_VERSION_TOO_LOW:
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_NO_SHARED_SIGNATURE_ALGORITHMS:
    case SSL_R_NO_SUITABLE_KEY_SHARE:
    case SSL_R_NO_APPLICATION_PROTOCOL: return {TlsFailure::kNothingShared, what};
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE: return {TlsFailure::kClientCertificate, what};
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
      return {TlsFailure::kClientCertificate, what + ": " + X509_verify_cert_error_string(SSL_get_verify_result(ssl_))};
    default: return {TlsFailure::kOther, what};
  }
}

TlsSession::Outcome TlsSession::Handshake() {
  ERR_clear_error();
  const Outcome outcome = OutcomeOf(SSL_do_handshake(ssl_));
  if (outcome == Outcome::kEnd) failure_ = FailureOf(0);
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
