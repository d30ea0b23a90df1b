#include "tests/cluster/scenario_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "attention_worker/cpu/attention_executor.h"
#include "base/check.h"
#include "compute_worker/attention_specs.h"
#include "server/openai/generation_response.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

using model::GgmlType;

TinyModelSpec SpecOf(TinyModelKind kind) {
  TinyModelSpec spec;
  spec.seed = static_cast<uint64_t>(kind) + 1;
  switch (kind) {
    case TinyModelKind::kGrouped:
    case TinyModelKind::kStories:
    case TinyModelKind::kGatedDelta:  // folders, not GGUF
    case TinyModelKind::kLightning:
    case TinyModelKind::kMamba2: break;
    case TinyModelKind::kWindowed:  // a window that ends inside a segment, three KV heads for up to five workers
      spec.architecture = "gemma3";
      spec.layers = 4;
      spec.heads = 6;
      spec.kv_heads = 3;
      spec.window = 83;
      break;
    case TinyModelKind::kBF16:
      spec.layers = 3;
      spec.types = {GgmlType::kBF16};
      break;
    case TinyModelKind::kQuantised:
      spec.hidden = spec.mlp = 256;
      spec.head_dim = 64;
      spec.vocab = 128;
      spec.types = {GgmlType::kQ4_0, GgmlType::kQ4_1, GgmlType::kQ5_0, GgmlType::kQ5_1, GgmlType::kQ8_0,
                    GgmlType::kQ4_K, GgmlType::kQ5_K, GgmlType::kQ6_K, GgmlType::kF16};
      break;
  }
  return spec;
}

int64_t BlocksOf(int tokens) { return (tokens + kSegmentTokens - 1) / kSegmentTokens; }

// Bytes of all KV heads and layers of `blocks` x 64 tokens on each of `workers`.
uint64_t KvBytes(const TestModel& model, DType kv, KvStorage storage, int64_t blocks, int workers) {
  const auto table = compute::AttentionTableOf(model.config(), kv);
  DT_CHECK(table.ok());
  uint64_t kv_blocks = 0;
  for (int group = 0; group < table->group_count(); ++group) {
    const proto::SoftmaxSpec& spec = table->softmax(LayerGroup(static_cast<uint16_t>(group)));
    kv_blocks += uint64_t(table->ops_in_group[group]) * spec.kv_heads * spec.blocks_per_head;
  }
  return kv_blocks * attention::AttentionExecutor::BlockBytes(*table, storage) * blocks * workers;
}

// Where two rows of floats first differ as bits, or empty.
std::string DifferentBits(std::span<const float> ours, std::span<const float> alone) {
  if (ours.size() != alone.size()) return absl::StrCat(ours.size(), " values, alone ", alone.size());
  if (ours.empty()) return "";  // memcmp may not be given null
  if (std::memcmp(ours.data(), alone.data(), ours.size_bytes()) == 0) return "";
  size_t first = 0, count = 0;
  for (size_t i = ours.size(); i-- > 0;)
    if (std::memcmp(&ours[i], &alone[i], sizeof(float)) != 0) first = i, ++count;
  return absl::StrCat(count, " of ", ours.size(), " values differ; number ", first, " is ", ours[first], ", alone ",
                      alone[first]);
}

// Once the statistics, which another process may publish, know of these tokens.
std::string KvHeld(engine::Engine& engine, uint64_t tokens) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  uint64_t held = 0;
  do {
    const engine::EngineStats stats = engine.stats();
    held = stats.kv_blocks_in_use;
    const bool known = stats.scheduler.generation_tokens >= tokens && stats.scheduler.running_sequences == 0;
    if (known && held == 0) return "";
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return absl::StrCat(held, " KV blocks are held after the last request ended");
}

// What a client gets that asks for the best `n` of these choices.
template <typename Choices>
std::string BestOf(const RequestSpec& spec, int n, const Choices& choices) {
  auto served = std::make_shared<server::ServedModel>();  // without a tokenizer: answers are token ids
  served->names = {"tiny"};
  server::ResponseSpec shape;
  shape.n = n;
  shape.best_of = spec.choices;
  shape.logprobs = 0;
  shape.return_token_ids = true;
  shape.prompts = {{1}};
  server::GenerationResponse response(std::move(served), std::move(shape));
  for (int c = 0; c < spec.choices; ++c) {
    requests::GenerationUpdate update;
    update.choice = c;
    update.tokens.assign(choices[c].tokens.begin(), choices[c].tokens.end());
    update.logprobs = choices[c].logprobs;
    update.choice_finished = true;
    update.reason = requests::FinishReason::kLength;
    response.OnUpdate(0, update);
  }
  return response.Body();
}

}  // namespace

ScenarioRunner::ScenarioRunner() {
  const std::filesystem::path folder = TempFolder();
  for (const TinyModelKind kind :
       {TinyModelKind::kGrouped, TinyModelKind::kWindowed, TinyModelKind::kBF16, TinyModelKind::kQuantised}) {
    files_[kind] = WriteTinyModel(SpecOf(kind), folder);
    models_.push_back(kind);
  }
  for (const auto& [kind, config] : {std::pair{TinyModelKind::kGatedDelta, TinyGatedDeltaConfig()},
                                     {TinyModelKind::kLightning, TinyLightningConfig()},
                                     {TinyModelKind::kMamba2, TinyMamba2Config()}}) {
    files_[kind] = WriteTinyFolder(config, static_cast<uint64_t>(kind), folder / Name(kind));
    models_.push_back(kind);
  }
  if (const auto stories = TestData("models/stories260K/hf")) {
    files_[TinyModelKind::kStories] = *stories;
    models_.push_back(TinyModelKind::kStories);
  }
}

TestModel& ScenarioRunner::Model(TinyModelKind kind, bool strongest_isa, int threads) {
  auto& model = loaded_[{kind, strongest_isa, threads}];
  if (model == nullptr) {
    auto loaded =
        TestModel::Load(files_.at(kind), model::WeightFormat::kAuto,
                        {.threads = threads, .max_isa = strongest_isa ? kernels::kStrongestIsa : kernels::Isa::kAvx2});
    DT_CHECK(loaded.ok(), std::string(loaded.status().message()));
    model = *std::move(loaded);
  }
  return *model;
}

engine::Engine& ScenarioRunner::AloneEngine(const Alone& which) {
  auto& engine = alone_[which];
  if (engine == nullptr) {
    const auto [kind, strongest_isa, kv, storage] = which;
    TestModel& model = Model(kind, strongest_isa, 1);
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(model, kv);
    options.kv_storage = storage;
    options.scheduler.max_model_len = kScenarioPositions;
    options.scheduler.max_num_batched_tokens = kScenarioPositions;
    options.scheduler.max_num_seqs = 1;
    options.scheduler.enable_prefix_caching = false;
    options.compute.prompt_scratch_bytes = 0;  // all attention on the attention worker
    auto cluster = StartCluster(model, options);
    DT_CHECK(cluster.ok(), std::string(cluster.status().message()));
    engine = *std::move(cluster);
  }
  return *engine;
}

ScenarioRunner::Choice ScenarioRunner::RunAlone(const Alone& which, const RequestSpec& spec, int choice) {
  const TestModel& model = Model(std::get<0>(which), std::get<1>(which), 1);
  requests::GenerationRequest request = spec.Request(static_cast<int>(model.config().vocab_size));
  request.choices = 1;
  request.sampling.seed += static_cast<uint64_t>(choice);
  const auto done = Generate(AloneEngine(which), std::move(request));
  DT_CHECK(done.ok(), std::string(done.status().message()), " ", spec.ToString());
  const cli::CollectingSink& sink = **done;
  return {sink.choices()[0].tokens, sink.choices()[0].logits, sink.choices()[0].logprobs,
          sink.prompt_logprobs(),   sink.prompt_logits(),     sink.pooled()};
}

std::string ScenarioRunner::CompareChoice(const Choice& alone, const cli::CollectingSink& sink, int index,
                                          bool cancelled) {
  const cli::CollectingSink::Choice& choice = sink.choices()[index];
  if (!choice.finished) return "did not finish";
  if (index == 0 && !(cancelled && sink.prompt_logits().empty()))
    if (std::string bits = DifferentBits(sink.prompt_logits(), alone.prompt_logits); !bits.empty())
      return "prompt logits: " + bits;
  if (index == 0 && !cancelled)
    if (std::string bits = DifferentBits(sink.pooled(), alone.pooled); !bits.empty()) return "pooled: " + bits;
  if (index == 0 && !cancelled && sink.prompt_logprobs() != alone.prompt_logprobs)
    return "prompt log probabilities differ";
  if (choice.tokens.size() > alone.tokens.size() || (!cancelled && choice.tokens.size() < alone.tokens.size()))
    return absl::StrCat("has ", choice.tokens.size(), " tokens, alone ", alone.tokens.size());
  if (choice.logits.size() != choice.tokens.size() || choice.logprobs.size() != choice.tokens.size())
    return absl::StrCat("has ", choice.tokens.size(), " tokens, but logits of ", choice.logits.size(),
                        " and log probabilities of ", choice.logprobs.size());
  for (size_t i = 0; i < choice.tokens.size(); ++i) {
    if (std::string bits = DifferentBits(choice.logits[i], alone.logits[i]); !bits.empty())
      return absl::StrCat("logits of token ", i, ": ", bits);
    if (choice.tokens[i] != alone.tokens[i])
      return absl::StrCat("token ", i, " is ", choice.tokens[i], ", alone ", alone.tokens[i], ", from the same logits");
    if (choice.logprobs[i] != alone.logprobs[i]) return absl::StrCat("log probabilities of token ", i, " differ");
  }
  return "";
}

std::string ScenarioRunner::Compare(const Scenario& scenario, size_t index, const cli::CollectingSink& sink) {
  const RequestSpec& spec = scenario.requests[index];
  if (sink.protocol_errors() > 0)
    return absl::StrCat("request ", index, ": ", sink.protocol_errors(), " updates out of order");
  std::vector<Choice> all_alone;
  for (int choice = 0; choice < spec.choices; ++choice) {
    all_alone.push_back(
        RunAlone({scenario.model, scenario.strongest_isa, scenario.kv, scenario.storage}, spec, choice));
    const std::string difference = CompareChoice(all_alone.back(), sink, choice, spec.cancel_after >= 0);
    if (!difference.empty()) return absl::StrCat("request ", index, " choice ", choice, ": ", difference);
  }
  if (spec.cancel_after >= 0) return "";
  for (int n = 1; n < spec.choices; ++n) {  // best_of
    const std::string ours = BestOf(spec, n, sink.choices()), alone = BestOf(spec, n, all_alone);
    if (ours != alone) return absl::StrCat("request ", index, ": the best ", n, " are ", ours, ", alone ", alone);
  }
  return "";
}

Outcome ScenarioRunner::Run(const Scenario& scenario) {
  TestModel& model = Model(scenario.model, scenario.strongest_isa, scenario.threads);
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(model, scenario.kv);
  options.kv_storage = scenario.storage;
  options.attention_workers = scenario.workers;
  options.compute_workers = scenario.compute_workers;
  options.scheduler.prefill_ranks = scenario.prefill_ranks;
  options.scheduler.prefill_rank_tokens = scenario.prefill_rank_tokens;
  options.scheduler.prefill_exchange = scenario.prefix;
  if (scenario.chain) options.scheduler.linear_exchange = proto::LinearExchange::kChain;
  if (scenario.state_switch) options.scheduler.linear_exchange = proto::LinearExchange::kSwitch;
  if (!scenario.prefix) options.scheduler.linear_exchange.reset();
  options.scheduler.placement = scenario.placement;
  options.scheduler.micro_batches = scenario.micro_batches;
  options.scheduler.enable_prefix_caching = scenario.prefix_cache;
  options.scheduler.enable_chunked_prefill = scenario.chunked;
  options.scheduler.max_model_len = kScenarioPositions;
  options.scheduler.max_num_batched_tokens = scenario.step_tokens;
  options.scheduler.max_num_seqs = scenario.max_seqs;
  options.scheduler.token_shard_tokens = scenario.token_shard;
  options.kv_cache_bytes = KvBytesOfWorker(scenario) * scenario.workers;
  options.compute = TuningOf(scenario);
  const auto cluster = StartCluster(model, options);
  if (!cluster.ok())
    return {absl::StrCat("the cluster does not start: ", std::string(cluster.status().message())), 0, 0, 0};
  return Run(scenario, **cluster);
}

uint64_t ScenarioRunner::KvBytesOfWorker(const Scenario& scenario) {
  int64_t largest = 0;
  for (const RequestSpec& request : scenario.requests)
    largest = std::max(largest, BlocksOf(request.prompt + request.max_tokens));
  const int64_t blocks = scenario.spare_blocks < 0 ? 256 : std::max<int64_t>(2, largest + scenario.spare_blocks);
  return KvBytes(Model(scenario.model, scenario.strongest_isa, scenario.threads), scenario.kv, scenario.storage, blocks,
                 1);
}

compute::ComputeWorkerTuning ScenarioRunner::TuningOf(const Scenario& scenario) {
  compute::ComputeWorkerTuning tuning;
  if (scenario.prompt_kib >= 0) tuning.prompt_scratch_bytes = uint64_t(scenario.prompt_kib) << 10;
  tuning.kv_storage = scenario.storage;
  tuning.prompt_tokens = scenario.prompt_tokens;
  tuning.gather_piece_bytes = scenario.gather_piece;
  tuning.key_values_in_flight = scenario.key_values_in_flight;
  tuning.linear_prompts = scenario.linear_prompts;
  tuning.q_first = scenario.q_first;
  tuning.hand_over_at_end = scenario.hand_over_at_end;
  return tuning;
}

Outcome ScenarioRunner::Run(const Scenario& scenario, engine::Engine& engine) {
  TestModel& model = Model(scenario.model, scenario.strongest_isa, scenario.threads);
  Outcome outcome;

  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (const RequestSpec& spec : scenario.requests) {
    if (spec.after >= 0) sinks[spec.after]->WaitForTokens(spec.after_tokens);
    sinks.push_back(std::make_shared<cli::CollectingSink>(spec.choices));
    const auto id = engine.Submit(spec.Request(static_cast<int>(model.config().vocab_size)), sinks.back());
    if (!id.ok()) {
      outcome.difference =
          absl::StrCat("request ", sinks.size() - 1, " is refused: ", std::string(id.status().message()));
      return outcome;
    }
    if (spec.cancel_after < 0) continue;
    sinks.back()->WaitForTokens(spec.cancel_after);
    engine.Cancel(*id);
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    const absl::Status ended = sinks[i]->WaitForEnd();
    if (!ended.ok()) outcome.difference = absl::StrCat("request ", i, " failed: ", std::string(ended.message()));
  }
  for (size_t i = 0; i < sinks.size() && outcome.difference.empty(); ++i) {
    outcome.difference = Compare(scenario, i, *sinks[i]);
    for (const auto& choice : sinks[i]->choices()) outcome.tokens += choice.tokens.size();
  }
  if (outcome.difference.empty()) outcome.difference = KvHeld(engine, outcome.tokens);
  const engine::EngineStats stats = engine.stats();
  outcome.preemptions = stats.scheduler.preemptions;
  outcome.prefix_hits = stats.scheduler.prefix_hits;
  outcome.prefill_groups = stats.scheduler.prefill_groups;
  outcome.gathered_bytes = stats.scheduler.prefix_gathered_bytes;
  outcome.state_bytes = stats.scheduler.prefix_state_bytes;
  outcome.chain_bytes = stats.scheduler.prefix_chain_bytes;
  outcome.direct_bytes = stats.scheduler.prefix_direct_bytes;
  outcome.ring_bytes = stats.scheduler.prefix_ring_bytes;
  outcome.switch_bytes = stats.scheduler.prefix_switch_bytes;
  outcome.pass_q_bytes = stats.scheduler.prefix_pass_q_bytes;
  return outcome;
}

Scenario ScenarioRunner::Shrink(Scenario failing, int attempts) {
  const auto differs = [&](const Scenario& scenario) {
    for (int i = 0; i < attempts; ++i)
      if (!Run(scenario).difference.empty()) return true;
    return false;
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (const Scenario& candidate : SimplerScenarios(failing)) {
      if (!differs(candidate)) continue;
      failing = candidate;
      smaller = true;
      break;
    }
  }
  return failing;
}

}  // namespace dovetail::test
