#include "compute_worker/turn_choice.h"

#include "gtest/gtest.h"

namespace dovetail::compute {
namespace {

using Load = TurnChoice::Load;
using Policy = TurnChoice::Policy;

constexpr Load kTwo{2, 128};
constexpr int kSettle = 2;  // of two steps under way

// Steps that take `side_by_side` or `in_turns` ms; how many of them took turns.
int RunSteps(TurnChoice& choice, int steps, double side_by_side, double in_turns, Load load = kTwo) {
  int turns = 0;
  for (int i = 0; i < steps; ++i) {
    const bool takes = choice.Takes(load);
    turns += takes ? 1 : 0;
    choice.Note(load, takes, takes ? in_turns : side_by_side);
  }
  return turns;
}
constexpr int kBothMeasured = 2 * (kSettle + TurnChoice::kTrialSteps);

TEST(TurnChoice, AStepAloneTakesNone) {
  TurnChoice choice;
  choice.Set(Policy::kTurns);
  EXPECT_FALSE(choice.Takes({1, 256}));
}

TEST(TurnChoice, PoliciesLeaveNothingToTheTimes) {
  TurnChoice choice;
  choice.Set(Policy::kTurns);
  EXPECT_EQ(RunSteps(choice, 50, 10, 20), 50);
  choice.Set(Policy::kSideBySide);
  EXPECT_EQ(RunSteps(choice, 50, 20, 10), 0);
}

TEST(TurnChoice, BothAreMeasuredThenTheFasterGoesOn) {
  for (const bool turns_win : {false, true}) {
    TurnChoice choice;
    EXPECT_FALSE(choice.Takes(kTwo)) << "as long as nothing is known";
    EXPECT_EQ(RunSteps(choice, kBothMeasured, 10, turns_win ? 9 : 11), kBothMeasured / 2);
    EXPECT_EQ(choice.Takes(kTwo), turns_win);
    EXPECT_EQ(RunSteps(choice, 500, 10, turns_win ? 9 : 11), turns_win ? 500 : 0);
  }
}

TEST(TurnChoice, LessThanAPercentIsNotWorthTurns) {
  TurnChoice choice;
  RunSteps(choice, kBothMeasured, 10, 9.95);
  EXPECT_FALSE(choice.Takes(kTwo));
}

TEST(TurnChoice, StepsThatRanBesideOnesOfTheOtherKindDoNotCount) {
  TurnChoice choice;
  RunSteps(choice, kSettle + TurnChoice::kTrialSteps, 10, 0);
  ASSERT_TRUE(choice.Takes(kTwo));
  for (int i = 0; i < 20; ++i) choice.Note(kTwo, false, 1);  // they began before the change
  EXPECT_TRUE(choice.Takes(kTwo));
  RunSteps(choice, kSettle, 0, 1000);
  RunSteps(choice, TurnChoice::kTrialSteps, 0, 9);
  EXPECT_TRUE(choice.Takes(kTwo)) << "9 against 10, and not the 1000 of the first ones";
}

TEST(TurnChoice, AFewStepsThatSomethingHeldUpChangeNothing) {
  TurnChoice choice;
  RunSteps(choice, kSettle + TurnChoice::kTrialSteps, 10, 0);
  RunSteps(choice, kSettle, 0, 9);
  for (int i = 0; i < TurnChoice::kTrialSteps; ++i) choice.Note(kTwo, true, i < 3 ? 500 : 9);
  EXPECT_TRUE(choice.Takes(kTwo));
}

TEST(TurnChoice, WhatWinsIsMeasuredAgain) {
  TurnChoice choice;
  RunSteps(choice, kBothMeasured, 10, 9);
  ASSERT_TRUE(choice.Takes(kTwo));
  RunSteps(choice, TurnChoice::kStepsPerChoice + kBothMeasured, 10, 12);  // contexts have grown meanwhile
  EXPECT_FALSE(choice.Takes(kTwo));
  EXPECT_LE(RunSteps(choice, TurnChoice::kStepsPerChoice, 10, 12), 2 * TurnChoice::kTrialSteps);
}

TEST(TurnChoice, EachLoadHasAChoiceOfItsOwn) {
  TurnChoice choice;
  RunSteps(choice, kBothMeasured, 10, 9);
  EXPECT_TRUE(choice.Takes({2, 200})) << "about as many rows";
  EXPECT_FALSE(choice.Takes({2, 32}));
  EXPECT_FALSE(choice.Takes({3, 128}));
  RunSteps(choice, 100, 9, 10, {2, 32});
  EXPECT_TRUE(choice.Takes(kTwo));
}

}  // namespace
}  // namespace dovetail::compute
