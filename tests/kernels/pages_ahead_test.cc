#include "kernels/pages_ahead.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/aligned_buffer.h"

namespace dovetail::kernels {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

bool Soon(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// Bytes of the buffer for which there is memory.
size_t Resident(AlignedBuffer& buffer) {
  constexpr size_t kPage = 4096;
  std::vector<unsigned char> pages((buffer.size_bytes() + kPage - 1) / kPage);
  EXPECT_EQ(mincore(buffer.data(), buffer.size_bytes(), pages.data()), 0);
  return kPage * static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }));
}

bool Supported() {
  auto probe = AlignedBuffer::Create(8 * kMiB);
  PagesAhead pages(probe->bytes(), 2 * kMiB);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (pages.taken() == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return pages.taken() > 0;
}

TEST(PagesAhead, TheFirstOnesAreThereBeforeAnythingIsWritten) {
  if (!Supported()) GTEST_SKIP() << "this kernel has no MADV_POPULATE_WRITE (Linux 5.14)";
  auto buffer = AlignedBuffer::Create(64 * kMiB);
  ASSERT_TRUE(buffer.ok());
  ASSERT_EQ(Resident(*buffer), 0u);
  PagesAhead pages(buffer->bytes(), 8 * kMiB);
  ASSERT_TRUE(Soon([&] { return pages.taken() >= 8 * kMiB; }));
  EXPECT_GE(Resident(*buffer), 8 * kMiB);
  EXPECT_LE(Resident(*buffer), 10 * kMiB) << "no more than was asked for";
}

TEST(PagesAhead, TheyStayAheadOfWhatIsUsedToTheEndOfTheBuffer) {
  if (!Supported()) GTEST_SKIP() << "this kernel has no MADV_POPULATE_WRITE (Linux 5.14)";
  auto buffer = AlignedBuffer::Create(64 * kMiB + 12288);
  ASSERT_TRUE(buffer.ok());
  PagesAhead pages(buffer->bytes(), 8 * kMiB);
  for (const size_t used : {kMiB / 2, 3 * kMiB + 1, 20 * kMiB, 60 * kMiB, 64 * kMiB}) {
    pages.WillUse(used);
    const size_t expected = std::min(buffer->size_bytes(), used + 7 * kMiB);  // told in eighths of 8 MiB
    ASSERT_TRUE(Soon([&] { return pages.taken() >= expected; })) << used << ": " << pages.taken();
    EXPECT_GE(Resident(*buffer), expected);
    EXPECT_LE(Resident(*buffer), used + 10 * kMiB);
  }
  EXPECT_EQ(pages.taken(), buffer->size_bytes());
  pages.WillUse(buffer->size_bytes());
}

TEST(PagesAhead, WhatIsWrittenMeanwhileStays) {
  auto buffer = AlignedBuffer::Create(64 * kMiB);
  ASSERT_TRUE(buffer.ok());
  {
    PagesAhead pages(buffer->bytes(), 64 * kMiB);
    for (size_t at = 0; at < buffer->size_bytes(); at += 4096) buffer->data()[at] = std::byte{7};
  }  // which may end it in the middle
  for (size_t at = 0; at < buffer->size_bytes(); at += 4096) ASSERT_EQ(buffer->data()[at], std::byte{7}) << at;
}

}  // namespace
}  // namespace dovetail::kernels
