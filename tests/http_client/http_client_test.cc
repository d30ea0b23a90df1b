// Answers that are waited for, over real connections to a server whose every byte the test decides. What a load
// generator needs beyond that is tested by loadgen_run_test.
#include "http_client/http_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/loadgen/script_server.h"

namespace dovetail::http_client {
namespace {

using loadgen::test::ScriptServer;
using loadgen::test::Visit;
using ::testing::HasSubstr;

std::unique_ptr<HttpClient> ClientOf(const ScriptServer& server, const HttpClientOptions& options = {}) {
  const Url url{.host = "127.0.0.1", .port = static_cast<uint16_t>(server.port()), .path = "/base"};
  auto client = HttpClient::Create(url, options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

TEST(Fetch, ReturnsStatusAndBodyAndKeepsTheConnection) {
  ScriptServer server([](Visit& visit) {
    EXPECT_THAT(visit.head(), HasSubstr("POST /base/things HTTP/1.1"));
    EXPECT_THAT(visit.head(), HasSubstr("User-Agent: a test"));
    visit.Answer(visit.body() == "first" ? 200 : 503, "{\"you sent\": \"" + visit.body() + "\"}");
  });
  const auto client = ClientOf(server, {.user_agent = "a test"});
  const auto first = client->Fetch({.target = "/things", .body = "first"});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->status, 200);
  EXPECT_EQ(first->body, "{\"you sent\": \"first\"}");
  const auto second = client->Fetch({.target = "/things", .body = "second"});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->status, 503);
  EXPECT_EQ(server.connections(), 1);
}

TEST(Fetch, GivesUpAtItsLimitAndTheNextOneTakesAnotherConnection) {
  ScriptServer server([](Visit& visit) {
    if (visit.body() == "silent")
      visit.WaitUntilClosed();
    else
      visit.Answer(200, "{}");
  });
  const auto client = ClientOf(server);
  const auto silent = client->Fetch({.target = "/", .body = "silent"}, absl::Milliseconds(100));
  EXPECT_TRUE(absl::IsDeadlineExceeded(silent.status())) << silent.status();
  EXPECT_THAT(std::string(silent.status().message()), HasSubstr("within 100ms"));
  const auto next = client->Fetch({.target = "/", .body = "next"});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->status, 200);
  EXPECT_EQ(server.connections(), 2);
}

TEST(Fetch, SaysThatNothingListens) {
  Url url{.host = "127.0.0.1"};
  {
    ScriptServer closed([](Visit&) {});
    url.port = static_cast<uint16_t>(closed.port());
  }
  const auto client = HttpClient::Create(url, {});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto answer = (*client)->Fetch({.target = "/"});
  EXPECT_TRUE(absl::IsUnavailable(answer.status())) << answer.status();
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("cannot connect"));
}

}  // namespace
}  // namespace dovetail::http_client
