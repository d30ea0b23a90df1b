#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/step_work.h"

// Steps of two micro-batches prepared by turns in one stream, on a GPU that exists here only: what streams were given
// runs in any order that streams and events allow.

namespace dovetail::kernels::cuda {
namespace {

struct Mark {
  bool come = false;
};
struct FakeEvent {
  std::shared_ptr<Mark> mark = std::make_shared<Mark>(Mark{true});  // of the last record
};
struct FakeWork {
  std::function<bool()> may_run;
  std::function<void()> run;
};
struct FakeStream : std::deque<FakeWork> {
  bool records = false;
  std::vector<FakeWork> recorded;
  void Give(FakeWork work) {
    if (records)
      recorded.push_back(std::move(work));
    else
      push_back(std::move(work));
  }
};

struct FakeGpu {
  std::mt19937 random;
  std::vector<FakeStream*> streams;

  // Runs the first work of some stream; false: none may run.
  bool RunOne() {
    std::vector<FakeStream*> able;
    for (FakeStream* stream : streams)
      if (!stream->empty() && stream->front().may_run()) able.push_back(stream);
    if (able.empty()) return false;
    FakeStream* const stream = able[random() % able.size()];
    stream->front().run();
    stream->pop_front();
    return true;
  }
  int RunUntil(const std::function<bool()>& done) {
    while (!done())
      if (!RunOne()) return 1;  // everybody waits
    return 0;
  }
};
FakeGpu* g_gpu = nullptr;

FakeStream& StreamOf(void* stream) { return *static_cast<FakeStream*>(stream); }
FakeEvent& EventOf(void* event) { return *static_cast<FakeEvent*>(event); }
constexpr auto kAlways = [] { return true; };

void FakeStreamsAndEvents(Backend& backend) {
  backend.stream_create = [](int, void** stream) {
    *stream = g_gpu->streams.emplace_back(new FakeStream);
    return 0;
  };
  backend.stream_destroy = [](int, void* stream) {
    std::erase(g_gpu->streams, static_cast<FakeStream*>(stream));
    delete static_cast<FakeStream*>(stream);
    return 0;
  };
  backend.stream_synchronize = [](void* stream) {
    return g_gpu->RunUntil([stream] { return StreamOf(stream).empty(); });
  };
  backend.event_create = [](int, bool, void** event) {
    *event = new FakeEvent;
    return 0;
  };
  backend.event_destroy = [](void* event) {
    delete static_cast<FakeEvent*>(event);
    return 0;
  };
  backend.event_record = [](void* event, void* stream) {
    const auto mark = EventOf(event).mark = std::make_shared<Mark>();
    StreamOf(stream).Give({kAlways, [mark] { mark->come = true; }});
    return 0;
  };
  backend.event_wait = [](void* event, void* stream) {
    StreamOf(stream).Give({[mark = EventOf(event).mark] { return mark->come; }, [] {}});
    return 0;
  };
  backend.event_synchronize = [](void* event) {
    return g_gpu->RunUntil([mark = EventOf(event).mark] { return mark->come; });
  };
  backend.copy = [](void* to, const void* from, size_t bytes, void* stream) {
    StreamOf(stream).Give({kAlways, [=] { std::memcpy(to, from, bytes); }});
    return 0;
  };
}

using FakeGraph = std::vector<FakeWork>;

void FakeGraphs(Backend& backend) {
  backend.capture_begin = [](void* stream) {
    StreamOf(stream).records = true;
    return 0;
  };
  backend.capture_end = [](void* stream, void** graph) {
    StreamOf(stream).records = false;
    *graph = new FakeGraph(std::exchange(StreamOf(stream).recorded, {}));
    return 0;
  };
  backend.graph_launch = [](void* graph, void* stream) {
    for (const FakeWork& work : *static_cast<FakeGraph*>(graph)) StreamOf(stream).Give(work);
    return 0;
  };
  backend.graph_destroy = [](void* graph) {
    delete static_cast<FakeGraph*>(graph);
    return 0;
  };
}

Backend FakeBackend() {
  Backend backend{};
  backend.abi = kBackendAbi;
  backend.error_text = [](int) { return "everybody waits for somebody"; };
  backend.is_out_of_memory = [](int) { return false; };
  backend.versions = [](int* driver, int* runtime) { return *driver = *runtime = 13000, 0; };
  backend.device_count = [](int* count) { return *count = 1, 0; };
  backend.device_info = [](int, DeviceInfo* info) { return info->major = 9, 0; };
  backend.has_code = [](int, bool* has) { return *has = true, 0; };
  backend.memory_info = [](int, size_t* free_bytes, size_t* total_bytes) {
    return *free_bytes = *total_bytes = size_t{1} << 30, 0;
  };
  backend.use_device = [](int) { return 0; };
  backend.allocate = [](int, size_t bytes, void** memory) { return *memory = std::calloc(1, bytes), 0; };
  backend.release = [](int, void* memory) { return std::free(memory), 0; };
  backend.allocate_pinned = backend.allocate;
  backend.release_pinned = [](void* memory) { return std::free(memory), 0; };
  FakeStreamsAndEvents(backend);
  FakeGraphs(backend);
  return backend;
}

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
