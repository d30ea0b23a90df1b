#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/runtime/step_work.h"
#include "tests/kernels_cuda/fake_gpu.h"

// Steps of two micro-batches prepared by turns in one stream, in any order of what runs.

namespace dovetail::kernels::cuda {
namespace {

using testing::FakeBackend;
using testing::FakeGpu;
using testing::g_gpu;

// Two micro-batches, whose steps copy what they find in their table to a place of their own, from where it is noted.
class Engine {
 public:
  Engine(CudaDevice& device, std::mt19937& random) : random_(random) {
    stream_ = *device.WorkerStream();
    for (Batch& batch : batches_)
      for (auto* buffer : {&batch.table, &batch.direct_table, &batch.out}) *buffer = *device.Allocate(sizeof(int));
    pinned_ = *device.AllocatePinned(kMost * sizeof(int));
    seen_ = *device.Allocate(kMost * sizeof(int));
  }

  absl::Status Act() {
    Batch& batch = batches_[random_() % 2];
    switch (batch.state) {
      case State::kIdle: return random_() % 4 == 0 ? RunDirectly(batch) : Begin(batch);
      case State::kCollecting: return Settle(batch);
      case State::kImmediate: return random_() % 3 != 0 ? UploadAndRun(batch) : End(batch);
    }
    return absl::OkStatus();
  }
  bool full() const { return uploads_ + 4 > kMost; }

  void Check() {
    ASSERT_TRUE(stream_->SynchronizeStatus().ok());
    const int* const seen = reinterpret_cast<const int*>(seen_->data());
    for (size_t i = 0; i < expected_.size(); ++i) ASSERT_EQ(seen[i], expected_[i]) << "kernel " << i;
  }

 private:
  enum class State { kIdle, kCollecting, kImmediate };
  struct Batch {
    StepWork work;
    State state = State::kIdle;
    std::unique_ptr<Buffer> table, direct_table, out;
    int uploaded = 0;  // to its table, last
  };
  static constexpr int kMost = 400;

  absl::Status Upload(Batch& batch, Buffer& table) {
    int* const from = reinterpret_cast<int*>(pinned_->data()) + uploads_;
    *from = batch.uploaded = ++uploads_;
    return stream_->Upload(table.data(), from, sizeof(int), nullptr);
  }
  static StepWork::Enqueue Kernel(Batch& batch, Buffer& table) {
    return [to = batch.out->data(), from = table.data()](CudaStream& stream) -> absl::Status {
      DT_RETURN_IF_ERROR(stream.UseDevice());
      return stream.Copy(to, from, sizeof(int));
    };
  }
  // Behind a kernel that has been enqueued.
  absl::Status Note(Batch& batch) {
    expected_.push_back(batch.uploaded);
    return stream_->Copy(seen_->data() + (expected_.size() - 1) * sizeof(int), batch.out->data(), sizeof(int));
  }
  absl::Status Begin(Batch& batch) {
    DT_RETURN_IF_ERROR(batch.work.Begin(*stream_));
    DT_RETURN_IF_ERROR(Upload(batch, *batch.table));
    batch.state = State::kCollecting;
    return batch.work.Add(*stream_, {StepWork::Word(&batch)}, Kernel(batch, *batch.table));
  }
  // Launched, given up, or enqueued from here on as it comes.
  absl::Status Settle(Batch& batch) {
    const unsigned how = random_() % 4;
    batch.state = how == 3 ? State::kImmediate : State::kIdle;
    if (how == 0) return absl::OkStatus();
    DT_RETURN_IF_ERROR(how == 3 ? batch.work.BeImmediate(*stream_) : batch.work.Launch(*stream_));
    return Note(batch);
  }
  absl::Status UploadAndRun(Batch& batch) {
    DT_RETURN_IF_ERROR(Upload(batch, *batch.table));
    DT_RETURN_IF_ERROR(batch.work.Add(*stream_, {}, Kernel(batch, *batch.table)));
    return Note(batch);
  }
  absl::Status End(Batch& batch) {
    batch.state = State::kIdle;
    return batch.work.Launch(*stream_);
  }
  // As what is drawn outside of a step: uploaded, run and waited for.
  absl::Status RunDirectly(Batch& batch) {
    DT_RETURN_IF_ERROR(Upload(batch, *batch.direct_table));
    DT_RETURN_IF_ERROR(Kernel(batch, *batch.direct_table)(*stream_));
    DT_RETURN_IF_ERROR(Note(batch));
    return stream_->SynchronizeStatus();
  }

  std::mt19937& random_;
  CudaStream* stream_ = nullptr;
  Batch batches_[2];
  std::unique_ptr<Buffer> pinned_, seen_;
  int uploads_ = 0;
  std::vector<int> expected_;  // by what was noted
};

TEST(UploadOrder, EveryKernelSeesWhatWasUploadedForIt) {
  const Backend backend = FakeBackend();
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    FakeGpu gpu{std::mt19937(seed), {}};
    g_gpu = &gpu;
    const auto library = std::make_shared<const CudaLibrary>(&backend);
    auto device = CudaDevice::Create(library, {.index = 0});
    ASSERT_TRUE(device.ok()) << device.status();
    Engine engine(**device, gpu.random);
    while (!engine.full()) {
      const absl::Status acted = engine.Act();
      ASSERT_TRUE(acted.ok()) << acted;
      for (int runs = gpu.random() % 3; runs > 0; --runs) gpu.RunOne();
    }
    engine.Check();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace dovetail::kernels::cuda
