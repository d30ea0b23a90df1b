#include "engine/measurements/engine_measurements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/measurements/memory_rate.h"

namespace dovetail::engine {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Arrivals of one token each, in milliseconds.
std::vector<Arrival> At(const std::vector<int>& times) {
  std::vector<Arrival> arrivals;
  for (const int ms : times) arrivals.push_back({TimePoint() + milliseconds(ms), 1});
  return arrivals;
}

TEST(FullBatchWindow, BeginsWhenTheLastSequenceShowsItsFirstToken) {
  const auto window = FullBatchWindow({At({10, 20, 30, 40, 50}), At({25, 30, 40, 50, 60})}, 2);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->tokens, 4);              // at 30, 30, 40, 40
  EXPECT_DOUBLE_EQ(window->seconds, 0.015);  // from 25 to 40
  EXPECT_NEAR(window->tokens_per_s(), 4 / 0.015, 1e-9);
}

TEST(FullBatchWindow, CountsTokensThatComeTogether) {
  std::vector<Arrival> pairs = At({10, 20, 30});
  for (Arrival& arrival : pairs) arrival.tokens = 2;
  const auto window = FullBatchWindow({pairs}, 4);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->tokens, 4);
  EXPECT_DOUBLE_EQ(window->seconds, 0.020);
}

TEST(FullBatchWindow, AMicroBatchMayBeAheadOfAnother) {
  const auto window = FullBatchWindow({At({1, 2, 3, 4, 5, 6, 8, 9}), At({1, 3, 5, 7, 9})}, 4);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->tokens, 8);  // five and three
  EXPECT_DOUBLE_EQ(window->seconds, 0.006);
}

TEST(FullBatchWindow, RefusesABatchThatWasNeverFull) {
  // One sequence had ended before the other began.
  const auto apart = FullBatchWindow({At({1, 2, 3, 4}), At({10, 11, 12, 13, 14, 15, 16, 17})}, 3);
  EXPECT_EQ(apart.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(apart.status().message()), HasSubstr("gave 0 of 3 tokens"));
  EXPECT_THAT(std::string(apart.status().message()), HasSubstr("--max-num-seqs"));
  // One ended before the others had given the rest of what is wanted.
  const auto early = FullBatchWindow({At({1, 2, 3, 4}), At({1, 3, 5, 7, 9, 11})}, 4);
  EXPECT_EQ(early.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FullBatchWindow({At({1, 2}), At({})}, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FullBatchWindow({At({1, 2})}, 5).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FullBatchWindow({}, 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(BatchShape, OutputsLastUntilTheOthersPromptsAreRead) {
  // 64 prompts of 128 at 512 a step, 64 of which decode: 19 steps.
  EXPECT_EQ(OutputTokensNeeded({.sequences = 64, .prompt_tokens = 128, .output_tokens = 64, .tokens_per_step = 512}),
            64 + 16 + 19 + 8);
  EXPECT_EQ(OutputTokensNeeded({.sequences = 1, .prompt_tokens = 128, .output_tokens = 64, .tokens_per_step = 512}),
            64 + 16 + 1 + 8);
}

TEST(PromptSource, NeverGivesTheSamePromptTwiceAndStaysInTheVocabulary) {
  PromptSource source{.vocab_size = 300, .seed = 5};
  std::set<std::vector<TokenId>> prompts;
  for (int i = 0; i < 20; ++i) {
    prompts.insert(source.Next(16));
    for (const TokenId token : *prompts.rbegin()) EXPECT_TRUE(token >= 0 && token < 300);
  }
  EXPECT_EQ(prompts.size(), 20u);
  PromptSource again{.vocab_size = 300, .seed = 5};
  EXPECT_TRUE(prompts.contains(again.Next(16)));
}

// What these engines have in common: nothing is cancelled or measured, and a sequence ends by its length.
class FakeEngine : public Engine {
 public:
  void Cancel(RequestId) override {}
  void StopChoice(RequestId, int) override {}
  void Pause(RequestId) override {}
  void Resume(RequestId) override {}
  EngineStats stats() override { return {}; }
  std::vector<StepSample> TakeStepSamples() override { return {}; }

 protected:
  static void Give(GenerationSink& sink, bool last) {
    requests::GenerationUpdate update;
    update.tokens = {1};
    update.choice_finished = update.request_finished = last;
    update.reason = requests::FinishReason::kLength;
    sink.OnUpdate(std::move(update));
  }
};

// Answers every request at once, from inside Submit.
class InstantEngine final : public FakeEngine {
 public:
  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request, std::shared_ptr<GenerationSink> sink) override {
    requests.push_back(request);
    if (refuse) return absl::ResourceExhaustedError("the queue is full");
    for (int i = 0; i < request.max_tokens; ++i) {
      requests::GenerationUpdate update;
      update.tokens = {1};
      update.first_index = i;
      update.choice_finished = update.request_finished = i + 1 == request.max_tokens || stop_early;
      update.reason = stop_early ? requests::FinishReason::kStop : requests::FinishReason::kLength;
      sink->OnUpdate(std::move(update));
      if (stop_early) break;
    }
    return RequestId(requests.size());
  }

  std::vector<requests::GenerationRequest> requests;
  bool refuse = false, stop_early = false;
};

TEST(Measurements, AskForWhatTheyMeasure) {
  InstantEngine engine;
  PromptSource prompts{.vocab_size = 100};
  const auto decode = MeasureDecode(engine, prompts, 32);
  ASSERT_TRUE(decode.ok()) << decode.status();
  EXPECT_EQ(decode->tokens, 32);
  const auto prefill = MeasurePrefill(engine, prompts, 200);
  ASSERT_TRUE(prefill.ok()) << prefill.status();
  EXPECT_EQ(prefill->tokens, 200);
  ASSERT_EQ(engine.requests.size(), 2u);
  EXPECT_EQ(engine.requests[0].prompt.size(), 1u);
  EXPECT_EQ(engine.requests[0].max_tokens, 32);
  EXPECT_EQ(engine.requests[1].prompt.size(), 200u);
  EXPECT_EQ(engine.requests[1].max_tokens, 1);
  for (const auto& request : engine.requests) {
    EXPECT_FALSE(request.use_prefix_cache);
    EXPECT_TRUE(request.stop_token_ids.empty());
  }
}

// Gives a token of every sequence whenever a prompt of `together` tokens has been read.
class ReadingEngine final : public FakeEngine {
 public:
  explicit ReadingEngine(size_t together) : together_(together) {}
  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request, std::shared_ptr<GenerationSink> sink) override {
    if (request.prompt.size() == together_) {
      ++read;
      for (auto& [batch_sink, left] : batch_) {
        if (left > 0) Give(*batch_sink, --left == 0);
      }
      Give(*sink, true);
    } else {
      Give(*sink, false);
      batch_.emplace_back(sink, request.max_tokens - 1);
    }
    return RequestId(1);
  }

  std::atomic<int> read{0};

 private:
  const size_t together_;
  std::vector<std::pair<std::shared_ptr<GenerationSink>, int>> batch_;
};

TEST(Measurements, ReadPromptsBesideABatchAndCountThoseOfItsWindow) {
  ReadingEngine engine(700);
  PromptSource prompts{.vocab_size = 100};
  const BatchShape shape{.sequences = 3, .prompt_tokens = 5, .output_tokens = 40, .beside_prompt_tokens = 700};
  const auto window = MeasureBatch(engine, prompts, shape);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->tokens, 3 * 40);
  EXPECT_GE(engine.read, OutputTokensNeeded(shape) - 1);
  // Forty steps, each with a prompt: the first and the last may be half outside.
  EXPECT_GT(window->beside_tokens, 38 * 700);
  EXPECT_LT(window->beside_tokens, 42 * 700);
}

// Takes 64 tokens of a prompt in a step, and gives a token of each running sequence meanwhile.
class SparingEngine final : public FakeEngine {
 public:
  explicit SparingEngine(size_t sequences) : sequences_(sequences) {}
  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request, std::shared_ptr<GenerationSink> sink) override {
    for (size_t read = 0; read < request.prompt.size(); read += 64) Step();
    left_.emplace_back(std::move(sink), request.max_tokens);
    if (++submitted % sequences_ == 0)
      while (Step()) {
      }
    return RequestId(1);
  }

  size_t submitted = 0;

 private:
  bool Step() {
    bool any = false;
    for (auto& [sink, left] : left_) {
      if (left == 0) continue;
      any = true;
      Give(*sink, --left == 0);
    }
    return any;
  }

  const size_t sequences_;
  std::vector<std::pair<std::shared_ptr<GenerationSink>, int>> left_;
};

TEST(Measurements, OfBatchesWhosePromptsAreReadInSmallPartsHaveLongerAnswers) {
  SparingEngine engine(8);
  PromptSource prompts{.vocab_size = 100};
  const auto window = MeasureBatch(engine, prompts, {.sequences = 8, .prompt_tokens = 256, .output_tokens = 20});
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->tokens, 8 * 20);
  EXPECT_EQ(engine.submitted, 16u) << "once more";
}

TEST(Measurements, PassOnRefusalsAndSequencesThatEndEarly) {
  InstantEngine engine;
  PromptSource prompts{.vocab_size = 100};
  engine.stop_early = true;
  EXPECT_EQ(MeasureDecode(engine, prompts, 32).status().code(), absl::StatusCode::kUnavailable);
  engine.refuse = true;
  EXPECT_EQ(MeasureBatch(engine, prompts, {.sequences = 4}).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryRate, IsWithinWhatMachinesDo) {
  kernels::ThreadPool pool({.threads = 2});
  const auto rate = MeasureReadRate(pool);
  ASSERT_TRUE(rate.ok()) << rate.status();
  EXPECT_GT(*rate, 1e8);
  EXPECT_LT(*rate, 1e13);
}

}  // namespace
}  // namespace dovetail::engine
