#include "server/cli/bench_device_command.h"

#include <stdlib.h>
#include <sys/sysinfo.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/device_choice.h"
#include "engine/measurements/device/device_kernels.h"
#include "engine/measurements/device/gpu_rates.h"
#include "engine/measurements/device/step_overhead.h"
#include "kernels/thread_pool.h"
#include "plan/device_profile.h"
#include "server/cli/command_line.h"
#include "server/version.h"
#include "transport/ucx/link_speed.h"

namespace dovetail::cli {
namespace {

using transport::ucx::Lanes;

constexpr size_t kMostNameBytes = 64;
constexpr absl::Duration kLinkTime = absl::Milliseconds(500);

// Names become DEVICE in ROLE.DEVICE:COUNT and DEVICE=USD.
absl::Status CheckName(const std::string& name) {
  const bool known =
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == std::string::npos;
  if (name.empty() || name.size() > kMostNameBytes || !known)
    return InvalidArgument("--name: '", name, "' is not 1..", kMostNameBytes,
                           " letters, digits, - and _, as epyc-zen4");
  return absl::OkStatus();
}

void Tell(const char* what) { std::fprintf(stderr, "measuring %s\n", what); }

double MemoryGb() {
  struct sysinfo info;
  return sysinfo(&info) == 0 ? static_cast<double>(info.totalram) * info.mem_unit / 1e9 : 0;
}

absl::Status MeasureCpu(kernels::Stream& stream, double seconds, plan::DeviceProfile& profile) {
  profile.threads = stream.pool().threads();
  profile.memory_gb = MemoryGb();
  Tell("memory");
  DT_ASSIGN_OR_RETURN(profile.reads, engine::MeasureReads(profile.threads));
  DT_ASSIGN_OR_RETURN(profile.cache_bytes, engine::MeasureCacheBytes(stream.pool(), profile.reads.back().bytes_per_s));
  Tell("products");
  DT_ASSIGN_OR_RETURN(profile.products, engine::MeasureProducts(stream, seconds, profile.cache_bytes));
  Tell("attention");
  DT_ASSIGN_OR_RETURN(profile.attention, engine::MeasureAttention(stream, seconds));
  Tell("linear states");
  DT_ASSIGN_OR_RETURN(profile.states, engine::MeasureStates(stream, seconds));
  return absl::OkStatus();
}

absl::Status MeasureGpu(kernels::cuda::CudaDevice& gpu, double seconds, plan::DeviceProfile& profile) {
  DT_ASSIGN_OR_RETURN(const auto memory, gpu.memory());
  profile.memory_gb = static_cast<double>(memory.total_bytes) / 1e9;
  Tell("memory");
  DT_ASSIGN_OR_RETURN(profile.reads, engine::MeasureGpuReads(gpu, seconds));
  Tell("products");
  DT_ASSIGN_OR_RETURN(profile.products, engine::MeasureGpuProducts(gpu, seconds));
  Tell("attention");
  DT_ASSIGN_OR_RETURN(profile.attention, engine::MeasureGpuAttention(gpu, seconds));
  Tell("linear states");
  DT_ASSIGN_OR_RETURN(profile.states, engine::MeasureGpuStates(gpu, seconds));
  return absl::OkStatus();
}

absl::StatusOr<plan::DeviceProfile> MeasureDevice(const BenchDeviceFlags& flags) {
  plan::DeviceProfile profile;
  if (double load = 0; getloadavg(&load, 1) == 1) profile.load = load;
  DT_ASSIGN_OR_RETURN(const auto device, engine::OpenDevice("--device", flags.device, flags.threads));
  profile.name = flags.name;
  profile.dated = absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone());
  profile.device = device->arithmetic();
  profile.source = absl::StrCat("dovetail ", kVersion, ", bench device");
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(*device); gpu != nullptr) {
    DT_RETURN_IF_ERROR(MeasureGpu(*gpu, flags.point_seconds, profile));
  } else {
    const auto stream = device->CreateStream();
    DT_RETURN_IF_ERROR(MeasureCpu(*stream, flags.point_seconds, profile));
  }
  Tell("links");
  for (const auto& [lane, lanes] : {std::pair("shm", Lanes::kShm), std::pair("tcp", Lanes::kTcp)}) {
    auto speed = transport::ucx::MeasureLink(lanes, kLinkTime);
    if (!speed.ok()) return Annotate(speed.status(), absl::StrCat("link ", lane));
    profile.links.push_back({lane, speed->latency_s, speed->bytes_per_s});
  }
  Tell("steps");
  DT_ASSIGN_OR_RETURN(profile.steps, engine::MeasureStepOverhead(*device, profile.threads, profile));
  return profile;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (file && !error) return absl::OkStatus();
  std::filesystem::remove(part, error);
  return absl::PermissionDeniedError(absl::StrCat("--out: ", path, ": cannot be written"));
}

}  // namespace

void AddBenchDeviceFlags(CLI::App& command, BenchDeviceFlags& flags) {
  const auto add = [&](const char* flag, auto& value, const std::string& text, const char* type) {
    return command.add_option(flag, value, text)->type_name(type)->group("Measurement");
  };
  add("--name", flags.name, "What price tables and `plan --devices` call this machine, as epyc-zen4", "NAME")
      ->required();
  add("--device", flags.device, "What is measured: cpu, or a GPU as cuda:0", "DEVICE");
  add("--out", flags.out, "The profile to write; empty: standard output", "FILE");
  add("--threads", flags.threads, "Of the worker on a CPU that the profile stands for; 0: one per core", "N")
      ->check(WholeNumber(0, kernels::ThreadPool::kMaxThreads, "0 takes one per core"));
  add("--point-seconds", flags.point_seconds, "How long each of some 300 points is measured; the best run counts", "S")
      ->check(Number(0.001, 10));
}

absl::Status RunBenchDevice(const BenchDeviceFlags& flags) {
  DT_RETURN_IF_ERROR(CheckName(flags.name));
  DT_ASSIGN_OR_RETURN(const plan::DeviceProfile profile, MeasureDevice(flags));
  const std::string text = plan::ToJson(profile);
  if (!flags.out.empty()) return WriteFile(flags.out, text);
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
