#include "tests/scheduler/action_digest.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <variant>
#include <vector>

namespace dovetail::scheduler {
namespace {

// FNV-1a over 64-bit words.
class Digest {
 public:
  explicit Digest(size_t kind) { Add(kind); }

  void Add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3ull ^ (hash_ >> 29); }
  void Add(WorkerId worker) { Add(uint64_t{worker.value()}); }
  void Add(Epoch epoch) { Add(uint64_t{epoch.value()}); }
  void Add(const std::string& text) {
    Add(text.size());
    for (const char c : text) Add(static_cast<uint64_t>(static_cast<unsigned char>(c)));
  }
  void Add(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    Add(uint64_t{bits});
  }
  void Add(TokenId token) { Add(static_cast<uint64_t>(static_cast<uint32_t>(token))); }
  void Add(const proto::PositionLogprobs& logprobs) { Add(logprobs.chosen.token); }
  template <typename Values>
  void AddAll(const Values& values) {
    Add(values.size());
    for (const auto& value : values) Add(value);
  }
  template <typename Message>
  void AddMessage(const Message& message) {
    std::vector<std::byte> bytes;
    proto::Encode(message, bytes);
    Add(bytes.size());
    for (const std::byte byte : bytes) Add(static_cast<uint64_t>(byte));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// What attention workers are asked for: a worker, its epoch and a message.
template <typename A>
void Add(Digest& digest, const A& action) {
  digest.Add(action.worker);
  digest.Add(action.epoch);
  if constexpr (requires { action.to; }) digest.Add(action.to);
  digest.AddMessage(action.message);
}

void Add(Digest& digest, const EmitCacheEvents& action) {
  for (const requests::CacheEvent& event : action.events.events) {
    digest.Add(uint64_t{event.stored});
    digest.Add(event.block->hash[0]);
  }
}
void Add(Digest& digest, const RunStep& action) {
  digest.Add(action.compute_worker);
  digest.AddMessage(action.plan);
}

void Add(Digest& digest, const WithdrawStep& action) {
  digest.Add(action.compute_worker);
  digest.Add(action.step.value());
  digest.Add(uint64_t{action.micro_batch.value()});
}

void Add(Digest& digest, const DismissComputeWorker& action) {
  digest.Add(action.worker);
  digest.Add(action.why);
}

void Add(Digest& digest, const EmitUpdate& action) {
  const GenerationUpdate& update = action.update;
  digest.Add(update.request.value());
  for (const int64_t number :
       {int64_t{update.choice}, int64_t{update.first_index}, int64_t{update.choice_finished},
        int64_t{static_cast<int>(update.reason)}, int64_t{update.stop_token},
        int64_t{static_cast<int>(update.error_code)}, int64_t{update.request_finished}, int64_t{update.prompt_tokens},
        int64_t{update.cached_tokens}, int64_t{update.prompt_done}, update.queued_us})
    digest.Add(static_cast<uint64_t>(number));
  digest.AddAll(update.tokens);
  digest.AddAll(update.logprobs);
  for (const std::vector<float>& row : update.logits) digest.AddAll(row);
  digest.AddAll(update.prompt_logprobs);
  digest.AddAll(update.prompt_logits);
  digest.AddAll(update.attention_workers);
  digest.AddAll(update.compute_workers);
  digest.Add(update.error);
}

}  // namespace

uint64_t DigestOf(const Action& action) {
  Digest digest(action.index());
  std::visit([&](const auto& a) { Add(digest, a); }, action);
  return digest.value();
}

}  // namespace dovetail::scheduler
