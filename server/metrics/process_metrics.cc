#include "server/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include "base/log.h"

namespace dovetail::server {
namespace {

prometheus::Gauge& MakeGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}
prometheus::Counter& MakeCounter(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

// Of proc(5), /proc/self/stat: in clock ticks, ticks since the machine's start, bytes and pages.
struct Stat {
  uint64_t user = 0, system = 0, start = 0, virtual_bytes = 0;
  int64_t resident_pages = 0;
};

std::optional<Stat> ReadStat() {
  std::ifstream file("/proc/self/stat");
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(name_end + 1));
  std::string skipped;
  const auto skip = [&](int fields) {
    while (fields-- > 0) rest >> skipped;
  };
  Stat stat;
  skip(11);  // state to cmajflt: fields 3..13
  rest >> stat.user >> stat.system;
  skip(6);  // cutime to itrealvalue
  rest >> stat.start >> stat.virtual_bytes >> stat.resident_pages;
  if (!rest) return std::nullopt;
  return stat;
}

// Seconds since 1970 at which the machine started; 0: not known.
double MachineStart() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("btime ", 0) == 0) return std::stod(line.substr(6));
  return 0;
}

}  // namespace

ProcessMetrics::ProcessMetrics(prometheus::Registry& registry)
    : cpu_(MakeCounter(registry, "process_cpu_seconds_total", "CPU time of this server, user and system.")),
      resident_(MakeGauge(registry, "process_resident_memory_bytes", "Resident memory of this server.")),
      virtual_(MakeGauge(registry, "process_virtual_memory_bytes", "Virtual memory of this server.")),
      started_(MakeGauge(registry, "process_start_time_seconds", "When this server started, in seconds since 1970.")),
      open_files_(MakeGauge(registry, "process_open_fds", "Descriptors that this server has open.")),
      most_files_(MakeGauge(registry, "process_max_fds", "Descriptors that this server may open.")),
      dropped_lines_(MakeCounter(registry, "dovetail:log_lines_dropped_total",
                                 "Lines of this server's log that were dropped, as what reads it was too slow.")) {
  if (const auto stat = ReadStat(); stat)
    started_.Set(MachineStart() + static_cast<double>(stat->start) / static_cast<double>(sysconf(_SC_CLK_TCK)));
}

void ProcessMetrics::Update() {
  MutexLock lock(mutex_);
  if (const auto stat = ReadStat(); stat) {
    const double cpu = static_cast<double>(stat->user + stat->system) / static_cast<double>(sysconf(_SC_CLK_TCK));
    cpu_.Increment(cpu - cpu_.Value());
    virtual_.Set(static_cast<double>(stat->virtual_bytes));
    resident_.Set(static_cast<double>(stat->resident_pages) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  }
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (!error) open_files_.Set(static_cast<double>(std::distance(begin(files), end(files))));
  if (rlimit limit; getrlimit(RLIMIT_NOFILE, &limit) == 0) most_files_.Set(static_cast<double>(limit.rlim_cur));
  dropped_lines_.Increment(static_cast<double>(DroppedLogLines()) - dropped_lines_.Value());
}

}  // namespace dovetail::server
