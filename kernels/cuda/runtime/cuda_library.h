#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// libdovetail_cuda.so, opened at run time, so that every binary starts on machines without a GPU and can say what is
// missing.
// Threads: immutable once opened; stays open for the life of the object, which must outlive all that
// was made with it.
class CudaLibrary {
 public:
  // Looks for the library at `path`, or, if that is empty, in the folder of this program and in lib, ../lib
  // and ../../lib of it. kNotFound if this build has none there; kFailedPrecondition if it cannot be opened or is of
  // another version.
  static absl::StatusOr<std::shared_ptr<const CudaLibrary>> Open(const std::string& path = "");
  // Over functions of the caller's, which must outlive it; for tests.
  explicit CudaLibrary(const Backend* backend) : backend_(backend) {}
  ~CudaLibrary();
  CudaLibrary(const CudaLibrary&) = delete;
  CudaLibrary& operator=(const CudaLibrary&) = delete;

  const Backend& operator*() const { return *backend_; }
  const Backend* operator->() const { return backend_; }

  // OK for 0. kResourceExhausted where memory was short, else kInternal: "<what>: <CUDA's text>".
  absl::Status Check(int error, const std::string& what) const;

 private:
  CudaLibrary(void* handle, const Backend* backend) : handle_(handle), backend_(backend) {}

  void* handle_ = nullptr;
  const Backend* backend_ = nullptr;
};

// A GPU of this machine, and whether it can be used.
struct CudaDeviceSummary {
  int index = 0;
  DeviceInfo info{};
  size_t free_bytes = 0;
  absl::Status usable;  // else why not and what would help
};

// What there is. An error says why no GPU can be looked at: no library, no driver, a driver too old.
struct CudaSurvey {
  absl::Status status;
  int driver_version = 0;  // 13000 for 13.0; 0: none
  int runtime_version = 0;
  std::vector<CudaDeviceSummary> devices;
};
// Threads: thread-safe; asks the driver.
CudaSurvey SurveyCuda(const CudaLibrary& library);

}  // namespace dovetail::kernels::cuda
