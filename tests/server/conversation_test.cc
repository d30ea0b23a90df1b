// A conversation of `dovetail run` that is cancelled, with the model that lies in the project.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/cli/conversation.h"
#include "server/cli/engine_flags.h"
#include "server/cli/model_text.h"

namespace dovetail::cli {
namespace {

class ConversationTest : public testing::Test {
 protected:
  void SetUp() override {
    EngineFlags flags;
    flags.model = DOVETAIL_TALES;
    auto started = StartEngine(flags, {});
    ASSERT_TRUE(started.ok()) << started.status();
    engine_ = std::make_unique<RunningEngine>(*std::move(started));
    auto served = MakeServedModel(*engine_->model->checkpoint, {.max_model_len = engine_->max_model_len});
    ASSERT_TRUE(served.ok()) << served.status();
    served_ = *std::move(served);
    AnswerOptions options;
    options.temperature = 0;
    options.max_tokens = 8;
    options.max_model_len = engine_->max_model_len;
    conversation_ = std::make_unique<Conversation>(*engine_->cluster, *served_, options);
  }

  std::unique_ptr<RunningEngine> engine_;
  std::shared_ptr<const server::ServedModel> served_;
  std::unique_ptr<Conversation> conversation_;
};

TEST_F(ConversationTest, ACancelThatComesBeforeTheAnswerBeginsStopsThatOneOnly) {
  conversation_->Cancel();
  const auto stopped = conversation_->Ask("Tell it all", [](const std::string&) {});
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  EXPECT_TRUE(stopped->cancelled);
  EXPECT_EQ(stopped->tokens, 0);
  const auto whole = conversation_->Ask("Tell it all", [](const std::string&) {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_FALSE(whole->cancelled);
  EXPECT_EQ(whole->tokens, 8);
}

}  // namespace
}  // namespace dovetail::cli
