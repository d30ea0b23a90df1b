#include "tests/cluster/scenario.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"

namespace dovetail::test {
namespace {

using scheduler::PlacementPolicy;

const char* Name(PlacementPolicy placement) {
  constexpr const char* kNames[] = {"request", "heads", "tokens", "mixed", "tiers"};
  return kNames[static_cast<int>(placement)];
}

void Sample(int style, proto::SamplingParams& sampling) {
  sampling.temperature = style == 0 ? 0.0f : 0.7f + 0.2f * static_cast<float>(style);
  if (style == 2) sampling.top_k = 20, sampling.top_p = 0.9f;
  if (style == 3)
    sampling.repetition_penalty = 1.3f, sampling.presence_penalty = 0.4f, sampling.frequency_penalty = 0.2f;
  if (style == 4) sampling.min_p = 0.02f, sampling.logit_bias = {{3, 2.0f}, {7, -5.0f}};
}

RequestSpec SomeRequest(Dice& dice, int earlier) {
  RequestSpec request;
  request.family = dice.Of(0, 1);
  request.prompt = dice.OneIn(3)   ? dice.Of(1, 20)
                   : dice.OneIn(3) ? 64 * dice.Of(1, 4) + dice.Of(-1, 1)
                                   : dice.Of(20, kLongestPrompt);
  request.twist = dice.OneIn(2) ? 0 : dice.Of(1, 3);
  request.max_tokens = dice.OneIn(6) ? dice.Of(60, kMostTokens) : dice.Of(1, 24);
  request.choices = dice.OneIn(4) ? dice.Of(2, 4) : 1;
  request.style = dice.OneIn(2) ? 0 : dice.Of(1, 4);
  request.seed = dice.Of(0, 1000);
  if (dice.OneIn(3)) request.logits_last = dice.OneIn(2) ? 1 : dice.Of(1, request.prompt);
  if (dice.OneIn(5)) request.prompt_logprobs = dice.Of(0, 3);
  request.use_prefix_cache = !dice.OneIn(6);
  request.tenant = dice.Of(0, 1);
  if (earlier > 0 && dice.OneIn(2)) {
    request.after = dice.Of(0, earlier - 1);
    request.after_tokens = dice.Of(1, 12);
  }
  if (dice.OneIn(8)) request.cancel_after = dice.Of(0, 10);
  return request;
}

Scenario Without(const Scenario& scenario, size_t dropped) {
  Scenario smaller = scenario;
  smaller.requests.erase(smaller.requests.begin() + static_cast<std::ptrdiff_t>(dropped));
  for (RequestSpec& request : smaller.requests) {
    if (request.after == static_cast<int>(dropped)) request.after = -1;
    if (request.after > static_cast<int>(dropped)) --request.after;
  }
  return smaller;
}

}  // namespace

requests::GenerationRequest RequestSpec::Request(int vocab) const {
  requests::GenerationRequest request;
  request.tenant = absl::StrCat("tenant ", tenant);
  std::mt19937_64 tokens(static_cast<uint64_t>(family) + 1);
  for (int i = 0; i < prompt; ++i)
    request.prompt.push_back(static_cast<TokenId>(tokens() % static_cast<uint64_t>(vocab)));
  request.prompt.back() = (request.prompt.back() + twist) % vocab;
  request.choices = choices;
  request.max_tokens = max_tokens;
  request.sampling.seed = static_cast<uint64_t>(seed);
  request.sampling.logprobs = 2;
  Sample(style, request.sampling);
  request.logits_last = logits_last;
  request.logits_of_output = true;
  request.prompt_logprobs = prompt_logprobs;
  request.pooling = pooling;
  request.use_prefix_cache = use_prefix_cache;
  return request;
}

std::string RequestSpec::ToString() const {
  std::string text = absl::StrCat("family ", family, " prompt ", prompt, " twist ", twist, " max_tokens ", max_tokens,
                                  " choices ", choices, " style ", style, " seed ", seed, " logits_last ", logits_last,
                                  " prompt_logprobs ", prompt_logprobs, " tenant ", tenant);
  if (pooling != requests::Pooling::kNone) absl::StrAppend(&text, " pooling ", static_cast<int>(pooling));
  if (!use_prefix_cache) absl::StrAppend(&text, " without prefix cache");
  if (after >= 0) absl::StrAppend(&text, " after ", after_tokens, " tokens of request ", after);
  if (cancel_after >= 0) absl::StrAppend(&text, " cancelled after ", cancel_after, " tokens");
  return text;
}

const char* Name(TinyModelKind kind) {
  constexpr const char* kNames[] = {"grouped",     "windowed",  "bf16",   "quantised",
                                    "gated_delta", "lightning", "mamba2", "stories260K"};
  return kNames[static_cast<int>(kind)];
}

std::string Scenario::ToString() const {
  std::string text = absl::StrCat(
      "DOVETAIL_SEED=", seed, "\n  model ", Name(model), " kv ", std::string(dovetail::Name(kv)),
      storage == KvStorage::kAsSent ? "" : absl::StrCat(" ", std::string(dovetail::Name(storage))),
      strongest_isa ? " strongest isa" : " avx2", " threads ", threads, "\n  workers ", workers, " placement ",
      Name(placement), " token_shard ", token_shard, " micro_batches ", micro_batches, " prefix_cache ", prefix_cache,
      " spare_blocks ", spare_blocks, "\n  prompt_kib ", prompt_kib, " gather_piece ", gather_piece, " prompt_tokens ",
      prompt_tokens, " key_values_in_flight ", key_values_in_flight, q_first ? "" : " q with k and v",
      hand_over_at_end ? " hand-over at the end" : "", "\n  prefix exchange ", prefix ? NameOf(*prefix) : "auto",
      linear_prompts ? " linear prompts" : "", chain ? " chain" : "", state_switch ? " switch of states" : "",
      " compute_workers ", compute_workers, " prefill_ranks ", prefill_ranks, " prefill_rank_tokens ",
      prefill_rank_tokens, "\n  step_tokens ", step_tokens, " max_seqs ", max_seqs, chunked ? "" : " not chunked");
  for (size_t i = 0; i < requests.size(); ++i) absl::StrAppend(&text, "\n  request ", i, ": ", requests[i].ToString());
  return text;
}

Scenario SomeScenario(uint64_t seed, const std::vector<TinyModelKind>& models) {
  Dice dice(seed);
  Scenario scenario;
  scenario.seed = seed;
  scenario.model = models[static_cast<size_t>(dice.Of(0, static_cast<int>(models.size()) - 1))];
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  scenario.kv = kTypes[dice.Of(0, 2)];
  scenario.strongest_isa = !dice.OneIn(3);
  scenario.threads = dice.Of(1, 3);
  constexpr int kWorkers[] = {1, 2, 3, 5};
  scenario.workers = kWorkers[dice.Of(0, 3)];
  scenario.placement = static_cast<PlacementPolicy>(dice.Of(0, 4));
  scenario.micro_batches = dice.Of(1, 3);
  scenario.prefix_cache = dice.OneIn(2);
  scenario.spare_blocks = dice.OneIn(3) ? -1 : dice.Of(0, 2);
  scenario.max_seqs = dice.OneIn(4) ? dice.Of(1, 3) : 8;
  scenario.chunked = !dice.OneIn(8);
  scenario.step_tokens = !scenario.chunked || dice.OneIn(4) ? kScenarioPositions
                         : dice.OneIn(2)                    ? dice.Of(scenario.max_seqs, 40)
                                                            : dice.Of(41, 200);
  scenario.token_shard = 64 * dice.Of(1, 3);
  Dice prompts(seed ^ 0x5ca1ab1e);
  scenario.prompt_kib = prompts.OneIn(4) ? 0 : prompts.OneIn(2) ? prompts.Of(8, 400) : -1;
  scenario.prompt_tokens = prompts.OneIn(2) ? 16 : prompts.Of(1, 40);
  scenario.key_values_in_flight = prompts.Of(2, 5);
  scenario.q_first = !prompts.OneIn(5);
  scenario.hand_over_at_end = prompts.OneIn(5);
  Dice groups(seed ^ 0x9a9a);
  scenario.compute_workers = groups.OneIn(3) ? 1 : groups.Of(2, 4);
  scenario.prefill_ranks = groups.OneIn(3) ? groups.Of(1, 3) : groups.OneIn(3) ? 0 : proto::kMaxPrefillRanks;
  scenario.prefill_rank_tokens = groups.OneIn(2) ? 64 : groups.Of(64, 150);
  scenario.prefix = groups.OneIn(3) ? proto::PrefixExchange::kAsk : proto::PrefixExchange::kGather;
  if (groups.OneIn(5)) scenario.prefix.reset();
  scenario.linear_prompts = !groups.OneIn(4);
  scenario.chain = scenario.linear_prompts && !groups.OneIn(4);
  if (scenario.prefix && scenario.compute_workers > 1) {
    if (!groups.OneIn(3))
      scenario.prefix = groups.OneIn(2) ? proto::PrefixExchange::kGatherDirect : proto::PrefixExchange::kRing;
    else if (!groups.OneIn(4))
      scenario.prefix = proto::PrefixExchange::kSwitch;
    if (IsBetweenRanks(*scenario.prefix) && !groups.OneIn(4)) {  // or few of them are in a group
      scenario.prefill_ranks = proto::kMaxPrefillRanks;
      scenario.prefill_rank_tokens = 64;
      scenario.chunked = true;
      scenario.step_tokens = std::max(scenario.step_tokens, groups.Of(64, 200));
    }
  }
  Dice asks(seed ^ 0x9a55);
  if (scenario.prefix && IsBetweenRanks(*scenario.prefix) && asks.OneIn(6))
    scenario.prefix = proto::PrefixExchange::kPassQ;
  Dice states(seed ^ 0x57a7e5);
  scenario.state_switch = scenario.chain && scenario.prefix == proto::PrefixExchange::kSwitch && !states.OneIn(3);
  Dice pieces(seed ^ 0x91ece);
  if (!pieces.OneIn(3)) scenario.gather_piece = 1 << pieces.Of(6, 15);
  Dice storages(seed ^ 0x8b175);
  const bool linear = scenario.model == TinyModelKind::kGatedDelta || scenario.model == TinyModelKind::kLightning ||
                      scenario.model == TinyModelKind::kMamba2;
  if (scenario.kv == DType::kBF16 && !linear && !storages.OneIn(3))
    scenario.storage = storages.OneIn(2) ? KvStorage::kE4M3 : KvStorage::kInt8;
  for (int i = dice.Of(1, 6); i > 0; --i)
    scenario.requests.push_back(SomeRequest(dice, static_cast<int>(scenario.requests.size())));
  Dice vectors(seed ^ 0x9001ed);
  for (int i = vectors.Of(0, 2); i > 0; --i) {
    RequestSpec request;
    request.family = vectors.Of(0, 1);
    request.prompt = vectors.Of(1, kLongestPrompt);
    request.twist = vectors.Of(0, 3);
    request.max_tokens = 0;
    request.after = 0;
    request.after_tokens = 1;
    request.pooling = static_cast<requests::Pooling>(vectors.Of(1, 3));
    scenario.requests.push_back(request);
  }
  return scenario;
}

std::vector<Scenario> SimplerScenarios(const Scenario& scenario) {
  std::vector<Scenario> simpler;
  if (scenario.requests.size() > 1)
    for (size_t i = 0; i < scenario.requests.size(); ++i) simpler.push_back(Without(scenario, i));
  const auto change = [&](auto Scenario::*field, auto value) {
    if (scenario.*field == value) return;
    simpler.push_back(scenario);
    simpler.back().*field = value;
  };
  change(&Scenario::workers, 1);
  if (scenario.workers > 2) change(&Scenario::workers, 2);
  change(&Scenario::placement, PlacementPolicy::kRequest);
  if (scenario.placement == PlacementPolicy::kMixed) {
    change(&Scenario::placement, PlacementPolicy::kHeads);
    change(&Scenario::placement, PlacementPolicy::kTokens);
  }
  change(&Scenario::compute_workers, 1);
  if (scenario.compute_workers > 2) change(&Scenario::compute_workers, 2);
  change(&Scenario::prefill_ranks, 1);
  change(&Scenario::prefill_rank_tokens, 64);
  change(&Scenario::micro_batches, 1);
  change(&Scenario::prompt_kib, 0);
  change(&Scenario::prompt_kib, -1);
  change(&Scenario::prompt_tokens, 16);
  change(&Scenario::gather_piece, 2 << 20);
  change(&Scenario::prefix, std::optional(proto::PrefixExchange::kAsk));
  if (scenario.prefix && IsBetweenRanks(*scenario.prefix))
    change(&Scenario::prefix, std::optional(proto::PrefixExchange::kGatherDirect));
  change(&Scenario::chain, false);
  if (!scenario.chain) change(&Scenario::linear_prompts, false);
  change(&Scenario::q_first, true);
  change(&Scenario::hand_over_at_end, false);
  change(&Scenario::prefix_cache, false);
  change(&Scenario::spare_blocks, -1);
  change(&Scenario::chunked, true);
  change(&Scenario::step_tokens, kScenarioPositions);
  change(&Scenario::threads, 1);
  change(&Scenario::strongest_isa, false);
  change(&Scenario::storage, KvStorage::kAsSent);
  if (scenario.storage == KvStorage::kAsSent) change(&Scenario::kv, DType::kF32);
  change(&Scenario::token_shard, 64);
  if (scenario.model != TinyModelKind::kGrouped) change(&Scenario::model, TinyModelKind::kGrouped);
  for (size_t i = 0; i < scenario.requests.size(); ++i) {
    const auto change_request = [&](auto RequestSpec::*field, auto value) {
      if (scenario.requests[i].*field == value) return;
      simpler.push_back(scenario);
      simpler.back().requests[i].*field = value;
    };
    const RequestSpec& request = scenario.requests[i];
    change_request(&RequestSpec::choices, 1);
    change_request(&RequestSpec::max_tokens, (request.max_tokens + 1) / 2);
    change_request(&RequestSpec::style, 0);
    change_request(&RequestSpec::logits_last, 0);
    change_request(&RequestSpec::prompt_logprobs, -1);
    change_request(&RequestSpec::cancel_after, -1);
    change_request(&RequestSpec::after, -1);
    change_request(&RequestSpec::twist, 0);
    change_request(&RequestSpec::tenant, 0);
    for (const int prompt : {(request.prompt + 1) / 2, request.prompt - 1}) {
      if (prompt < 1 || prompt == request.prompt) continue;
      change_request(&RequestSpec::prompt, prompt);
      Scenario& last = simpler.back();
      last.requests[i].logits_last = std::min(last.requests[i].logits_last, prompt);
    }
  }
  return simpler;
}

}  // namespace dovetail::test
