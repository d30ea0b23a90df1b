#include "kernels/cuda/runtime/cuda_device.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

// A driver with 100 MiB, on the host.
struct FakeDriver {
  size_t free_bytes = size_t{100} << 20;
  std::map<char*, size_t> taken;

  MemoryPool Pool(bool frees = true) {
    MemoryPool::Free free = [this](void* memory) {
      auto* piece = static_cast<char*>(memory);
      free_bytes += taken.at(piece);
      taken.erase(piece);
      delete[] piece;
    };
    return MemoryPool(
        [this](size_t bytes) -> absl::StatusOr<void*> {
          if (bytes > free_bytes) return ResourceExhausted("device memory: out of memory");
          free_bytes -= bytes;
          char* memory = new char[1];
          taken[memory] = bytes;
          return memory;
        },
        frees ? std::move(free) : nullptr);
  }
};

TEST(MemoryPool, GivesAFreedPieceToTheNextRequestOfItsSize) {
  FakeDriver driver;
  MemoryPool pool = driver.Pool();
  void* a = *pool.Take(1000);
  EXPECT_EQ(pool.taken_bytes(), 1024u);
  pool.Return(a, 1000);
  EXPECT_EQ(pool.taken_bytes(), 0u);
  EXPECT_EQ(pool.kept_bytes(), 1024u);
  EXPECT_EQ(*pool.Take(600), a) << "the same size, rounded up";
  void* b = *pool.Take(600);
  EXPECT_NE(a, b);
  pool.Return(a, 600);
  pool.Return(b, 600);
}

TEST(MemoryPool, GivesBackWhatItKeepsBeforeItFails) {
  FakeDriver driver;
  MemoryPool pool = driver.Pool();
  const size_t most = size_t{60} << 20;
  void* a = *pool.Take(most);
  pool.Return(a, most);
  const auto larger = pool.Take(size_t{80} << 20);
  ASSERT_TRUE(larger.ok()) << larger.status();
  EXPECT_EQ(pool.kept_bytes(), 0u);
  EXPECT_EQ(pool.Take(most).status().code(), absl::StatusCode::kResourceExhausted);
  pool.Return(*larger, size_t{80} << 20);
  pool.Trim();
  EXPECT_TRUE(driver.taken.empty());
}

TEST(MemoryPool, WithoutAWayToFreeItKeepsWhatOthersMayHaveOpen) {
  FakeDriver driver;
  MemoryPool pool = driver.Pool(/*frees=*/false);
  const size_t most = size_t{60} << 20;
  void* a = *pool.Take(most);
  pool.Return(a, most);
  EXPECT_EQ(pool.Take(size_t{80} << 20).status().code(), absl::StatusCode::kResourceExhausted);
  pool.Trim();
  EXPECT_EQ(pool.kept_bytes(), most);
  EXPECT_EQ(*pool.Take(most), a);
  pool.Return(a, most);
  for (const auto& [memory, bytes] : driver.taken) delete[] memory;
}

TEST(MemoryPool, NothingIsNull) {
  FakeDriver driver;
  MemoryPool pool = driver.Pool();
  EXPECT_EQ(*pool.Take(0), nullptr);
  pool.Return(nullptr, 0);
  EXPECT_EQ(pool.kept_bytes(), 0u);
}

// A driver as the survey sees it.
int g_driver_version = 13000;
Backend FakeBackend() {
  Backend backend{};
  backend.abi = kBackendAbi;
  backend.error_text = [](int) { return "no luck"; };
  backend.is_out_of_memory = [](int error) { return error == 2; };
  backend.versions = [](int* driver, int* runtime) {
    *driver = g_driver_version;
    *runtime = 13000;
    return 0;
  };
  backend.device_count = [](int* count) {
    *count = 2;
    return 0;
  };
  backend.device_info = [](int device, DeviceInfo* info) {
    info->major = device == 0 ? 9 : 7;
    info->minor = 0;
    return 0;
  };
  backend.has_code = [](int, bool* has) {
    *has = false;
    return 0;
  };
  return backend;
}

TEST(CudaSurvey, SaysWhatIsMissing) {
  const Backend backend = FakeBackend();
  const CudaLibrary library(&backend);
  g_driver_version = 0;
  EXPECT_NE(SurveyCuda(library).status.message().find("no NVIDIA driver"), std::string::npos);
  g_driver_version = 12040;
  EXPECT_NE(SurveyCuda(library).status.message().find("is for CUDA 12.4; 13.0 or newer is needed"), std::string::npos);
  g_driver_version = 13010;
  const CudaSurvey survey = SurveyCuda(library);
  ASSERT_TRUE(survey.status.ok()) << survey.status;
  ASSERT_EQ(survey.devices.size(), 2u);
  EXPECT_NE(survey.devices[0].usable.message().find("no kernels for compute capability 9.0"), std::string::npos);
  EXPECT_NE(survey.devices[1].usable.message().find("compute capability 7.0 is too old"), std::string::npos);
}

TEST(CudaLibraryTest, ErrorsAreTyped) {
  const Backend backend = FakeBackend();
  const CudaLibrary library(&backend);
  EXPECT_TRUE(library.Check(0, "a copy").ok());
  EXPECT_EQ(library.Check(2, "a buffer").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(library.Check(719, "a kernel").ToString(), "INTERNAL: a kernel: no luck (CUDA error 719)");
  EXPECT_EQ(CudaLibrary::Open("/nowhere/libdovetail_cuda.so").status().code(), absl::StatusCode::kNotFound);
}

TEST(CudaName, IsParsed) {
  EXPECT_EQ(*ParseCudaName("cuda:0"), 0);
  EXPECT_EQ(*ParseCudaName("cuda:12"), 12);
  for (const char* bad : {"cuda", "cuda:", "cuda:-1", "cuda:1x", "cpu", ""})
    EXPECT_FALSE(ParseCudaName(bad).ok()) << bad;
}

using CudaDeviceTest = testing::CudaTest;

TEST_F(CudaDeviceTest, CopiesBothWaysThroughPinnedMemory) {
  auto pinned = device().AllocatePinned(1 << 20);
  ASSERT_TRUE(pinned.ok());
  for (size_t i = 0; i < 1 << 20; ++i) (*pinned)->data()[i] = static_cast<std::byte>(i * 7);
  auto there = device().Allocate(1 << 20);
  ASSERT_TRUE(there.ok());
  ASSERT_TRUE(stream().Copy((*there)->data(), (*pinned)->data(), 1 << 20).ok());
  const auto back = Download<std::byte>(**there);
  for (size_t i = 0; i < back.size(); ++i) ASSERT_EQ(back[i], static_cast<std::byte>(i * 7));
}

// The other process runs the same test with the handle in its environment, and reads.
class SharedMemoryTest : public CudaDeviceTest {
 protected:
  static constexpr const char* kHandle = "DOVETAIL_TEST_MEMORY_HANDLE";
  static constexpr size_t kBytes = 3000;
  static std::byte Expected(size_t i) { return static_cast<std::byte>(i * 13 + 5); }

  void Share() {
    auto shared = device().AllocateShared(kBytes);
    ASSERT_TRUE(shared.ok()) << shared.status();
    EXPECT_EQ((*shared)->size_bytes(), size_t{2} << 20) << "a power of two, and an allocation of the driver's";
    auto pinned = device().AllocatePinned(kBytes);
    ASSERT_TRUE(pinned.ok());
    for (size_t i = 0; i < kBytes; ++i) (*pinned)->data()[i] = Expected(i);
    ASSERT_TRUE(stream().Copy((*shared)->data(), (*pinned)->data(), kBytes).ok());
    ASSERT_TRUE(stream().SynchronizeStatus().ok());
    const auto handle = device().Export(**shared);
    ASSERT_TRUE(handle.ok()) << handle.status();
    if (std::string_view(device().info().name) != "CPU emulation") {
      EXPECT_FALSE(device().Open(*handle).ok()) << "a process does not open its own";
    }
    const absl::string_view bytes(reinterpret_cast<const char*>(handle->bytes), sizeof(handle->bytes));
    const std::string command = absl::StrCat(kHandle, "=", absl::BytesToHexString(bytes), " ",
                                             std::filesystem::read_symlink("/proc/self/exe").string(),
                                             " --gtest_filter=SharedMemoryTest.AnotherProcessReadsIt");
    EXPECT_EQ(std::system(command.c_str()), 0);
  }

  void Read(const std::string& hex) {
    MemoryHandle handle;
    const std::string bytes = absl::HexStringToBytes(hex);
    ASSERT_EQ(bytes.size(), sizeof(handle.bytes));
    std::memcpy(handle.bytes, bytes.data(), bytes.size());
    const auto opened = device().Open(handle);
    ASSERT_TRUE(opened.ok()) << opened.status();
    ASSERT_GE(opened->bytes().size(), kBytes);
    auto pinned = device().AllocatePinned(kBytes);
    ASSERT_TRUE(pinned.ok());
    ASSERT_TRUE(stream().Copy((*pinned)->data(), opened->bytes().data(), kBytes).ok());
    ASSERT_TRUE(stream().SynchronizeStatus().ok());
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ((*pinned)->data()[i], Expected(i)) << i;
  }
};

TEST_F(SharedMemoryTest, AnotherProcessReadsIt) {
  const char* const handle = std::getenv(kHandle);
  handle == nullptr ? Share() : Read(handle);
}

TEST_F(SharedMemoryTest, IsUsedAgain) {
  auto first = device().AllocateShared(5 << 20);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ((*first)->size_bytes(), size_t{8} << 20);
  const std::byte* const memory = (*first)->data();
  first->reset();
  auto second = device().AllocateShared(6 << 20);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*second)->data(), memory);
}

TEST_F(CudaDeviceTest, MoreMemoryThanThereIsFailsWithNumbers) {
  const auto memory = device().memory();
  ASSERT_TRUE(memory.ok());
  EXPECT_GT(memory->total_bytes, size_t{1} << 30);
  const auto buffer = device().Allocate(memory->total_bytes + (size_t{1} << 30));
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(buffer.status().message().find("MiB asked for"), std::string::npos) << buffer.status();
  EXPECT_TRUE(device().Allocate(4096).ok()) << "the device works on";
}

TEST_F(CudaDeviceTest, AGraphRunsWhatWasRecorded) {
  auto a = device().Allocate(4096), b = device().Allocate(4096);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_TRUE(stream().BeginCapture().ok());
  ASSERT_TRUE(stream().Fill((*a)->data(), 7, 4096).ok());
  ASSERT_TRUE(stream().Copy((*b)->data(), (*a)->data(), 4096).ok());
  auto graph = stream().EndCapture();
  ASSERT_TRUE(graph.ok()) << graph.status();
  ASSERT_TRUE(stream().Fill((*b)->data(), 0, 4096).ok());
  ASSERT_TRUE(stream().Launch(*graph).ok());
  for (const std::byte x : Download<std::byte>(**b)) ASSERT_EQ(x, std::byte{7});
}

TEST_F(CudaDeviceTest, AStreamWaitsForAnEventOfAnother) {
  auto other = device().CreateCudaStream();
  auto event = device().CreateEvent();
  auto memory = device().Allocate(size_t{256} << 20);
  ASSERT_TRUE(other.ok() && event.ok() && memory.ok());
  ASSERT_TRUE(stream().Fill((*memory)->data(), 1, (*memory)->size_bytes()).ok());
  ASSERT_TRUE(stream().Record(*event).ok());
  ASSERT_TRUE((*other)->Wait(*event).ok());
  std::byte last{0};
  ASSERT_TRUE((*other)->Copy(&last, (*memory)->data() + (*memory)->size_bytes() - 1, 1).ok());
  ASSERT_TRUE((*other)->SynchronizeStatus().ok());
  EXPECT_EQ(last, std::byte{1});
  EXPECT_TRUE(*event->Done());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
