#pragma once
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/backend_abi.h"

// A GPU that exists in a test only: what streams were given runs in any order that streams and events allow, when
// a thread waits for it or the test says so. One test at a time.

namespace dovetail::kernels::cuda::testing {

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
      if (!RunOne()) return 1;  // all wait
    return 0;
  }
};
inline FakeGpu* g_gpu = nullptr;

inline FakeStream& StreamOf(void* stream) { return *static_cast<FakeStream*>(stream); }
inline FakeEvent& EventOf(void* event) { return *static_cast<FakeEvent*>(event); }
inline constexpr auto kAlways = [] { return true; };

inline void FakeStreamsAndEvents(Backend& backend) {
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

inline void FakeGraphs(Backend& backend) {
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

// Of one GPU, without kernels. `g_gpu` is there while anything made with it lives.
inline Backend FakeBackend() {
  Backend backend{};
  backend.abi = kBackendAbi;
  backend.error_text = [](int) { return "all threads wait for each other"; };
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

}  // namespace dovetail::kernels::cuda::testing
