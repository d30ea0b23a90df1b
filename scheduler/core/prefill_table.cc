#include "scheduler/core/prefill_table.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "absl/strings/str_cat.h"
#include "proto/head_switch.h"
#include "proto/linear_switch.h"
#include "proto/prefill_exchange.h"
#include "scheduler/core/prefill_plan.h"

namespace dovetail::scheduler {
namespace {

struct LayerCost {  // of all layers of one kind, a rank
  int64_t bytes = 0;
  double attention_s = 0;
  double exposed_s = 0;  // transfers that nothing hides
};

PromptShape ShapeOf(const PrefillTableInput& input) { return {input.new_tokens, input.earlier_tokens, input.ranks}; }

// Seconds of a rank's attention in one layer, where all ranks have equal parts of it.
double AttentionOf(const PrefillTableInput& input, const proto::SoftmaxSpec& spec) {
  const int64_t pairs = proto::SeenTokens(input.earlier_tokens, input.new_tokens, spec.window, 0,
                                          input.earlier_tokens + input.new_tokens);
  return proto::AttentionFlops(pairs, spec.query_heads, spec) * input.flop_s / input.ranks;
}

using SoftmaxLayer = std::function<LayerCost(const proto::SoftmaxSpec& spec)>;
using LinearLayer = std::function<LayerCost(const proto::LinearSpec& spec)>;

// Of exchanges between the ranks themselves. But for gather-direct, the ring, pass-q, the switch with a KV head for
// each rank, the chain, and with a switch of softmax layers that of linear ones, they are not built.
struct Direct {
  std::string name;
  SoftmaxLayer softmax;
  std::string why_not;
};
struct DirectLinear {
  std::string name;
  LinearLayer layer;
};

std::vector<Direct> DirectExchanges(const PrefillTableInput& in) {
  const PromptShape shape = ShapeOf(in);
  const double hops = in.ranks - 1;
  int least_heads = proto::kMaxHeads;
  for (const proto::SoftmaxSpec& spec : in.attention.views)
    if (!spec.linear()) least_heads = std::min(least_heads, spec.query_heads);
  const std::string too_many_ranks =
      in.ranks > least_heads ? absl::StrCat("more ranks than the ", least_heads, " query heads") : "";
  return {
      {"switch",
       [=](const proto::SoftmaxSpec& spec) {
         const int64_t bytes = SwitchBytes(spec, shape);
         return LayerCost{bytes, AttentionOf(in, spec),
                          static_cast<double>(bytes) * in.link_byte_s + 2 * (hops > 0 ? in.link_latency_s : 0)};
       },
       too_many_ranks},
      {"gather-direct",
       [=](const proto::SoftmaxSpec& spec) {
         const int64_t bytes = RingBytes(spec, shape);
         return LayerCost{bytes, AttentionOf(in, spec),
                          static_cast<double>(bytes) * in.link_byte_s + (hops > 0 ? in.link_latency_s : 0)};
       },
       ""},
      {"ring",
       [=](const proto::SoftmaxSpec& spec) {  // a hop's transfer and the attention over what came before it overlap
         const int64_t bytes = RingBytes(spec, shape);
         const double attention = AttentionOf(in, spec);
         const double transfer = static_cast<double>(bytes) * in.link_byte_s + hops * in.link_latency_s;
         return LayerCost{bytes, attention, std::max(0.0, transfer - attention * hops / in.ranks)};
       },
       ""},
      {"pass-q",
       [=](const proto::SoftmaxSpec& spec) {  // there and back
         const int64_t bytes = PassQBytes(spec, shape);
         return LayerCost{bytes, AttentionOf(in, spec),
                          static_cast<double>(bytes) * in.link_byte_s + 2 * (hops > 0 ? in.link_latency_s : 0)};
       },
       ""},
  };
}

std::vector<DirectLinear> DirectLinearExchanges(const PrefillTableInput& in) {
  const PromptShape shape = ShapeOf(in);
  const double hops = in.ranks - 1;
  const auto plain = [=](int64_t bytes, double messages) {
    return LayerCost{bytes, 0, static_cast<double>(bytes) * in.link_byte_s + messages * in.link_latency_s};
  };
  return {
      {"chain",  // one after the other: the last rank waits for all hops
       [=](const proto::LinearSpec& spec) {
         const int64_t bytes = ChainBytes(spec, shape);
         return LayerCost{bytes, 0, hops * (static_cast<double>(bytes) * in.link_byte_s + in.link_latency_s)};
       }},
      {"state-gather",
       [=](const proto::LinearSpec& spec) { return plain(StateGatherBytes(spec, shape), hops > 0 ? 1 : 0); }},
      {"scan",
       [=](const proto::LinearSpec& spec) {
         const int64_t bytes = StateScanBytes(spec, shape);
         return plain(bytes, static_cast<double>(std::bit_width(static_cast<uint64_t>(in.ranks - 1))));
       }},
      {"switch",
       [=](const proto::LinearSpec& spec) { return plain(LinearSwitchBytes(spec, shape), hops > 0 ? 2 : 0); }},
  };
}

PrefillTableRow DirectRow(const PrefillTableInput& in, const Direct* softmax, const DirectLinear* linear) {
  PrefillTableRow row;
  if (softmax != nullptr) row.softmax = softmax->name;
  if (linear != nullptr) row.linear = linear->name;
  double attention = 0, exposed = 0;
  for (int g = 0; g < in.attention.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::LinearSpec* const state = in.attention.linear(group);
    const LayerCost layer = state != nullptr ? linear->layer(*state) : softmax->softmax(in.attention.views[g]);
    const int ops = in.attention.ops_in_group[g];
    row.rank_bytes += ops * layer.bytes;
    attention += ops * layer.attention_s;
    exposed += ops * layer.exposed_s;
  }
  row.total_bytes = in.ranks * row.rank_bytes;
  const double dense = static_cast<double>(in.new_tokens) * in.token_s / in.ranks;
  row.seconds = dense + attention + exposed;
  row.bound = exposed > std::max(dense, attention) ? PrefillBound::kLink
              : attention > dense                  ? PrefillBound::kAttention
                                                   : PrefillBound::kDense;
  if (softmax != nullptr && !softmax->why_not.empty()) {
    row.possible = false;
    row.why_not = softmax->why_not;
  }
  return row;
}

// Heads are divided whatever the cuts, and with pass-q first ranks attend to most for others: cuts are even then.
PrefillCutOptions CutOptions(const PrefillTableInput& in, proto::PrefixExchange exchange) {
  PrefillCutOptions options{.most_tokens = in.max_step_tokens};
  if (exchange == proto::PrefixExchange::kSwitch || exchange == proto::PrefixExchange::kPassQ) options.par_tokens = 1e9;
  return options;
}

// That follow each other in a step of so many ranks: one there and back for each attention layer, and once more for
// each rank that waits for the one before. One way where what that layer needs comes from a rank, but a switch and
// queries go there and back.
double MessagesOf(const PrefillTableInput& in, proto::PrefixExchange exchange, proto::LinearExchange linear,
                  size_t ranks) {
  double messages = 2 * (static_cast<double>(ranks) - 1);
  for (int g = 0; g < in.attention.group_count(); ++g) {
    const bool is_linear = in.attention.views[g].linear();
    const bool one_way = IsBetweenRanks(exchange) && exchange != proto::PrefixExchange::kSwitch &&
                         exchange != proto::PrefixExchange::kPassQ;
    const bool direct = ranks > 1 && (is_linear ? linear == proto::LinearExchange::kChain : one_way);
    messages += (direct ? 1 : 2) * in.attention.ops_in_group[g];
  }
  return messages;
}

// Step by step, as the scheduler does it.
PrefillTableRow BuiltRow(const PrefillTableInput& in, proto::PrefixExchange exchange,
                         proto::LinearExchange linear = proto::LinearExchange::kStates) {
  PrefillTableRow row;
  row.built = true;
  if (HasSoftmax(in.attention)) row.softmax = NameOf(exchange);
  if (in.attention.has_linear()) row.linear = NameOf(linear);
  const Position end = in.earlier_tokens + in.new_tokens;
  const ComputeRates rate{in.token_s, in.flop_s, in.link_byte_s};
  const PlaneRates plane{in.plane_flop_s, in.link_byte_s};
  std::vector<HeldTokens> held(in.ranks);
  std::vector<int64_t> bytes(in.ranks);
  std::vector<double> by_bound(4);
  bool holds_state = false;
  for (Position base = in.earlier_tokens; base < end;) {
    const int ranks = RanksFor(end - base, in.new_tokens, in.rank_tokens, in.max_step_tokens, in.ranks);
    const PrefillCutOptions cut = CutOptions(in, exchange);
    const std::vector<Position> cuts =
        ranks == 1 ? std::vector<Position>{base, std::min<Position>(end, base + in.max_step_tokens)}
                   : CutPrefill(base, EndOfGroup(base, end, ranks, cut), ranks, cut);
    std::vector<StepWork> work;
    const proto::PrefixExchange by = proto::ExchangeOf(exchange, ranks);
    const bool gives_back = by == proto::PrefixExchange::kGatherDirect && cuts.back() < end;
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      work.push_back(WorkOf(in.attention, {.ctx_len = cuts[r],
                                           .base = base,
                                           .tokens = cuts[r + 1] - cuts[r],
                                           .group_end = cuts.back(),
                                           .rank = static_cast<int>(r),
                                           .ranks = ranks,
                                           .cuts = cuts,
                                           .exchange = by,
                                           .held = held[r],
                                           .scratch_blocks = in.scratch_blocks,
                                           .given_back = gives_back,
                                           .last = cuts[r + 1] >= end,
                                           .holds_state = holds_state && ranks == 1,
                                           .chained = r > 0 && linear == proto::LinearExchange::kChain,
                                           .switched = ranks > 1 && linear == proto::LinearExchange::kSwitch}));
      held[r] = work.back().held;
      bytes[r] += BytesOf(work.back().traffic);
      row.traffic = Sum(row.traffic, work.back().traffic);
    }
    const std::vector<ComputeRates> rates(work.size(), rate);
    const Prediction step = Predict(work, rates, plane);
    const double latency = in.link_latency_s * MessagesOf(in, exchange, linear, work.size());
    row.seconds += step.seconds + latency;
    by_bound[static_cast<size_t>(step.bound)] += step.seconds;
    by_bound[static_cast<size_t>(PrefillBound::kLink)] += latency;
    holds_state = ranks == 1;
    base = cuts.back();
  }
  row.bound = static_cast<PrefillBound>(std::max_element(by_bound.begin(), by_bound.end()) - by_bound.begin());
  row.rank_bytes = *std::max_element(bytes.begin(), bytes.end());
  row.total_bytes = BytesOf(row.traffic);
  return row;
}

PrefillTableRow TensorParallelRow(const PrefillTableInput& in) {
  PrefillTableRow row;
  row.softmax = row.linear = "tensor-parallel";
  const int64_t layers = in.attention.op_count();
  const int64_t element = static_cast<int64_t>(SizeOf(in.attention.views[0].kv));
  row.rank_bytes = layers * TensorParallelBytes(in.hidden, element, ShapeOf(in));
  row.total_bytes = in.ranks * row.rank_bytes;
  double attention = 0;
  for (int g = 0; g < in.attention.group_count(); ++g)
    if (!in.attention.views[g].linear())
      attention += in.attention.ops_in_group[g] * AttentionOf(in, in.attention.views[g]);
  const double dense = static_cast<double>(in.new_tokens) * in.token_s / in.ranks;
  const double exposed = static_cast<double>(row.rank_bytes) * in.link_byte_s +
                         (in.ranks > 1 ? 4.0 * static_cast<double>(layers) * in.link_latency_s : 0);
  row.seconds = dense + attention + exposed;
  row.bound = exposed > std::max(dense, attention) ? PrefillBound::kLink
              : attention > dense                  ? PrefillBound::kAttention
                                                   : PrefillBound::kDense;
  return row;
}

}  // namespace

std::vector<PrefillTableRow> MakePrefillTable(const PrefillTableInput& input) {
  using proto::LinearExchange, proto::PrefixExchange;
  std::vector<PrefillTableRow> rows;
  const bool softmax = HasSoftmax(input.attention), linear = input.attention.has_linear();
  const bool states_switch = linear && input.ranks <= proto::MostLinearSwitchRanks(input.attention);
  const bool switches = softmax ? input.ranks <= proto::MostSwitchRanks(input.attention) : states_switch;
  for (const PrefixExchange exchange : {PrefixExchange::kAsk, PrefixExchange::kGather, PrefixExchange::kGatherDirect,
                                        PrefixExchange::kRing, PrefixExchange::kSwitch, PrefixExchange::kPassQ}) {
    const bool is_switch = exchange == PrefixExchange::kSwitch;
    if (!softmax && exchange != PrefixExchange::kAsk && !is_switch) continue;
    if (!switches && is_switch) continue;
    if (!linear || !IsBetweenRanks(exchange)) rows.push_back(BuiltRow(input, exchange));
    const bool states = is_switch && states_switch;
    if (linear) rows.push_back(BuiltRow(input, exchange, states ? LinearExchange::kSwitch : LinearExchange::kChain));
  }
  const std::vector<Direct> directs = DirectExchanges(input);
  const std::vector<DirectLinear> linears = DirectLinearExchanges(input);
  for (size_t s = 0; s < (softmax ? directs.size() : 1); ++s)
    for (size_t l = 0; l < (linear ? linears.size() : 1); ++l) {
      const bool direct = !softmax || directs[s].name == NameOf(PrefixExchange::kGatherDirect) ||
                          directs[s].name == NameOf(PrefixExchange::kRing) ||
                          directs[s].name == NameOf(PrefixExchange::kPassQ) ||
                          (switches && directs[s].name == NameOf(PrefixExchange::kSwitch));
      const bool is_switch = softmax ? directs[s].name == NameOf(PrefixExchange::kSwitch)
                                     : linears[l].name == NameOf(LinearExchange::kSwitch);
      const LinearExchange with = is_switch && states_switch ? LinearExchange::kSwitch : LinearExchange::kChain;
      const bool given = !linear || linears[l].name == NameOf(with);
      if (direct && given) continue;  // it is there, built
      rows.push_back(DirectRow(input, softmax ? &directs[s] : nullptr, linear ? &linears[l] : nullptr));
    }
  rows.push_back(TensorParallelRow(input));
  double alone_s = static_cast<double>(input.new_tokens) * input.token_s;
  for (int g = 0; g < input.attention.group_count(); ++g)
    if (!input.attention.views[g].linear())
      alone_s += input.attention.ops_in_group[g] * input.ranks * AttentionOf(input, input.attention.views[g]);
  for (PrefillTableRow& row : rows) {
    row.speedup = alone_s / row.seconds;
    row.efficiency = row.speedup / input.ranks;
  }
  std::stable_sort(rows.begin(), rows.end(), [](const PrefillTableRow& a, const PrefillTableRow& b) {
    return a.possible != b.possible ? a.possible : a.seconds < b.seconds;
  });
  return rows;
}

}  // namespace dovetail::scheduler
