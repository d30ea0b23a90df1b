#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/record_words.h"

namespace dovetail::kernels::cuda {

// The work of one micro-batch's step on a device, piece by piece: launches are added in the order in which they are to
// run, also by several workers of one process, and run when the step is launched.
// A step whose launches are those of an earlier one runs as its recorded graph: launches then do not bound steps of few
// rows. The second step of a kind is recorded; the first lets products choose their algorithms.
//
// Uploads are not part of it: they go at once, ahead of the launches, and overlap with another micro-batch's step that
// still runs (CudaStream::Upload).
// Ownership: must not outlive the device.
// Errors: those of the launches; kInternal: the device is lost.
// Threads: thread-compatible.
class StepWork {
 public:
  using Enqueue = std::function<absl::Status(CudaStream&)>;
  static constexpr size_t kMostRecorded = 128;  // kinds of steps; the longest unused goes

  // A step begins. It shares the memory of its uploads with the last one of this alone, and waits for no other's.
  // What that added and was not launched is void.
  absl::Status Begin(CudaStream& stream);

  // `what` tells everything that the launches depend on but the contents of memory: pointers, sizes, indices. In an
  // immediate step the launches are enqueued at once.
  absl::Status Add(CudaStream& stream, std::span<const uint64_t> what, Enqueue enqueue);
  absl::Status Add(CudaStream& stream, std::initializer_list<uint64_t> what, Enqueue enqueue) {
    return Add(stream, std::span(what.begin(), what.size()), std::move(enqueue));
  }

  // Launches that depend on the record alone, since `run` is given nothing else. Its bytes tell them.
  template <PlainRecord Record>
  absl::Status Add(CudaStream& stream, const Record& record,
                   std::type_identity_t<absl::Status (*)(CudaStream&, const Record&)> run) {
    std::vector<uint64_t> what = {reinterpret_cast<uint64_t>(run)};
    AppendWords(record, what);
    return Add(stream, what, [record, run](CudaStream& s) { return run(s, record); });
  }

  // Enqueues what was added; from here on this step is immediate. For steps too large to be bound by launches, and for
  // those whose uploads must come between launches: until it ends, no upload of the stream overlaps.
  absl::Status BeImmediate(CudaStream& stream);
  bool immediate() const { return immediate_; }

  // Enqueues the step, once.
  absl::Status Launch(CudaStream& stream);

  static uint64_t Word(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

 private:
  struct Recorded {
    std::vector<uint64_t> what;
    CudaGraph graph;
  };
  void Clear();
  void ReleaseUploads();
  absl::Status EnqueueAll(CudaStream& stream);
  absl::Status Record(CudaStream& stream, CudaGraph& graph);
  absl::Status LaunchPieces(CudaStream& stream);

  bool immediate_ = false;
  std::vector<uint64_t> what_;
  std::vector<Enqueue> pieces_;
  std::list<Recorded> recorded_;  // front: used last
  CudaEvent done_;                // behind the last step
  bool launched_ = false;         // done_ stands there
  CudaStream* held_ = nullptr;    // whose uploads this immediate step holds
};

}  // namespace dovetail::kernels::cuda
