#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "gtest/gtest.h"
#include "tests/proto/message_samples.h"

// A count is a claim: what a decoder allocates is bounded by the bytes that are there.

// The pair below is malloc and free throughout, which g++ cannot see once one of them is inlined.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
std::atomic<uint64_t> allocated_bytes{0};
}  // namespace

void* operator new(size_t bytes) {
  allocated_bytes += bytes;
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace dovetail::proto::testing {
namespace {

uint64_t BytesToDecode(const MessageKind& kind, const std::vector<std::byte>& bytes) {
  const uint64_t before = allocated_bytes;
  (void)kind.decode(bytes);
  return allocated_bytes - before;
}

TEST(Decoder, AllocatesByWhatIsThereNotByWhatIsClaimed) {
  for (const MessageKind& kind : AllMessages()) {
    const auto& sample = kind.samples[0];
    const uint64_t honest = BytesToDecode(kind, sample);
    for (size_t at = 0; at + 4 <= sample.size(); ++at)
      for (const uint32_t claim : {0xffffffffu, 0x7fffffffu, 0x80000000u, 0x00100000u, 0x00010000u, 0x1000u}) {
        auto bytes = sample;
        std::memcpy(bytes.data() + at, &claim, 4);
        EXPECT_LE(BytesToDecode(kind, bytes), honest + 8192) << kind.name << ": " << claim << " at byte " << at;
      }
  }
}

// The smallest encoding of an element bounds how many there can be, however large the element is in memory.
TEST(Decoder, AllocatesAModestMultipleOfALargeMessage) {
  for (const MessageKind& kind : AllMessages()) {
    std::vector<std::byte> zeros(1 << 20);
    const uint32_t claim = 4096;
    for (size_t at = 0; at + 4 <= 64; ++at) {
      auto bytes = zeros;
      std::memcpy(bytes.data() + at, &claim, 4);
      EXPECT_LE(BytesToDecode(kind, bytes), 16 * bytes.size()) << kind.name << " at byte " << at;
    }
  }
}

}  // namespace
}  // namespace dovetail::proto::testing
