// A grammar that is being compiled keeps neither the I/O threads nor those that read requests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

std::string Ask(const std::string& more) {
  return Post("/v1/completions", absl::StrCat(R"({"model":"bytes","prompt":"the","max_tokens":4)", more, "}"));
}

TEST(GrammarQueue, OthersAreReadWhileAGrammarIsCompiled) {
  absl::Notification reads, let_go;
  const auto served = TestModel();
  served->grammars = std::make_shared<grammar::GrammarEngine>(
      [&]() -> absl::StatusOr<std::vector<std::string>> {
        reads.Notify();
        let_go.WaitForNotificationWithTimeout(absl::Seconds(60));
        return std::vector<std::string>{"a", "b"};
      },
      served->vocab_size);
  HttpServerOptions options;
  options.worker_threads = 1;
  TestServer server({}, options, served);
  RawClient constrained(server.port());
  constrained.Send(Ask(R"(,"guided_regex":"a*")"));
  reads.WaitForNotification();
  for (int i = 0; i < 3; ++i) server.AskJson(Ask(""));
  EXPECT_FALSE(let_go.HasBeenNotified());
  let_go.Notify();
  EXPECT_EQ(constrained.Read().status, 200);
}

TEST(GrammarQueue, AGrammarThatCannotBeCompiledIsNamed) {
  const auto served = TestModel();
  served->grammars = std::make_shared<grammar::GrammarEngine>(
      []() -> absl::StatusOr<std::vector<std::string>> { return InvalidArgument("no tokens"); }, served->vocab_size);
  TestServer server({}, {}, served);
  const Json answer = server.AskJson(Ask(R"(,"structured_outputs":{"json":{"type":"object"}})"), 400);
  EXPECT_EQ(answer["error"]["param"], "structured_outputs.json");
}

}  // namespace
}  // namespace dovetail::server::test
