#include <gtest/gtest.h>

#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/scheduler/fake_cluster.h"

// Golden scenarios: everything that the core asks for, as text, in small stories that can be followed by hand. A step
// costs 1 ms and 0.01 ms a token, attention workers answer at once. To change one, read the new text and see that each
// line has its reason.

namespace dovetail::scheduler {
namespace {

std::string Describe(const OpenSequence& a) {
  return absl::StrCat("open s", a.message.sequence.value(), " on worker ", a.worker.value(), ", ",
                      a.message.hashes.size(), " hashes");
}
std::string Describe(const ForkSequence& a) {
  return absl::StrCat("fork s", a.message.child.value(), " from s", a.message.parent.value(), " at ",
                      a.message.ctx_len);
}
std::string Describe(const ReleaseSequence& a) {
  return absl::StrCat("release s", a.message.sequence.value(), " at ", a.message.ctx_len, ", ", a.message.hashes.size(),
                      " hashes");
}
std::string Describe(const ProbePrefix& a) {
  return absl::StrCat("probe worker ", a.worker.value(), ", ", a.message.hashes.size(), " hashes");
}
std::string Describe(const Unpin& a) { return absl::StrCat("unpin on worker ", a.worker.value()); }
std::string Describe(const MoveSequence& a) {
  return absl::StrCat("move s", a.message.sequence.value(), "[", a.message.begin, "..", a.message.end, ") from worker ",
                      a.worker.value(), " to ", a.to.value());
}
std::string Describe(const RunStep& a) {
  std::string text = absl::StrCat("step ", a.plan.step.value(), ":");
  for (const proto::StepEntry& entry : a.plan.entries) {
    const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    absl::StrAppend(&text, " s", entry.sequence.value(), "[", entry.ctx_len, "..", end,
                    entry.sample ? ") samples" : ")");
  }
  return text;
}
std::string Describe(const WithdrawStep& a) {
  return absl::StrCat("withdraw ", a.step.value(), " of ", a.compute_worker.value());
}
std::string Describe(const DismissComputeWorker& a) { return absl::StrCat("dismiss worker ", a.worker.value()); }
std::string Describe(const EmitCacheEvents& a) {
  return absl::StrCat("the cache gains or loses ", a.events.events.size());
}
std::string Describe(const EmitUpdate& a) {
  const GenerationUpdate& update = a.update;
  std::string text = absl::StrCat("r", update.request.value(), "/", update.choice, " gets ", update.tokens.size());
  static constexpr const char* kReasons[] = {"stop", "length", "cancelled", "error"};
  if (update.choice_finished) absl::StrAppend(&text, ", ends: ", kReasons[static_cast<int>(update.reason)]);
  if (update.request_finished) absl::StrAppend(&text, ", was the last");
  return text;
}

std::string TraceOf(FakeCluster& cluster) {
  std::string trace = "\n";
  cluster.on_action = [&](const Action& action) {
    const double ms = absl::ToDoubleMilliseconds(cluster.now() - cluster.at(absl::ZeroDuration()));
    const std::string what = std::visit([](const auto& a) { return Describe(a); }, action);
    absl::StrAppend(&trace, absl::StrFormat("%5.2f  %s\n", ms, what));
  };
  cluster.RunUntilIdle();
  cluster.on_action = nullptr;
  EXPECT_TRUE(cluster.violations().empty());
  return trace;
}

ClusterOptions OneWorker() {
  ClusterOptions options;
  options.scheduler.attention = SmallTable(1, 1);  // a KV block per 64 tokens
  options.scheduler.max_num_seqs = 4;
  options.scheduler.max_num_batched_tokens = 100;
  options.kv_blocks = {100};
  return options;
}

GenerationRequest Ask(int prompt, int max_tokens, const std::string& tenant = "a", uint64_t seed = 7) {
  GenerationRequest request;
  request.tenant = tenant;
  request.prompt = SomePrompt(prompt, seed);
  request.max_tokens = max_tokens;
  return request;
}

TEST(Trace, ARequestThatJoinsARunningOneIsPrefilledInWhatTheStepHasLeft) {
  FakeCluster cluster(OneWorker());
  cluster.Submit(Ask(10, 4));
  cluster.SubmitAt(cluster.at(absl::Milliseconds(1.5)), Ask(150, 2, "a", 8));
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  open s1 on worker 0, 0 hashes
 0.00  step 1: s1[0..10) samples
 1.10  r1/0 gets 1
 1.10  step 2: s1[10..11) samples
 1.50  open s2 on worker 0, 2 hashes
 2.11  r1/0 gets 1
 2.11  step 3: s1[11..12) samples s2[0..99)
 4.11  r1/0 gets 1
 4.11  step 4: s1[12..13) samples s2[99..150) samples
 5.63  release s1 at 13, 0 hashes
 5.63  r1/0 gets 1, ends: length, was the last
 5.63  r2/0 gets 1
 5.63  step 5: s2[150..151) samples
 6.64  release s2 at 151, 0 hashes
 6.64  r2/0 gets 1, ends: length, was the last
)");
}

TEST(Trace, ACancelledRequestIsReleasedWhenItsStepReturns) {
  FakeCluster cluster(OneWorker());
  const RequestId id = cluster.Submit(Ask(70, 100));
  cluster.Post(cluster.at(absl::Milliseconds(2)), RequestCancelled{id});
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  open s1 on worker 0, 1 hashes
 0.00  step 1: s1[0..70) samples
 1.70  r1/0 gets 1
 1.70  step 2: s1[70..71) samples
 2.00  r1/0 gets 0, ends: cancelled, was the last
 2.71  release s1 at 71, 0 hashes
)");
}

// Three blocks of 64: both fit with one each. The older one's second takes the last, and when the newer one needs its
// second it has to go.
TEST(Trace, TheNewerOfTwoIsPreemptedAndBeginsAgainFromItsLog) {
  ClusterOptions options = OneWorker();
  options.kv_blocks = {3};
  FakeCluster cluster(options);
  cluster.Submit(Ask(62, 5, "a", 1));
  cluster.Submit(Ask(62, 4, "a", 2));
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  open s1 on worker 0, 0 hashes
 0.00  open s2 on worker 0, 0 hashes
 0.00  step 1: s1[0..62) samples
 1.62  r1/0 gets 1
 1.62  step 2: s1[62..63) samples s2[0..62) samples
 3.25  r1/0 gets 1
 3.25  r2/0 gets 1
 3.25  step 3: s1[63..64) samples s2[62..63) samples
 4.27  r1/0 gets 1
 4.27  r2/0 gets 1
 4.27  step 4: s1[64..65) samples s2[63..64) samples
 5.29  r1/0 gets 1
 5.29  r2/0 gets 1
 5.29  release s2 at 64, 1 hashes
 5.29  step 5: s1[65..66) samples
 6.30  release s1 at 66, 0 hashes
 6.30  r1/0 gets 1, ends: length, was the last
 6.30  open s3 on worker 0, 1 hashes
 6.30  step 6: s3[64..65) samples
 7.31  release s3 at 65, 0 hashes
 7.31  r2/0 gets 1, ends: length, was the last
)");
}

TEST(Trace, TwoChoicesShareOnePrefill) {
  FakeCluster cluster(OneWorker());
  GenerationRequest request = Ask(65, 2);
  request.choices = 2;
  cluster.Submit(request);
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  open s1 on worker 0, 0 hashes
 0.00  step 1: s1[0..64)
 1.64  fork s2 from s1 at 64
 1.64  step 2: s1[64..65) samples s2[64..65) samples
 2.66  r1/0 gets 1
 2.66  r1/1 gets 1
 2.66  step 3: s1[65..66) samples s2[65..66) samples
 3.68  release s1 at 66, 0 hashes
 3.68  r1/0 gets 1, ends: length
 3.68  release s2 at 66, 0 hashes
 3.68  r1/1 gets 1, ends: length, was the last
)");
}

TEST(Trace, TwoTenantsShareTheStepHoweverManyRequestsTheyHave) {
  ClusterOptions options = OneWorker();
  options.scheduler.max_num_seqs = 2;
  FakeCluster cluster(options);
  for (int i = 0; i < 3; ++i) cluster.Submit(Ask(40, 1, "greedy", i + 1));
  cluster.Submit(Ask(40, 1, "modest", 9));
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  open s1 on worker 0, 0 hashes
 0.00  open s2 on worker 0, 0 hashes
 0.00  step 1: s1[0..40) samples
 0.00  release s2 at 0, 0 hashes
 0.00  open s3 on worker 0, 0 hashes
 1.40  release s1 at 40, 0 hashes
 1.40  r1/0 gets 1, ends: length, was the last
 1.40  open s4 on worker 0, 0 hashes
 1.40  step 2: s3[0..40) samples
 2.80  release s3 at 40, 0 hashes
 2.80  r4/0 gets 1, ends: length, was the last
 2.80  open s5 on worker 0, 0 hashes
 2.80  step 3: s4[0..40) samples
 4.20  release s4 at 40, 0 hashes
 4.20  r2/0 gets 1, ends: length, was the last
 4.20  step 4: s5[0..40) samples
 5.60  release s5 at 40, 0 hashes
 5.60  r3/0 gets 1, ends: length, was the last
)");
}

TEST(Trace, ARequestGoesToTheWorkerThatHoldsItsPrefix) {
  ClusterOptions options = OneWorker();
  options.kv_blocks = {100, 100};
  FakeCluster cluster(options);
  cluster.Submit(Ask(130, 1));
  cluster.SubmitAt(cluster.at(absl::Milliseconds(10)), Ask(130, 1));
  EXPECT_EQ(TraceOf(cluster), R"(
 0.00  probe worker 0, 2 hashes
 0.00  probe worker 1, 2 hashes
 0.00  open s1 on worker 0, 2 hashes
 0.00  unpin on worker 0
 0.00  unpin on worker 1
 0.00  step 1: s1[0..100)
 2.00  step 2: s1[100..130) samples
 3.30  release s1 at 130, 1 hashes
 3.30  r1/0 gets 1, ends: length, was the last
10.00  probe worker 0, 2 hashes
10.00  probe worker 1, 2 hashes
10.00  open s2 on worker 0, 2 hashes
10.00  unpin on worker 0
10.00  unpin on worker 1
10.00  step 3: s2[128..130) samples
11.02  release s2 at 130, 0 hashes
11.02  r2/0 gets 1, ends: length, was the last
)");
}

}  // namespace
}  // namespace dovetail::scheduler
