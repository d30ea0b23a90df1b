#include "server/cli/spare_input.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

namespace dovetail::cli {
namespace {

using ::testing::HasSubstr;

class SpareInputTest : public ::testing::Test {
 protected:
  SpareInputTest() {
    EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    input_.emplace(ends_[0]);
  }
  ~SpareInputTest() override {
    EndInput();
    close(ends_[0]);
  }
  void Write(const std::string& text) {
    EXPECT_EQ(write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  void EndInput() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }
  // The name; empty: none came.
  std::string Name() {
    const auto name = input().Wait();
    EXPECT_TRUE(name.ok()) << name.status();
    return name.ok() ? name->value_or(SpareOrder{}).name : "";
  }
  SpareInput& input() { return *input_; }

 private:
  int ends_[2] = {-1, -1};
  std::optional<SpareInput> input_;
};

TEST_F(SpareInputTest, GivesTheNameThatTheLineHas) {
  Write(ServeLine({.name = "attention-1"}) + "\n");
  EXPECT_EQ(Name(), "attention-1");
}

TEST_F(SpareInputTest, GivesTheKvThatAWorkerHadBefore) {
  for (const SpareOrder& order : {SpareOrder{"attention-1", uint64_t{90} << 30}, SpareOrder{"attention-2", {}}}) {
    Write(ServeLine(order) + "\n");
    const auto given = input().Wait();
    ASSERT_TRUE(given.ok()) << given.status();
    EXPECT_EQ(*given, order);
  }
}

TEST_F(SpareInputTest, WaitsForTheEndOfALineThatComesInPieces) {
  std::thread writer([this] {
    for (const char* piece : {"ser", "ve attention", "-12", "\n"}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      Write(piece);
    }
  });
  EXPECT_EQ(Name(), "attention-12");
  writer.join();
}

TEST_F(SpareInputTest, HasNoNameWhereTheInputEndsWithoutALine) {
  Write("serve attention");
  EndInput();
  EXPECT_EQ(Name(), "");
}

TEST_F(SpareInputTest, HasNoNameOnceItIsStopped) {
  std::thread stopper([this] { input().Stop(); });
  EXPECT_EQ(Name(), "");
  stopper.join();
  EXPECT_EQ(Name(), "") << "stopped before it waits";
}

TEST_F(SpareInputTest, RefusesOtherLinesAndLongerOnesWithWhatToWrite) {
  for (const std::string& text :
       {std::string("stop\n"), std::string("serve \n"), std::string("servea1\n"), std::string("serve a1 \n"),
        std::string("serve a1 0\n"), std::string("serve a1 8GiB\n"), std::string("serve a1 8 9\n"),
        std::string(kMostServeLineBytes, 'x')}) {
    Write(text);
    const absl::Status refused = input().Wait().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("write `serve NAME`"));
  }
}

}  // namespace
}  // namespace dovetail::cli
