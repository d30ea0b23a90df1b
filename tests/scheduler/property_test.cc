#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/scheduler/fake_cluster.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 300
#endif

// Whatever the cluster looks like and whatever happens to it, a stream is a function of its request: random clusters,
// requests and disturbances, by seed. DOVETAIL_SEED repeats one, DOVETAIL_SEEDS says how many.

namespace dovetail::scheduler {
namespace {

using ::testing::AnyOf;
using ::testing::IsEmpty;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int Of(int least, int most) { return least + static_cast<int>(random_() % static_cast<uint64_t>(most - least + 1)); }
  bool Coin(int one_in = 2) { return Of(1, one_in) == 1; }
  uint64_t Bits() { return random_(); }

 private:
  std::mt19937_64 random_;
};

ClusterOptions SomeCluster(Dice& dice, uint64_t seed) {
  ClusterOptions options;
  SchedulerOptions& scheduler = options.scheduler;
  scheduler.attention = SmallTable(dice.Of(1, 2), dice.Of(1, 3), dice.Coin() ? dice.Of(1, 2) : 0);
  scheduler.micro_batches = dice.Of(1, 3);
  scheduler.max_num_seqs = dice.Of(1, 12);
  scheduler.max_num_batched_tokens = std::max(scheduler.max_num_seqs, dice.Coin() ? dice.Of(1, 40) : dice.Of(40, 400));
  scheduler.max_model_len = dice.Of(300, 700);
  scheduler.enable_prefix_caching = !dice.Coin(4);
  if (dice.Coin(6)) {
    scheduler.enable_chunked_prefill = false;
    scheduler.max_num_batched_tokens = scheduler.max_model_len + dice.Of(0, 100);
  }
  scheduler.placement = static_cast<PlacementPolicy>(dice.Of(0, 4));
  scheduler.token_shard_tokens = 64 * dice.Of(1, 4);
  scheduler.max_queued_requests = dice.Coin(4) ? dice.Of(1, 10) : 1000;
  options.kv_blocks.assign(dice.Of(1, 4), 0);
  const int per_block = scheduler.attention.op_count() * scheduler.attention.softmax(LayerGroup(0)).kv_heads;
  for (uint64_t& blocks : options.kv_blocks) {
    blocks = static_cast<uint64_t>(per_block * (dice.Coin() ? dice.Of(6, 14) : dice.Of(14, 200)));
  }
  if (scheduler.placement == PlacementPolicy::kTiers)
    for (size_t i = 0; i < options.kv_blocks.size(); ++i) options.rates.push_back(dice.Coin() ? 10 : dice.Of(1, 10));
  options.compute_workers = dice.Coin(3) ? dice.Of(2, 4) : 1;
  scheduler.prefill_ranks = dice.Of(0, 3);
  scheduler.prefill_rank_tokens = dice.Coin() ? 64 : dice.Of(64, 200);
  options.answer_delay_most = dice.Coin() ? absl::Milliseconds(dice.Of(1, 25)) : absl::ZeroDuration();
  options.out_of_memory = dice.Coin(4) ? 0.1 : 0;
  options.evict = dice.Coin() ? 0.3 : 0;
  options.seed = seed;
  if (seed % 4 == 0) options.moves_fail = 0.3;
  if (seed % 3 == 0) options.pairs = options.compute_workers;
  if (seed % 7 == 0) options.damage = seed % 2 == 0 ? 0.05 : 0.4;
  if (seed % 5 == 0) {
    options.unanswered = 0.05;
    scheduler.step_timeout = absl::Milliseconds(200);
  }
  return options;
}

GenerationRequest SomeRequest(Dice& dice, int most_prompt) {
  GenerationRequest request;
  request.tenant = absl::StrCat("tenant ", dice.Of(1, 3));
  if (dice.Coin(5)) request.cache_salt = "salt";
  request.priority = dice.Of(0, 1);
  const int size = dice.Coin() ? dice.Of(1, 70) : dice.Of(1, most_prompt);
  request.prompt = SomePrompt(size, dice.Coin() ? 1 : dice.Bits());  // often a prefix of another
  if (dice.Coin(3)) request.prompt.back() = 0;
  request.choices = dice.Coin(4) ? dice.Of(2, 5) : 1;
  request.max_tokens = dice.Coin(10) ? 0 : dice.Of(1, 150);
  request.min_tokens = dice.Coin(3) ? dice.Of(0, 20) : 0;
  for (int i = dice.Of(0, 2); i > 0; --i) request.stop_token_ids.push_back(dice.Of(0, 49));
  if (dice.Coin(4)) request.prompt_logprobs = dice.Of(0, 3);
  if (dice.Coin(4)) request.logits_last = dice.Of(1, size);
  request.logits_of_output = dice.Coin(5);
  request.use_prefix_cache = !dice.Coin(6);
  request.sampling.seed = dice.Bits();
  if (dice.Coin(3)) request.sampling.repetition_penalty = 1.2f;
  if (dice.Coin(3)) request.sampling.logprobs = 1;
  if (dice.Coin(3)) request.call = static_cast<uint64_t>(dice.Of(1, 4));
  request.prompt_progress = request.sampling.seed % 5 == 0;
  if (request.sampling.seed % 6 != 0) return request;
  request.pooling = static_cast<requests::Pooling>(1 + request.sampling.seed / 6 % 3);
  request.max_tokens = 0;
  request.choices = 1;
  return request;
}

std::vector<float> Vector(const GenerationRequest& request) {
  const auto size = static_cast<Position>(request.prompt.size());
  const Position begin = request.pooling == requests::Pooling::kLast ? size - 1 : 0;
  const Position end = request.pooling == requests::Pooling::kCls ? 1 : size;
  ExactSums sums;
  for (Position at = begin; at < end; ++at) sums.Add(HiddenState(at, request.prompt[at]));
  return sums.Mean(end - begin);
}

// A stream is what the model says, or its beginning if something ended it early.
void CheckStream(FakeCluster& cluster, RequestId id, int choice) {
  const GenerationRequest& request = cluster.request(id);
  const Stream& stream = cluster.stream(id, choice);
  SCOPED_TRACE(absl::StrCat("request ", id.value(), " choice ", choice, " ", stream.error));
  ASSERT_TRUE(stream.finished);
  std::vector<TokenId> expected = cluster.Undisturbed(request, choice);
  ASSERT_LE(stream.tokens.size(), expected.size());
  const bool complete = stream.tokens.size() == expected.size();
  expected.resize(stream.tokens.size());
  EXPECT_EQ(stream.tokens, expected);
  const bool ran_out =
      stream.reason == FinishReason::kLength || (stream.reason == FinishReason::kStop && stream.stop_token >= 0);
  const Position size = static_cast<Position>(request.prompt.size() + stream.tokens.size());
  const bool fills_the_cache = stream.reason == FinishReason::kLength && size > cluster.core().LongestSequence();
  EXPECT_TRUE(complete || !ran_out || fills_the_cache);
  if (stream.reason == FinishReason::kError) {
    // The queue was full, for all or for this tenant; it could never fit; a worker was lost, or has no memory; its KV
    // was damaged again and again.
    EXPECT_THAT(stream.error_code,
                AnyOf(absl::StatusCode::kResourceExhausted, absl::StatusCode::kAborted, absl::StatusCode::kOutOfRange,
                      absl::StatusCode::kUnavailable, absl::StatusCode::kInternal));
    EXPECT_EQ(stream.error_code == absl::StatusCode::kInternal, absl::StrContains(stream.error, "damaged again"));
  } else {
    EXPECT_EQ(stream.error_code, absl::StatusCode::kOk);
  }
  EXPECT_EQ(stream.logits.size(), request.logits_of_output ? stream.tokens.size() : 0);
  for (size_t i = 0; i < stream.logits.size(); ++i) EXPECT_EQ(stream.logits[i][0], request.prompt.size() + i - 1);
  if (request.pooling != requests::Pooling::kNone && stream.reason == FinishReason::kLength) {
    EXPECT_EQ(stream.pooled, Vector(request));
  }
  if (request.pooling == requests::Pooling::kNone) {
    EXPECT_TRUE(stream.pooled.empty());
  }
  if (choice != 0 || (stream.reason != FinishReason::kLength && stream.tokens.empty())) return;
  if (request.prompt_logprobs >= 0) {
    ASSERT_EQ(stream.prompt_logprobs.size(), request.prompt.size() - 1);
    for (size_t i = 1; i < request.prompt.size(); ++i)
      EXPECT_EQ(stream.prompt_logprobs[i - 1].chosen.token, request.prompt[i]);
  }
  ASSERT_EQ(stream.prompt_done.empty(), !request.prompt_progress);
  EXPECT_EQ(std::adjacent_find(stream.prompt_done.begin(), stream.prompt_done.end(), std::greater_equal<int>()),
            stream.prompt_done.end());
  if (request.prompt_progress) {
    EXPECT_EQ(stream.prompt_done.back(), static_cast<int>(request.prompt.size()));
  }
  ASSERT_EQ(stream.prompt_logits.size(), 2u * request.logits_last);
  for (int i = 0; i < request.logits_last; ++i) {
    const size_t position = request.prompt.size() - request.logits_last + i;
    EXPECT_EQ(stream.prompt_logits[2 * i], static_cast<float>(position));
    EXPECT_EQ(stream.prompt_logits[2 * i + 1], static_cast<float>(request.prompt[position]));
  }
}

// A client that was sent tokens of a call loses no other part of it to a full queue.
void CheckCalls(FakeCluster& cluster, const std::vector<RequestId>& submitted) {
  for (const RequestId lost : submitted) {
    const Stream& stream = cluster.stream(lost);
    const bool full =
        stream.error_code == absl::StatusCode::kAborted || stream.error_code == absl::StatusCode::kResourceExhausted;
    if (cluster.request(lost).call == 0 || !full) continue;
    for (const RequestId other : submitted) {
      if (other == lost || cluster.request(other).call != cluster.request(lost).call) continue;
      bool spoke = false, here = false;
      for (int choice = 0; choice < cluster.request(other).choices; ++choice) {
        const Stream& sibling = cluster.stream(other, choice);
        spoke = spoke || (!sibling.tokens.empty() && sibling.first_token < stream.end);
        here = here || sibling.end > stream.end;
      }
      EXPECT_FALSE(spoke && here) << "request " << lost.value() << " was refused while " << other.value() << " spoke";
    }
  }
}

struct Outcome {
  uint64_t trace = 0, preemptions = 0, hits = 0, tokens = 0, errors = 0, moves = 0, ahead = 0, damaged = 0;
};

enum class Ahead : uint8_t { kNo, kOneGpu, kPairs };

Outcome RunSeed(uint64_t seed, Ahead ahead = Ahead::kNo) {
  Dice dice(seed);
  ClusterOptions options = SomeCluster(dice, seed);
  if (ahead != Ahead::kNo) {
    options.scheduler.run_ahead = true;
    options.scheduler.micro_batches = options.compute_workers = 1;
  }
  if (ahead == Ahead::kOneGpu) {
    options.kv_blocks.resize(1);
    options.pairs = 1;
  }
  if (ahead == Ahead::kPairs) options.compute_workers = options.pairs = static_cast<int>(options.kv_blocks.size());
  FakeCluster cluster(options);
  const int requests = dice.Of(1, 40);
  const int span_ms = dice.Of(0, 300);
  std::vector<RequestId> submitted;
  for (int i = 0; i < requests; ++i) {
    const absl::Time when = cluster.at(absl::Milliseconds(dice.Of(0, span_ms)));
    const RequestId id = cluster.SubmitAt(when, SomeRequest(dice, options.scheduler.max_model_len - 1));
    submitted.push_back(id);
    const absl::Time later = when + absl::Milliseconds(dice.Of(0, 200));
    if (dice.Coin(6)) cluster.Post(later, RequestCancelled{id});
    if (dice.Coin(8)) cluster.Post(later, ChoiceStopped{id, dice.Of(0, 1)});
    if (dice.Coin(6)) {
      cluster.Post(later, RequestPaused{id});
      cluster.Post(later + absl::Milliseconds(dice.Of(0, 500)), RequestResumed{id});
    }
  }
  if (dice.Coin(6)) {  // an attention worker restarts and forgets everything
    const WorkerId worker(static_cast<uint32_t>(dice.Of(0, static_cast<int>(options.kv_blocks.size()) - 1)));
    cluster.Post(cluster.at(absl::Milliseconds(dice.Of(0, 400))),
                 AttentionWorkerJoined{worker, Epoch(2), options.kv_blocks[worker.value()]});
  }
  Dice losses(seed ^ 0x6c6f7373);
  if (losses.Coin(4) && options.kv_blocks.size() > 1) {  // steps end for a worker some time before its loss is known
    const WorkerId worker(static_cast<uint32_t>(losses.Of(1, static_cast<int>(options.kv_blocks.size()) - 1)));
    const absl::Duration when = absl::Milliseconds(losses.Of(0, 400));
    cluster.RunUntil(cluster.at(when));
    cluster.Disconnect(worker);
    cluster.Post(cluster.at(when + absl::Milliseconds(losses.Of(0, 300))),
                 AttentionWorkerLost{worker, cluster.worker(worker).epoch()});
  }
  Dice moves(seed ^ 0x6d6f7665);
  const int workers = static_cast<int>(options.kv_blocks.size());
  for (int i = workers > 1 && moves.Coin() ? moves.Of(1, workers - 1) : 0; i > 0; --i) {
    const WorkerId worker(static_cast<uint32_t>(i));  // one stays
    cluster.Post(cluster.at(absl::Milliseconds(moves.Of(0, 400))), AttentionWorkerDraining{worker, Epoch(1)});
    if (moves.Coin(3)) {  // and comes back
      cluster.Post(cluster.at(absl::Milliseconds(moves.Of(400, 600))),
                   AttentionWorkerJoined{worker, Epoch(2), options.kv_blocks[worker.value()]});
    }
  }
  cluster.RunUntilIdle();
  Outcome outcome;
  EXPECT_THAT(cluster.violations(), IsEmpty());
  for (RequestId id : submitted) {
    EXPECT_TRUE(cluster.finished(id));
    for (int choice = 0; choice < cluster.request(id).choices; ++choice) {
      CheckStream(cluster, id, choice);
      outcome.tokens += cluster.stream(id, choice).tokens.size();
      outcome.errors += cluster.stream(id, choice).reason == FinishReason::kError;
    }
  }
  CheckCalls(cluster, submitted);
  EXPECT_EQ(cluster.sequences_held(), 0);
  const SchedulerStats stats = cluster.core().stats();
  EXPECT_EQ(stats.running_sequences, 0);
  EXPECT_EQ(stats.waiting_requests, 0);
  EXPECT_EQ(stats.paused_requests, 0);
  EXPECT_EQ(stats.kv_usage, 0);
  outcome.trace = cluster.trace;
  outcome.preemptions = stats.preemptions;
  outcome.moves = stats.moves;
  outcome.damaged = stats.damaged;
  outcome.ahead = static_cast<uint64_t>(cluster.tokens_ahead);
  outcome.hits = stats.prefix_hits;
  return outcome;
}

// The same number before and after a change that is to change no decision.
void PrintTrace(const Outcome& all) {
  std::printf("digest of all actions: %016llx\n", static_cast<unsigned long long>(all.trace));
}

TEST(Streams, DependOnNothingButTheirRequest) {
  const char* only = std::getenv("DOVETAIL_SEED");
  const char* count = std::getenv("DOVETAIL_SEEDS");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last =
      only != nullptr ? first : (count != nullptr ? std::strtoull(count, nullptr, 10) : DOVETAIL_SEED_COUNT);
  Outcome all;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
    const Outcome outcome = RunSeed(seed);
    if (::testing::Test::HasFailure()) return;
    if (seed % 20 == 0) {
      EXPECT_EQ(RunSeed(seed).trace, outcome.trace) << "not the same actions twice";
    }
    all.trace = all.trace * 31 + outcome.trace;
    all.preemptions += outcome.preemptions;
    all.hits += outcome.hits;
    all.moves += outcome.moves;
    all.damaged += outcome.damaged;
    all.tokens += outcome.tokens;
    all.errors += outcome.errors;
  }
  std::printf("seeds %llu..%llu: %llu tokens, %llu preemptions, %llu prefix tokens found, %llu errors\n",
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(last),
              static_cast<unsigned long long>(all.tokens), static_cast<unsigned long long>(all.preemptions),
              static_cast<unsigned long long>(all.hits), static_cast<unsigned long long>(all.errors));
  PrintTrace(all);
  if (only != nullptr) return;
  EXPECT_GT(all.moves, 100u);
  EXPECT_GT(all.damaged, 100u);
  EXPECT_GT(all.preemptions, 100u);  // else the seeds are too tame to say anything
  EXPECT_GT(all.hits, 1000u);
}

// The same where steps are planned before the tokens of the one before are known.
using AheadTest = ::testing::TestWithParam<Ahead>;
TEST_P(AheadTest, StreamsDependOnNothingButTheirRequest) {
  const char* only = std::getenv("DOVETAIL_SEED");
  const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last = only != nullptr ? first : DOVETAIL_SEED_COUNT;
  Outcome all;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
    const Outcome outcome = RunSeed(seed, GetParam());
    if (::testing::Test::HasFailure()) return;
    all.trace = all.trace * 31 + outcome.trace;
    all.preemptions += outcome.preemptions;
    all.tokens += outcome.tokens;
    all.ahead += outcome.ahead;
  }
  PrintTrace(all);
  if (only != nullptr) return;
  EXPECT_GT(all.ahead * 10, all.tokens) << "hardly a step ran ahead: many have one with penalties or listed logprobs";
  EXPECT_GT(all.preemptions, 100u);
}
INSTANTIATE_TEST_SUITE_P(, AheadTest, ::testing::Values(Ahead::kOneGpu, Ahead::kPairs),
                         [](const auto& info) { return info.param == Ahead::kPairs ? "OfPairs" : "OfOneGpu"; });

}  // namespace
}  // namespace dovetail::scheduler
