#include "base/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <thread>

#include "absl/time/clock.h"

namespace dovetail {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

// What is logged while it lives, through a pipe.
class Logged {
 public:
  explicit Logged(LogOptions options) {
    EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    options.file = ends_[1];
    writer_.emplace(std::move(options));
  }
  ~Logged() {
    if (ends_[1] >= 0) Lines();
    close(ends_[0]);
  }

  // Ends the log.
  std::vector<std::string> Lines() {
    std::thread ending([this] {
      writer_.reset();
      close(ends_[1]);
    });
    std::vector<std::string> lines = Read();
    ending.join();
    ends_[1] = -1;
    return lines;
  }

  LogWriter& writer() { return *writer_; }
  size_t room() const { return static_cast<size_t>(fcntl(ends_[1], F_GETPIPE_SZ)); }

 private:
  std::vector<std::string> Read() {
    std::string text;
    char chunk[65536];
    for (ssize_t bytes; (bytes = read(ends_[0], chunk, sizeof(chunk))) > 0;)
      text.append(chunk, static_cast<size_t>(bytes));
    std::vector<std::string> lines;
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
      lines.push_back(text.substr(at, end - at));
    return lines;
  }

  int ends_[2] = {-1, -1};
  std::optional<LogWriter> writer_;
};

TEST(Log, ATextLineHasADateALevelAndNamedValues) {
  Logged logged({});
  LogLine(LogLevel::kWarning, "something happened", {{"tenant", "a b"}, {"tokens", int64_t{12}}, {"ms", 0.25}});
  const auto lines = logged.Lines();
  ASSERT_THAT(lines, SizeIs(1));
  const std::regex form(R"(W \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} something happened tenant="a b" tokens=12 ms=0.25)");
  EXPECT_TRUE(std::regex_match(lines[0], form)) << lines[0];
  absl::Time written;
  ASSERT_TRUE(absl::ParseTime("%Y-%m-%d %H:%M:%E*S", lines[0].substr(2, 23), &written, nullptr));
  EXPECT_LT(absl::AbsDuration(absl::Now() - written), absl::Hours(1)) << "the time of day, not of some other clock";
}

TEST(Log, OnlyLinesOfTheLevelOrAboveAreKept) {
  Logged logged({.level = LogLevel::kWarning});
  EXPECT_FALSE(LogsAt(LogLevel::kInfo));
  EXPECT_TRUE(LogsAt(LogLevel::kError));
  LogInfo("no");
  LogWarning("yes");
  LogError("yes");
  EXPECT_THAT(logged.Lines(), SizeIs(2));
}

TEST(Log, AJsonLineHasTheNameThatItsProcessWasGivenLater) {
  Logged logged({.format = LogFormat::kJson, .process = "spare"});
  LogInfo("waits");
  FlushLog(absl::Seconds(10));
  logged.writer().Rename("attention-1");
  LogInfo("serves");
  const auto lines = logged.Lines();
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(nlohmann::json::parse(lines[0])["process"], "spare");
  EXPECT_EQ(nlohmann::json::parse(lines[1])["process"], "attention-1");
}

TEST(Log, AJsonLineIsOneValidObjectWhateverTheTextHolds) {
  std::string bytes;
  for (int c = 0; c < 256; ++c) bytes += static_cast<char>(c);
  Logged logged({.format = LogFormat::kJson, .process = "server"});
  EXPECT_TRUE(LogsAsJson());
  LogLine(LogLevel::kError, bytes, {{"request_id", "id\"\n" + bytes}, {"status", int64_t{503}}, {"ms", 1.5}});
  const auto lines = logged.Lines();
  ASSERT_THAT(lines, SizeIs(1));
  const auto json = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(json["level"], "error");
  EXPECT_EQ(json["process"], "server");
  EXPECT_THAT(json["message"].get<std::string>(), HasSubstr("0123456789"));
  EXPECT_THAT(json["request_id"].get<std::string>(), HasSubstr("id\"\n"));
  EXPECT_EQ(json["status"], 503);
  EXPECT_EQ(json["ms"], 1.5);
  EXPECT_TRUE(
      std::regex_match(json["time"].get<std::string>(), std::regex(R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z)")));
}

// A client must not be able to forge a line, or to reach the operator's terminal.
TEST(Log, WhatAClientSentMakesNoLineOfItsOwn) {
  Logged logged({});
  LogLine(LogLevel::kInfo, "refused: x\nE 2026-01-01 00:00:00.000 forged \x1b[31m", {{"id", "a\nb c"}});
  const auto lines = logged.Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0], HasSubstr(R"(refused: x\nE 2026-01-01 00:00:00.000 forged \x1b[31m id="a\nb c")"));
}

TEST(Log, ALongTextIsCutAndSaysHowLongItWas) {
  Logged logged({});
  LogInfo(std::string(1 << 20, 'x'));
  const auto lines = logged.Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_LT(lines[0].size(), (16u << 10) + 100);
  EXPECT_THAT(lines[0], HasSubstr("xxx... (1048576 bytes)"));
}

// Nothing reads: the pipe and the queue fill, and no caller waits. Each line is then either read or counted.
TEST(Log, AFileThatTakesNothingBlocksNoThreadAndWhatIsLostIsCounted) {
  const uint64_t before = DroppedLogLines();
  Logged logged({});
  const std::string text(100, 'x');
  const size_t written = 2 * (LogWriter::kMaxQueuedLines + logged.room() / text.size());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (size_t line = 0; line < written / 4; ++line) LogInfo(text);
    });
  for (std::thread& thread : threads) thread.join();
  const uint64_t dropped = DroppedLogLines() - before;
  EXPECT_GT(dropped, 0u);
  const auto lines = logged.Lines();
  size_t kept = 0;
  uint64_t told = 0;
  for (const std::string& line : lines) {
    kept += line.find(text) != std::string::npos;
    if (const size_t at = line.find(" log lines were dropped"); at != std::string::npos)
      told += std::stoull(line.substr(line.rfind(' ', at - 1) + 1));
  }
  EXPECT_EQ(kept + dropped, written / 4 * 4);
  EXPECT_EQ(told, dropped);
}

}  // namespace
}  // namespace dovetail
