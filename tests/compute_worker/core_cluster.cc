// The scheduler of a CoreCluster, and what comes when. Cores and what they ask for: core_cluster_shell.cc.
#include "tests/compute_worker/core_cluster.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "proto/drawn_token.h"
#include "tests/compute_worker/rank_fixture.h"
#include "tests/compute_worker/small_spec.h"

namespace dovetail::compute {

using proto::LinearExchange;
using proto::PrefixExchange;
using proto::StepEntry;
using proto::StepPlan;
using proto::StepStatus;

namespace {

constexpr int kAttentionWorkers = 3, kMostWorkers = 4, kVocabSize = 100, kMaxStepTokens = 512;
constexpr Position kLongest = 1200;

// More ops than a rank may be ahead, of four heads each, so that up to four ranks can divide them.
proto::AttentionTable SomeTable(bool has_linear) {
  proto::SoftmaxSpec full = SmallSpec();
  full.query_heads = 8;
  full.kv_heads = 4;
  proto::SoftmaxSpec windowed = full;
  windowed.window = 100;
  if (!has_linear) return *proto::AttentionTable::Build({full, windowed, full, full, windowed, full});
  proto::LinearSpec linear;
  linear.heads = 4;
  linear.key_dim = linear.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(4, -0.1f);
  return *proto::AttentionTable::Build({full, linear, windowed, full, full, linear, full},
                                       {{}, decays, {}, {}, {}, decays, {}});
}

}  // namespace

CoreCluster::Counts& CoreCluster::Counts::operator+=(const Counts& more) {
  done += more.done, failed += more.failed, refused += more.refused, ahead += more.ahead;
  pieces += more.pieces, kept += more.kept, again += more.again;
  for (size_t i = 0; i < std::size(groups); ++i) groups[i] += more.groups[i];
  return *this;
}

CoreCluster::CoreCluster(uint64_t seed)
    : random_(static_cast<uint32_t>(seed)),
      table_(SomeTable(/*has_linear=*/Coin(2))),
      program_(ProgramFor(table_)),
      options_(SomeOptions()),
      answer_(size_t{1} << 22) {
  for (uint32_t worker = 0; worker < kAttentionWorkers; ++worker)
    attention_.push_back({.worker = WorkerId(worker),
                          .epoch = Epoch(1),
                          .node = NodeId(next_node_++),
                          .linked = Coin(6),
                          .same_gpu = Coin(8)});
  trouble_ = Coin(3) ? 0 : Coin(2) ? 1 : 10;
  const int count = Of(1, kMostWorkers);
  workers_.reserve(kMostWorkers + 1);  // they do not move
  for (int worker = 0; worker < count; ++worker) AddComputeWorker();
}

ComputeWorkerOptions CoreCluster::SomeOptions() {
  ComputeWorkerOptions options;
  options.micro_batches = Of(1, 4);
  options.max_step_tokens = kMaxStepTokens;
  options.vocab_size = kVocabSize;
  options.linear_prompts = table_.has_linear() && !Coin(4);
  options.rank_rows = options.rank_ring = options.rank_switch = options.rank_queries = true;
  options.rank_state_switch = options.linear_prompts && Coin(2);
  options.state_slots = Of(0, 4);
  options.hand_over_at_end = Coin(3);
  options.key_values_in_flight = options.hand_over_at_end ? table_.op_count() : Of(1, 4);
  options.gather_piece_bytes = Coin(2) ? 4096 : 1 << 20;
  return options;
}

// Ranks may have unequal room.
void CoreCluster::AddComputeWorker() {
  ComputeWorker& worker = workers_.emplace_back();
  ComputeWorkerOptions options = options_;
  options.prompt_blocks = Coin(4) ? 0 : Coin(3) ? 100 : 2000;
  worker.core = std::make_unique<ComputeWorkerCore>(table_, program_, options);
  const auto count = static_cast<size_t>(options.micro_batches);
  worker.running.resize(count);
  worker.last.resize(count);
  worker.work.resize(count);
  worker.taken.resize(count);
  for (const AttentionWorkerAddress& address : attention_) {
    worker.core->AddAttentionWorker(address);
    worker.known.emplace(address.worker, address.epoch);
  }
}

// ---- the scheduler ----

void CoreCluster::Step() {
  if (Trouble(60)) return MakeTrouble();
  if (!Coin(8)) {
    LetSomethingCome();
  } else if (Coin(3)) {
    PlanGroup();
  } else if (Coin(2)) {
    PlanFollower(Of(0, static_cast<int>(workers_.size()) - 1));
  } else {
    PlanStep();
  }
}

void CoreCluster::MakeTrouble() {
  switch (Of(0, 5)) {
    case 0: return LoseAttentionWorker();
    case 1: return LoseComputeWorker();
    case 2: return FailSomeStep();
    default: break;
  }
  if (!planned_.empty()) Withdraw(std::next(planned_.begin(), Of(0, static_cast<int>(planned_.size()) - 1))->first);
}

proto::Placement CoreCluster::SomePlacement() {
  const int first = Of(0, kAttentionWorkers - 1), second = (first + 1) % kAttentionWorkers;
  const int how = Of(0, 3);
  proto::Placement placement;
  for (int g = 0; g < table_.group_count(); ++g) {
    const auto add = [&](int worker, proto::HeadRange heads, proto::TokenRange tokens) {
      const AttentionWorkerAddress& address = attention_[static_cast<size_t>(worker)];
      placement.push_back({LayerGroup(static_cast<uint16_t>(g)), address.worker, address.epoch, heads, tokens});
    };
    if (how == 1) {
      add(first, {0, 2}, {});
      add(second, {2, 4}, {});
    } else if (how == 2 && !table_.views[static_cast<size_t>(g)].linear()) {
      add(first, {0, 4}, {0, 128});
      add(second, {0, 4}, {128, proto::kOpenEnd});
    } else {
      add(how == 3 && g % 2 == 1 ? second : first, {0, 4}, {});
    }
  }
  return placement;
}

// One that is in no step. Most of those whose workers were lost are not planned any more.
int CoreCluster::FreeSequence() {
  for (size_t i = 0; i < sequences_.size(); ++i) {
    Sequence& sequence = sequences_[i];
    if (sequence.steps > 0 || sequence.gone) continue;
    const bool lost = std::any_of(sequence.placement.begin(), sequence.placement.end(), [&](const proto::Shard& shard) {
      return attention_[shard.worker.value()].epoch != shard.epoch;
    });
    sequence.gone = sequence.ctx_len > kLongest || (lost && !Coin(4));
    if (!sequence.gone && !Coin(3)) return static_cast<int>(i);
  }
  Sequence& fresh = sequences_.emplace_back();
  fresh.id = SequenceId(next_sequence_++);
  fresh.ctx_len = Coin(2) ? 0 : Coin(2) ? Of(1, 300) : 64 * Of(1, 5);  // what is before was found in a cache
  fresh.placement = SomePlacement();
  return static_cast<int>(sequences_.size()) - 1;
}

StepEntry CoreCluster::EntryFor(int sequence, int q_len) {
  const Sequence& planned = sequences_[static_cast<size_t>(sequence)];
  StepEntry entry;
  entry.sequence = planned.id;
  entry.ctx_len = planned.ctx_len;
  entry.tokens.assign(static_cast<size_t>(q_len), 7);
  entry.sample = q_len == 1 || Coin(2);
  entry.placement = planned.placement;
  if (Coin(2)) entry.exchange = PrefixExchange::kGather;
  return entry;
}

// While a step may wait for what another draws, none but that follows.
std::optional<MicroBatchId> CoreCluster::FreeMicroBatch(int worker) {
  const ComputeWorker& known = workers_[static_cast<size_t>(worker)];
  if (planned_.contains(known.before_last)) return std::nullopt;
  const auto free = std::find(known.taken.begin(), known.taken.end(), false);
  if (free == known.taken.end()) return std::nullopt;
  return MicroBatchId(static_cast<uint16_t>(free - known.taken.begin()));
}

void CoreCluster::Send(int to, StepPlan plan, std::vector<int> sequences, bool well_formed) {
  ComputeWorker& worker = workers_[static_cast<size_t>(to)];
  worker.taken[plan.micro_batch.value()] = true;
  for (const int sequence : sequences) ++sequences_[static_cast<size_t>(sequence)].steps;
  planned_[plan.step] = {.worker = to, .sequences = std::move(sequences), .group = plan.part.group};
  StepWatch& watch = worker.watches.try_emplace(plan.step, *worker.core, program_, plan).first->second;
  if (!well_formed) watch.MustEnd(StepStatus::kWorkerFailed);
  worker.before_last = proto::FollowsAnother(plan) ? worker.last_sent : StepId();
  worker.last_sent = plan.step;
  worker.plans.push_back({PlanArrived{plan}});
  if (Coin(8)) worker.plans.push_back({PlanArrived{std::move(plan)}, /*again=*/true});
}

void CoreCluster::PlanStep() {
  const int worker = Of(0, static_cast<int>(workers_.size()) - 1);
  const auto id = FreeMicroBatch(worker);
  if (!id) return;
  StepPlan plan{StepId(next_step_++), *id, {}};
  std::vector<int> sequences;
  for (int count = Of(1, 4); count > 0; --count) {
    const int sequence = FreeSequence();
    if (std::find(sequences.begin(), sequences.end(), sequence) != sequences.end()) continue;
    plan.entries.push_back(EntryFor(sequence, Coin(2) ? 1 : Of(1, 100)));
    sequences.push_back(sequence);
  }
  const bool well_formed = !Trouble(20);
  if (!well_formed) plan.entries.back().tokens[0] = kVocabSize;
  Send(worker, std::move(plan), std::move(sequences), well_formed);
}

// Of what the step before draws, if it draws anything.
void CoreCluster::PlanFollower(int to) {
  ComputeWorker& worker = workers_[static_cast<size_t>(to)];
  const auto before = planned_.find(worker.last_sent);
  const auto id = FreeMicroBatch(to);
  if (!id || before == planned_.end() || before->second.group != StepId()) return;
  StepPlan plan{StepId(next_step_++), *id, {}};
  std::vector<int> sequences;
  const StepPlan& drawing = worker.watches.at(worker.last_sent).plan();
  for (size_t e = 0; e < drawing.entries.size(); ++e) {
    const StepEntry& entry = drawing.entries[e];
    if (!entry.sample || entry.tokens[0] == kVocabSize || Coin(4)) continue;
    StepEntry& next = plan.entries.emplace_back(EntryFor(before->second.sequences[e], 1));
    next.ctx_len = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    next.tokens = {proto::kDrawnBefore};
    next.exchange = PrefixExchange::kAsk;
    sequences.push_back(before->second.sequences[e]);
  }
  if (plan.entries.empty()) return;
  const StepId step = plan.step, first = worker.last_sent;
  Send(to, std::move(plan), std::move(sequences), /*well_formed=*/true);
  worker.watches.at(step).draws_for_it = first;
}

void CoreCluster::PlanGroup() {
  std::vector<std::pair<int, MicroBatchId>> free;
  for (int worker = 0; worker < static_cast<int>(workers_.size()); ++worker)
    if (const auto id = FreeMicroBatch(worker)) free.emplace_back(worker, *id);
  std::shuffle(free.begin(), free.end(), random_);
  if (free.size() < 2) return;
  const int ranks = Of(2, static_cast<int>(free.size()));
  const int sequence = FreeSequence();
  const auto exchange = static_cast<PrefixExchange>(Of(0, 5));
  LinearExchange linear = options_.linear_prompts && Coin(2) ? LinearExchange::kChain : LinearExchange::kStates;
  if (options_.linear_prompts && exchange == PrefixExchange::kSwitch && Coin(2)) linear = LinearExchange::kSwitch;
  const std::vector<Position> cuts = RandomCuts(sequences_[static_cast<size_t>(sequence)].ctx_len, ranks, random_);
  const uint64_t first = next_step_;
  next_step_ += static_cast<uint64_t>(ranks);
  const bool between = IsBetweenRanks(exchange) || IsBetweenRanks(linear), goes_on = Coin(2);
  const bool gives_back = exchange == PrefixExchange::kGatherDirect && goes_on && !Coin(4);
  std::vector<StepPlan> plans;
  for (int r = 0; r < ranks; ++r) {
    StepPlan& plan = plans.emplace_back(RankPlan(table_, r, cuts, first, exchange, linear));
    plan.micro_batch = free[static_cast<size_t>(r)].second;
    plan.entries[0].sequence = sequences_[static_cast<size_t>(sequence)].id;
    plan.entries[0].placement = sequences_[static_cast<size_t>(sequence)].placement;
    plan.entries[0].sample = r + 1 == ranks && !goes_on;
    plan.gives_back = gives_back;
    for (int other = 0; other < ranks; ++other) {
      plan.ranks[static_cast<size_t>(other)].worker = WorkerId(static_cast<uint32_t>(free[other].first));
      plan.ranks[static_cast<size_t>(other)].micro_batch = free[static_cast<size_t>(other)].second;
    }
    if (!between) plan.ranks.clear();
    groups_[StepId(first)].steps.push_back(plan.step);
  }
  groups_[StepId(first)].left = plans.size();
  for (int r = 0; r < ranks; ++r) Send(free[static_cast<size_t>(r)].first, std::move(plans[r]), {sequence}, true);
}

// What it ended as is watched elsewhere.
void CoreCluster::TakeResult(const proto::StepResult& result) {
  const auto found = planned_.find(result.step);
  ASSERT_NE(found, planned_.end()) << "step " << result.step.value() << " ends twice";
  Planned planned = std::move(found->second);
  planned_.erase(found);
  const bool well = result.status == StepStatus::kOk;
  ++(well ? counts_.done : counts_.failed);
  const StepPlan& plan = workers_[static_cast<size_t>(planned.worker)].watches.at(result.step).plan();
  for (size_t e = 0; e < planned.sequences.size(); ++e) {
    Sequence& sequence = sequences_[static_cast<size_t>(planned.sequences[e])];
    --sequence.steps;
    const StepEntry& entry = plan.entries[e];
    if (planned.group == StepId() && well)
      sequence.ctx_len = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    if (!well && Coin(3)) sequence.gone = true;
  }
  if (planned.group != StepId()) return EndRank(planned, well);
  workers_[static_cast<size_t>(planned.worker)].taken[result.micro_batch.value()] = false;
}

// The others wait for tokens that will not come.
void CoreCluster::FailGroup(Group& group) {
  if (std::exchange(group.failed, true)) return;
  for (const StepId step : group.steps)
    if (planned_.contains(step)) Withdraw(step);
}

// Micro-batches are free when all ranks have ended.
void CoreCluster::EndRank(const Planned& rank, bool well) {
  Group& group = groups_.at(rank.group);
  if (!well) FailGroup(group);
  if (--group.left > 0) return;
  for (const StepId step : group.steps)
    for (ComputeWorker& worker : workers_) {
      const auto watch = worker.watches.find(step);
      if (watch == worker.watches.end()) continue;
      const StepPlan& plan = watch->second.plan();
      worker.taken[plan.micro_batch.value()] = false;
      if (group.failed || plan.part.rank > 0) continue;
      sequences_[static_cast<size_t>(rank.sequences[0])].ctx_len = plan.part.end;
      ++counts_.groups[static_cast<size_t>(plan.entries[0].exchange)];
    }
  groups_.erase(rank.group);
}

void CoreCluster::Withdraw(StepId step) {
  const Planned& planned = planned_.at(step);
  ComputeWorker& worker = workers_[static_cast<size_t>(planned.worker)];
  worker.plans.push_back({StepWithdrawn{step, worker.watches.at(step).plan().micro_batch}});
}

// It joins again as another one, without state. No step waits for results of the former one.
void CoreCluster::LoseComputeWorker() {
  const int lost = Of(0, static_cast<int>(workers_.size()) - 1);
  ComputeWorker& worker = workers_[static_cast<size_t>(lost)];
  std::vector<std::pair<StepId, MicroBatchId>> steps;
  for (const auto& [step, planned] : planned_)
    if (planned.worker == lost) steps.emplace_back(step, worker.watches.at(step).plan().micro_batch);
  for (const auto& [step, id] : steps)
    TakeResult({.step = step, .micro_batch = id, .status = StepStatus::kWorkerUnreachable});
  for (auto& [id, group] : groups_)  // of which it has ended its part
    if (std::any_of(group.steps.begin(), group.steps.end(), [&](StepId step) { return worker.watches.contains(step); }))
      FailGroup(group);
  std::erase_if(serving_, [&](const auto& one) { return std::get<1>(one.first) == lost; });
  worker.watches.clear();
  AddComputeWorker();
  worker = std::move(workers_.back());
  workers_.pop_back();
}

// It comes again with another epoch, of which compute workers hear at any time, in any order.
void CoreCluster::LoseAttentionWorker() {
  AttentionWorkerAddress& address = attention_[static_cast<size_t>(Of(0, kAttentionWorkers - 1))];
  const AttentionWorkerAddress lost = address;
  address.epoch = Epoch(lost.epoch.value() + 1);
  address.node = NodeId(next_node_++);
  if (Coin(2)) std::erase_if(serving_, [&](const auto& one) { return std::get<0>(one.first) == lost.node.value(); });
  for (ComputeWorker& worker : workers_) {
    worker.members.emplace_back(lost, false);
    const bool first = Coin(4);
    worker.members.insert(first ? std::prev(worker.members.end()) : worker.members.end(), {address, true});
  }
}

// ---- what comes ----

void CoreCluster::End() {
  ending_ = true;
  while (LetSomethingCome())
    if (::testing::Test::HasFailure()) return;
  EXPECT_TRUE(planned_.empty()) << "step " << planned_.begin()->first.value() << " does not end";
  late_.clear();
  for (const ComputeWorker& worker : workers_) {
    EXPECT_TRUE(worker.core->idle());
    EXPECT_EQ(worker.core->rank_bytes(), 0u) << "of other ranks";
    CheckScratch(*worker.core);
  }
  for (const auto& tensor : tensors_) ASSERT_TRUE(tensor.expired()) << "a tensor of another rank is held";
}

// False: nothing is on its way.
bool CoreCluster::LetSomethingCome() {
  std::vector<std::function<void()>> ready;
  for (ComputeWorker& worker : workers_) {
    if (!worker.plans.empty()) ready.push_back([&] { LetPlanCome(worker); });
    if (!worker.members.empty()) ready.push_back([&] { LetMemberCome(worker); });
    if (!worker.keeping.empty()) ready.push_back([&] { EndKeeping(worker); });
    for (size_t id = 0; id < worker.work.size(); ++id)
      if (worker.work[id] != Work::kNone)
        ready.push_back([&, id] { EndWork(worker, MicroBatchId(static_cast<uint16_t>(id))); });
  }
  for (auto& [from, serving] : serving_)
    if (MayAnswer(from, serving)) ready.push_back([&, from = from] { LetAnswerCome(from, serving); });
  const size_t frames = (to_ranks_.size() + 1) / 2;
  for (size_t i = 0; i < frames; ++i) ready.push_back([&] { LetRankFrameCome(); });
  if (ready.empty()) return false;
  ready[random_() % ready.size()]();
  return true;
}

void CoreCluster::LetPlanCome(ComputeWorker& worker) {
  FromScheduler next = std::move(worker.plans.front());
  worker.plans.pop_front();
  if (!next.again) {
    if (const auto* plan = std::get_if<PlanArrived>(&next.event)) worker.unfinished.insert(plan->plan.step);
    return Feed(worker, std::move(next.event));
  }
  ++counts_.again;
  std::deque<Action> actions;
  Handle(worker, std::move(next.event), actions);
  EXPECT_TRUE(actions.empty()) << "a plan that comes twice runs once";
}

void CoreCluster::LetMemberCome(ComputeWorker& worker) {
  const auto [address, joins] = worker.members.front();
  worker.members.pop_front();
  if (!joins) {
    worker.lost.emplace(address.worker, address.epoch);
    worker.known.erase({address.worker, address.epoch});
    return Feed(worker, AttentionWorkerLost{address.worker, address.epoch});
  }
  std::erase_if(worker.known, [&](const WorkerEpoch& one) { return one.first == address.worker; });
  worker.known.emplace(address.worker, address.epoch);
  worker.core->AddAttentionWorker(address);
}

// A shell looks at answers when the dense piece that it runs for their step is done.
bool CoreCluster::MayAnswer(const std::tuple<uint32_t, int, StepId>& from, const Serving& serving) const {
  if (serving.answers.empty() && serving.pieces.empty()) return false;
  const ComputeWorker& worker = workers_[static_cast<size_t>(std::get<1>(from))];
  const size_t id = worker.watches.at(std::get<2>(from)).plan().micro_batch.value();
  return serving.refuses || worker.running[id] != std::get<2>(from) || worker.work[id] != Work::kDense;
}

// In order, but a piece may be copied while the answer behind it is there.
void CoreCluster::LetAnswerCome(const std::tuple<uint32_t, int, StepId>& from, Serving& serving) {
  const bool piece = serving.answers.empty() || (!serving.pieces.empty() && Coin(2));
  std::deque<Event>& queue = piece ? serving.pieces : serving.answers;
  Event event = std::move(queue.front());
  queue.pop_front();
  ComputeWorker& worker = workers_[static_cast<size_t>(std::get<1>(from))];
  const auto watch = worker.watches.find(std::get<2>(from));
  if (const auto* partial = std::get_if<PartialArrived>(&event)) watch->second.Comes(*partial);
  if (const auto* rows = std::get_if<EarlierRowsArrived>(&event)) watch->second.Comes(*rows);
  const bool again = Coin(8);
  if (again) {
    ++counts_.again;
    Event first = event;
    Feed(worker, std::move(first));
  }
  Feed(worker, std::move(event));
}

// In any order, and again and again, also when the step has ended.
void CoreCluster::LetRankFrameCome() {
  std::vector<ToRank>& from = !late_.empty() && !ending_ && Coin(8) ? late_ : to_ranks_;
  const size_t next = random_() % from.size();
  ToRank frame = from[next];
  if (ending_ || !Coin(6)) from.erase(from.begin() + static_cast<int64_t>(next));
  if (!ending_ && Coin(16) && late_.size() < 50) late_.push_back(frame);
  ComputeWorker& worker = workers_[static_cast<size_t>(frame.worker)];
  const auto watch = worker.watches.find(frame.step);
  if (watch == worker.watches.end()) return;  // the worker it was sent to is lost
  StepWatch& step = watch->second;
  if (const auto* e = std::get_if<RankStateArrived>(&frame.event)) step.Comes(*e);
  if (const auto* e = std::get_if<RankRowsArrived>(&frame.event)) step.Comes(*e);
  if (const auto* e = std::get_if<RankHeadsArrived>(&frame.event)) step.Comes(*e);
  if (const auto* e = std::get_if<RankOutputsArrived>(&frame.event)) step.Comes(*e);
  if (const auto* e = std::get_if<RankAttended>(&frame.event)) step.Comes(*e);
  Feed(worker, std::move(frame.event));
}

}  // namespace dovetail::compute
