#include "engine/host_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/support/test_data.h"

namespace dovetail::engine {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A host of `with` and without memory in its nodes; each has all cores.
std::filesystem::path Nodes(std::initializer_list<uint64_t> kib) {
  const std::filesystem::path folder = test::TempFolder();
  int node = 0;
  for (const uint64_t memory : kib) {
    const auto place = folder / absl::StrCat("node", node);
    std::filesystem::create_directories(place);
    std::ofstream(place / "cpulist") << "0-" << CPU_SETSIZE - 1 << "\n";
    std::ofstream(place / "meminfo") << "Node " << node << " MemTotal:       " << memory << " kB\nNode " << node
                                     << " MemFree:        1 kB\n";
    ++node;
  }
  std::filesystem::create_directories(folder / "power");
  std::ofstream(folder / "online") << "0-1\n";
  return folder;
}

TEST(HostLimits, AreReadFromTheSystem) {
  const HostFacts host = ReadHostFacts(Nodes({1000, 0}));
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  EXPECT_EQ(host.cores, CPU_COUNT(&allowed));
  ASSERT_EQ(host.nodes.size(), 2u);
  EXPECT_EQ(host.nodes[0].memory_bytes, 1000u << 10);
  EXPECT_EQ(host.nodes[0].cores, host.cores);
  EXPECT_EQ(host.nodes[1].number, 1);
  EXPECT_EQ(host.nodes[1].memory_bytes, 0u);
  EXPECT_THAT(ReadHostFacts("/nowhere/at/all").nodes, IsEmpty());
}

TEST(HostLimits, ALimitOfLockedMemoryIsRead) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const rlimit less{std::min<rlim_t>(before.rlim_cur, 8 << 20), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &less), 0);
  const HostFacts host = ReadHostFacts();
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  EXPECT_EQ(host.memlock_bytes, std::optional<uint64_t>(less.rlim_cur));
}

TEST(HostLimits, WhatIsShortIsSaidWithWhatHelps) {
  const HostFacts host{.cores = 8, .nodes = {{0, 4, 1 << 30}, {1, 4, 0}}, .memlock_bytes = 64 << 10};
  EXPECT_THAT(
      WhatIsShort(host, {.threads = 12, .on_cpu = true, .rdma = true}),
      ElementsAre(
          AllOf(HasSubstr("--threads: 12 threads compute at the same time, but this process may run on "
                          "8 cores"),
                HasSubstr("take 8, or 0")),
          AllOf(HasSubstr("NUMA node 1 has 4 of the 8 cores that this process may run on and no memory"),
                HasSubstr("numactl --cpunodebind")),
          AllOf(HasSubstr("--lanes rc: this process may lock 64 KiB of memory"), HasSubstr("LimitMEMLOCK=infinity"))));
}

TEST(HostLimits, NothingIsSaidOfWhatIsNotNeeded) {
  const HostFacts host{.cores = 8, .nodes = {{0, 8, 1 << 30}, {1, 0, 0}}, .memlock_bytes = 64 << 10};
  EXPECT_THAT(WhatIsShort(host, {.threads = 8}), IsEmpty()) << "a node whose cores are not ours, and no RDMA";
  const HostFacts gpu{.cores = 8, .nodes = {{0, 8, 0}}};
  EXPECT_THAT(WhatIsShort(gpu, {.threads = 8, .on_cpu = false, .rdma = true}), IsEmpty());
}

}  // namespace
}  // namespace dovetail::engine
