#include "kernels/moe.h"

#include <algorithm>
#include <cmath>

namespace dovetail::kernels {
namespace {

// Marks the experts of all groups but the chosen ones.
void TakeOtherGroups(const RouteArgs& args, const float* choice, bool* taken) {
  const int size = args.experts / args.groups;
  float scores[kMaxExperts / 2];
  for (int g = 0; g < args.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      if (choice[e] > first) {
        second = first;
        first = choice[e];
      } else {
        second = std::max(second, choice[e]);
      }
    }
    scores[g] = first + second;
    if (std::isnan(scores[g])) scores[g] = -INFINITY;
  }
  bool kept[kMaxExperts / 2] = {};
  for (int s = 0; s < args.chosen_groups; ++s) {
    int best = -1;
    for (int g = 0; g < args.groups; ++g)
      if (!kept[g] && (best < 0 || scores[g] > scores[best])) best = g;
    kept[best] = true;
  }
  for (int e = 0; e < args.experts; ++e) taken[e] = !kept[e / size];
}

void RouteRow(const RouteArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.experts;
  float scores[kMaxExperts], choice[kMaxExperts];
  float largest = logits[0];
  for (int e = 1; e < args.experts; ++e) largest = std::max(largest, logits[e]);
  double sum = 0;
  for (int e = 0; e < args.experts; ++e) {
    if (args.score == RouterScore::kSoftmaxOfChosen) {
      scores[e] = logits[e];
    } else if (args.score == RouterScore::kSigmoid) {
      scores[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))));
    } else {
      const double x = std::exp(static_cast<double>(logits[e]) - largest);
      scores[e] = static_cast<float>(x);
      sum += x;
    }
  }
  if (args.score == RouterScore::kSoftmax)
    for (int e = 0; e < args.experts; ++e) scores[e] = static_cast<float>(scores[e] / sum);
  for (int e = 0; e < args.experts; ++e) {
    choice[e] = scores[e] + (args.selection_bias != nullptr ? args.selection_bias[e] : 0.0f);
    if (std::isnan(choice[e])) choice[e] = -INFINITY;
  }
  int32_t* expert = args.expert + row * args.chosen;
  float* weight = args.weight + row * args.chosen;
  bool taken[kMaxExperts] = {};
  if (args.groups > 1) TakeOtherGroups(args, choice, taken);
  for (int s = 0; s < args.chosen; ++s) {
    int best = -1;
    for (int e = 0; e < args.experts; ++e)
      if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
    taken[best] = true;
    expert[s] = best;
    weight[s] = scores[best];
  }
  double total = 0;
  if (args.score == RouterScore::kSoftmaxOfChosen) {
    const float first = weight[0];
    for (int s = 0; s < args.chosen; ++s) weight[s] = std::exp(weight[s] - first);
  }
  for (int s = 0; s < args.chosen; ++s) total += weight[s];
  const bool divide = args.renormalise || args.score == RouterScore::kSoftmaxOfChosen;
  for (int s = 0; s < args.chosen; ++s)
    weight[s] = static_cast<float>((divide ? weight[s] / total : weight[s]) * static_cast<double>(args.scale));
}

}  // namespace

absl::Status Route(const OpContext& context, const RouteArgs& args) {
  if (args.rows < 0 || args.experts < 1 || args.experts > kMaxExperts || args.chosen < 1 || args.chosen > args.experts)
    return InvalidArgument("router: ", args.chosen, " of ", args.experts, " experts for ", args.rows, " rows; at most ",
                           kMaxExperts, " experts are supported");
  if (args.groups < 1 || args.experts % args.groups != 0 || (args.groups > 1 && args.experts / args.groups < 2) ||
      args.chosen_groups < 1 || args.chosen_groups > args.groups ||
      args.chosen > args.chosen_groups * (args.experts / args.groups))
    return InvalidArgument("router: ", args.chosen, " experts from ", args.chosen_groups, " of ", args.groups,
                           " groups of ", args.experts, " experts");
  if (args.rows == 0) return absl::OkStatus();
  if (args.logits == nullptr || args.expert == nullptr || args.weight == nullptr)
    return InvalidArgument("router: logits, expert or weight is null");
  ForRows(context, args.rows, int64_t{args.experts} * (args.chosen + 16), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) RouteRow(args, row);
  });
  return absl::OkStatus();
}

absl::Status CombineExperts(const OpContext& context, const CombineArgs& args) {
  if (args.rows < 0 || args.chosen < 1 || args.size < 0)
    return InvalidArgument("combine experts: ", args.rows, " rows of ", args.size, " from ", args.chosen, " experts");
  if (args.rows == 0 || args.size == 0) return absl::OkStatus();
  if (args.parts == nullptr || args.slot == nullptr || args.weight == nullptr || args.out == nullptr)
    return InvalidArgument("combine experts: parts, slot, weight or out is null");
  ForRows(context, args.rows, args.size * args.chosen, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* out = args.out + row * args.size;
      for (int s = 0; s < args.chosen; ++s) {
        const float* part = args.parts + args.slot[row * args.chosen + s] * args.size;
        const float weight = args.weight[row * args.chosen + s] * args.scale;
        for (int64_t i = 0; i < args.size; ++i) out[i] += weight * part[i];
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
