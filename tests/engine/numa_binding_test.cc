#include "engine/numa_binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace dovetail::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int CoresOfThisThread() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return CPU_COUNT(&allowed);
}

// Containers may not. The policy is what it is already.
bool MayChooseMemory() { return syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0) == 0; }

// The memory policy of a page of `memory`, as numa_maps of the calling thread has it: "default", "prefer:0".
std::string PolicyOf(const void* memory) {
  std::ifstream maps("/proc/thread-self/numa_maps");
  std::string found;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    uintptr_t begin = 0;
    std::string policy;
    words >> std::hex >> begin >> policy;
    if (begin > reinterpret_cast<uintptr_t>(memory)) break;
    found = policy;
  }
  return found;
}

TEST(NumaBinding, GivesAThreadTheNodesCoresAndItsMemory) {
  const HostFacts host = ReadHostFacts();
  const std::vector<NumaNode> usable = UsableNodes(host);
  if (usable.empty()) GTEST_SKIP() << "the system names no NUMA nodes";
  const int before = CoresOfThisThread();
  std::thread bound([&] {
    const bool may_choose = MayChooseMemory();
    ASSERT_TRUE(BindToNumaNode("--numa-node", usable.back().number, host).ok());
    EXPECT_EQ(CoresOfThisThread(), usable.back().cores);
    const std::vector<char> memory(size_t{4} << 20, 1);
    if (may_choose && access("/proc/thread-self/numa_maps", R_OK) == 0) {
      EXPECT_THAT(PolicyOf(memory.data() + (size_t{1} << 20)), HasSubstr("prefer"));
    }
    std::thread([&] { EXPECT_EQ(CoresOfThisThread(), usable.back().cores); }).join();
  });
  bound.join();
  EXPECT_EQ(CoresOfThisThread(), before);
}

TEST(NumaBinding, KeepsToTheCoresThatAThreadMayRunOn) {
  std::thread narrow([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    const HostFacts host = ReadHostFacts();
    const std::vector<NumaNode> usable = UsableNodes(host);
    if (usable.empty()) return;
    ASSERT_EQ(usable.size(), 1u);  // of the others it has no core
    ASSERT_TRUE(BindToNumaNode("--numa-node", usable[0].number, host).ok());
    EXPECT_EQ(CoresOfThisThread(), 1);
  });
  narrow.join();
}

TEST(NumaBinding, ANodeWithoutMemoryOrCoresIsRefusedAndThoseThatWouldDoAreNamed) {
  const HostFacts host{.cores = 8, .nodes = {{0, 4, 1 << 30}, {1, 4, 0}, {2, 0, 1 << 30}, {3, 4, 1 << 30}}};
  for (const int node : {1, 2, 7}) {
    const absl::Status refused = BindToNumaNode("--numa-node", node, host);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("--numa-node: " + std::to_string(node)), HasSubstr("those are 0, 3")));
  }
  EXPECT_THAT(std::string(BindToNumaNode("--numa-node", 0, {}).message()), HasSubstr("leave the flag out"));
}

}  // namespace
}  // namespace dovetail::engine
