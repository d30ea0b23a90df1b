#include "server/cli/kv_capacity.h"

#include <sys/sysinfo.h>

#include <algorithm>

#include "engine/device_choice.h"
#include "engine/host_limits.h"
#include "server/cli/command_line.h"

namespace dovetail::cli {
namespace {

constexpr uint64_t kPercentOfFree = 94;
constexpr uint64_t kLeastKvBytes = uint64_t{1} << 20;

absl::StatusOr<uint64_t> RoomOn(kernels::Device& device, std::optional<int> numa_node) {
  if (const kernels::cuda::CudaDevice* const gpu = engine::AsGpu(device); gpu != nullptr) return KvRoomOn(*gpu);
  for (const engine::NumaNode& node : engine::ReadHostFacts().nodes)
    if (node.number == numa_node) return node.memory_bytes / 4;
  struct sysinfo machine;
  if (sysinfo(&machine) != 0) return Internal("--kv-capacity auto: this machine does not say how much memory it has");
  return uint64_t{machine.totalram} * machine.mem_unit / 4;
}

}  // namespace

absl::StatusOr<uint64_t> KvRoomOn(const kernels::cuda::CudaDevice& gpu) {
  DT_ASSIGN_OR_RETURN(const kernels::cuda::CudaDevice::Memory memory, gpu.memory());
  return (memory.free_bytes + memory.kept_bytes) / 100 * kPercentOfFree;
}

absl::Status CheckKvCapacity(const KvCapacityFlags& flags) {
  if (flags.capacity != "auto") DT_RETURN_IF_ERROR(ParseBytes("--kv-capacity", flags.capacity, "auto").status());
  DT_RETURN_IF_ERROR(ParseBytes("--kv-leave", flags.leave).status());
  return ParseBytes("--kv-most", flags.most).status();
}

absl::StatusOr<uint64_t> KvBytesOf(const KvCapacityFlags& flags, kernels::Device& device,
                                   std::optional<int> numa_node) {
  if (flags.capacity != "auto") {
    DT_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--kv-capacity", flags.capacity, "auto"));
    if (bytes == 0) return InvalidArgument("--kv-capacity: a worker of no bytes holds no token; write 8GiB");
    return bytes;
  }
  DT_ASSIGN_OR_RETURN(const uint64_t room, RoomOn(device, numa_node));
  DT_ASSIGN_OR_RETURN(const uint64_t leave, ParseBytes("--kv-leave", flags.leave));
  DT_ASSIGN_OR_RETURN(const uint64_t most, ParseBytes("--kv-most", flags.most));
  const uint64_t bytes = room > leave ? (room - leave) / static_cast<uint64_t>(flags.sharers) : 0;
  if (bytes < kLeastKvBytes)
    return ResourceExhausted("--kv-capacity auto: ", room >> 20, " MiB are to be had on ", device.name(), ", of which ",
                             leave >> 20, " MiB are for others; free some memory there, or take another device");
  return most == 0 ? bytes : std::min(bytes, most);
}

KvCapacityFlags TakenBefore(KvCapacityFlags flags, uint64_t bytes) {
  if (flags.capacity != "auto") return flags;
  flags.leave = "0";
  flags.most = std::to_string(bytes);
  flags.sharers = 1;
  return flags;
}

}  // namespace dovetail::cli
