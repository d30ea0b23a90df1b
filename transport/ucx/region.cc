#include "transport/ucx/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

namespace dovetail::transport::ucx {
namespace {

// Its size is for ever: a writer can rely on it though it does not trust the owner.
inline constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

std::byte* Map(int descriptor, uint64_t bytes) {
  void* front =
      mmap(nullptr, kRegionFrontBytes + bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  return front == MAP_FAILED ? nullptr : static_cast<std::byte*>(front);
}

absl::Status Gone(const char* why) { return absl::UnavailableError(absl::StrCat("region key: ", why)); }

// Why a path to a descriptor of the owner leads nowhere, by errno.
absl::Status NotThere(int error) {
  const bool ended = error == ENOENT || error == ESRCH || error == ENXIO;
  return Gone(ended ? "its owner has ended, or has given the region up" : std::strerror(error));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReceiveRegion>> ReceiveRegion::Create(uint64_t bytes) {
  std::unique_ptr<ReceiveRegion> region(new ReceiveRegion);
  const auto failed = [&](const char* call) {
    return ResourceExhausted("a receive region of ", bytes, " bytes: ", call, ": ", std::strerror(errno));
  };
  region->bytes_ = bytes;
  region->descriptor_ = memfd_create("dovetail-receive", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region->descriptor_ < 0) return failed("memfd_create");
  if (fchmod(region->descriptor_, S_IRUSR | S_IWUSR) != 0) return failed("fchmod");  // it is made with 0777
  if (ftruncate(region->descriptor_, static_cast<off_t>(kRegionFrontBytes + bytes)) != 0) return failed("ftruncate");
  if (fcntl(region->descriptor_, F_ADD_SEALS, kSeals) != 0) return failed("F_ADD_SEALS");
  region->front_ = Map(region->descriptor_, bytes);
  if (region->front_ == nullptr) return failed("mmap");
  std::random_device random;
  region->token_ = uint64_t{random()} << 32 | random();
  std::memcpy(region->front_, &region->token_, sizeof(region->token_));
  return region;
}

// If the system does not want to, they stay until the region goes.
void ReceiveRegion::DropPages() {
  [[maybe_unused]] const int dropped = madvise(front_ + kRegionFrontBytes, bytes_, MADV_REMOVE);
}

ReceiveRegion::~ReceiveRegion() {
  if (front_ != nullptr) munmap(front_, kRegionFrontBytes + bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<std::unique_ptr<RemoteRegion>> RemoteRegion::Open(const ProcessIdentity& owner, uint32_t descriptor,
                                                                 uint64_t bytes, uint64_t token) {
  if (owner.pid == 0) return InvalidArgument("region key: its owner did not say which process it is");
  const std::string path = absl::StrCat("/proc/", owner.pid, "/fd/", descriptor);
  // Looked at before it is opened: opening a device or a pipe may do something.
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    if (errno != EACCES && errno != EPERM) return NotThere(errno);
    return FailedPrecondition("region key: ", path, " may not be opened; run all workers of a host as one user");
  }
  if (!S_ISREG(info.st_mode)) return InvalidArgument("region key: ", path, " is no memory");
  const Descriptor opened{open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
  if (opened.number < 0) return NotThere(errno);
  if (fstat(opened.number, &info) != 0 || (fcntl(opened.number, F_GET_SEALS) & F_SEAL_SHRINK) == 0 ||
      fcntl(opened.number, F_GET_SEALS) < 0)
    return Gone("the region is gone");
  if (info.st_size < 0 || bytes > static_cast<uint64_t>(info.st_size) ||
      static_cast<uint64_t>(info.st_size) - bytes < kRegionFrontBytes)
    return InvalidArgument("region key: ", bytes, " bytes are more than the region has");
  std::byte* front = Map(opened.number, bytes);
  if (front == nullptr) return ResourceExhausted("region key: mmap: ", std::strerror(errno));
  std::unique_ptr<RemoteRegion> region(new RemoteRegion(front, bytes));
  uint64_t found = 0;
  std::memcpy(&found, front, sizeof(found));
  if (found != token) return Gone("the region is gone");
  return region;
}

RemoteRegion::~RemoteRegion() { munmap(front_, kRegionFrontBytes + bytes_); }

}  // namespace dovetail::transport::ucx
