#include "tests/seam/seam_monitor.h"

#include <functional>
#include <vector>

#include "gmock/gmock.h"

// Each obligation of exchange/seam.h, violated once: a step that breaks nothing, and what is said when one thing about
// it is wrong.

namespace dovetail::test {
namespace {

using exchange::BetweenGpus;
using exchange::OnOneGpu;
using exchange::ThroughHosts;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr SeamMonitor::StepKey kStep{MicroBatchId(0), StepId(5)}, kNext{MicroBatchId(0), StepId(6)};
constexpr NodeId kWorker(7), kOther(8);

using Call = std::function<void(SeamMonitor&)>;

class SeamMonitorTest : public ::testing::Test {
 protected:
  // What a step of one op and one part does, in order.
  enum Framed {
    kBegin,
    kDense,
    kAttention,
    kPackQ,
    kQuery,
    kAttend,
    kPackKv,
    kKeyValue,
    kAppend,
    kAnswer,
    kTaken,
    kOutput,
    kDraw,
    kEnd
  };
  std::vector<Call> InFrames(const exchange::Seam& seam) {
    const SeamMonitor::Payload payload(bytes_);
    return {[](SeamMonitor& m) { m.SendsBegin(kStep, kWorker, true); },
            [seam](SeamMonitor& m) { m.PreparesDense(kStep, seam); },
            [seam](SeamMonitor& m) { m.PreparesAttention(kStep, kWorker, seam); },
            [](SeamMonitor& m) { m.Packs(kStep, 0); },
            [payload](SeamMonitor& m) { m.SendsQuery(kStep, 0, kWorker, payload); },
            [](SeamMonitor& m) { m.Attends(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.Packs(kStep, 0); },
            [payload](SeamMonitor& m) { m.SendsKeyValue(kStep, 0, kWorker, payload); },
            [](SeamMonitor& m) { m.Appends(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.SendsAnswer(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.TakesAnswer(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.RunsOutput(kStep, 0); },
            [](SeamMonitor& m) { m.Draws(kStep); },
            [](SeamMonitor& m) { m.Ends(kStep, true); }};
  }
  enum Unframed {
    kBeginHere,
    kDenseHere,
    kOutputHere,
    kDrawHere,
    kPrepareThere,
    kAttendThere,
    kAppendThere,
    kLaunchThere,
    kEndHere
  };
  static std::vector<Call> BetweenTwoGpus(bool ok = true) {
    const exchange::Seam seam = BetweenGpus{{nullptr}};
    return {[](SeamMonitor& m) { m.SendsBegin(kStep, kWorker, false); },
            [seam](SeamMonitor& m) { m.PreparesDense(kStep, seam); },
            [](SeamMonitor& m) { m.RunsOutput(kStep, 0); },
            [](SeamMonitor& m) { m.Draws(kStep); },
            [seam](SeamMonitor& m) { m.PreparesAttention(kStep, kWorker, seam); },
            [](SeamMonitor& m) { m.Attends(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.Appends(kStep, kWorker, 0); },
            [](SeamMonitor& m) { m.Launches(kStep, kWorker); },
            [ok](SeamMonitor& m) { m.Ends(kStep, ok); }};
  }
  static std::vector<std::string> Said(const std::vector<Call>& calls, bool on_cpu = false) {
    SeamMonitor monitor(on_cpu);
    for (const Call& call : calls)
      if (call) call(monitor);
    return monitor.violations();
  }
  static std::vector<Call> Without(std::vector<Call> calls, int which) {
    calls[which] = nullptr;
    return calls;
  }
  static std::vector<Call> Swapped(std::vector<Call> calls, int a, int b) {
    std::swap(calls[a], calls[b]);
    return calls;
  }
  static std::vector<Call> With(std::vector<Call> calls, int before, Call call) {
    calls.insert(calls.begin() + before, std::move(call));
    return calls;
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(64);
};

TEST_F(SeamMonitorTest, AStepThatKeepsThemBreaksNone) {
  EXPECT_THAT(Said(InFrames(ThroughHosts()), /*on_cpu=*/true), IsEmpty());
  EXPECT_THAT(Said(InFrames(OnOneGpu())), IsEmpty());
  EXPECT_THAT(Said(BetweenTwoGpus()), IsEmpty());
}

TEST_F(SeamMonitorTest, OneAStepThatCrossesInTwoWays) {
  const Call other = [](SeamMonitor& m) { m.SendsBegin(kStep, kOther, false); };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kDense, other)).at(0), HasSubstr("obligation 1: step 5"));
  const Call again = [](SeamMonitor& m) { m.PreparesDense(kStep, OnOneGpu()); };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kQuery, again)).at(0), HasSubstr("obligation 1"));
  const Call there = [](SeamMonitor& m) { m.PreparesAttention(kStep, kWorker, OnOneGpu()); };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kQuery, there)).at(0), HasSubstr("obligation 1"));
}

TEST_F(SeamMonitorTest, TwoAPartThatIsBegunLateOrTwice) {
  EXPECT_THAT(Said(Swapped(InFrames(ThroughHosts()), kBegin, kQuery)).at(0), HasSubstr("obligation 2"));
  const Call again = [](SeamMonitor& m) { m.SendsBegin(kStep, kWorker, true); };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kDense, again)).at(0), HasSubstr("obligation 2"));
}

TEST_F(SeamMonitorTest, ThreeABackendThatIsNotToldOrOfACpu) {
  EXPECT_THAT(Said(Without(InFrames(ThroughHosts()), kDense)).at(0), HasSubstr("obligation 3"));
  EXPECT_THAT(Said(Without(InFrames(ThroughHosts()), kAttention)).at(0), HasSubstr("obligation 3"));
  EXPECT_THAT(Said(InFrames(OnOneGpu()), /*on_cpu=*/true).at(0), HasSubstr("obligation 3"));
}

TEST_F(SeamMonitorTest, FourOpsOutOfOrder) {
  EXPECT_THAT(Said(Swapped(InFrames(ThroughHosts()), kQuery, kKeyValue)).at(0), HasSubstr("obligation 4"));
  EXPECT_THAT(Said(Swapped(InFrames(OnOneGpu()), kAttend, kAppend)).at(0), HasSubstr("obligation 4"));
  const Call again = [](SeamMonitor& m) { m.Appends(kStep, kWorker, 0); };
  EXPECT_THAT(Said(With(BetweenTwoGpus(), kLaunchThere, again)).at(0), HasSubstr("obligation 4"));
}

TEST_F(SeamMonitorTest, FiveAPayloadThatChanges) {
  const Call change = [this](SeamMonitor&) { bytes_[9] = std::byte{1}; };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kAnswer, change)), SizeIs(2)) << "q, and k and v";
  bytes_[9] = std::byte{0};
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kAnswer, change)).at(0), HasSubstr("obligation 5"));
  bytes_[9] = std::byte{0};
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kOutput, change)), IsEmpty()) << "it was answered";
}

TEST_F(SeamMonitorTest, SixAnAnswerThatIsMissingOrComesTwice) {
  EXPECT_THAT(Said(Without(InFrames(ThroughHosts()), kTaken)).at(0), HasSubstr("obligation 6"));
  EXPECT_THAT(Said(Swapped(InFrames(OnOneGpu()), kTaken, kOutput)).at(0), HasSubstr("obligation 6"));
  const Call again = [](SeamMonitor& m) { m.SendsAnswer(kStep, kWorker, 0); };
  EXPECT_THAT(Said(With(InFrames(ThroughHosts()), kTaken, again)).at(0), HasSubstr("obligation 6"));
}

TEST_F(SeamMonitorTest, SevenAFrameBetweenGpus) {
  const SeamMonitor::Payload payload(bytes_);
  const Call query = [payload](SeamMonitor& m) { m.SendsQuery(kStep, 0, kWorker, payload); };
  EXPECT_THAT(Said(With(BetweenTwoGpus(), kOutputHere, query)).at(0), HasSubstr("obligation 7"));
  const Call pack = [](SeamMonitor& m) { m.Packs(kStep, 0); };
  EXPECT_THAT(Said(With(BetweenTwoGpus(), kOutputHere, pack)).at(0), HasSubstr("obligation 7"));
  const Call answer = [](SeamMonitor& m) { m.SendsAnswer(kStep, kWorker, 0); };
  EXPECT_THAT(Said(With(BetweenTwoGpus(), kLaunchThere, answer)).at(0), HasSubstr("obligation 7"));
}

TEST_F(SeamMonitorTest, EightWorkThatIsNotLaunchedOrTooEarly) {
  EXPECT_THAT(Said(Without(BetweenTwoGpus(), kLaunchThere)).at(0), HasSubstr("obligation 8"));
  EXPECT_THAT(Said(Swapped(BetweenTwoGpus(), kLaunchThere, kAppendThere)).at(0), HasSubstr("obligation 8"));
  EXPECT_THAT(Said(Without(InFrames(OnOneGpu()), kDraw)).at(0), HasSubstr("obligation 8"));
  const Call launch = [](SeamMonitor& m) { m.Launches(kStep, kWorker); };
  EXPECT_THAT(Said(With(InFrames(OnOneGpu()), kDraw, launch)).at(0), HasSubstr("obligation 8"));
}

TEST_F(SeamMonitorTest, NineAFailedStepWhoseWaitsGoOn) {
  std::vector<Call> calls = BetweenTwoGpus(/*ok=*/false);
  const Call next = [](SeamMonitor& m) { m.SendsBegin(kNext, kWorker, false); };
  calls.push_back(next);
  EXPECT_THAT(Said(calls).at(0), HasSubstr("obligation 9: step 5"));
  const Call ended = [](SeamMonitor& m) { m.EndsWaits(kStep); };
  EXPECT_THAT(Said(With(calls, static_cast<int>(calls.size()) - 1, ended)), IsEmpty());
}

}  // namespace
}  // namespace dovetail::test
