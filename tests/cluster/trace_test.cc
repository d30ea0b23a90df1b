#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "nlohmann/json.hpp"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// What a trace shows of the order of things: q before k and v, one micro-batch in dense layers while another is in
// attention, K and V of prompts layer by layer. Times are not judged, only the order.

namespace dovetail::test {
namespace {

using Spans = std::vector<Trace::Span>;

class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    TinyModelSpec spec;
    spec.layers = 4;
    auto model = TestModel::Load(WriteTinyModel(spec, folder_), model::WeightFormat::kAuto, {.threads = 1});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  // The compute worker's spans of so many requests at once; a Chrome trace is left in file().
  Spans Run(int micro_batches, int requests, int prompt, const compute::ComputeWorkerTuning& tuning = {}) {
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*model_, DType::kF32);
    options.scheduler.micro_batches = micro_batches;
    options.attention_workers = 2;
    options.compute = tuning;
    options.trace_file = file();
    const auto cluster = StartCluster(*model_, options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
    for (int i = 0; i < requests; ++i) {
      sinks.push_back(std::make_shared<cli::CollectingSink>());
      std::vector<TokenId> tokens;
      for (int t = 0; t < prompt; ++t) tokens.push_back((7 * t + i) % 97);
      EXPECT_TRUE((*cluster)->Submit(GreedyRequest(tokens, 12), sinks.back()).ok());
    }
    for (const auto& sink : sinks) EXPECT_TRUE(sink->WaitForEnd().ok());
    const Spans spans = (*cluster)->traces()[0]->Spans();
    attention_spans_ = (*cluster)->traces()[1]->Spans().size();
    samples_ = (*cluster)->TakeStepSamples();
    return spans;
  }
  std::string file() const { return (folder_ / "trace.json").string(); }

  // Index of the first span of `what` in (step, op), or -1.
  static int Find(const Spans& spans, const std::string& what, StepId step, int op) {
    for (size_t i = 0; i < spans.size(); ++i)
      if (spans[i].what == what && spans[i].step == step && spans[i].op == op) return static_cast<int>(i);
    return -1;
  }
  static int Count(const Spans& spans, int first, int last, const std::string& what, MicroBatchId but_not) {
    return static_cast<int>(std::count_if(spans.begin() + first, spans.begin() + last, [&](const Trace::Span& s) {
      return s.what == what && s.micro_batch != but_not;
    }));
  }
  static int DenseBetween(const Spans& spans, int first, int last, StepId step) {
    return static_cast<int>(std::count_if(spans.begin() + first, spans.begin() + last, [&](const Trace::Span& s) {
      return std::string(s.what) == "dense" && s.step == step;
    }));
  }

  const std::filesystem::path folder_ = TempFolder();
  std::unique_ptr<TestModel> model_;
  size_t attention_spans_ = 0;
  std::vector<engine::StepSample> samples_;
};

TEST_F(TraceTest, QueriesLeaveBeforeKeysAndValuesAreComputed) {
  for (const bool q_first : {true, false}) {
    compute::ComputeWorkerTuning tuning;
    tuning.q_first = q_first;
    const Spans spans = Run(1, 1, 3, tuning);
    int ops = 0;
    for (const Trace::Span& span : spans) {
      if (std::string(span.what) != "send q") continue;
      const int q = Find(spans, "send q", span.step, span.op), kv = Find(spans, "send k, v", span.step, span.op);
      ASSERT_GE(kv, 0);
      EXPECT_LT(q, kv);
      EXPECT_EQ(DenseBetween(spans, q, kv, span.step), q_first ? 1 : 0) << "the projection of k and v";
      EXPECT_LT(kv, Find(spans, "partial arrives", span.step, span.op));
      ++ops;
    }
    EXPECT_GT(ops, 4 * 8);
  }
}

TEST_F(TraceTest, OneMicroBatchIsInDenseLayersWhileAnotherIsInAttention) {
  for (const int micro_batches : {1, 2, 3}) {
    const Spans spans = Run(micro_batches, 6, 3);
    std::set<int> rotating;
    int waits = 0, filled = 0;
    for (size_t i = 0; i < spans.size(); ++i) {
      if (std::string(spans[i].what) != "send k, v") continue;
      const int partial = Find(spans, "partial arrives", spans[i].step, spans[i].op);
      ASSERT_GT(partial, static_cast<int>(i));
      ++waits;
      filled += Count(spans, static_cast<int>(i), partial, "dense", spans[i].micro_batch) > 0;
      rotating.insert(spans[i].micro_batch.value());
    }
    EXPECT_EQ(rotating.size(), static_cast<size_t>(micro_batches));
    if (micro_batches == 1) {
      EXPECT_EQ(filled, 0);
    } else {
      EXPECT_GT(filled, waits / 2) << "most waits of one are dense layers of another";
    }
  }
}

TEST_F(TraceTest, WorkForOtherStepsIsNoneOfTheTimeOfTheWire) {
  for (const int micro_batches : {1, 2}) {
    Run(micro_batches, 6, 3);
    ASSERT_GT(samples_.size(), 10u);
    int64_t overlapped = 0;
    for (const engine::StepSample& step : samples_) {
      EXPECT_GE(step.overlapped_us, 0);
      EXPECT_LE(step.overlapped_us, step.attention_wait_us);
      EXPECT_LE(step.WirePartUs(), step.attention_wait_us - step.overlapped_us);
      overlapped += step.overlapped_us;
    }
    if (micro_batches == 1) {
      EXPECT_EQ(overlapped, 0);
    } else {
      EXPECT_GT(overlapped, 0);
    }
  }
}

TEST_F(TraceTest, KeysAndValuesOfAPromptGoLayerByLayerOrAtTheEnd) {
  for (const bool at_end : {false, true}) {
    compute::ComputeWorkerTuning tuning;
    tuning.hand_over_at_end = at_end;
    const Spans spans = Run(1, 1, 200, tuning);
    const StepId step = spans.front().step;
    int first_sent = -1, last_prompt = -1, prompts = 0;
    for (int i = 0; i < static_cast<int>(spans.size()) && spans[i].step == step; ++i) {
      const std::string what = spans[i].what;
      if (what == "send k, v" && first_sent < 0) first_sent = i;
      if (what == "attend prompts") last_prompt = i, ++prompts;
    }
    EXPECT_EQ(prompts, 4) << "one a layer";
    EXPECT_EQ(first_sent > last_prompt, at_end);
  }
}

TEST_F(TraceTest, IsAChromeTrace) {
  Run(2, 4, 20);
  EXPECT_GT(attention_spans_, 50u);
  const std::string text = ReadFile(file());
  auto json = nlohmann::json::parse(text.substr(0, text.rfind(",\n")) + "]");
  std::map<int, std::string> processes;
  std::map<std::string, int> events;
  for (const auto& event : json) {
    if (event["ph"] == "M") {
      processes[event["pid"]] = event["args"]["name"];
      continue;
    }
    ASSERT_TRUE(processes.contains(event["pid"]));
    EXPECT_TRUE(event["ph"] == "i" || event["dur"].get<double>() > 0);
    EXPECT_GT(event["ts"].get<int64_t>(), 0);
    ++events[processes[event["pid"]] + ": " + event["name"].get<std::string>()];
  }
  EXPECT_EQ(processes.size(), 3u);
  EXPECT_GT(events["compute worker: dense"], 0);
  EXPECT_GT(events["attention worker 0: append, attend"], 0);
  EXPECT_EQ(events["attention worker 0: attend before k, v"], 0) << "in one process they come with q";
}

}  // namespace
}  // namespace dovetail::test
