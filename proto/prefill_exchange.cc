#include "proto/prefill_exchange.h"

namespace dovetail::proto {

const char* NameOf(PrefixExchange exchange) {
  switch (exchange) {
    case PrefixExchange::kAsk: return "plane";
    case PrefixExchange::kGather: return "gather";
    case PrefixExchange::kGatherDirect: return "gather-direct";
    case PrefixExchange::kSwitch: return "switch";
    case PrefixExchange::kRing: return "ring";
    case PrefixExchange::kPassQ: return "pass-q";
  }
  return "";
}

const char* NameOf(LinearExchange exchange) {
  switch (exchange) {
    case LinearExchange::kStates: return "state";
    case LinearExchange::kChain: return "chain";
    case LinearExchange::kScan: return "scan";
    case LinearExchange::kStateGather: return "state-gather";
    case LinearExchange::kSwitch: return "switch";
  }
  return "";
}

std::string NameOf(const PrefillWay& way) {
  const std::string softmax = NameOf(way.softmax);
  return IsBetweenRanks(way.linear) ? softmax + "+" + NameOf(way.linear) : softmax;
}

}  // namespace dovetail::proto
