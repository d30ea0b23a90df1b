#include "http_client/url.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dovetail::http_client {
namespace {

using ::testing::HasSubstr;

TEST(Urls, AreTakenApart) {
  const auto plain = ParseUrl("http://localhost:8000/proxy/");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(plain->tls);
  EXPECT_EQ(plain->host, "localhost");
  EXPECT_EQ(plain->port, 8000);
  EXPECT_EQ(plain->path, "/proxy");
  const auto tls = ParseUrl("https://[::1]");
  ASSERT_TRUE(tls.ok()) << tls.status();
  EXPECT_TRUE(tls->tls);
  EXPECT_EQ(tls->host, "::1");
  EXPECT_EQ(tls->HostHeader(), "[::1]:443");
  EXPECT_EQ(ParseUrl("http://10.0.0.1")->port, 80);
}

TEST(Urls, ThatCannotBeReachedAreRefused) {
  for (const char* bad : {"", "localhost:8000", "ftp://a", "http://", "http://:80", "http://a:0", "http://a:70000",
                          "http://a:b", "http://u:p@a", "http://a/?x=1", "http://a b", "http://[::1", "http://[::1]x"})
    EXPECT_THAT(std::string(ParseUrl(bad).status().message()), HasSubstr("http://127.0.0.1:8000")) << bad;
}

}  // namespace
}  // namespace dovetail::http_client
