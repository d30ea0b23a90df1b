#include "kernels/cuda/runtime/cuda_device.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <utility>

namespace dovetail::kernels::cuda {
namespace {

constexpr size_t kLeastPinned = size_t{4} << 20;  // without which a device is not opened
constexpr size_t kLeastShared = size_t{2} << 20;

std::string Mebibytes(size_t bytes) { return absl::StrCat(bytes >> 20, " MiB"); }

class PooledBuffer : public Buffer {
 public:
  PooledBuffer(MemoryPool& pool, void* memory, size_t bytes) : pool_(pool), memory_(memory), bytes_(bytes) {}
  ~PooledBuffer() override { pool_.Return(memory_, bytes_); }
  std::byte* data() override { return static_cast<std::byte*>(memory_); }
  size_t size_bytes() const override { return bytes_; }

 private:
  MemoryPool& pool_;  // of the device, which outlives its buffers
  void* memory_;
  size_t bytes_;
};

class PinnedBuffer : public Buffer {
 public:
  PinnedBuffer(const CudaLibrary& library, void* memory, size_t bytes)
      : library_(library), memory_(memory), bytes_(bytes) {}
  ~PinnedBuffer() override {
    if (memory_ != nullptr) library_->release_pinned(memory_);
  }
  std::byte* data() override { return static_cast<std::byte*>(memory_); }
  size_t size_bytes() const override { return bytes_; }

 private:
  const CudaLibrary& library_;
  void* memory_;
  size_t bytes_;
};

}  // namespace

CudaEvent::CudaEvent(CudaEvent&& other) noexcept
    : library_(other.library_), event_(std::exchange(other.event_, nullptr)) {}
CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(event_, other.event_);
  return *this;
}
CudaEvent::~CudaEvent() {
  if (event_ != nullptr) (*library_)->event_destroy(event_);
}
absl::StatusOr<bool> CudaEvent::Done() const {
  bool done = false;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->event_done(event_, &done), "asking for an event"));
  return done;
}
absl::Status CudaEvent::Synchronize() const {
  return library_->Check((*library_)->event_synchronize(event_), "waiting for an event");
}
absl::StatusOr<float> CudaEvent::MillisecondsSince(const CudaEvent& earlier) const {
  float milliseconds = 0;
  const int error = (*library_)->event_milliseconds(earlier.event_, event_, &milliseconds);
  DT_RETURN_IF_ERROR(library_->Check(error, "reading the time between two events"));
  return milliseconds;
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : library_(other.library_), graph_(std::exchange(other.graph_, nullptr)) {}
CudaGraph& CudaGraph::operator=(CudaGraph&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(graph_, other.graph_);
  return *this;
}
CudaGraph::~CudaGraph() {
  if (graph_ != nullptr) (*library_)->graph_destroy(graph_);
}

OpenedMemory::OpenedMemory(OpenedMemory&& other) noexcept
    : device_(other.device_), memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}
OpenedMemory& OpenedMemory::operator=(OpenedMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  return *this;
}
OpenedMemory::~OpenedMemory() {
  if (memory_ != nullptr) device_->library()->close_memory(device_->index(), memory_);
}

CudaStream::~CudaStream() {
  (void)SynchronizeStatus();
  device_.library()->stream_destroy(device_.index_, stream_);
}
ThreadPool& CudaStream::pool() { return device_.host_stream_->pool(); }
const KernelTable& CudaStream::kernels() const { return device_.host_stream_->kernels(); }

absl::Status CudaStream::SynchronizeStatus() {
  if (uploads_pending_) DT_RETURN_IF_ERROR(aside_->SynchronizeStatus());
  return device_.library().Check(device_.library()->stream_synchronize(stream_), device_.name());
}
absl::Status CudaStream::Copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return device_.library().Check(device_.library()->copy(to, from, bytes, stream_), device_.name() + ": copy");
}
absl::Status CudaStream::CopyRows(const Rows& to, const ConstRows& from, size_t row_bytes, size_t rows) {
  if (row_bytes == 0 || rows == 0) return absl::OkStatus();
  if (to.step < row_bytes || from.step < row_bytes)
    return InvalidArgument(device_.name(), ": rows of ", row_bytes, " bytes that begin every ", from.step, " and ",
                           to.step, " bytes overlap");
  return device_.library().Check(
      device_.library()->copy_rows(to.data, to.step, from.data, from.step, row_bytes, rows, stream_),
      device_.name() + ": copy of rows");
}
absl::Status CudaStream::Fill(void* memory, uint8_t value, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return device_.library().Check(device_.library()->fill(memory, value, bytes, stream_), device_.name() + ": fill");
}
absl::Status CudaStream::UseDevice() {
  DT_RETURN_IF_ERROR(EndUploads());
  return device_.library().Check(device_.library()->use_device(device_.index_), device_.name());
}
absl::Status CudaStream::Record(CudaEvent& event) {
  return device_.library().Check(device_.library()->event_record(event.handle(), stream_), device_.name() + ": record");
}
absl::Status CudaStream::Wait(const CudaEvent& event) {
  return device_.library().Check(device_.library()->event_wait(event.handle(), stream_), device_.name() + ": wait");
}
absl::Status CudaStream::BeginUploads(const CudaEvent& after) {
  if (upload_holds_ > 0) return EndUploads();
  if (aside_ == nullptr) {
    DT_ASSIGN_OR_RETURN(aside_, device_.CreateCudaStream());
    DT_ASSIGN_OR_RETURN(uploaded_, device_.CreateEvent());
  }
  uploads_aside_ = true;
  return aside_->Wait(after);
}
absl::Status CudaStream::Upload(void* to, const void* from, size_t bytes, CudaEvent* copied) {
  CudaStream& by = uploads_aside_ ? *aside_ : *this;
  uploads_pending_ = uploads_pending_ || uploads_aside_;
  DT_RETURN_IF_ERROR(by.Copy(to, from, bytes));
  return copied != nullptr ? by.Record(*copied) : absl::OkStatus();
}
absl::Status CudaStream::EndUploads() {
  uploads_aside_ = false;
  if (!std::exchange(uploads_pending_, false)) return absl::OkStatus();
  DT_RETURN_IF_ERROR(aside_->Record(uploaded_));
  return Wait(uploaded_);
}
absl::Status CudaStream::BeginCapture() {
  return device_.library().Check(device_.library()->capture_begin(stream_), device_.name() + ": begin of a graph");
}
absl::StatusOr<CudaGraph> CudaStream::EndCapture() {
  void* graph = nullptr;
  DT_RETURN_IF_ERROR(
      device_.library().Check(device_.library()->capture_end(stream_, &graph), device_.name() + ": end of a graph"));
  return CudaGraph(&device_.library(), graph);
}
absl::Status CudaStream::Launch(const CudaGraph& graph) {
  return device_.library().Check(device_.library()->graph_launch(graph.graph_, stream_),
                                 device_.name() + ": launch of a graph");
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(std::shared_ptr<const CudaLibrary> library,
                                                               const CudaDeviceOptions& options) {
  CudaSurvey survey = SurveyCuda(*library);
  DT_RETURN_IF_ERROR(survey.status);
  if (options.index < 0 || options.index >= static_cast<int>(survey.devices.size())) {
    return InvalidArgument("cuda:", options.index, ": this machine has ", survey.devices.size(), " GPUs");
  }
  const CudaDeviceSummary& summary = survey.devices[options.index];
  if (!summary.usable.ok())
    return Annotate(summary.usable, absl::StrCat("cuda:", options.index, " (", summary.info.name, ")"));
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Device> host, CreateCpuDevice({.threads = options.host_threads}));
  std::unique_ptr<CudaDevice> device(new CudaDevice(std::move(library), options.index, summary.info, std::move(host)));
  DT_RETURN_IF_ERROR(device->AllocatePinned(kLeastPinned).status());  // now, not in the first step
  return device;
}

CudaDevice::CudaDevice(std::shared_ptr<const CudaLibrary> library, int index, const DeviceInfo& info,
                       std::unique_ptr<Device> host)
    : library_(std::move(library)),
      index_(index),
      info_(info),
      host_(std::move(host)),
      host_stream_(host_->CreateStream()),
      pool_([this](size_t bytes) { return AllocateFromDriver(bytes); },
            [this](void* memory) { (*library_)->release(index_, memory); }),
      shared_pool_([this](size_t bytes) { return AllocateFromDriver(bytes); }, nullptr) {}

absl::StatusOr<void*> CudaDevice::AllocateFromDriver(size_t bytes) const {
  void* memory = nullptr;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->allocate(index_, bytes, &memory), "device memory"));
  return memory;
}

CudaDevice::~CudaDevice() = default;

std::string CudaDevice::name() const { return absl::StrCat("cuda:", index_); }

// How sums are split depends on the number of multiprocessors, in cuBLASLt too.
std::string CudaDevice::arithmetic() const {
  return absl::StrCat("GPU sm_", info_.major, info_.minor, " of ", info_.multiprocessors, " multiprocessors");
}

std::unique_ptr<Stream> CudaDevice::CreateStream() {
  absl::StatusOr<std::unique_ptr<CudaStream>> stream = CreateCudaStream();
  return stream.ok() ? *std::move(stream) : nullptr;
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaDevice::CreateCudaStream() {
  void* stream = nullptr;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->stream_create(index_, &stream), name() + ": a new stream"));
  return std::unique_ptr<CudaStream>(new CudaStream(*this, stream));
}

absl::StatusOr<CudaStream*> CudaDevice::WorkerStream() {
  MutexLock lock(mutex_);
  if (worker_stream_ == nullptr) {
    DT_ASSIGN_OR_RETURN(worker_stream_, CreateCudaStream());
  }
  return worker_stream_.get();
}

absl::StatusOr<CudaEvent> CudaDevice::CreateEvent(bool timed) {
  void* event = nullptr;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->event_create(index_, timed, &event), name() + ": a new event"));
  return CudaEvent(library_.get(), event);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::Allocate(size_t size_bytes) {
  return AllocateFrom(pool_, size_bytes);
}

// Powers of two: pieces that have become too small are used no more unless something smaller is asked for, and all of
// them together are no larger than the next one. The driver may put several of less than the least one into one
// allocation, which is what a handle names.
absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::AllocateShared(size_t size_bytes) {
  return AllocateFrom(shared_pool_, std::bit_ceil(std::max(size_bytes, kLeastShared)));
}

absl::StatusOr<MemoryHandle> CudaDevice::Export(Buffer& shared) const {
  MemoryHandle handle;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->export_memory(index_, shared.data(), &handle),
                                     name() + ": memory for other processes"));
  return handle;
}

absl::StatusOr<OpenedMemory> CudaDevice::Open(const MemoryHandle& handle) const {
  void* memory = nullptr;
  size_t size = 0;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->open_memory(index_, &handle, &memory, &size),
                                     name() + ": memory of another process"));
  return OpenedMemory(this, memory, size);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::AllocateFrom(MemoryPool& pool, size_t size_bytes) {
  absl::StatusOr<void*> memory = pool.Take(size_bytes);
  if (memory.ok()) return std::make_unique<PooledBuffer>(pool, *memory, size_bytes);
  if (!absl::IsResourceExhausted(memory.status())) return memory.status();
  const absl::StatusOr<Memory> now = this->memory();
  if (!now.ok()) return memory.status();
  return ResourceExhausted(name(), " (", info_.name, "): ", Mebibytes(size_bytes), " asked for, ",
                           Mebibytes(now->free_bytes), " of ", Mebibytes(now->total_bytes),
                           " free; this process holds ", Mebibytes(now->taken_bytes),
                           ", other processes may hold the rest");
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::AllocatePinned(size_t size_bytes) {
  void* memory = nullptr;
  if (size_bytes > 0) {
    const int error = (*library_)->allocate_pinned(index_, size_bytes, &memory);
    if (absl::Status status =
            library_->Check(error, absl::StrCat(name(), ": ", Mebibytes(size_bytes), " of pinned host memory"));
        !status.ok())
      return absl::Status(status.code(),
                          absl::StrCat(status.message(),
                                       "; what crosses between this GPU and its host lies there: free "
                                       "memory of the host, or raise what bounds this process (the memory of its "
                                       "container, ulimit -l)"));
    std::memset(memory, 0, size_bytes);
  }
  return std::make_unique<PinnedBuffer>(*library_, memory, size_bytes);
}

absl::StatusOr<bool> CudaDevice::ReachPeer(const CudaDevice& peer) {
  bool reaches = peer.index_ == index_;
  if (reaches) return reaches;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->reach_peer(index_, peer.index_, &reaches),
                                     absl::StrCat(name(), ": reaching ", peer.name())));
  return reaches;
}

absl::StatusOr<CudaDevice::Memory> CudaDevice::memory() const {
  Memory memory;
  DT_RETURN_IF_ERROR(library_->Check((*library_)->memory_info(index_, &memory.free_bytes, &memory.total_bytes),
                                     name() + ": asking for free memory"));
  memory.taken_bytes = pool_.taken_bytes() + shared_pool_.taken_bytes();
  memory.kept_bytes = pool_.kept_bytes();  // the shared pool gives nothing back
  return memory;
}

// After a fault every call of the CUDA runtime returns it, whichever asks.
absl::Status CudaDevice::Health() {
  const absl::Status asked = memory().status();
  if (asked.ok()) return asked;
  return FailedPrecondition(name(), " (", info_.name, ") is lost: ", asked.message(),
                            "; start this process again (the kernel's log may name the fault: `dmesg | grep Xid`)");
}

DeviceLimits CudaDevice::limits() const {
  return {.multiprocessors = info_.multiprocessors,
          .shared_bytes = info_.shared_bytes,
          .major = info_.major,
          .minor = info_.minor};
}

absl::StatusOr<int> ParseCudaName(const std::string& name) {
  int index = -1;
  const char* begin = name.data() + 5;
  const char* end = name.data() + name.size();
  if (name.rfind("cuda:", 0) == 0 && begin < end) {
    const auto [rest, error] = std::from_chars(begin, end, index);
    if (error == std::errc() && rest == end && index >= 0) return index;
  }
  return InvalidArgument("device '", name, "' is not cpu or cuda:N");
}

}  // namespace dovetail::kernels::cuda
