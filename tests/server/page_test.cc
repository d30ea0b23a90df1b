// The built-in page as a file: what it is sent with. page_test.py uses it in a browser.
#include <gmock/gmock.h>

#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Page, IsOneTextThatNeedsNothingFromOutside) {
  TestServer test;
  const RawResponse page = test.Ask(Get("/"));
  EXPECT_EQ(page.status, 200);
  EXPECT_EQ(page.headers.at("content-type"), "text/html; charset=utf-8");
  EXPECT_THAT(page.body, StartsWith("<!doctype html>"));
  EXPECT_THAT(page.body, HasSubstr("</html>"));
  for (const char* part : {"@PAGE", "src=\"", "@import", "url(", "innerHTML", "eval("})
    EXPECT_THAT(page.body, Not(HasSubstr(part)));
  for (const char* part :
       {"function parseMetrics", "const markdown", "const api", "showDocs()", "prefers-color-scheme"})
    EXPECT_THAT(page.body, HasSubstr(part));
  EXPECT_EQ(test.Ask(Get("/docs")).body, page.body);
  EXPECT_EQ(test.Ask(Get("//")).status, 404);
}

TEST(Page, LetsTheBrowserRunNoOtherScript) {
  TestServer test;
  const RawResponse page = test.Ask(Get("/"));
  const std::string& policy = page.headers.at("content-security-policy");
  EXPECT_THAT(policy, StartsWith("default-src 'none'; script-src 'sha256-"));
  EXPECT_THAT(policy, HasSubstr("; style-src 'sha256-"));
  EXPECT_THAT(policy, Not(HasSubstr("unsafe")));
  EXPECT_EQ(page.headers.at("x-content-type-options"), "nosniff");
}

}  // namespace
}  // namespace dovetail::server::test
