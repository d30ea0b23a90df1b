#include "tests/scheduler/fake_cluster.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/drawn_token.h"
#include "tests/scheduler/action_digest.h"

namespace dovetail::scheduler {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 32);
}

constexpr double kNoWork = 1e12;  // floating-point operations in a microsecond

// The model: the next token is a hash of all tokens so far and of the seed.
TokenId NextToken(uint64_t tokens_hash, int32_t rope_length, uint64_t seed, Position position, int vocabulary,
                  const std::vector<TokenId>& banned) {
  uint64_t hash = Mix(Mix(Mix(tokens_hash, static_cast<uint64_t>(rope_length)), seed), static_cast<uint64_t>(position));
  for (;; hash = Mix(hash, 1)) {
    const TokenId token = static_cast<TokenId>(hash % static_cast<uint64_t>(vocabulary));
    if (std::find(banned.begin(), banned.end(), token) == banned.end()) return token;
  }
}

}  // namespace

proto::AttentionTable SmallTable(int ops, int kv_heads, int windowed) {
  std::vector<proto::AttentionSpec> specs;
  for (int i = 0; i < ops + windowed; ++i) {
    proto::SoftmaxSpec spec{
        .query_heads = 2 * kv_heads, .kv_heads = kv_heads, .key_dim = 16, .value_dim = 16, .scale = 0.25f};
    if (i >= ops) spec.window = 96;
    specs.push_back(spec);
  }
  auto table = proto::AttentionTable::Build(specs);
  DT_CHECK(table.ok(), std::string(table.status().message()));
  return *std::move(table);
}

std::vector<TokenId> SomePrompt(int size, uint64_t seed, int vocabulary) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> prompt;
  for (int i = 0; i < size; ++i) prompt.push_back(static_cast<TokenId>(random() % static_cast<uint64_t>(vocabulary)));
  return prompt;
}

FakeCluster::FakeCluster(ClusterOptions options)
    : options_(std::move(options)), core_(options_.scheduler, options_.seed), random_(options_.seed) {
  for (size_t i = 0; i < options_.kv_blocks.size(); ++i) {
    const WorkerId id(static_cast<uint32_t>(i));
    workers_.emplace_back(id, Epoch(1), options_.kv_blocks[i], &options_.scheduler.attention,
                          options_.scheduler.enable_prefix_caching);
    const double rate = i < options_.rates.size() ? options_.rates[i] : 1;
    AttentionWorkerJoined joined{.worker = id, .epoch = Epoch(1), .kv_blocks = options_.kv_blocks[i], .rate = rate};
    if (static_cast<int>(i) < options_.pairs) joined.pair = WorkerId(kFirstComputeWorker + id.value());
    Post(now_, joined);
  }
  for (int i = 0; i < options_.compute_workers; ++i) {
    Post(now_, ComputeWorkerJoined{.worker = WorkerId(next_compute_worker_++)});
  }
}

RequestId FakeCluster::SubmitAt(absl::Time when, GenerationRequest request) {
  if (request.id == RequestId(0)) request.id = RequestId(next_request_++);
  const RequestId id = request.id;
  Client& client = clients_[id];
  client.request = std::make_shared<const GenerationRequest>(std::move(request));
  client.streams.resize(std::clamp(client.request->choices, 1, kMaxChoices));
  Post(when, RequestArrived{client.request});
  return id;
}

void FakeCluster::Post(absl::Time when, Event event) {
  events_.emplace(std::make_pair(std::max(when, now_), next_event_++), std::move(event));
}

bool FakeCluster::RunOne() {
  const absl::Time deadline = core_.NextDeadline();
  if (events_.empty() && deadline == absl::InfiniteFuture()) return false;
  if (events_.empty() || deadline < events_.begin()->first.first) {
    now_ = std::max(now_, deadline);
    Deliver(Tick{});
    if (core_.NextDeadline() <= now_) Violate("a deadline that passed is still the next");
    return true;
  }
  const auto first = events_.begin();
  now_ = first->first.first;
  const Event event = std::move(first->second);
  events_.erase(first);
  Deliver(event);
  return true;
}

void FakeCluster::RunUntilIdle(int most_events) {
  while (RunOne()) {
    if (--most_events == 0) return Violate("does not come to rest");
    if (violations_.size() > 20) return;
  }
}

void FakeCluster::RunUntil(absl::Time when) {
  while (!events_.empty() && std::min(events_.begin()->first.first, core_.NextDeadline()) <= when) RunOne();
  now_ = std::max(now_, when);
}

void FakeCluster::Deliver(Event event) {
  if (auto* joined = std::get_if<AttentionWorkerJoined>(&event)) {
    // When it was posted, the worker's fate was not known: no incarnation joins twice.
    if (!joined_.emplace(joined->worker, worker(joined->worker).epoch()).second) worker(joined->worker).Restart();
    joined->epoch = worker(joined->worker).epoch();
    // Started again, it is still in the process of its compute worker.
    if (static_cast<int>(joined->worker.value()) < options_.pairs && !joined->pair)
      joined->pair = WorkerId(kFirstComputeWorker + joined->worker.value());
    joined_.emplace(joined->worker, joined->epoch);
  }
  if (const auto* lost = std::get_if<AttentionWorkerLost>(&event)) {
    if (lost->epoch == worker(lost->worker).epoch()) worker(lost->worker).Restart();
  }
  if (const auto* lost = std::get_if<ComputeWorkerLost>(&event))
    std::erase_if(in_flight_, [&](const auto& entry) { return entry.second.compute_worker == lost->worker; });
  if (const auto* finished = std::get_if<StepFinished>(&event)) {
    const auto at = in_flight_.find(finished->result.micro_batch.value());
    if (at != in_flight_.end() && at->second.plan.step == finished->result.step) in_flight_.erase(at);
    const bool in_order = options_.scheduler.run_ahead;
    std::erase_if(in_flight_, [&](const auto& entry) {
      return in_order && entry.second.compute_worker == finished->compute_worker &&
             !entry.second.plan.part.in_group() && entry.second.plan.step < finished->result.step;
    });
  }
  std::vector<Action> actions;
  core_.Handle(event, now_, actions);
  for (const Action& action : actions) {
    if (on_action) on_action(action);
    trace = Mix(trace, DigestOf(action));
    std::visit([this](const auto& a) { Do(a); }, action);
  }
  for (FakeAttentionWorker& each : workers_) {
    for (const std::string& complaint : each.TakeComplaints()) Violate(complaint);
  }
  if (++deliveries_ % options_.reread_every == 0) {
    if (const absl::Status status = core_.CheckInvariants(); !status.ok()) Violate(std::string(status.message()));
  }
  const SchedulerStats stats = core_.stats();
  if (stats.running_sequences > options_.scheduler.max_num_seqs) Violate("more sequences than --max-num-seqs");
  if (stats.kv_usage > 1) Violate("the budget is overdrawn");
}

void FakeCluster::Violate(const std::string& what) {
  violations_.push_back(absl::StrCat("at ", absl::ToInt64Microseconds(now_ - absl::UnixEpoch()), " us: ", what));
}

absl::Duration FakeCluster::AnswerDelay() {
  const int64_t most = absl::ToInt64Microseconds(options_.answer_delay_most);
  return absl::Microseconds(most == 0 ? 0 : static_cast<int64_t>(random_() % static_cast<uint64_t>(most + 1)));
}

bool FakeCluster::Chance(double probability) {
  return probability > 0 && static_cast<double>(random_() >> 11) * 0x1p-53 < probability;
}

void FakeCluster::Do(const OpenSequence& action) {
  if (Chance(options_.evict)) worker(action.worker).EvictSome(random_());
  Post(now_ + AnswerDelay(), SequenceOpened{action.worker, action.epoch, worker(action.worker).Open(action.message)});
}

void FakeCluster::Do(const ForkSequence& action) {
  if (InFlight(action.message.parent)) Violate("a sequence was forked under a step");
  Post(now_ + AnswerDelay(), SequenceOpened{action.worker, action.epoch, worker(action.worker).Fork(action.message)});
}

void FakeCluster::Do(const ReleaseSequence& action) {
  if (action.epoch != worker(action.worker).epoch()) return Violate("a release for a former epoch");
  if (InFlight(action.message.sequence)) Violate("a sequence was released under a step");
  last_reads_.erase(action.message.sequence);
  worker(action.worker).Release(action.message);
}

void FakeCluster::Do(const ProbePrefix& action) {
  if (Chance(options_.evict)) worker(action.worker).EvictSome(random_());
  Post(now_ + AnswerDelay(),
       PrefixProbed{action.worker,
                    action.epoch,
                    {.pin_id = action.message.pin_id,
                     .resumable = worker(action.worker).Probe(action.message.shards, action.message.hashes)}});
}

void FakeCluster::Do(const Unpin&) {}

void FakeCluster::Do(const MoveSequence& action) {
  if (InFlight(action.message.sequence)) Violate("a sequence was moved under a step");
  const bool current =
      action.epoch == worker(action.worker).epoch() && action.message.target_epoch == worker(action.to).epoch();
  const bool moved =
      current && !Chance(options_.moves_fail) && worker(action.to).TakeFrom(worker(action.worker), action.message);
  Post(now_ + AnswerDelay(),
       SequenceMoved{
           action.worker, action.epoch, {action.message.sequence, action.message.step, moved, "as the test wanted"}});
}

bool FakeCluster::InFlight(SequenceId sequence, StepId but_not, StepId group) const {
  for (const auto& [micro_batch, running] : in_flight_) {
    if (running.plan.part.in_group() && running.plan.part.group == group) continue;
    for (const proto::StepEntry& entry : running.plan.entries) {
      if (entry.sequence == sequence && (but_not == StepId() || running.plan.step != but_not)) return true;
    }
  }
  return false;
}

void FakeCluster::CheckPlan(const RunStep& action) {
  const proto::StepPlan& plan = action.plan;
  const SchedulerOptions& limits = options_.scheduler;
  if (!(last_step_ < plan.step)) Violate("step ids do not grow");
  last_step_ = plan.step;
  const StepId before = std::exchange(last_sent_[action.compute_worker].step, plan.step);
  if (in_flight_.contains(plan.micro_batch.value())) Violate("two steps of a micro-batch in flight");
  const int least = limits.run_ahead || limits.placement == PlacementPolicy::kTiers ? 2 : 1;  // tiers step apart
  const int each = std::max(limits.micro_batches, least);
  const bool in_group = plan.part.in_group();
  if (!in_group && plan.micro_batch.value() >= each * std::max(1, options_.compute_workers))
    Violate("a micro-batch too many");
  if (in_group) CheckRank(action);
  size_t tokens = 0;
  std::set<SequenceId> seen;
  for (const proto::StepEntry& entry : plan.entries) {
    tokens += entry.tokens.size();
    if (entry.tokens.empty()) Violate("an entry without tokens");
    const StepId follows = proto::IsDrawnBefore(entry) ? before : StepId();
    if (!seen.insert(entry.sequence).second || InFlight(entry.sequence, follows, plan.part.group))
      Violate("a sequence in two steps at once");
    if (const absl::Status valid = proto::Validate(entry.placement, limits.attention); !valid.ok()) {
      Violate(std::string(valid.message()));
    }
    const auto [rope, is_new] = rope_lengths_.emplace(entry.sequence, entry.rope_length);
    if (rope->second != entry.rope_length) Violate("the rope length changed");
  }
  if (plan.entries.empty()) Violate("an empty step");
  if (tokens > static_cast<size_t>(limits.max_num_batched_tokens)) Violate(absl::StrCat(tokens, " tokens in a step"));
  most_sequences_in_step = std::max(most_sequences_in_step, static_cast<int>(plan.entries.size()));
}

// The ranks of a group are planned together, in their order, one for a compute worker; and their tokens follow each
// other.
void FakeCluster::CheckRank(const RunStep& action) {
  const proto::PrefillPart& part = action.plan.part;
  if (action.plan.entries.size() != 1) return Violate("a rank's step has not one entry");
  const proto::StepEntry& entry = action.plan.entries[0];
  const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
  if (part.rank == 0) {
    group_ = {.id = part.group, .next = part.base};
    ++groups;
  }
  if (part.group != group_.id || part.rank != group_.ranks++ || entry.ctx_len != group_.next)
    Violate("a rank does not follow the one before");
  if (part.rank > 0 && part.rank < part.ranks && entry.ctx_len % kSegmentTokens != 0)
    Violate("a rank begins within a segment");
  if ((part.rank == part.ranks - 1) != (end == part.end)) Violate("the last rank does not end with its group");
  if (part.rank < part.ranks - 1 && entry.sample) Violate("a rank before the last draws a token");
  group_.next = end;
  for (const auto& [slot, running] : in_flight_)
    if (running.plan.part.in_group() && running.compute_worker == action.compute_worker)
      Violate("a compute worker is two ranks at once");
}

// What the step before drew, where the plan names it.
void FakeCluster::FillDrawn(proto::StepPlan& plan, const proto::StepResult& before) {
  for (proto::StepEntry& entry : plan.entries) {
    for (TokenId& token : entry.tokens) {
      if (token != proto::kDrawnBefore) continue;
      ++tokens_ahead;
      for (const proto::EntryResult& result : before.entries)
        if (result.sequence == entry.sequence && result.position == entry.ctx_len) token = result.token;
      if (token == proto::kDrawnBefore && before.status == proto::StepStatus::kOk)
        Violate("a token that no worker drew");
    }
  }
}

void FakeCluster::Do(const RunStep& asked) {
  CheckPlan(asked);
  ++steps;
  RunStep action = asked;
  const bool follows = proto::FollowsAnother(action.plan);
  proto::StepResult& before = last_sent_[action.compute_worker].result;
  FillDrawn(action.plan, before);
  const proto::StepPlan& plan = action.plan;
  proto::StepResult result{.step = plan.step, .micro_batch = plan.micro_batch};
  result.status = std::exchange(next_status_, std::nullopt).value_or(proto::StepStatus::kOk);
  const bool in_group = plan.part.in_group();
  if (in_group && rank_to_fail_ && rank_to_fail_->first == plan.part.rank) {
    result.status = std::exchange(rank_to_fail_, std::nullopt)->second;
    result.failed_worker = plan.entries[0].placement[0].worker;
    if (result.status == proto::StepStatus::kDamaged) result.damaged = {plan.entries[0].sequence};
  }
  if (Chance(options_.out_of_memory)) {
    const proto::Placement& placement = plan.entries[random_() % plan.entries.size()].placement;
    result.status = proto::StepStatus::kOutOfMemory;
    result.failed_worker = placement[random_() % placement.size()].worker;
  }
  for (const proto::StepEntry& entry : plan.entries) {
    for (const proto::Shard& shard : entry.placement) {
      const auto limit = room_limits_.find(shard.worker);
      if (limit != room_limits_.end() && worker(shard.worker).sequences() > limit->second) {
        result.status = proto::StepStatus::kOutOfMemory;
        result.failed_worker = shard.worker;
      }
      if (!disconnected_.contains({shard.worker, shard.epoch})) continue;
      result.status = proto::StepStatus::kWorkerUnreachable;
      result.failed_worker = shard.worker;
    }
  }
  for (const proto::StepEntry& entry : plan.entries)
    if (compiles_grammar && compiles_grammar(entry)) result.pending.push_back(entry.sequence);
  if (!result.pending.empty()) result.status = proto::StepStatus::kGrammarPending;
  const bool all_damaged = steps_to_damage_ > 0;
  if (all_damaged) --steps_to_damage_;
  if (result.status == proto::StepStatus::kOk && (all_damaged || Chance(options_.damage))) {
    result.status = proto::StepStatus::kDamaged;
    const size_t first = all_damaged ? 0 : random_() % plan.entries.size();
    result.failed_worker = plan.entries[first].placement[0].worker;
    for (size_t i = first; i < plan.entries.size(); ++i)
      if (i == first || all_damaged || random_() % 2 == 0) result.damaged.push_back(plan.entries[i].sequence);
  }
  if (follows && before.entries.empty()) {  // fails with it
    result.status = before.status;
    result.failed_worker = before.failed_worker;
    result.damaged = before.damaged;
  }
  int64_t tokens = 0;
  for (const proto::StepEntry& entry : plan.entries) {
    tokens += static_cast<int64_t>(entry.tokens.size());
    if (result.status != proto::StepStatus::kOk || (in_group && group_.stuck)) continue;
    std::set<WorkerId> involved;
    for (const proto::Shard& shard : entry.placement) {
      if (shard.epoch == worker(shard.worker).epoch() && involved.insert(shard.worker).second)
        worker(shard.worker).Step(entry, plan.part);
    }
  }
  result.prefix = {tokens, 2 * tokens, 3 * tokens};
  in_flight_[plan.micro_batch.value()] = {action.compute_worker, plan};
  if (in_group && rank_to_hang_) {
    group_.stuck = true;
    if (*rank_to_hang_ == plan.part.rank) {
      hung_ = plan.step;
      rank_to_hang_.reset();
    }
  }
  if (in_group && group_.stuck) return;  // it waits for tokens that do not come
  out_of_memory += result.status == proto::StepStatus::kOutOfMemory ? 1 : 0;
  if (result.status == proto::StepStatus::kOk) {
    for (const proto::StepEntry& entry : plan.entries) result.entries.push_back(RunEntry(entry, action.compute_worker));
  } else {
    result.error = "as the test wanted";
  }
  if (std::exchange(spoil_next_entry_, false) && !result.entries.empty()) {
    result.status = result.entries[0].status = proto::StepStatus::kBadLogits;
  }
  const auto slow = slowness_.find(action.compute_worker);
  const absl::Duration takes = tokens * options_.step_per_token * (slow == slowness_.end() ? 1 : slow->second);
  if (options_.reports_work && result.status == proto::StepStatus::kOk) {
    result.work = {tokens, tokens, options_.attends_in_pairs ? 0 : kNoWork, kNoWork, UINT32_MAX};
    result.timings = {.total_us = absl::ToInt64Microseconds(takes),
                      .dense_us = absl::ToInt64Microseconds(takes),
                      .attention_wait_us = 1,
                      .attention_us = 1,
                      .prompt_us = 1};
  }
  before = result;
  absl::Time begins = now_;
  if (options_.scheduler.run_ahead) begins = std::max(begins, last_end_);
  last_end_ = begins + options_.step_base + takes;
  if (results_to_lose_ > 0 || (steps > last_lost_result_ + 40 && Chance(options_.unanswered))) {
    results_to_lose_ = std::max(0, results_to_lose_ - 1);
    last_lost_result_ = steps;
    group_.stuck = true;
    return;
  }
  if (in_group) {
    group_.stuck = result.status != proto::StepStatus::kOk;
    last_end_ = group_.last_end = std::max(last_end_, group_.last_end + absl::Microseconds(1));
  }
  in_flight_[plan.micro_batch.value()].answered = true;
  Post(last_end_, StepFinished{action.compute_worker, std::move(result)});
}

void FakeCluster::Do(const WithdrawStep& action) {
  const auto at = in_flight_.find(action.micro_batch.value());
  if (at == in_flight_.end() || at->second.plan.step != action.step)
    return Violate("a step is withdrawn that has ended");
  if (at->second.answered || action.step == hung_) return;
  ++withdrawn;
  at->second.answered = true;
  Post(now_ + AnswerDelay(), StepFinished{action.compute_worker,
                                          {.step = action.step,
                                           .micro_batch = action.micro_batch,
                                           .status = proto::StepStatus::kWorkerFailed,
                                           .error = "withdrawn"}});
}

void FakeCluster::Do(const DismissComputeWorker& action) {
  dismissed.push_back(action.worker);
  std::erase_if(in_flight_, [&](const auto& entry) { return entry.second.compute_worker == action.worker; });
  Post(now_ + absl::Milliseconds(3), ComputeWorkerJoined{.worker = WorkerId(next_compute_worker_++)});
}

uint64_t FakeCluster::ReadBack(const proto::StepEntry& entry, Position begin, Position end, uint64_t hash) {
  for (Position position = begin; position < end; ++position) {
    TokenId token = -1;
    for (const proto::Shard& shard : entry.placement) {
      if (position < shard.tokens.begin || position >= shard.tokens.end) continue;
      const int window = options_.scheduler.attention.softmax(shard.group).window;
      if (window > 0 && entry.ctx_len - position >= window) continue;  // no row of this step sees it
      for (const int head : {shard.kv_heads.begin, shard.kv_heads.end - 1}) {
        const TokenId held = worker(shard.worker).Read(entry.sequence, shard.group, head, position);
        if (token != -1 && held != token) Violate(absl::StrCat("shards disagree about position ", position));
        token = held;
        if (held == -1)
          Violate(absl::StrCat("no worker holds position ", position, " of sequence ", entry.sequence.value()));
      }
    }
    hash = Mix(hash, static_cast<uint64_t>(token));
  }
  return hash;
}

uint64_t FakeCluster::ReadContext(const proto::StepEntry& entry) {
  const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
  if (options_.reread_every == 1) return ReadBack(entry, 0, end, 0);
  LastRead& last = last_reads_[entry.sequence];
  const bool goes_on = last.end == entry.ctx_len;
  const bool reread = !goes_on || ++last.steps % options_.reread_every == 0;
  const uint64_t context = reread ? ReadBack(entry, 0, entry.ctx_len, 0) : last.hash;
  if (goes_on && context != last.hash)
    Violate(absl::StrCat("sequence ", entry.sequence.value(), " does not hold what it did"));
  last.end = end;
  return last.hash = ReadBack(entry, entry.ctx_len, end, context);
}

proto::EntryResult FakeCluster::RunEntry(const proto::StepEntry& entry, WorkerId compute_worker) {
  proto::EntryResult result{.sequence = entry.sequence};
  const Position end = entry.ctx_len + static_cast<Position>(entry.tokens.size());
  result.position = end;
  const uint64_t hash = ReadContext(entry);
  auto& history = histories_[{compute_worker.value(), entry.sequence}];
  if (entry.history_given) history = entry.history;
  if (entry.history_given && static_cast<Position>(history.size()) != entry.ctx_len)
    Violate("a history of the wrong length");
  auto& lists = lists_[{compute_worker.value(), entry.sequence}];
  if (entry.given.lists != nullptr) lists = entry.given;
  if (entry.has_lists && lists.lists == nullptr) Violate("lists are missing");
  if (entry.sample) {
    if (entry.sampling.needs_history() && static_cast<Position>(history.size()) != entry.ctx_len)
      Violate("history is missing");
    history.insert(history.end(), entry.tokens.begin(), entry.tokens.end());
    uint64_t seen = hash;
    if (entry.sampling.needs_history()) {
      seen = 0;
      for (TokenId token : history) seen = Mix(seen, static_cast<uint64_t>(token));
    }
    if (seen != hash) Violate("the history is not what the sequence says");
    result.token = NextToken(hash, entry.rope_length, entry.sampling.seed, end, options_.vocabulary,
                             entry.ban_early ? lists.lists->banned_early : std::vector<TokenId>());
    if (entry.sampling.logprobs >= 0) {
      result.has_logprobs = true;
      result.logprobs.chosen.token = result.token;
    }
  }
  const Position whole_from = entry.history_given ? 0 : entry.ctx_len;
  if (entry.prompt_tokens != std::max<Position>(0, std::min<Position>(entry.rope_length, end) - whole_from)) {
    Violate("prompt_tokens is wrong");
  }
  if (entry.prompt_logprobs >= 0) {
    std::vector<TokenId> successors(entry.tokens.begin() + 1, entry.tokens.end());
    if (entry.next_prompt_token >= 0) successors.push_back(entry.next_prompt_token);
    for (TokenId token : successors) result.prompt_logprobs.push_back({.chosen = {.token = token}});
  }
  if (entry.logits_rows > static_cast<int>(entry.tokens.size())) Violate("more rows of logits than tokens");
  for (Position position = end - entry.logits_rows; position < end; ++position) {
    result.logits.push_back(static_cast<float>(position));
    result.logits.push_back(static_cast<float>(entry.tokens[position - entry.ctx_len]));
  }
  ExactSums pooled;
  for (int row = entry.pool_first; row < entry.pool_first + entry.pool_rows; ++row)
    pooled.Add(HiddenState(entry.ctx_len + row, entry.tokens[row]));
  result.pooled = pooled.TakeWords();
  return result;
}

void FakeCluster::Do(const EmitUpdate& action) {
  const auto at = clients_.find(action.update.request);
  if (at == clients_.end()) return Violate("an update for an unknown request");
  CheckUpdate(at->second, action.update);
}

void FakeCluster::CheckUpdate(Client& client, const GenerationUpdate& update) {
  if (client.finished) return Violate("an update after the end of the request");
  if (update.choice < 0 || update.choice >= static_cast<int>(client.streams.size()))
    return Violate("an update for no choice");
  Stream& stream = client.streams[update.choice];
  if (stream.finished) return Violate("an update after the end of the choice");
  if (update.first_index != static_cast<int>(stream.tokens.size())) Violate("positions are not in order");
  if (stream.tokens.empty() && !update.tokens.empty()) stream.first_token = now_;
  stream.tokens.insert(stream.tokens.end(), update.tokens.begin(), update.tokens.end());
  stream.logits.insert(stream.logits.end(), update.logits.begin(), update.logits.end());
  stream.prompt_logprobs.insert(stream.prompt_logprobs.end(), update.prompt_logprobs.begin(),
                                update.prompt_logprobs.end());
  if (update.prompt_done > 0) stream.prompt_done.push_back(update.prompt_done);
  if (!update.pooled.empty() && !stream.pooled.empty()) Violate("the vector came twice");
  if (!update.pooled.empty()) stream.pooled = update.pooled;
  if (!update.prompt_logits.empty() && !stream.prompt_logits.empty()) Violate("prompt logits came twice");
  stream.prompt_logits.insert(stream.prompt_logits.end(), update.prompt_logits.begin(), update.prompt_logits.end());
  if (update.prompt_tokens != static_cast<int>(client.request->prompt.size())) Violate("prompt_tokens is missing");
  stream.cached_tokens = update.cached_tokens;
  stream.queued_us = update.queued_us;
  if (update.choice_finished) {
    stream.finished = true;
    stream.reason = update.reason;
    stream.stop_token = update.stop_token;
    stream.error = update.error;
    stream.error_code = update.error_code;
    stream.end = now_;
    stream.attention_workers.assign(update.attention_workers.begin(), update.attention_workers.end());
  }
  const bool all =
      std::all_of(client.streams.begin(), client.streams.end(), [](const Stream& s) { return s.finished; });
  if (update.request_finished != all) Violate("request_finished is wrong");
  client.finished = update.request_finished;
}

std::vector<TokenId> FakeCluster::Undisturbed(const GenerationRequest& request, int choice) const {
  std::vector<TokenId> output;
  const int32_t prompt = static_cast<int32_t>(request.prompt.size());
  uint64_t hash = 0;
  for (TokenId token : request.prompt) hash = Mix(hash, static_cast<uint64_t>(token));
  while (static_cast<int>(output.size()) < request.max_tokens &&
         prompt + static_cast<int>(output.size()) < options_.scheduler.max_model_len) {
    const bool may_stop = static_cast<int>(output.size()) >= request.min_tokens;
    const TokenId token = NextToken(hash, prompt, request.sampling.seed + static_cast<uint64_t>(choice),
                                    prompt + static_cast<Position>(output.size()), options_.vocabulary,
                                    may_stop ? std::vector<TokenId>() : request.stop_token_ids);
    output.push_back(token);
    hash = Mix(hash, static_cast<uint64_t>(token));
    const auto& stops = request.stop_token_ids;
    if (may_stop && std::find(stops.begin(), stops.end(), token) != stops.end()) break;
  }
  return output;
}

std::vector<RequestId> FakeCluster::requests() const {
  std::vector<RequestId> ids;
  for (const auto& [id, client] : clients_) ids.push_back(id);
  return ids;
}

int FakeCluster::sequences_held() const {
  size_t held = 0;
  for (const FakeAttentionWorker& each : workers_) held += each.sequences();
  return static_cast<int>(held);
}

}  // namespace dovetail::scheduler
