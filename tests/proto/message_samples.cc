#include "tests/proto/message_samples.h"

#include "proto/cache_frames.h"
#include "proto/trace_frame.h"

namespace dovetail::proto::testing {
namespace {

std::vector<BlockHash> SomeHashes(int count) {
  std::vector<BlockHash> hashes;
  for (int i = 0; i < count; ++i) hashes.push_back({0x1111111111111111u * (i + 1), ~uint64_t{0} - i});
  return hashes;
}

std::vector<Shard> SomeShards() {
  return {{LayerGroup(1), WorkerId(2), Epoch(3), {0, 4}, {0, 128}, KvGeneration(0x0807060504030201u)},
          {LayerGroup(1), WorkerId(9), Epoch(8), {4, 6}, {128, kOpenEnd}}};
}

PositionLogprobs SomeLogprobs() { return {{11, -0.25f, 1}, {{11, -0.25f, 1}, {7, -3.5f, 2}}}; }

template <typename Message>
MessageKind SequenceMessage(const char* name, std::vector<Message> samples) {
  MessageKind kind{name, {}, [](std::span<const std::byte> bytes) -> absl::StatusOr<std::vector<std::byte>> {
                     DT_ASSIGN_OR_RETURN(const Message message, Decode<Message>(bytes));
                     return Bytes(message);
                   }};
  for (const Message& sample : samples) kind.samples.push_back(Bytes(sample));
  return kind;
}

}  // namespace

SamplingParams FullSampling() {
  SamplingParams p;
  p.temperature = 0.7f;
  p.top_k = 40;
  p.top_p = 0.9f;
  p.min_p = 0.05f;
  p.repetition_penalty = 1.1f;
  p.presence_penalty = 0.5f;
  p.frequency_penalty = -0.5f;
  p.seed = 0xfedcba9876543210u;
  p.logprobs = 20;
  return p;
}

SamplingLists FullLists() { return {{{5, 2.5f}, {6, -100.0f}}, {5, 6, 7}, {6}, {2, 0}}; }

StepPlan FullPlan() {
  StepEntry entry;
  entry.sequence = SequenceId(0x0102030405060708u);
  entry.ctx_len = 129;
  entry.tokens = {3, 1, 4, 1, 5};
  entry.rope_length = 4096;
  entry.sample = true;
  entry.prompt_logprobs = 3;
  entry.logits_rows = 2;
  entry.pool_first = 1;
  entry.pool_rows = 3;
  entry.next_prompt_token = 9;
  entry.sampling = FullSampling();
  entry.has_lists = true;
  entry.given.lists = std::make_shared<const SamplingLists>(FullLists());
  entry.ban_early = true;
  entry.prompt_tokens = 4;
  entry.history = {9, 8, 7};
  entry.history_given = true;
  entry.exchange = PrefixExchange::kGather;
  const auto shards = SomeShards();
  entry.placement.assign(shards.begin(), shards.end());
  entry.block_hashes = SomeHashes(2);
  StepEntry plain;
  plain.sequence = SequenceId(2);
  plain.tokens = {1};
  return StepPlan{StepId(77), MicroBatchId(3), {entry, plain}};
}

StepPlan PlanOfRank() {
  StepEntry entry;
  entry.sequence = SequenceId(5);
  entry.ctx_len = 192;
  entry.tokens = {3, 1, 4};
  entry.exchange = PrefixExchange::kRing;
  entry.linear_exchange = LinearExchange::kChain;
  return StepPlan{StepId(78),
                  MicroBatchId(3),
                  {entry},
                  {StepId(77), 100, 195, 1, 2},
                  {{WorkerId(4), StepId(77), MicroBatchId(9), 100}, {WorkerId(5), StepId(78), MicroBatchId(3), 192}}};
}

StepResult FullResult() {
  EntryResult entry;
  entry.sequence = SequenceId(5);
  entry.status = StepStatus::kBadLogits;
  entry.position = 134;
  entry.token = 42;
  entry.has_logprobs = true;
  entry.logprobs = SomeLogprobs();
  entry.prompt_logprobs = {SomeLogprobs(), {}};
  entry.logits = {1.5f, -2.0f, 0.0f};
  entry.pooled = {1, 2, 3, ~uint64_t{0}};
  return StepResult{StepId(77),
                    MicroBatchId(3),
                    StepStatus::kWorkerFailed,
                    "attention worker 2: out of blocks",
                    WorkerId(2),
                    {entry, EntryResult{}},
                    {1000, 600, 300, 100, 200, 50, 10, 40},
                    {7000, 900, 80, 70, 60, 50, 40},
                    {512, 520, 1.5e9, 2.5e8, 4096, true, true, true, true},
                    {{WorkerId(4), 70000, 90}, {WorkerId(6), 60, 5}},
                    {SequenceId(5), SequenceId(9)},
                    {SequenceId(7)}};
}

OpenSequence FullOpen() { return {SequenceId(5), SomeShards(), SomeHashes(3), true, 200, StepId(71)}; }

StepBegin FullBegin() {
  return {{{SequenceId(1), 128, 1, SomeHashes(1)},
           {SequenceId(2), 0, 512, {}, 0, kOpenEnd, kOpenEnd, StateExchange::kTokens, 512},
           {SequenceId(3), 192, 64, {}, 128, 130, 150, StateExchange::kFetch, 0}},
          {},
          4096};
}

StepBegin BeginOfRank() { return {{{SequenceId(1), 192, 3, SomeHashes(1), 128}}, {StepId(77), 100, 195, 1, 2}}; }

std::vector<MessageKind> AllMessages() {
  std::vector<MessageKind> all;
  all.push_back({"StepPlan",
                 {Bytes(FullPlan()), Bytes(PlanOfRank())},
                 [](std::span<const std::byte> bytes) -> absl::StatusOr<std::vector<std::byte>> {
                   DT_ASSIGN_OR_RETURN(const StepPlan plan, DecodeStepPlan(bytes));
                   return Bytes(plan);
                 }});
  all.push_back({"StepResult",
                 {Bytes(FullResult()), Bytes(StepResult{})},
                 [](std::span<const std::byte> bytes) -> absl::StatusOr<std::vector<std::byte>> {
                   DT_ASSIGN_OR_RETURN(const StepResult result, DecodeStepResult(bytes));
                   return Bytes(result);
                 }});
  all.push_back(SequenceMessage<OpenSequence>("OpenSequence", {FullOpen(), {}}));
  all.push_back(
      SequenceMessage<SequenceOpened>("SequenceOpened", {{SequenceId(5), {3, 2, 1, 0}, KvGeneration(9)}, {}}));
  all.push_back(
      SequenceMessage<ForkSequence>("ForkSequence", {{SequenceId(5), SequenceId(6), 700, KvGeneration(9)}, {}}));
  all.push_back(
      SequenceMessage<ReleaseSequence>("ReleaseSequence", {{SequenceId(5), 700, SomeHashes(2), KvGeneration(9)}, {}}));
  all.push_back(SequenceMessage<PrefixProbe>("PrefixProbe", {{99, SomeShards(), SomeHashes(4)}, {}}));
  all.push_back(SequenceMessage<PrefixProbed>("PrefixProbed", {{99, {4, 0}}, {}}));
  all.push_back(SequenceMessage<Unpin>("Unpin", {{99}, {}}));
  all.push_back(SequenceMessage<CacheChanged>(
      "CacheChanged", {{{{{3, 4}, LayerGroup(2), {0, 8}, true}, {{5, 6}, LayerGroup(0), {2, 3}, false}}}, {}}));
  all.push_back(SequenceMessage<TraceSequence>("TraceSequence", {{SequenceId(7), {1, 2, 3, true}}, {}}));
  all.push_back(SequenceMessage<MoveSequence>(
      "MoveSequence", {{SequenceId(5), 64, 700, 3, StepId(9), NodeId(7), Epoch(8), KvGeneration(1), KvGeneration(2)}}));
  all.push_back(SequenceMessage<SequenceMoved>("SequenceMoved", {{SequenceId(5), StepId(9), false, "cut"}, {}}));
  all.push_back(SequenceMessage<StepBegin>("StepBegin", {FullBegin(), BeginOfRank()}));
  all.push_back(SequenceMessage<StepRefused>(
      "StepRefused", {{true, "the step needs 12 KvBlocks", {}}, {false, "damaged", {SequenceId(3)}}, {}}));
  return all;
}

}  // namespace dovetail::proto::testing
