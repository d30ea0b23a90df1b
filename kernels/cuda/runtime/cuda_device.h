#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/mutex.h"
#include "kernels/cuda/runtime/cuda_library.h"
#include "kernels/cuda/runtime/memory_pool.h"
#include "kernels/device.h"

namespace dovetail::kernels::cuda {

class CudaDevice;

// A mark in a stream. Waiting for it from another stream costs the host nothing. Movable.
// Ownership: must not outlive its device.
// Threads: thread-compatible.
class CudaEvent {
 public:
  CudaEvent() = default;
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&& other) noexcept;
  ~CudaEvent();

  void* handle() const { return event_; }
  absl::StatusOr<bool> Done() const;
  absl::Status Synchronize() const;  // blocks the host
  // Both must be timed and done.
  absl::StatusOr<float> MillisecondsSince(const CudaEvent& earlier) const;

 private:
  friend class CudaDevice;
  CudaEvent(const CudaLibrary* library, void* event) : library_(library), event_(event) {}
  const CudaLibrary* library_ = nullptr;
  void* event_ = nullptr;
};

// Recorded work that runs again with one launch.
// Ownership: must not outlive its device; the memory that it names must stay.
// Threads: thread-compatible.
class CudaGraph {
 public:
  CudaGraph() = default;
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  ~CudaGraph();
  bool empty() const { return graph_ == nullptr; }

 private:
  friend class CudaStream;
  CudaGraph(const CudaLibrary* library, void* graph) : library_(library), graph_(graph) {}
  const CudaLibrary* library_ = nullptr;
  void* graph_ = nullptr;
};

// A CUDA stream. Ops enqueue and return; pool() and kernels() are the host's, for the small work on its side.
// Errors: those of kernels come back from SynchronizeStatus or from the next call; after one the device is lost
// (kInternal from then on).
// Threads: one thread at a time, as Stream.
class CudaStream : public Stream {
 public:
  ~CudaStream() override;
  void Synchronize() override { (void)SynchronizeStatus(); }
  ThreadPool& pool() override;
  const KernelTable& kernels() const override;

  absl::Status SynchronizeStatus();
  // Any direction; host memory should be pinned (AllocatePinned), else the call may wait for the copy.
  absl::Status Copy(void* to, const void* from, size_t bytes);
  // Rows of memory that begin every `step` bytes, step >= row_bytes.
  struct Rows {
    std::byte* data = nullptr;
    size_t step = 0;
  };
  struct ConstRows {
    const std::byte* data = nullptr;
    size_t step = 0;
  };
  // Likewise `rows` of them, of `row_bytes` bytes each. kInvalidArgument: a step is smaller than that.
  absl::Status CopyRows(const Rows& to, const ConstRows& from, size_t row_bytes, size_t rows);
  absl::Status Fill(void* memory, uint8_t value, size_t bytes);
  absl::Status Record(CudaEvent& event);
  absl::Status Wait(const CudaEvent& event);

  // Small inputs of what is enqueued later, from pinned memory; `copied`, if not null, is recorded behind them. Between
  // BeginUploads and EndUploads they overlap with what this stream still runs, as soon as `after` has come, behind
  // which nothing reads the memory that they go to. Outside they are copies like others, and so they are while a caller
  // holds them, whose uploads go to memory that enqueued work still reads.
  absl::Status BeginUploads(const CudaEvent& after);
  absl::Status Upload(void* to, const void* from, size_t bytes, CudaEvent* copied);
  absl::Status EndUploads();
  void HoldUploads() { ++upload_holds_; }
  void ReleaseUploads() { --upload_holds_; }

  // Between the two nothing runs and nothing may allocate or synchronise.
  absl::Status BeginCapture();
  absl::StatusOr<CudaGraph> EndCapture();
  absl::Status Launch(const CudaGraph& graph);

  // Before launches: of this thread's following ones, which come behind the uploads so far.
  absl::Status UseDevice();
  void* handle() const { return stream_; }
  CudaDevice& device() { return device_; }

 private:
  friend class CudaDevice;
  CudaStream(CudaDevice& device, void* stream) : device_(device), stream_(stream) {}
  CudaDevice& device_;
  void* stream_;
  std::unique_ptr<CudaStream> aside_;  // uploads; made by the first BeginUploads
  CudaEvent uploaded_;
  bool uploads_aside_ = false, uploads_pending_ = false;
  int upload_holds_ = 0;
};

// Memory of another process's device, as this one's copies and kernels read it. Movable.
// It stays mapped while this object lives, also when that process has ended: its device gets the memory back only then.
// Ownership: must not outlive its device; must outlive work that reads it.
// Threads: thread-compatible.
class OpenedMemory {
 public:
  OpenedMemory() = default;
  OpenedMemory(OpenedMemory&& other) noexcept;
  OpenedMemory& operator=(OpenedMemory&& other) noexcept;
  ~OpenedMemory();
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(memory_), size_}; }

 private:
  friend class CudaDevice;
  OpenedMemory(const CudaDevice* device, void* memory, size_t size) : device_(device), memory_(memory), size_(size) {}
  const CudaDevice* device_ = nullptr;
  void* memory_ = nullptr;
  size_t size_ = 0;
};

struct CudaDeviceOptions {
  int index = 0;
  int host_threads = 1;  // of the pool for work on the host's side
};

// A GPU behind Device. Memory is pooled (memory_pool.h) and not zeroed.
// Threads: thread-safe after creation.
class CudaDevice : public Device {
 public:
  // kNotFound, kFailedPrecondition: SurveyCuda; kInvalidArgument: no such GPU; kResourceExhausted: no pinned memory.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(std::shared_ptr<const CudaLibrary> library,
                                                            const CudaDeviceOptions& options);
  ~CudaDevice() override;

  std::string name() const override;  // "cuda:0"
  std::string arithmetic() const override;
  std::unique_ptr<Stream> CreateStream() override;
  // kResourceExhausted names what was asked for, what is free and what others hold.
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) override;
  absl::Status Health() override;

  absl::StatusOr<std::unique_ptr<CudaStream>> CreateCudaStream();
  // The stream in which the workers of this process enqueue: what one has enqueued is done before what another enqueues
  // later. Made on first use; lives as long as the device.
  absl::StatusOr<CudaStream*> WorkerStream();
  absl::StatusOr<CudaEvent> CreateEvent(bool timed = false);
  // Host memory that copies reach without staging; zeroed.
  absl::StatusOr<std::unique_ptr<Buffer>> AllocatePinned(size_t size_bytes);

  // Memory that other processes of this machine may open (Export): at least so much, and never given back to the driver
  // but kept for the next call, since nothing says when the last of them has closed it.
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateShared(size_t size_bytes);
  absl::StatusOr<MemoryHandle> Export(Buffer& shared) const;
  // kInternal: another machine's, this process's own, or one whose device this one does not reach.
  absl::StatusOr<OpenedMemory> Open(const MemoryHandle& handle) const;

  struct Memory {
    size_t free_bytes = 0;  // of the whole device, for all processes
    size_t total_bytes = 0;
    size_t taken_bytes = 0;  // buffers of this device object
    size_t kept_bytes = 0;   // for its next buffers; given back to the driver when that has no more
  };
  absl::StatusOr<Memory> memory() const;

  // Copies between the two GPUs go directly from here on, if they are connected so; false: through the host, slower.
  absl::StatusOr<bool> ReachPeer(const CudaDevice& peer);

  int index() const { return index_; }
  const DeviceInfo& info() const { return info_; }
  DeviceLimits limits() const;
  const CudaLibrary& library() const { return *library_; }

 private:
  friend class CudaStream;
  CudaDevice(std::shared_ptr<const CudaLibrary> library, int index, const DeviceInfo& info,
             std::unique_ptr<Device> host);
  absl::StatusOr<void*> AllocateFromDriver(size_t bytes) const;
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateFrom(MemoryPool& pool, size_t size_bytes);

  const std::shared_ptr<const CudaLibrary> library_;  // shared: opened once for all devices
  const int index_;
  const DeviceInfo info_;
  const std::unique_ptr<Device> host_;
  const std::unique_ptr<Stream> host_stream_;
  MemoryPool pool_, shared_pool_;
  Mutex mutex_;
  std::unique_ptr<CudaStream> worker_stream_ ABSL_GUARDED_BY(mutex_);
};

// Host memory that copies to and from a GPU reach without staging, behind Device: for tensors that the host packs or
// takes apart on their way.
// Ownership: `device` outlives it.
// Threads: thread-safe.
class PinnedHost final : public Device {
 public:
  explicit PinnedHost(CudaDevice& device) : device_(device) {}
  std::string name() const override { return "pinned memory for " + device_.name(); }
  std::unique_ptr<Stream> CreateStream() override { return device_.CreateStream(); }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) override {
    return device_.AllocatePinned(size_bytes);
  }

 private:
  CudaDevice& device_;
};

// "cuda:3" -> 3; kInvalidArgument for anything else.
absl::StatusOr<int> ParseCudaName(const std::string& name);

}  // namespace dovetail::kernels::cuda
