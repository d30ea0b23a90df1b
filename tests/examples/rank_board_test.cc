#include "examples/spatio_temporal/gpu/rank_board.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;

RankBoard::Event NewEvent() { return std::make_shared<kernels::cuda::CudaEvent>(); }

TEST(RankBoard, GivesTheEventBehindWhichEnoughFramesAreThere) {
  RankBoard board(2, absl::Seconds(10));
  const RankBoard::Event one = NewEvent(), all = NewEvent(), next = NewEvent();
  board.Tell(0, 1, 1, 2, one);
  board.Tell(0, 1, 1, 4, all);
  board.Tell(0, 1, 2, 4, next);
  EXPECT_EQ(*board.Await(0, 1, 1, 1), one);
  EXPECT_EQ(*board.Await(0, 1, 1, 2), one);
  EXPECT_EQ(*board.Await(0, 1, 1, 3), all);
  EXPECT_EQ(*board.Await(0, 1, 2, 1), next);
}

TEST(RankBoard, WaitsForTheSendersThread) {
  RankBoard board(3, absl::Seconds(60));
  const RankBoard::Event event = NewEvent();
  std::thread sender([&] {
    board.Tell(2, 0, 1, 5, NewEvent());  // to another rank
    board.Tell(2, 1, 1, 5, event);
  });
  EXPECT_EQ(*board.Await(2, 1, 1, 5), event);
  sender.join();
}

TEST(RankBoard, AFailureEndsAllWaitsAndTheFirstIsNamed) {
  RankBoard board(3, absl::Seconds(60));
  std::thread meets([&] { EXPECT_THAT(std::string(board.Meet(1).message()), HasSubstr("rank 2 failed: no memory")); });
  board.Fail(2, absl::ResourceExhaustedError("no memory"));
  board.Fail(0, absl::InternalError("later"));
  meets.join();
  const auto waited = board.Await(0, 1, 1, 1);
  EXPECT_TRUE(absl::IsUnavailable(waited.status()));
  EXPECT_THAT(std::string(waited.status().message()), HasSubstr("rank 2 failed: no memory"));
}

TEST(RankBoard, SaysForHowLongItWaited) {
  RankBoard board(2, absl::Milliseconds(1));
  EXPECT_THAT(std::string(board.Await(0, 1, 1, 1).status().message()),
              HasSubstr("rank 1 waited 1ms for what another rank sends"));
  EXPECT_THAT(std::string(board.Meet(0).message()), HasSubstr("rank 0 waited 1ms for the other ranks"));
}

TEST(RankBoard, AllMeetAsOftenAsEachComes) {
  RankBoard board(2, absl::Seconds(60));
  int value = 0;
  std::thread other([&] {
    value = 1;
    ASSERT_TRUE(board.Meet(1).ok());
    ASSERT_TRUE(board.Meet(1).ok());
  });
  ASSERT_TRUE(board.Meet(0).ok());
  EXPECT_EQ(value, 1);
  ASSERT_TRUE(board.Meet(0).ok());
  other.join();
}

}  // namespace
}  // namespace dovetail::spatio_temporal
