#include "transport/ucx/region.h"

#include <sys/mman.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace dovetail::transport::ucx {
namespace {

// Pages of shared memory come into being when they are written, by the peer, which dies of it if there are none left;
// and other regions are made out of the same space.
inline constexpr uint64_t kRoomForRegions = 16;

absl::Status CheckSharedMemory(uint64_t bytes) {
  struct statvfs info;
  if (statvfs("/dev/shm", &info) != 0) return absl::OkStatus();  // not where UCX takes it from
  const uint64_t free = uint64_t{info.f_bavail} * info.f_frsize;
  if (free / kRoomForRegions >= bytes) return absl::OkStatus();
  return ResourceExhausted("a receive region of ", bytes, " bytes wants ", kRoomForRegions,
                           " times that free in /dev/shm, which has ", free,
                           "; enlarge it (--shm-size of a container)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReceiveRegion>> ReceiveRegion::Create(const UcxWorker& worker, uint64_t bytes) {
  DT_RETURN_IF_ERROR(CheckSharedMemory(bytes));
  std::unique_ptr<ReceiveRegion> region(new ReceiveRegion(worker.context()));
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.length = kTokenBefore + bytes;
  params.flags = UCP_MEM_MAP_ALLOCATE | UCP_MEM_MAP_NONBLOCK;
  if (const ucs_status_t status = ucp_mem_map(region->context_, &params, &region->handle_); status != UCS_OK)
    return UcxError(status, absl::StrCat("a receive region of ", bytes, " bytes"));
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH;
  if (const ucs_status_t status = ucp_mem_query(region->handle_, &attributes); status != UCS_OK)
    return UcxError(status, "a receive region");
  region->data_ = static_cast<std::byte*>(attributes.address) + kTokenBefore;
  region->bytes_ = std::min<uint64_t>(bytes, attributes.length - kTokenBefore);
  std::random_device random;
  region->token_ = uint64_t{random()} << 32 | random();
  std::memcpy(attributes.address, &region->token_, sizeof(region->token_));
  return region;
}

// If the system does not want to, they stay until the region goes.
void ReceiveRegion::DropPages() { [[maybe_unused]] const int dropped = madvise(data_, bytes_, MADV_REMOVE); }

ReceiveRegion::~ReceiveRegion() {
  if (handle_ != nullptr) ucp_mem_unmap(context_, handle_);
}

absl::StatusOr<std::string> ReceiveRegion::RemoteKey() const {
  void* buffer = nullptr;
  size_t length = 0;
  if (const ucs_status_t status = ucp_rkey_pack(context_, handle_, &buffer, &length); status != UCS_OK)
    return UcxError(status, "the key of a receive region");
  std::string key(static_cast<const char*>(buffer), length);
  ucp_rkey_buffer_release(buffer);
  return key;
}

}  // namespace dovetail::transport::ucx
