#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

// How the tokens of a prompt's step see earlier tokens that their compute worker does not have: those of a cached
// prefix, of earlier steps that other compute workers took, and of the ranks before it in a prefill group. The
// scheduler says it in each entry of a step (StepEntry in step_plan.h). A compute worker refuses a step whose exchange
// it does not have. docs/sequence_parallelism.md has the bytes of each.

namespace dovetail::proto {

// In layers of softmax attention.
enum class PrefixExchange : uint8_t {
  kAsk = 0,     // pass-Q through the plane: attention workers attend to them; queries go there, partials come back
  kGather = 1,  // attention workers give their K and V, as far as there is room; they are attended to here
  kGatherDirect = 2,  // the ranks before give their K and V
  kSwitch = 3,        // head switch (Ulysses): all tokens of some heads here, and back
  kRing = 4,          // K and V go round the ranks (BurstAttention)
  kPassQ = 5,         // queries go to the ranks that have the tokens, and partials come back
};
inline constexpr PrefixExchange kLastPrefixExchange = PrefixExchange::kPassQ;

// In layers of linear attention.
enum class LinearExchange : uint8_t {
  kStates = 0,       // states through the plane: an attention worker keeps the state after each step
  kChain = 1,        // each rank gives its state to the next one (LASP)
  kScan = 2,         // ranks exchange (M, E) of their tokens in ceil(log2 P) rounds
  kStateGather = 3,  // each rank gets those of all ranks before it (LASP-2)
  kSwitch = 4,       // all tokens of some heads here, and back
};
inline constexpr LinearExchange kLastLinearExchange = LinearExchange::kSwitch;

// Both: a way in which a prompt's step sees earlier tokens.
struct PrefillWay {
  PrefixExchange softmax = PrefixExchange::kAsk;
  LinearExchange linear = LinearExchange::kStates;
  auto operator<=>(const PrefillWay&) const = default;
};
inline constexpr size_t kLinearExchanges = static_cast<size_t>(kLastLinearExchange) + 1;
inline constexpr size_t kPrefillWays = (static_cast<size_t>(kLastPrefixExchange) + 1) * kLinearExchanges;

// A number in [0, kPrefillWays) for each way, and back.
// Threads: pure.
constexpr size_t IndexOf(const PrefillWay& way) {
  return static_cast<size_t>(way.softmax) * kLinearExchanges + static_cast<size_t>(way.linear);
}
constexpr PrefillWay WayAt(size_t index) {
  return {static_cast<PrefixExchange>(index / kLinearExchanges), static_cast<LinearExchange>(index % kLinearExchanges)};
}

// Whether compute workers exchange with each other: only the ranks of a group can.
constexpr bool IsBetweenRanks(PrefixExchange exchange) { return exchange > PrefixExchange::kGather; }
constexpr bool IsBetweenRanks(LinearExchange exchange) { return exchange != LinearExchange::kStates; }
constexpr bool IsBetweenRanks(const PrefillWay& way) {
  return IsBetweenRanks(way.softmax) || IsBetweenRanks(way.linear);
}

// That of a step of so many ranks where this one is asked for: a step alone gathers from the attention workers what it
// would gather from ranks.
// Threads: pure.
constexpr PrefixExchange ExchangeOf(PrefixExchange exchange, int ranks) {
  return ranks < 2 && IsBetweenRanks(exchange) ? PrefixExchange::kGather : exchange;
}

// As --prefill-exchange and plan-prefill spell them. Static strings.
const char* NameOf(PrefixExchange exchange);
const char* NameOf(LinearExchange exchange);

// "gather"; "gather-direct+chain" where the linear layers' exchange is one between ranks.
std::string NameOf(const PrefillWay& way);

}  // namespace dovetail::proto
