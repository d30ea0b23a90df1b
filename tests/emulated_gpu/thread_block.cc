// Thread blocks on a CPU: a fiber a thread, one block after the other, warps in random order, asynchronous copies as
// late as that allows. Any mistake that shows is reported, and ends the program.
#include "tests/emulated_gpu/thread_block.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {

struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
struct Warp {
  uint32_t ready = 0, meeting = 0, exited = 0, members = 0;
  bool downward = false;
};

Fiber* current;

namespace {

constexpr int kShared = 227 << 10, kArena = 256 << 10, kMostThreads = 1024;
constexpr size_t kStack = 60 << 10, kPitch = kStack + (4 << 10) + (4 << 10);  // a guard page; not a power of two

struct NamedBarrier {
  int expected = 0, arrived = 0, all = 1;
  bool everyone = false;
  std::vector<Fiber*> waiting;
};
struct Barrier {
  int64_t count = -1, pending = 0, bytes = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};
constexpr uint64_t kMark = 0x5eba441e5eba441e;
struct Async {
  std::vector<Copy> copies;
  uint32_t bar;
  int64_t bytes;  // of a bulk copy; -1: an arrival behind copies of `owner`
  Fiber* owner;
};

std::mutex mutex;
std::byte* arena;
std::byte* stacks;
Fiber fibers[kMostThreads];
Copies copies[kMostThreads];
Warp warps[kMostThreads / 32];
NamedBarrier named[16];
Barrier barriers[kArena / 8];
std::vector<uint32_t> initialised;
std::vector<Async> pending;
const std::function<void()>* body;
void* scheduler;
const char* kernel_name = "no kernel";
uint64_t block_number = 0, random_state = 88172645463325252ull;
size_t dynamic_bytes, used_bytes;
int threads, live, stuck, lateness;
std::unordered_map<const void*, int> shared_limits;
int last_error = 0;

uint32_t Random() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 32);
}

const char* Where(const Fiber& f) {
  static char text[128];
  const char* const name = std::strrchr(f.at.file_name(), '/');
  std::snprintf(text, sizeof(text), "%s:%u", name != nullptr ? name + 1 : f.at.file_name(), f.at.line());
  return text;
}

void Report() {
  std::fprintf(stderr, "emu: a kernel of %s, block %u,%u of %u,%u, %d threads of %d run\n", kernel_name, blockIdx.x,
               blockIdx.y, gridDim.x, gridDim.y, live, threads);
  std::set<void*> callers;
  for (int at = 0; at < threads;) {  // neighbours that wait for the same
    const Fiber& f = fibers[at];
    int end = at + 1;
    if (f.state != Fiber::kExited && f.caller != nullptr) callers.insert(f.caller);
    if (current != nullptr) callers.insert(current->caller);
    for (; end < threads && end % 32 != 0; ++end) {
      const Fiber& g = fibers[end];
      if (g.state != f.state || g.at.line() != f.at.line() || g.bar != f.bar || g.parity != f.parity) break;
    }
    std::fprintf(stderr, "  warp %d lanes %d..%d: ", at / 32, f.lane, fibers[end - 1].lane);
    const Barrier& b = barriers[f.bar / 8 % (kArena / 8)];
    switch (f.state) {
      case Fiber::kRuns: std::fprintf(stderr, "run, last seen at %s\n", Where(f)); break;
      case Fiber::kMeets: std::fprintf(stderr, "collective %d of lanes %08x at %s\n", f.op, f.mask, Where(f)); break;
      case Fiber::kBar:
        std::fprintf(stderr, "bar.sync %u at %s: %d of %d\n", f.bar, Where(f), named[f.bar].arrived,
                     named[f.bar].everyone ? live : named[f.bar].expected);
        break;
      case Fiber::kPolls:
        std::fprintf(stderr,
                     "mbarrier at %u, parity %u, at %s; it has phase %u, lacks %ld of %ld arrivals, %ld bytes\n", f.bar,
                     f.parity, Where(f), b.phase, b.pending, b.count, b.bytes);
        break;
      case Fiber::kExited: std::fprintf(stderr, "ended\n"); break;
    }
    at = end;
  }
  for (void* caller : callers) {  // how it came there: needs -g1
    Dl_info info;
    char command[512];
    if (dladdr(caller, &info) == 0) continue;
    std::snprintf(command, sizeof(command),
                  "addr2line -pie %s %#zx | sed 's|^[^ ]*/||; s|(inlined by) .*/|  by |' | tr '\\n' ' ' >&2; echo >&2",
                  info.dli_fname, static_cast<char*>(caller) - 1 - static_cast<char*>(info.dli_fbase));
    if (std::system(command) != 0) return;
  }
}

}  // namespace

void Fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::fflush(stdout);
  std::fprintf(stderr, "emu: ");
  std::vfprintf(stderr, format, list);
  if (current != nullptr)
    std::fprintf(stderr, " (thread %u = warp %d lane %d, last seen at %s)", current->thread.x,
                 int(current - fibers) / 32, current->lane, Where(*current));
  std::fprintf(stderr, "\n");
  Report();
  std::abort();
}

namespace {

void OnFault(int number, siginfo_t* info, void* context) {
  const auto at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  if (current != nullptr) current->caller = reinterpret_cast<void*>(at + 1);
  for (int i : {SIGSEGV, SIGBUS, SIGILL}) signal(i, SIG_DFL);
  Fail(number == SIGILL ? "a misaligned access, or other undefined behaviour" : "a fault at address %p", info->si_addr);
}

// Saves what a function must keep, and goes on where the other fiber did so.
asm(R"(
.text
.type emu_switch, @function
emu_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
extern "C" void emu_switch(void** save, void* to);

int Next(const Warp& warp) { return warp.downward ? 31 - __builtin_clz(warp.ready) : __builtin_ctz(warp.ready); }

// The fiber goes on later: another lane of its warp does, or another fiber that the scheduler takes.
void Away(bool to_scheduler) {
  Fiber* const self = current;
  const Warp& warp = *self->warp;
  if (to_scheduler || warp.ready == 0) {
    emu_switch(&self->sp, scheduler);
  } else {
    current = fibers + (&warp - warps) * 32 + Next(warp);
    if (current != self) emu_switch(&self->sp, current->sp);
  }
  threadIdx = self->thread;
}
void Wait(decltype(Fiber::state) state) {
  current->state = state;
  current->warp->ready &= ~(1u << current->lane);
  Away(false);
}
void Wake(Fiber* fiber) {
  fiber->state = Fiber::kRuns;
  fiber->warp->ready |= 1u << fiber->lane;
}
void WakeAll(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) Wake(fiber);
  waiting.clear();
  stuck = 0;
}

void Release(NamedBarrier& bar) {
  for (Fiber* fiber : bar.waiting) fiber->result = bar.all;
  WakeAll(bar.waiting);
  bar.arrived = 0, bar.all = 1, bar.expected = 0;
}

Barrier& At(uint32_t address) {
  uint64_t mark;
  std::memcpy(&mark, SharedAt(address, 8, 8), 8);
  Barrier& bar = barriers[address / 8];
  if (bar.count < 0) Fail("no barrier at %u", address);
  if (mark != kMark) Fail("the barrier at %u has been overwritten", address);
  return bar;
}
void Check(Barrier& bar) {
  if (bar.pending < 0) Fail("a barrier of %ld got more arrivals", bar.count);
  if (bar.pending > 0 || bar.bytes != 0) return;
  bar.phase ^= 1, bar.pending = bar.count;
  WakeAll(bar.waiting);
}
void Land(const std::vector<Copy>& all) {
  for (const Copy& copy : all) {
    std::memcpy(arena + copy.to, copy.from, copy.given);
    std::memset(arena + copy.to + copy.given, 0, copy.bytes - copy.given);
  }
}
void Land(size_t i) {
  const Async async = std::move(pending[i]);
  pending[i] = std::move(pending.back());
  pending.pop_back();
  Land(async.copies);
  Barrier& bar = At(async.bar);
  async.bytes >= 0 ? bar.bytes -= async.bytes : bar.pending -= 1;
  Check(bar);
}

void Enter() {
  threadIdx = current->thread;
  (*body)();
  Fiber& self = *current;
  Warp& warp = *self.warp;
  self.state = Fiber::kExited;
  warp.exited |= 1u << self.lane;
  --live;
  stuck = 0;
  for (NamedBarrier& bar : named)
    if (bar.everyone && !bar.waiting.empty() && bar.arrived == live) Release(bar);
  Wait(Fiber::kExited);
  std::abort();
}

void StartBlock(size_t shared) {
  ++block_number;
  dynamic_bytes = shared, used_bytes = shared;
  std::memset(arena, 0xff, shared);
  for (uint32_t address : initialised) barriers[address / 8] = Barrier();
  initialised.clear();
  stuck = 0;
  for (NamedBarrier& bar : named) bar = NamedBarrier();
  live = threads;
  for (int i = 0; i < (threads + 31) / 32; ++i) warps[i] = Warp();
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    // Their bases differ in all bits that choose a line of the cache.
    std::byte* const top = stacks + (i + 1) * kPitch - i * 320 % 4096;
    auto* const frame = reinterpret_cast<void**>(top) - 8;  // six registers, where to begin, a frame's alignment
    std::memset(frame, 0, 64);
    frame[6] = reinterpret_cast<void*>(&Enter);
    f = Fiber();
    f.sp = frame;
    f.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    f.warp = &warps[i / 32];
    f.lane = i % 32;
    f.copies = &copies[i];
    f.copies->open.clear(), f.copies->groups.clear();
    f.warp->ready |= 1u << f.lane;
  }
  for (int i = 0; i < (threads + 31) / 32; ++i) warps[i].members = warps[i].ready;
  constexpr int kLate[] = {2, 2, 16, 128, 1 << 30};
  lateness = kLate[Random() % 5];
}

void RunBlock(size_t shared) {
  StartBlock(shared);
  const int count = (threads + 31) / 32;
  while (live > 0) {
    if (!pending.empty() && Random() % lateness == 0) Land(Random() % pending.size());
    int chosen = -1;
    for (int i = 0, first = Random() % count; i < count && chosen < 0; ++i)
      if (warps[(first + i) % count].ready != 0) chosen = (first + i) % count;
    if (chosen >= 0) {
      Warp& warp = warps[chosen];
      warp.downward = Random() % 2;
      current = fibers + 32 * chosen + Next(warp);
      emu_switch(&scheduler, current->sp);
      current = nullptr;
    } else if (!pending.empty()) {
      Land(Random() % pending.size());
    } else {
      if (++stuck > 4) Fail("no thread can go on");
      bool some = false;  // those that only ask barriers, and might have other things to do
      for (int i = 0; i < threads; ++i)
        if (fibers[i].state == Fiber::kPolls) Wake(&fibers[i]), some = true;
      for (uint32_t address : initialised) barriers[address / 8].waiting.clear();
      if (!some) Fail("no thread can go on");
    }
  }
  for (const Async& async : pending)
    if (async.bytes >= 0) Fail("a block ended before its bulk copies");
  pending.clear();
}

void StartOnce() {
  static const bool started = [] {
    arena = static_cast<std::byte*>(
        mmap(nullptr, kArena + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    stacks = static_cast<std::byte*>(
        mmap(nullptr, kMostThreads * kPitch, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(arena + kArena, 4096, PROT_NONE);
    for (int i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kPitch, 4096, PROT_NONE);
    if (const char* seed = std::getenv("DOVETAIL_EMULATION_SEED"))
      random_state += 0x9e3779b97f4a7c15ull * std::atoll(seed);
    static std::byte fault_stack[64 << 10];
    const stack_t stack = {.ss_sp = fault_stack, .ss_flags = 0, .ss_size = sizeof(fault_stack)};
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGILL}) sigaction(signal, &action, nullptr);
    return true;
  }();
  (void)started;
}

}  // namespace

void Meet(Op op, uint32_t mask, Site at) {
  Fiber& self = *current;
  Warp& warp = *self.warp;
  Fiber* const lanes = &self - self.lane;
  self.op = op, self.mask = mask, self.at = at, self.caller = __builtin_return_address(0);
  mask &= warp.members;
  if ((mask >> self.lane & 1) == 0) Fail("a collective of lanes %08x by another lane", mask);
  if (mask & warp.exited) Fail("a collective of lanes %08x, of which %08x have ended", mask, mask & warp.exited);
  if (const uint32_t there = warp.meeting & mask) {
    const Fiber& first = lanes[__builtin_ctz(there)];
    if (first.op != op || first.mask != self.mask || first.at.line() != at.line())
      Fail("lanes of a warp meet at different collectives: %d of %08x at line %u, %d of %08x at %s", op, self.mask,
           at.line(), first.op, first.mask, Where(first));
  }
  warp.meeting |= 1u << self.lane;
  if ((warp.meeting & mask) != mask) return Wait(Fiber::kMeets);
  warp.meeting &= ~mask;
  warp.ready |= mask;
  RunCollective(op, lanes, mask);
  for (uint32_t left = mask; left != 0; left &= left - 1) lanes[__builtin_ctz(left)].state = Fiber::kRuns;
  if (Random() % 64 == 0) Away(true);
}

int Bar(int id, int count, bool waits, int predicate, Site at) {
  NamedBarrier& bar = named[id];
  current->at = at, current->caller = __builtin_return_address(0), current->bar = id;
  if (count % 32 != 0) Fail("bar.sync %d of %d threads", id, count);
  if (bar.arrived > 0 && (bar.everyone != (count == 0) || bar.expected != count))
    Fail("bar.sync %d of %d and of %d threads", id, count, bar.expected);
  bar.expected = count, bar.everyone = count == 0;
  bar.all &= predicate;
  if (++bar.arrived == (bar.everyone ? live : count)) {
    const int all = bar.all;
    Release(bar);
    if (Random() % 4 == 0) Away(true);
    return all;
  }
  if (!waits) return 0;
  bar.waiting.push_back(current);
  Wait(Fiber::kBar);
  return current->result;
}

std::byte* DynamicShared() { return arena; }
std::byte* StaticShared(Slot& slot, size_t bytes, size_t alignment) {
  if (slot.block != block_number) {
    used_bytes = (used_bytes + alignment - 1) / alignment * alignment;
    slot = {block_number, arena + used_bytes};
    used_bytes += bytes;
    if (used_bytes > kShared) Fail("%zu bytes of shared memory", used_bytes);
    std::memset(slot.at, 0xff, bytes);
  }
  return slot.at;
}
uint32_t AddressOf(const void* shared) {
  const auto at = static_cast<const std::byte*>(shared) - arena;
  if (at < 0 || static_cast<size_t>(at) > used_bytes) Fail("%p is not in shared memory", shared);
  return static_cast<uint32_t>(at);
}
std::byte* SharedAt(uint32_t address, uint32_t bytes, uint32_t alignment) {
  if (address + size_t{bytes} > used_bytes) Fail("%u bytes at %u of %zu of shared memory", bytes, address, used_bytes);
  if (address % alignment != 0) Fail("shared address %u is not a multiple of %u", address, alignment);
  return arena + address;
}

void BarrierInit(uint32_t address, uint32_t count) {
  std::memcpy(SharedAt(address, 8, 8), &kMark, 8);
  Barrier& bar = barriers[address / 8];
  if (bar.count >= 0) Fail("the barrier at %u is there already", address);
  if (count < 1 || count >= 1 << 20) Fail("a barrier of %u arrivals", count);
  bar.count = bar.pending = count;
  initialised.push_back(address);
}
void BarrierArrive(uint32_t address, uint32_t count) {
  Barrier& bar = At(address);
  bar.pending -= count;
  Check(bar);
}
void BarrierExpect(uint32_t address, uint32_t bytes, bool arrives) {
  Barrier& bar = At(address);
  bar.bytes += bytes;
  if (bar.bytes >= 1 << 20) Fail("a barrier of %ld bytes", bar.bytes);
  bar.pending -= arrives;
  if (arrives) Check(bar);
}
bool BarrierTest(uint32_t address, uint32_t parity, Site at) {
  Barrier& bar = At(address);
  if (parity > 1) Fail("parity %u", parity);
  if (bar.phase != parity) return true;
  current->at = at, current->caller = __builtin_return_address(0), current->bar = address, current->parity = parity;
  bar.waiting.push_back(current);
  Wait(Fiber::kPolls);
  return bar.phase != parity;
}

void CheckCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t unit) {
  if (bytes == 0 || bytes % unit != 0 || to % unit != 0 || reinterpret_cast<uintptr_t>(from) % unit != 0)
    Fail("a copy of %u bytes from %p to %u, which are no multiples of %u", bytes, from, to, unit);
  std::memset(SharedAt(to, bytes, unit), 0xff, bytes);  // must not be read or written until it has landed
}
void BulkCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  At(bar);
  CheckCopy(to, from, bytes, 16);
  pending.push_back({{{to, from, bytes, bytes}}, bar, bytes, current});
}
void CopyAsync(uint32_t to, const void* from, uint32_t bytes, uint32_t given) {
  if (given > bytes) Fail("a copy of %u of %u bytes", given, bytes);
  CheckCopy(to, from, bytes, bytes);
  current->copies->open.push_back({to, from, bytes, given});
}
void CopiesArrive(uint32_t bar) {
  At(bar);
  Copies& own = *current->copies;
  Async async = {std::move(own.open), bar, -1, current};
  own.open.clear();
  for (const auto& group : own.groups) async.copies.insert(async.copies.end(), group.begin(), group.end());
  own.groups.clear();
  pending.push_back(std::move(async));
}
void CommitCopies() {
  current->copies->groups.push_back(std::move(current->copies->open));
  current->copies->open.clear();
}
void WaitForCopies(int groups_left) {
  Copies& own = *current->copies;
  if (groups_left < 0) CommitCopies(), groups_left = 0;
  for (size_t i = pending.size(); i-- > 0;)
    if (pending[i].owner == current && pending[i].bytes < 0) Land(i);
  for (; own.groups.size() > static_cast<size_t>(groups_left); own.groups.pop_front()) Land(own.groups.front());
}

void Unsupported(const char* what) { Fail("not emulated: %s", what); }

int SetSharedLimit(const void* function, int bytes) {
  const std::lock_guard lock(mutex);
  if (bytes > kShared) return cudaErrorInvalidValue;
  shared_limits[function] = std::max(shared_limits[function], bytes);  // a graph keeps what held as it was recorded
  return 0;
}

void RunKernel(const char* name, dim3 grid, dim3 block, size_t shared, const void* function,
               const std::function<void()>& thread) {
  const std::lock_guard lock(mutex);
  StartOnce();
  const auto limit = shared_limits.find(function);
  threads = block.x * block.y * block.z;
  if (threads < 1 || threads > kMostThreads || grid.x * grid.y * grid.z < 1 || grid.y > 65535 || grid.z > 65535 ||
      shared > static_cast<size_t>(limit != shared_limits.end() ? limit->second : 48 << 10)) {
    std::fprintf(stderr, "emu: %s: a launch of %ux%ux%u blocks, %d threads, %zu bytes\n", name, grid.x, grid.y, grid.z,
                 threads, shared);
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  kernel_name = name, gridDim = grid, blockDim = block, body = &thread;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) RunBlock(shared);
}

cudaError_t TakeError() { return static_cast<cudaError_t>(std::exchange(last_error, 0)); }
uint64_t Nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace emu
