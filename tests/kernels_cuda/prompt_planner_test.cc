#include "kernels/cuda/prompts/prompt_planner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace dovetail::kernels::cuda {
namespace {

using State = PromptPlanner::State;

PromptSize Of(int tokens) {
  PromptSize size;
  size.batch = 1;
  size.most_tokens = tokens;
  return size;
}

// Makes plans that are the numbers of their tokens, each when the test allows it.
class Maker {
 public:
  PromptPlanner::Maker function() {
    return [this](const PromptSize& size) -> PromptPlanner::Plan {
      std::unique_lock lock(mutex_);
      began_.push_back(size.most_tokens);
      changed_.notify_all();
      changed_.wait(lock, [this] { return allowed_ > 0; });
      --allowed_;
      if (size.most_tokens < 0) return nullptr;
      ++alive_;
      return {new int(size.most_tokens), [this](void* plan) { delete static_cast<int*>(plan), --alive_; }};
    };
  }
  void Allow(int plans) {
    const std::lock_guard lock(mutex_);
    allowed_ += plans;
    changed_.notify_all();
  }
  void AwaitBegun(size_t plans) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return began_.size() >= plans; });
  }
  std::vector<int> began() {
    const std::lock_guard lock(mutex_);
    return began_;
  }
  int alive() const { return alive_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> began_;
  int allowed_ = 0;
  std::atomic<int> alive_{0};
};

int NumberOf(const PromptPlanner::Plan& plan) { return plan == nullptr ? -1 : *static_cast<const int*>(plan.get()); }

TEST(PromptPlannerTest, NobodyWaitsForAPlanThatIsBeingMade) {
  Maker maker;
  PromptPlanner planner(maker.function());
  EXPECT_EQ(planner.Find(Of(7)).state, State::kUnknown);
  planner.Ask(Of(7));
  maker.AwaitBegun(1);  // and it does not end before it may
  EXPECT_EQ(planner.Find(Of(7)).state, State::kAsked);
  EXPECT_EQ(planner.Find(Of(7)).plan, nullptr);
  planner.Ask(Of(7));
  planner.Ask(Of(8));
  EXPECT_EQ(planner.Find(Of(8)).state, State::kAsked);
  EXPECT_EQ(planner.Find(Of(9)).state, State::kUnknown);
  maker.Allow(2);
  for (const int tokens : {7, 8})
    while (planner.Find(Of(tokens)).state != State::kReady) std::this_thread::yield();
  EXPECT_EQ(NumberOf(planner.Find(Of(7)).plan), 7);
  EXPECT_EQ(maker.began(), (std::vector<int>{7, 8})) << "each once";
}

TEST(PromptPlannerTest, WhatIsAwaitedIsMadeHereUnlessItHasBegun) {
  Maker maker, here;
  here.Allow(2);
  PromptPlanner planner(maker.function());
  for (const int tokens : {1, 2, 3}) planner.Ask(Of(tokens));
  maker.AwaitBegun(1);  // which is not done before the others are
  EXPECT_EQ(NumberOf(planner.Await(Of(3), here.function())), 3);
  EXPECT_EQ(NumberOf(planner.Await(Of(9), here.function())), 9) << "nobody had asked for it";
  EXPECT_EQ(NumberOf(planner.Await(Of(9), here.function())), 9);
  EXPECT_EQ(here.began(), (std::vector<int>{3, 9}));
  EXPECT_EQ(planner.Find(Of(1)).state, State::kAsked);
  maker.Allow(100);
  EXPECT_EQ(NumberOf(planner.Await(Of(1), here.function())), 1);
  while (planner.Find(Of(2)).state != State::kReady) std::this_thread::yield();
  EXPECT_EQ(maker.began(), (std::vector<int>{1, 2}));
}

TEST(PromptPlannerTest, ASizeWithoutAPlanIsAskedForOnce) {
  Maker maker;
  maker.Allow(100);
  PromptPlanner planner(maker.function());
  EXPECT_EQ(planner.Await(Of(-5), maker.function()), nullptr);
  EXPECT_EQ(planner.Find(Of(-5)).state, State::kNone);
  planner.Ask(Of(-5));
  EXPECT_EQ(planner.Await(Of(-5), maker.function()), nullptr);
  EXPECT_EQ(maker.began().size(), 1u);
}

TEST(PromptPlannerTest, PlansThatNobodyFindsGoAndThoseInUseStay) {
  Maker maker;
  maker.Allow(1000);
  PromptPlanner planner(maker.function());
  const int most = PromptPlanner::kMostPlans;
  PromptPlanner::Plan held = planner.Await(Of(1), maker.function());
  planner.Await(Of(2), maker.function());
  for (int other = 100; other < 100 + most; ++other) {
    planner.Await(Of(other), maker.function());
    EXPECT_EQ(planner.Find(Of(2)).state, State::kReady) << "it is found again and again";
  }
  planner.Await(Of(-1), maker.function());  // what went before is gone when this has begun
  EXPECT_EQ(planner.Find(Of(1)).state, State::kUnknown);
  EXPECT_EQ(planner.Find(Of(100)).state, State::kUnknown);
  EXPECT_EQ(NumberOf(held), 1) << "somebody holds it";
  EXPECT_LE(maker.alive(), most + 1);
  const std::weak_ptr<void> last = held;
  held = nullptr;
  EXPECT_TRUE(last.expired());
}

TEST(PromptPlannerTest, MoreThanItsLimitIsNotAskedFor) {
  Maker maker;
  PromptPlanner planner(maker.function());
  const int most = PromptPlanner::kMostAsked;
  planner.Ask(Of(1000));
  maker.AwaitBegun(1);
  for (int tokens = 1; tokens <= most + 1; ++tokens) planner.Ask(Of(tokens));
  EXPECT_EQ(planner.Find(Of(most)).state, State::kAsked);
  EXPECT_EQ(planner.Find(Of(most + 1)).state, State::kUnknown);
  maker.Allow(most + 1);
  EXPECT_EQ(NumberOf(planner.Await(Of(most), maker.function())), most);
}

TEST(PromptPlannerTest, EndsBehindThePlanThatIsBeingMadeAndForgetsTheOthers) {
  Maker maker;
  {
    PromptPlanner planner(maker.function());
    for (const int tokens : {1, 2, 3}) planner.Ask(Of(tokens));
    maker.AwaitBegun(1);
    planner.End();
    maker.Allow(100);
  }
  EXPECT_EQ(maker.began(), std::vector<int>{1});
  EXPECT_EQ(maker.alive(), 0);
  const PromptPlanner unused(maker.function());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
