#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "loadgen/event_stream.h"
#include "loadgen/openai.h"
#include "loadgen/server_times.h"

namespace dovetail::loadgen {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> EventsOf(const std::string& text, size_t piece) {
  EventStream stream;
  std::vector<std::string> events;
  for (size_t at = 0; at < text.size(); at += piece)
    EXPECT_TRUE(
        stream.Add(std::string_view(text).substr(at, piece), [&](std::string_view data) { events.emplace_back(data); })
            .ok());
  return events;
}

TEST(EventStreams, AreTheSameHoweverTheyAreCut) {
  const std::string text =
      ": ping\n\ndata: {\"a\": 1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\ndata: cut";
  for (size_t piece = 1; piece < text.size(); ++piece)
    EXPECT_THAT(EventsOf(text, piece), ElementsAre("{\"a\": 1}", "two\nlines", "[DONE]")) << piece;
}

TEST(EventStreams, AnEventWithoutEndIsRefused) {
  EventStream stream;
  const std::string piece(size_t{1} << 20, 'x');
  absl::Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) status = stream.Add(piece, [](std::string_view) {});
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 16 MiB"));
}

TEST(Answers, TheMessageOfAnErrorIsFoundWhereverItIs) {
  EXPECT_EQ(ErrorText(R"({"error": {"message": "full"}})"), "full");
  EXPECT_EQ(ErrorText(R"({"error": "full"})"), "full");
  EXPECT_EQ(ErrorText(R"({"detail": "Not Found"})"), "Not Found");
  EXPECT_EQ(ErrorText("<html>\nno</html>"), "<html> no</html>");
  EXPECT_EQ(ErrorText(std::string(1000, 'x')).size(), 303u);
}

TEST(Answers, UsageMayComeWithTheLastChunkOfChoices) {
  AnswerReader reader(Backend::kOpenai, {"p", 1, 8, 0, ""}, nullptr);
  reader.Begin(0, 1);
  reader.OnStatus(200, "OK");
  ASSERT_TRUE(reader
                  .OnBody("data: {\"choices\": [{\"text\": \"a\", \"finish_reason\": \"length\"}], \"usage\": "
                          "{\"prompt_tokens\": 5, \"completion_tokens\": 8}}\n\n",
                          1.5)
                  .ok());
  reader.OnEnd(absl::OkStatus());
  EXPECT_TRUE(reader.record().success) << "a finish_reason ends an answer as well as [DONE]";
  EXPECT_EQ(reader.record().output_len, 8);
  EXPECT_EQ(reader.record().input_len, 5);
  EXPECT_DOUBLE_EQ(reader.record().ttft_s, 0.5);
}

TEST(ServersTimes, AreSummedOverEnginesAndTakenSinceTheLastLook) {
  const auto page = [](double queue, int count) {
    return absl::StrCat("# TYPE vllm:request_queue_time_seconds histogram\n",
                        "vllm:request_queue_time_seconds_bucket{engine=\"0\",le=\"1\"} 99\n",
                        "vllm:request_queue_time_seconds_sum{engine=\"0\",model_name=\"a } 7\"} ", queue, "\n",
                        "vllm:request_queue_time_seconds_sum{engine=\"1\"} 0.5 1700000000\n",
                        "vllm:request_queue_time_seconds_sum_of_another{engine=\"1\"} 50\n",
                        "vllm:request_prefill_time_seconds_sum 2\nvllm:request_decode_time_seconds_sum 3e0\n",
                        "vllm:request_decode_time_seconds_count ", count, "\n");
  };
  const auto before = ParseServerTimes(page(1, 4)), after = ParseServerTimes(page(1.25, 9));
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_DOUBLE_EQ(before->queue_s, 1.5);
  EXPECT_EQ(before->requests, 4);
  const auto between = after->Since(*before);
  ASSERT_TRUE(between.ok()) << between.status();
  EXPECT_DOUBLE_EQ(between->queue_s, 0.25);
  EXPECT_DOUBLE_EQ(between->decode_s, 0);
  EXPECT_EQ(between->requests, 5);
  EXPECT_THAT(std::string(before->Since(*after).status().message()), HasSubstr("counted from 0 again"));
}

TEST(ServersTimes, OfAServerWithoutThemAreAnErrorThatNamesTheHistogram) {
  for (const char* text :
       {"", "<html>", "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_sum NaN",
        "vllm:request_queue_time_seconds_sum{engine=\"0\" 1"})
    EXPECT_THAT(std::string(ParseServerTimes(text).status().message()),
                HasSubstr("/metrics: has no vllm:request_queue_time_seconds_sum"))
        << text;
}

}  // namespace
}  // namespace dovetail::loadgen
