#pragma once
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/kv_storage.h"
#include "proto/prefill_exchange.h"
#include "requests/generation.h"
#include "scheduler/core/scheduler.h"

// What may not change a request's tokens or the bits of its logits: how the cluster is built, and who else is there.
// Plain values, drawn from a seed, printed and shrunk.

namespace dovetail::test {

inline constexpr int kLongestPrompt = 300, kMostTokens = 100;
inline constexpr int kScenarioPositions = kLongestPrompt + kMostTokens;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int Of(int least, int most) { return least + static_cast<int>(random_() % static_cast<uint64_t>(most - least + 1)); }
  bool OneIn(int n) { return Of(1, n) == 1; }

 private:
  std::mt19937_64 random_;
};

struct RequestSpec {
  int family = 0;  // prompts of one family begin alike
  int prompt = 1;  // tokens
  int twist = 0;   // changes the prompt's last token
  int max_tokens = 1;
  int choices = 1;
  int style = 0;  // 0: greedy; others: temperatures, filters, penalties
  int seed = 0;
  int logits_last = 0;
  int prompt_logprobs = -1;
  requests::Pooling pooling = requests::Pooling::kNone;
  bool use_prefix_cache = true;
  int tenant = 0;
  int after = -1;  // submitted once request `after` has given `after_tokens`; -1: at once
  int after_tokens = 0;
  int cancel_after = -1;  // tokens; -1: runs to its end

  requests::GenerationRequest Request(int vocab) const;
  std::string ToString() const;
};

// Which model a scenario runs on; scenario_runner.h builds them.
enum class TinyModelKind { kGrouped, kWindowed, kBF16, kQuantised, kGatedDelta, kLightning, kMamba2, kStories };
const char* Name(TinyModelKind kind);

struct Scenario {
  uint64_t seed = 0;
  TinyModelKind model = TinyModelKind::kGrouped;
  DType kv = DType::kF32;
  KvStorage storage = KvStorage::kAsSent;  // 8 bits with a bf16 kv, of models without linear states
  bool strongest_isa = true;
  int threads = 1;
  int workers = 1;
  scheduler::PlacementPolicy placement = scheduler::PlacementPolicy::kRequest;
  int micro_batches = 1;
  bool prefix_cache = false;
  int spare_blocks = -1;  // per worker, beyond what the largest request alone needs; -1: room for all requests
  bool chunked = true;
  int step_tokens = kScenarioPositions;
  int max_seqs = 8;
  int token_shard = 64;
  int compute_workers = 1;
  int prefill_ranks = 0;         // at most as many as there are compute workers; 0: by predictions
  int prefill_rank_tokens = 64;  // at least, of a prompt
  int prompt_kib = -1;           // the compute worker's scratch for prompts; 0: none; -1: as much as it likes
  int gather_piece = 2 << 20;    // bytes; more of earlier tokens' K and V come in pieces
  int prompt_tokens = 16;        // from which on an entry is attended there
  std::optional<proto::PrefixExchange> prefix = proto::PrefixExchange::kAsk;  // nothing: by predictions
  bool linear_prompts = true;
  bool chain = false;  // with linear_prompts: ranks hand on linear states to each other; nothing in `prefix`: maybe
  bool state_switch = false;  // with chain and a switch in `prefix`: they exchange tokens of linear layers for heads
  int key_values_in_flight = 4;
  bool q_first = true;
  bool hand_over_at_end = false;
  std::vector<RequestSpec> requests;

  std::string ToString() const;
};

Scenario SomeScenario(uint64_t seed, const std::vector<TinyModelKind>& models);

// Every scenario that is a little simpler than this one, the largest simplifications first.
std::vector<Scenario> SimplerScenarios(const Scenario& scenario);

}  // namespace dovetail::test
