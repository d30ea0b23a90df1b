#include "kernels/cuda/prompts/prompt_planner.h"

#include <algorithm>
#include <utility>

#include "base/thread_name.h"

namespace dovetail::kernels::cuda {

PromptPlanner::PromptPlanner(Maker maker) : maker_(std::move(maker)) {}

PromptPlanner::~PromptPlanner() {
  End();
  if (thread_.joinable()) thread_.join();
}

void PromptPlanner::End() {
  const std::lock_guard lock(mutex_);
  ends_ = true;
  work_.notify_all();
}

PromptPlanner::Answer PromptPlanner::Find(const PromptSize& size) {
  const std::lock_guard lock(mutex_);
  const auto entry = Touch(size);
  return entry == entries_.end() ? Answer{} : Answer{entry->state, entry->plan};
}

void PromptPlanner::Ask(const PromptSize& size) {
  const std::lock_guard lock(mutex_);
  if (Touch(size) != entries_.end() || asked_.size() >= kMostAsked) return;
  entries_.push_front({size, State::kAsked, nullptr});
  asked_.push_back(size);
  if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  work_.notify_one();
}

PromptPlanner::Plan PromptPlanner::Await(const PromptSize& size, const Maker& here) {
  std::unique_lock lock(mutex_);
  const bool begun = Touch(size) != entries_.end() && std::erase(asked_, size) == 0;
  if (Touch(size) == entries_.end()) entries_.push_front({size, State::kAsked, nullptr});
  if (!begun) Make(size, here, lock);
  auto entry = Touch(size);
  for (; entry != entries_.end() && entry->state == State::kAsked; entry = Touch(size)) made_.wait(lock);
  return entry == entries_.end() ? nullptr : entry->plan;
}

PromptPlanner::Entries::iterator PromptPlanner::Touch(const PromptSize& size) {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.size == size; });
  if (at != entries_.end()) entries_.splice(entries_.begin(), entries_, at);
  return at;
}

void PromptPlanner::Work() {
  NameThread("dt-plan");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return ends_ || !asked_.empty(); });
    if (ends_) return;
    const PromptSize size = asked_.front();
    asked_.pop_front();
    Make(size, maker_, lock);
  }
}

void PromptPlanner::Make(const PromptSize& size, const Maker& by, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  Plan plan = by(size);
  lock.lock();
  Entries gone = Keep(size, std::move(plan));
  made_.notify_all();
  lock.unlock();
  gone.clear();  // which may take a while, too
  lock.lock();
}

PromptPlanner::Entries PromptPlanner::Keep(const PromptSize& size, Plan plan) {
  const auto made = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.size == size; });
  made->state = plan != nullptr ? State::kReady : State::kNone;
  made->plan = std::move(plan);
  Entries gone;
  size_t done = 0;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->state != State::kAsked && ++done > kMostPlans && entry != made) gone.splice(gone.end(), entries_, entry);
    entry = next;
  }
  return gone;
}

PromptCall CallOf(const PromptSize& size) {
  PromptCall call{};
  call.batch = size.batch;
  call.most_tokens = size.most_tokens;
  call.q_heads = size.q_heads;
  call.kv_heads = size.kv_heads;
  call.key_dim = size.key_dim;
  call.value_dim = size.value_dim;
  call.type = size.type;
  call.scale = size.scale;
  call.with_sums = size.with_sums ? 1 : 0;
  call.even = size.even ? 1 : 0;
  return call;
}

namespace {

struct OwnDnn {
  ~OwnDnn() {
    if (handle != nullptr) (*library)->dnn_close(handle);
  }
  bool Open(int device) {
    char text[1024];
    if (!std::exchange(tried, true) && (*library)->dnn_open(device, &handle, text, sizeof(text)) != 0) handle = nullptr;
    return handle != nullptr;
  }

  const std::shared_ptr<const CudaLibrary> library;
  void* handle = nullptr;
  bool tried = false;
};

}  // namespace

PromptPlanner::Plan MakePromptPlan(const CudaLibrary& library, void* dnn, const PromptSize& size) {
  const PromptCall call = CallOf(size);
  void* plan = nullptr;
  if (library->dnn_plan(dnn, &call, &plan) != 0) return nullptr;
  return {plan, library->dnn_plan_release};
}

PromptPlanner::Maker CudnnPlans(std::shared_ptr<const CudaLibrary> library, int device) {
  auto dnn = std::make_shared<OwnDnn>(std::move(library));  // shared: a std::function is copied
  return [dnn, device](const PromptSize& size) {
    return dnn->Open(device) ? MakePromptPlan(*dnn->library, dnn->handle, size) : nullptr;
  };
}

}  // namespace dovetail::kernels::cuda
