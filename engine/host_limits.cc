#include "engine/host_limits.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/log.h"

namespace dovetail::engine {
namespace {

// Of "0-3,8", those that `allowed` has.
std::vector<int> CoresOf(const std::string& list, const cpu_set_t& allowed) {
  std::vector<int> cores;
  for (const absl::string_view part : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last)) continue;
    for (int core = std::max(first, 0); core <= last && core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

std::string TextOf(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// Of the line "Node 0 MemTotal: 24684084 kB"; nothing: there is none.
std::optional<uint64_t> MemoryOf(const std::string& meminfo) {
  const size_t at = meminfo.find("MemTotal:");
  if (at == std::string::npos) return std::nullopt;
  const std::vector<std::string> words =
      absl::StrSplit(meminfo.substr(at, meminfo.find('\n', at) - at), ' ', absl::SkipEmpty());
  uint64_t kib = 0;
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &kib)) return std::nullopt;
  return kib << 10;
}

}  // namespace

HostFacts ReadHostFacts(const std::filesystem::path& nodes) {
  HostFacts host;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  host.cores = CPU_COUNT(&allowed);
  rlimit locked;
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) host.memlock_bytes = locked.rlim_cur;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator(nodes, error)) {
    const std::string name = folder.path().filename().string();
    NumaNode node;
    if (name.rfind("node", 0) != 0 || !absl::SimpleAtoi(name.substr(4), &node.number)) continue;
    const std::optional<uint64_t> memory = MemoryOf(TextOf(folder.path() / "meminfo"));
    if (!memory) continue;
    node.memory_bytes = *memory;
    node.core_numbers = CoresOf(TextOf(folder.path() / "cpulist"), allowed);
    node.cores = static_cast<int>(node.core_numbers.size());
    host.nodes.push_back(node);
  }
  std::sort(host.nodes.begin(), host.nodes.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.number < b.number; });
  return host;
}

std::vector<std::string> WhatIsShort(const HostFacts& host, const HostNeeds& needs) {
  std::vector<std::string> lines;
  if (host.cores > 0 && needs.threads > host.cores)
    lines.push_back(absl::StrCat("--threads: ", needs.threads,
                                 " threads compute at the same time, but this process may ", "run on ", host.cores,
                                 " cores: each op waits for the thread that runs last; take ", host.cores,
                                 ", or 0, which takes one for each core"));
  for (const NumaNode& node : host.nodes)
    if (needs.on_cpu && node.cores > 0 && node.memory_bytes == 0)
      lines.push_back(absl::StrCat(
          "NUMA node ", node.number, " has ", node.cores, " of the ", host.cores,
          " cores that this process may run on and no memory: all that those read comes from ",
          "other nodes; bind the worker to a node with memory (numactl --cpunodebind), or put ", "memory there"));
  if (needs.rdma && host.memlock_bytes)
    lines.push_back(
        absl::StrCat("--lanes rc: this process may lock ", *host.memlock_bytes >> 10,
                     " KiB of memory (ulimit -l), and an RDMA device locks all that is sent from: take the ",
                     "limit away (ulimit -l unlimited, or LimitMEMLOCK=infinity in its unit)"));
  return lines;
}

void WarnOfWhatIsShort(const HostNeeds& needs) {
  for (const std::string& line : WhatIsShort(ReadHostFacts(), needs)) LogWarning(line);
}

}  // namespace dovetail::engine
