#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "kernels/cuda/runtime/cuda_library.h"

namespace dovetail::kernels::cuda {

// What a plan of cuDNN is made for; PromptCall (backend_abi.h) says what each field is.
struct PromptSize {
  int32_t q_heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
  WireType type = WireType::kBF16;
  float scale = 0;
  int32_t batch = 0, most_tokens = 0;
  bool with_sums = false, even = false;
  bool operator==(const PromptSize&) const = default;
};
PromptCall CallOf(const PromptSize& size);  // without pointers

// Makes plans one after the other in a thread of its own, begun by the first that is asked for, and keeps them: cuDNN
// takes 40 ms for one, a second where it has to compile. Thread-safe; no lock is held while a plan is made, so Find and
// Ask never wait for one. Keeps kMostPlans, far more than steps in flight run; the one that was not found for longest
// goes, and its memory with whoever still holds it. The destructor forgets what was asked for and waits for the plan
// that is being made, up to 1.6 s: cuDNN cannot be stopped.
class PromptPlanner {
 public:
  static constexpr size_t kMostPlans = 128;
  static constexpr size_t kMostAsked = 32;  // not begun; what is asked for beyond is not made

  using Plan = std::shared_ptr<void>;
  using Maker = std::function<Plan(const PromptSize&)>;  // null: there is none for this size
  enum class State { kUnknown, kAsked, kReady, kNone };
  struct Answer {
    State state = State::kUnknown;
    Plan plan;  // kReady
  };

  explicit PromptPlanner(Maker maker);  // called in that thread only
  ~PromptPlanner();
  PromptPlanner(const PromptPlanner&) = delete;
  PromptPlanner& operator=(const PromptPlanner&) = delete;

  Answer Find(const PromptSize& size);
  // Has it made behind what was asked for before, unless it was already.
  void Ask(const PromptSize& size);
  // Blocks: makes it here and now, beside what the thread does, or, if it has begun, waits for it. Null: there is none.
  Plan Await(const PromptSize& size, const Maker& here);
  // The thread begins no further plan. Does not wait for the one that is being made; the destructor does, behind this.
  void End();

 private:
  struct Entry {
    PromptSize size;
    State state = State::kAsked;
    Plan plan;
  };
  using Entries = std::list<Entry>;

  Entries::iterator Touch(const PromptSize& size);  // becomes the first; end(): unknown
  void Work();
  void Make(const PromptSize& size, const Maker& by, std::unique_lock<std::mutex>& lock);
  Entries Keep(const PromptSize& size, Plan plan);  // gives what goes for it

  const Maker maker_;
  std::mutex mutex_;  // of what follows
  std::condition_variable work_, made_;
  Entries entries_;               // first: found last
  std::deque<PromptSize> asked_;  // not begun
  bool ends_ = false;
  std::thread thread_;
};

// A plan by dnn, which dnn_open gave. The library outlives it.
PromptPlanner::Plan MakePromptPlan(const CudaLibrary& library, void* dnn, const PromptSize& size);
// Plans by a dnn of its own, opened by the first call; null where there is no cuDNN.
PromptPlanner::Maker CudnnPlans(std::shared_ptr<const CudaLibrary> library, int device);

}  // namespace dovetail::kernels::cuda
