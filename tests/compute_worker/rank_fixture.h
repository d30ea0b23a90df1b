#pragma once
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

// The core of a compute worker that is a rank of prefill groups, with a dense backend and an attention worker that
// answer at once. Worker, micro-batch and rank have the same number; plans are those of RankPlan().
class FakeRank {
 public:
  // For another rank: what it gets, as its node would make it of a frame.
  struct ToRank {
    int rank = 0;
    Event event;
  };

  FakeRank(int rank, const proto::AttentionTable& table, uint32_t prompt_blocks, bool hand_over_at_end = false,
           bool switches_states = true);

  // Everything that it can do without another rank's frame; returns what it sends to ranks.
  std::vector<ToRank> Feed(Event event);

  // Ops that were attended here, in order, and what each began with: the state of the rank before it, or K and V of all
  // ranks before it.
  const std::vector<int>& ran() const { return ran_; }
  const std::vector<std::vector<std::byte>>& from() const { return from_; }
  const std::vector<proto::StepResult>& results() const { return results_; }
  // In a ring: K and V of the ranks before it, as they were attended to.
  struct Shard {
    int op = 0;
    int rank = 0;
    std::vector<std::byte> rows;
  };
  const std::vector<Shard>& shards() const { return shards_; }
  // K and V of later ranks, as they were put into the prompt's blocks.
  const std::vector<Shard>& kept() const { return kept_; }
  bool keeps = true;  // else its device fails to
  // In a head switch: what was attended to, in order, for which rank, and with what of others; and what came back for
  // the step's own tokens.
  struct Heads {
    int op = 0;
    int rank = 0;
    std::vector<std::byte> rows;
  };
  const std::vector<Heads>& heads() const { return heads_; }
  // With pass-q: queries of later ranks, as they were attended to. `placed` has what came back for its own.
  const std::vector<Heads>& queries() const { return queries_; }
  const std::vector<Heads>& placed() const { return placed_; }
  const std::vector<int>& handed_over() const { return handed_over_; }  // ops whose k and v, or states, have gone
  std::vector<std::string> errors() const;
  void Clear() {
    ran_.clear(), from_.clear(), results_.clear(), shards_.clear(), kept_.clear();
    heads_.clear(), placed_.clear(), queries_.clear(), handed_over_.clear();
  }
  ComputeWorkerCore& core() { return core_; }

 private:
  void Perform(const Action& action, std::deque<Event>& events, std::deque<Event>& frames, std::vector<ToRank>& sent);
  void PerformSwitch(const Action& action, std::deque<Event>& events, std::vector<ToRank>& sent);
  void PerformPassQ(const Action& action, std::deque<Event>& events, std::vector<ToRank>& sent);
  bool AsksRanks() const;
  void Note(int op);
  void AnswerStates(int op, std::deque<Event>& frames);
  void AnswerWith(int op, int64_t bytes, std::deque<Event>& frames);
  const proto::StepLayout& LayoutOf(int op) const;

  MicroBatchId id_;  // of the plan that came last
  ComputeWorkerCore core_;
  std::vector<std::byte> answer_ = std::vector<std::byte>(1 << 20);  // does not move
  std::vector<int> ran_;
  std::vector<std::vector<std::byte>> from_;
  std::vector<proto::StepResult> results_;
  std::vector<Shard> shards_, kept_;
  std::vector<Heads> heads_, placed_, queries_;
  int op_at_[kRankOpsAhead] = {-1, -1, -1, -1};  // whose K and V lie in each place
  std::vector<int> handed_over_;
};

// A program with two dense pieces before each op and one behind the last.
StepProgram ProgramFor(const proto::AttentionTable& table);

// `ops` softmax ops, but one that is linear and one with a window of `window` tokens.
proto::AttentionTable HybridTable(int ops, int linear_op, int windowed_op, int window);

// What rank `rank` leaves of a linear op, and gives of a softmax op, of tokens [begin, end): each byte says whose it
// is.
std::vector<std::byte> StateOf(const proto::AttentionTable& table, int rank, int op);
std::vector<std::byte> RowsOf(const proto::AttentionTable& table, int rank, int op, Position begin, Position end);

// In a head switch of those cuts: q, k and v of rank `from`, and what it gives of tokens of rank `to`. Likewise.
std::vector<std::byte> HeadsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts, int from,
                               int to);
std::vector<std::byte> OutputsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                 int from, int to);

// With pass-q and those cuts: q of rank `from` for what rank `to` has, and what that gives back. Likewise.
std::vector<std::byte> QueriesOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                 int from, int to);
std::vector<std::byte> PartialsOf(const proto::AttentionTable& table, int op, const std::vector<Position>& cuts,
                                  int from, int to);

// The plan of a rank: `cuts` say where the ranks begin, and the end; the group's step is `group`, and rank r has the
// one r later.
proto::StepPlan RankPlan(const proto::AttentionTable& table, int rank, const std::vector<Position>& cuts,
                         uint64_t group, proto::PrefixExchange exchange, proto::LinearExchange linear);

// Cuts of a group of so many ranks from `base` on, on segments, but the end.
std::vector<Position> RandomCuts(Position base, int ranks, std::mt19937& random);

// Feeds `workers`, FakeRanks by rank, `ready` and what they send, at most `events` of it: in any order, and all but
// plans again and again. Some of that is kept in `late`, for when the group has ended. after(): what holds behind each
// event.
template <typename Rank, typename After>
void FeedInAnyOrder(std::vector<FakeRank::ToRank> ready, int events, std::mt19937& random, std::vector<Rank>& workers,
                    std::vector<FakeRank::ToRank>& late, After&& after) {
  while (!ready.empty() && events-- > 0) {
    const size_t next = random() % ready.size();
    FakeRank::ToRank one = ready[next];
    const bool plan = std::holds_alternative<PlanArrived>(one.event);
    if (plan || random() % 4 != 0) ready.erase(ready.begin() + static_cast<int64_t>(next));
    if (!plan && random() % 8 == 0) late.push_back(one);
    for (FakeRank::ToRank& sent : workers[one.rank].Feed(std::move(one.event))) ready.push_back(std::move(sent));
    after();
  }
}

}  // namespace dovetail::compute
