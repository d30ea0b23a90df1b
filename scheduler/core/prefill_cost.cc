#include "scheduler/core/prefill_cost.h"

#include <algorithm>
#include <bit>

#include "base/segment_tree.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "proto/pass_q.h"
#include "proto/placement.h"
#include "proto/state_blocks.h"

namespace dovetail::scheduler {
namespace {

int64_t SegmentsTo(Position begin, Position end) { return (end - begin + kSegmentTokens - 1) / kSegmentTokens; }

// Where a step's own attention begins, and what it gathers before that.
struct Reach {
  Position attend_begin = 0;  // tokens from here on are attended on the compute worker
  Position gather_begin = proto::kOpenEnd;
  Position gather_end = proto::kOpenEnd;  // what follows comes from the ranks before
  bool gathers = false;
  bool keeps_later = false;  // later ranks' tokens, up to the group's end
  HeldTokens held;
};

struct BlockCounts {
  int64_t all_ops = 0, one_op = 0;  // of a segment
};

BlockCounts BlocksOf(const proto::AttentionTable& table) {
  BlockCounts blocks;
  for (const LayerGroup group : table.op_group) {
    const proto::SoftmaxSpec& spec = table.softmax(group);
    if (spec.linear()) continue;
    blocks.all_ops += spec.kv_heads;
    blocks.one_op = std::max<int64_t>(blocks.one_op, spec.kv_heads);
  }
  return blocks;
}

// Room for K and V of tokens from `begin` on, of which the first `held` segments are there for all ops: for all ops of
// the others too, so that the next step finds them; else for one op at a time.
enum class Room { kNone, kForStep, kKept };
Room RoomFor(const PromptStep& step, const BlockCounts& blocks, Position begin, int64_t held) {
  const int64_t more = std::max<int64_t>(0, SegmentsTo(begin, step.ctx_len + step.tokens) - held);
  const int64_t free = int64_t{step.scratch_blocks} - held * blocks.all_ops;
  if (more == 0) return Room::kKept;
  if (!step.last && more * blocks.all_ops <= free) return Room::kKept;
  return more * blocks.one_op <= free ? Room::kForStep : Room::kNone;
}

HeldTokens KeptFrom(const PromptStep& step, Position begin, Room room) {
  return room == Room::kKept ? HeldTokens{begin, step.ctx_len + step.tokens} : HeldTokens{};
}

// Whether there is room for all ops of all tokens of the group, so that later ranks' are kept, too.
bool KeepsLater(const PromptStep& step, const BlockCounts& blocks, Position begin, int64_t held) {
  const int64_t more = std::max<int64_t>(0, SegmentsTo(begin, step.group_end) - held);
  return step.given_back && step.group_end > step.ctx_len + step.tokens && !step.last &&
         (held + more) * blocks.all_ops <= int64_t{step.scratch_blocks};
}

// As ComputeWorkerCore::BeginPromptFromRanks.
bool GathersFromRanks(const PromptStep& step, const BlockCounts& blocks, Reach& reach) {
  const bool first_of_ring = step.exchange == proto::PrefixExchange::kRing && step.ctx_len == step.base;
  if ((step.exchange != proto::PrefixExchange::kGatherDirect && !first_of_ring) || step.scratch_blocks == 0)
    return false;
  const bool goes_on = !step.held.empty() && step.base >= step.held.begin;
  const Position segment = step.base / kSegmentTokens * kSegmentTokens;
  Position begin = goes_on ? step.held.begin : 0;
  Position missing = goes_on ? std::min(step.held.end, step.base) : 0;
  Room room = RoomFor(step, blocks, begin, SegmentsTo(begin, missing));
  if (room == Room::kNone && segment > 0) {
    begin = missing = segment;
    room = RoomFor(step, blocks, begin, 0);
  }
  if (room == Room::kNone) return false;
  reach = {.attend_begin = begin, .gather_end = step.base, .gathers = true, .held = KeptFrom(step, begin, room)};
  reach.gather_begin = std::min(missing, step.base);
  reach.keeps_later = KeepsLater(step, blocks, begin, SegmentsTo(begin, missing));
  if (reach.keeps_later) reach.held = {begin, step.group_end};
  return true;
}

// As ComputeWorkerCore::BeginPromptOfRing, of a rank after the first.
bool Rings(const PromptStep& step, const BlockCounts& blocks, Reach& reach) {
  if (step.exchange != proto::PrefixExchange::kRing || step.ctx_len == step.base) return false;
  const int64_t segments = SegmentsTo(step.ctx_len, step.ctx_len + step.tokens);
  if (step.scratch_blocks == 0 || segments * blocks.one_op > step.scratch_blocks) return false;
  const Position begin = step.base / kSegmentTokens * kSegmentTokens;
  reach = {.attend_begin = begin, .gather_begin = begin, .gather_end = step.base, .gathers = true};
  return true;
}

// As ComputeWorkerCore::BeginPromptOfSwitch.
bool Switches(const PromptStep& step, Reach& reach) {
  if (step.exchange != proto::PrefixExchange::kSwitch) return false;
  reach = {.attend_begin = proto::SwitchBegin(step.base), .gathers = true};
  if (step.rank == 0) {
    reach.gather_begin = reach.attend_begin;
    reach.gather_end = step.base;
  }
  return true;
}

// As ComputeWorkerCore::BeginPromptOfPassQ.
bool AsksRanks(const PromptStep& step, Reach& reach) {
  if (step.exchange != proto::PrefixExchange::kPassQ) return false;
  reach = {.attend_begin = proto::SwitchBegin(step.base), .gathers = true};
  if (step.rank == 0) {
    reach.gather_begin = reach.attend_begin;
    reach.gather_end = step.base;
  }
  return true;
}

bool Gathers(const PromptStep& step, const BlockCounts& blocks, Reach& reach) {
  if (step.exchange != proto::PrefixExchange::kGather || step.scratch_blocks == 0) return false;
  const bool goes_on = !step.held.empty() && step.ctx_len >= step.held.begin;
  const Position begin = goes_on ? step.held.begin : 0;
  const Position missing = goes_on ? std::min(step.held.end, step.ctx_len) : 0;
  if (missing >= step.ctx_len) return false;
  const Room room = RoomFor(step, blocks, begin, SegmentsTo(begin, missing));
  if (room == Room::kNone) return false;
  reach = {.attend_begin = begin, .gather_begin = missing, .gathers = true, .held = KeptFrom(step, begin, room)};
  return true;
}

// As PromptScratch::Begin and BeginGathering (compute_worker/core/prompt_scratch.h).
Reach ReachOf(const proto::AttentionTable& table, const PromptStep& step) {
  const BlockCounts blocks = BlocksOf(table);
  const Reach elsewhere{.attend_begin = step.ctx_len + step.tokens};
  Reach reach;
  if (Gathers(step, blocks, reach) || GathersFromRanks(step, blocks, reach) || Rings(step, blocks, reach) ||
      Switches(step, reach) || AsksRanks(step, reach))
    return reach;
  if (step.scratch_blocks == 0) return elsewhere;
  if (step.exchange == proto::PrefixExchange::kRing && step.ctx_len > step.base) return elsewhere;
  const bool dropped = IsBetweenRanks(step.exchange);
  const bool goes_on =
      !dropped && !step.held.empty() && step.held.begin <= step.ctx_len && step.ctx_len <= step.held.end;
  const bool aligned = step.ctx_len % kSegmentTokens == 0;
  if (!goes_on && !aligned) return elsewhere;  // the open segment is elsewhere
  Position begin = goes_on ? step.held.begin : step.ctx_len;
  Room room = RoomFor(step, blocks, begin, SegmentsTo(begin, step.ctx_len));
  if (room == Room::kNone && aligned) {  // the earlier parts go
    begin = step.ctx_len;
    room = SegmentsTo(begin, begin + step.tokens) * blocks.one_op <= step.scratch_blocks ? Room::kForStep : Room::kNone;
  }
  if (room == Room::kNone) return elsewhere;
  return {.attend_begin = begin, .held = KeptFrom(step, begin, room)};
}

// Maximal aligned subtrees of what the step's rows ask of tokens [0, attend_end).
int64_t SubtreesAsked(const PromptStep& step, const proto::SoftmaxSpec& spec, int64_t rows, Position attend_end) {
  if (rows == 0) return 0;
  if (spec.window == 0)
    return rows * std::popcount(static_cast<uint64_t>((attend_end + kSegmentTokens - 1) / kSegmentTokens));
  int64_t nodes = 0;
  for (int64_t row = 0; row < rows; ++row)
    nodes += CountSubtrees(VisibleSegments(step.ctx_len + row, spec.window, 0, attend_end));
  return nodes;
}

void AddSoftmax(const PromptStep& step, const Reach& reach, const proto::SoftmaxSpec& spec, int ops, StepWork& work) {
  const int64_t element = SizeOf(spec.kv);
  const Position step_end = step.ctx_len + step.tokens;
  const auto flops = [&](Position from, Position to) {
    const int64_t pairs = proto::SeenTokens(step.ctx_len, step.tokens, spec.window, from, to);
    return ops * proto::AttentionFlops(pairs, spec.query_heads, spec);
  };
  const bool switches = step.exchange == proto::PrefixExchange::kSwitch;
  const proto::SwitchRank heads{.base = step.base,
                                .end = step.group_end,
                                .tokens = {step.ctx_len, step_end},
                                .rank = step.rank,
                                .ranks = step.ranks};
  const bool asks_ranks = step.exchange == proto::PrefixExchange::kPassQ;
  work.here_flops += switches     ? ops * proto::SwitchFlopsOf(spec, heads)
                     : asks_ranks ? ops * proto::PassQFlopsOf(spec, step.cuts, step.rank)
                                  : flops(reach.attend_begin, step_end);
  if (asks_ranks) work.traffic.pass_q_bytes += ops * proto::PassQBytesTo(spec, step.cuts, step.rank);
  if (switches) work.traffic.switch_bytes += ops * proto::SwitchBytesTo(spec, heads);
  work.asked_flops += flops(0, reach.attend_begin);
  // Where nothing is attended here, all of it is a part of the step like those of short prompts.
  if (reach.attend_begin > 0 && reach.attend_begin < step_end) {
    const proto::ShardRows rows =
        proto::RowsOf({}, spec.window, step.ctx_len, static_cast<int>(step.tokens), reach.attend_begin);
    const int64_t nodes = SubtreesAsked(step, spec, rows.q_count, reach.attend_begin);
    work.traffic.asked_bytes +=
        int64_t{ops} * spec.query_heads * (rows.q_count * spec.key_dim * element + nodes * 4 * (spec.value_dim + 2));
  }
  if (!reach.gathers) return;
  const Position seen =
      spec.window > 0 ? (step.ctx_len - spec.window + 1) / kSegmentTokens * kSegmentTokens : Position{0};
  const int64_t row = int64_t{ops} * spec.kv_heads * (spec.key_dim + spec.value_dim) * element;
  const Position end = std::min(reach.gather_end, step.ctx_len);
  work.traffic.gathered_bytes += std::max<Position>(0, end - std::max(reach.gather_begin, seen)) * row;
  if (switches || asks_ranks) return;
  int64_t& from_ranks =
      step.exchange == proto::PrefixExchange::kRing ? work.traffic.ring_bytes : work.traffic.direct_bytes;
  from_ranks += std::max<Position>(0, step.ctx_len - std::max(end, seen)) * row;
  if (!reach.keeps_later) return;
  const Position seen_after =
      spec.window > 0 ? (step.group_end - spec.window + 1) / kSegmentTokens * kSegmentTokens : Position{0};
  from_ranks += std::max<Position>(0, step.group_end - std::max(step_end, seen_after)) * row;
}

void AddLinear(const PromptStep& step, const proto::SoftmaxSpec& spec, int ops, StepWork& work) {
  if (!step.states) return;
  int64_t bytes = BytesOf(proto::StatesLeft(step.ctx_len, step.ctx_len + step.tokens), spec);
  const int64_t before = step.holds_state ? 0 : BytesOf(proto::StatesBefore(step.ctx_len), spec);
  const bool from_rank_0 = step.switched && step.rank > 0;
  if (!step.chained && !from_rank_0) bytes += before;
  if (step.switched)
    work.traffic.switch_bytes +=
        ops * proto::LinearSwitchBytesTo(spec, {.base = step.base,
                                                .end = step.group_end,
                                                .tokens = {step.ctx_len, step.ctx_len + step.tokens},
                                                .rank = step.rank,
                                                .ranks = step.ranks});
  work.traffic.state_bytes += int64_t{ops} * spec.kv_heads * bytes;
  if (step.chained) work.traffic.chain_bytes += int64_t{ops} * spec.kv_heads * before;
}

// Each rank that gives rows gives its own.
double OverOneLink(const PromptStep& step) {
  if (!step.link_by_pair) return 1;
  Position most = 0, all = 0;
  for (size_t r = 0; r + 1 < step.cuts.size(); ++r) {
    const bool gives = static_cast<int>(r) < step.rank || (static_cast<int>(r) > step.rank && step.given_back);
    if (!gives) continue;
    const Position tokens = step.cuts[r + 1] - step.cuts[r];
    most = std::max(most, tokens);
    all += tokens;
  }
  return all > 0 ? static_cast<double>(most) / static_cast<double>(all) : 1;
}

struct Parts {  // of a rank's time, seconds
  double dense = 0, attention = 0, plane = 0, link = 0;

  double sum(proto::PrefixExchange exchange) const {
    const double asked = plane + link;
    return dense + (exchange == proto::PrefixExchange::kAsk ? std::max(attention, asked) : attention + asked);
  }
  PrefillBound bound(proto::PrefixExchange exchange) const {
    const bool hidden = exchange == proto::PrefixExchange::kAsk && attention >= plane + link;
    const bool hides = exchange == proto::PrefixExchange::kAsk && !hidden;
    const double parts[] = {dense, hides ? 0 : attention, hidden ? 0 : plane, hidden ? 0 : link};
    return static_cast<PrefillBound>(std::max_element(std::begin(parts), std::end(parts)) - std::begin(parts));
  }
};

// Of ranks that wait for each other in every layer: `longest` of each part. What crosses between them comes before they
// attend, and attention workers answer meanwhile.
Prediction PredictSwitch(const Parts& longest, double given_s) {
  const double attends = longest.attention + given_s, asked = longest.plane + longest.link;
  const bool asks = asked > attends;
  const double parts[] = {longest.dense, asks ? 0 : longest.attention, asks ? longest.plane : 0,
                          asks ? longest.link : given_s};
  return {longest.dense + std::max(attends, asked),
          static_cast<PrefillBound>(std::max_element(std::begin(parts), std::end(parts)) - std::begin(parts))};
}

}  // namespace

bool HasSoftmax(const proto::AttentionTable& table) {
  return std::any_of(table.views.begin(), table.views.end(),
                     [](const proto::SoftmaxSpec& spec) { return !spec.linear(); });
}

StepWork WorkOf(const proto::AttentionTable& table, const PromptStep& step) {
  const Reach reach = ReachOf(table, step);
  StepWork work;
  work.tokens = step.tokens;
  work.held = reach.held;
  work.over_one_link = OverOneLink(step);
  if (reach.gathers) work.exchange = step.exchange;
  for (int group = 0; group < table.group_count(); ++group) {
    const proto::SoftmaxSpec& spec = table.views[group];
    if (spec.linear())
      AddLinear(step, spec, table.ops_in_group[group], work);
    else
      AddSoftmax(step, reach, spec, table.ops_in_group[group], work);
  }
  return work;
}

Prediction Predict(std::span<const StepWork> ranks, std::span<const ComputeRates> rates, const PlaneRates& plane) {
  Prediction slowest;
  Parts longest;
  double longest_given = 0;
  double asked = 0, crossed = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const StepWork& work = ranks[r];
    const double flop_s = rates[r].flop_s.value_or(0);
    Parts parts;
    parts.dense = static_cast<double>(work.tokens) * rates[r].token_s.value_or(0);
    parts.attention = work.here_flops * flop_s;
    parts.plane = work.asked_flops * plane.flop_s.value_or(flop_s);
    parts.link = static_cast<double>(PlaneBytesOf(work.traffic)) * plane.byte_s.value_or(0);
    asked += parts.plane;
    crossed += parts.link;
    const double other_links = static_cast<double>(work.traffic.direct_bytes) * (1 - work.over_one_link);
    const double link_bytes = static_cast<double>(RankBytesOf(work.traffic)) - other_links;
    const double given = link_bytes * rates[r].link_byte_s.value_or(0);
    longest = {std::max(longest.dense, parts.dense), std::max(longest.attention, parts.attention),
               std::max(longest.plane, parts.plane), std::max(longest.link, parts.link)};
    longest_given = std::max(longest_given, given);
    const double exposed = work.exchange == proto::PrefixExchange::kPassQ ? given : 0;
    const double seconds = parts.sum(work.exchange) + exposed;
    const bool waits = exposed > std::max({parts.dense, parts.attention, parts.plane});
    if (seconds > slowest.seconds) slowest = {seconds, waits ? PrefillBound::kLink : parts.bound(work.exchange)};
    if (given > slowest.seconds) slowest = {given, PrefillBound::kLink};
  }
  if (!ranks.empty() && ranks[0].exchange == proto::PrefixExchange::kSwitch)
    slowest = PredictSwitch(longest, longest_given);
  if (asked > slowest.seconds) slowest = {asked, PrefillBound::kPlane};
  if (crossed > slowest.seconds) slowest = {crossed, PrefillBound::kLink};
  return slowest;
}

}  // namespace dovetail::scheduler
