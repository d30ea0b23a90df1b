// Clients that do not finish a TLS handshake, and what becomes of their connections.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/server/test_server.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

HttpServerOptions WithTls() {
  const std::string folder = dovetail::test::TempFolder().string();
  HttpServerOptions options;
  options.tls.cert_file = folder + "/server.pem";
  options.tls.key_file = folder + "/server.key";
  const std::string command = absl::StrCat(
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=server -keyout ",
      options.tls.key_file, " -out ", options.tls.cert_file, " 2>/dev/null");
  EXPECT_EQ(std::system(command.c_str()), 0);
  options.tls_handshake_timeout = std::chrono::milliseconds(200);
  options.header_timeout = options.idle_timeout = std::chrono::hours(1);
  return options;
}

// The other limits are longer than the client waits.
TEST(TlsHandshake, HasALimitOnItsTime) {
  TestServer test({}, WithTls());
  for (const std::string_view begin : {std::string_view(), std::string_view("\x16\x03\x01\x02\x00\x01", 6)}) {
    RawClient client(test.port());
    client.Send(begin);
    EXPECT_TRUE(client.WaitForClose());
  }
}

TEST(TlsHandshake, WithWhatIsNoTlsEndsAtOnce) {
  HttpServerOptions options = WithTls();
  options.tls_handshake_timeout = std::chrono::hours(1);
  TestServer test({}, options);
  RawClient client(test.port());
  client.Send("\x01\x02\x03\x04\x05\x06\x07\x08");
  EXPECT_TRUE(client.WaitForClose());
}

TEST(TlsHandshake, WithPlainHttpIsAnsweredInPlainHttp) {
  TestServer test({}, WithTls());
  const RawResponse answer = test.Ask(Get("/health"));
  EXPECT_EQ(answer.status, 400);
  EXPECT_NE(answer.body.find("This port speaks HTTPS"), std::string::npos);
}

}  // namespace
}  // namespace dovetail::server::test
