#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// No allocation, lock or log on the per-layer path, over the whole engine: two models that differ only in their number
// of layers must allocate and lock equally often for the same decode steps. What a step costs once (its plan, its
// result, the update of the stream) cancels out; one call a layer would show as four a step.

namespace {
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> locks{0};
}  // namespace

// The C library's own, behind the names that everything in this process calls: operator new too.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, bytes);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  using Lock = int (*)(pthread_mutex_t*);
  static std::atomic<Lock> real{nullptr};
  Lock lock = real.load(std::memory_order_acquire);
  if (lock == nullptr) {
    lock = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
    real.store(lock, std::memory_order_release);
  }
  locks.fetch_add(1, std::memory_order_relaxed);
  return lock(mutex);
}
}

namespace dovetail::test {
namespace {

constexpr int kSteps = 60;
constexpr int kFewLayers = 2, kManyLayers = 6;

struct Case {
  const char* name;
  int attention_workers;
  scheduler::PlacementPolicy placement;
  DType kv;
  const char* architecture = "llama";
  int choices = 1;
};

struct Counts {
  int64_t allocations = 0;
  int64_t locks = 0;
};

Counts Now() { return {allocations.load(), locks.load()}; }
Counts operator-(const Counts& a, const Counts& b) { return {a.allocations - b.allocations, a.locks - b.locks}; }

// What kSteps decode steps cost a model of this many layers, once every buffer has grown to its size.
Counts CostOfDecoding(const Case& c, int layers) {
  TinyModelSpec spec;
  spec.architecture = c.architecture;
  spec.layers = layers;
  spec.window = 64;
  // One thread: a thread of the pool that has fallen asleep is woken under a lock, whenever that happens.
  const auto model = TestModel::Load(WriteTinyModel(spec, TempFolder()), model::WeightFormat::kAuto, {.threads = 1});
  EXPECT_TRUE(model.ok()) << model.status();
  auto options = ClusterOptionsFor(**model, c.kv);
  options.attention_workers = c.attention_workers;
  options.scheduler.placement = c.placement;
  options.scheduler.token_shard_tokens = 64;
  options.scheduler.enable_prefix_caching = false;
  const auto cluster = StartCluster(**model, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();

  const auto cost = [&](int max_tokens) {
    auto request = GreedyRequest(std::vector<TokenId>(150, 5), max_tokens);
    request.choices = c.choices;
    const Counts before = Now();
    const auto generated = Generate(**cluster, std::move(request));
    EXPECT_TRUE(generated.ok()) << generated.status();
    EXPECT_EQ((*generated)->choices()[0].tokens.size(), static_cast<size_t>(max_tokens));
    return Now() - before;
  };
  cost(20 + kSteps);
  const Counts shorter = cost(20);
  return cost(20 + kSteps) - shorter;
}

class PerLayerPath : public ::testing::TestWithParam<Case> {};

TEST_P(PerLayerPath, NeitherAllocatesNorLocksNorLogs) {
  ::testing::internal::CaptureStderr();
  const Counts few = CostOfDecoding(GetParam(), kFewLayers);
  const Counts many = CostOfDecoding(GetParam(), kManyLayers);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "something was logged";
  // Sleeping and waking between steps differs from run to run by a few calls, never by one a layer and step.
  const double layers_and_steps = (kManyLayers - kFewLayers) * kSteps;
  EXPECT_LT((many.allocations - few.allocations) / layers_and_steps, 0.25)
      << few.allocations << " and " << many.allocations << " allocations in " << kSteps << " steps";
  EXPECT_LT((many.locks - few.locks) / layers_and_steps, 0.25)
      << few.locks << " and " << many.locks << " locks in " << kSteps << " steps";
  RecordProperty("allocations_a_step", static_cast<int>(many.allocations / kSteps));
  RecordProperty("locks_a_step", static_cast<int>(many.locks / kSteps));
}

TEST(Counting, SeesAllocationsAndLocks) {
  const Counts before = Now();
  auto* volatile number = new int(3);
  delete number;
  static std::mutex mutex;
  mutex.lock();
  mutex.unlock();
  const Counts seen = Now() - before;
  EXPECT_GE(seen.allocations, 1);
  EXPECT_GE(seen.locks, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Placements, PerLayerPath,
    ::testing::Values(Case{"OneWorker", 1, scheduler::PlacementPolicy::kRequest, DType::kBF16},
                      Case{"OneWorkerInFloat", 1, scheduler::PlacementPolicy::kRequest, DType::kF32},
                      Case{"Forked", 1, scheduler::PlacementPolicy::kRequest, DType::kBF16, "llama", 3},
                      Case{"ByHeads", 2, scheduler::PlacementPolicy::kHeads, DType::kBF16},
                      Case{"ByTokens", 3, scheduler::PlacementPolicy::kTokens, DType::kBF16},
                      Case{"Windows", 2, scheduler::PlacementPolicy::kTokens, DType::kBF16, "gemma3"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
