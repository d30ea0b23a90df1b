#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cuda/runtime/cuda_device.h"

// A GPU for tests, or a skip that says why there is none; ./check counts those skips.

namespace dovetail::kernels::cuda::testing {

inline absl::StatusOr<std::unique_ptr<CudaDevice>> OpenTestDevice() {
  DT_ASSIGN_OR_RETURN(std::shared_ptr<const CudaLibrary> library, CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = 0});
}

class CudaTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<CudaDevice>> device = OpenTestDevice();
    if (device.ok()) {
      device_ = std::move(*device);
    } else {
      reason_ = std::string(device.status().message());
    }
  }
  static void TearDownTestSuite() { device_.reset(); }

  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << "needs a GPU: " << reason_;
    auto stream = device_->CreateCudaStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = std::move(*stream);
  }
  void TearDown() override { stream_.reset(); }

  CudaDevice& device() { return *device_; }
  CudaStream& stream() { return *stream_; }

  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& values) {
    std::unique_ptr<Buffer> buffer = Empty(values.size() * sizeof(T));
    EXPECT_TRUE(stream_->Copy(buffer->data(), values.data(), values.size() * sizeof(T)).ok());
    EXPECT_TRUE(stream_->SynchronizeStatus().ok());
    return buffer;
  }
  // Full of bytes 0xff: NaN in every float type.
  std::unique_ptr<Buffer> Empty(size_t bytes) {
    auto buffer = device_->Allocate(bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(stream_->Fill((*buffer)->data(), 0xff, bytes).ok());
    return *std::move(buffer);
  }
  template <typename T>
  std::vector<T> Download(Buffer& buffer) {
    std::vector<T> values(buffer.size_bytes() / sizeof(T));
    EXPECT_TRUE(stream_->Copy(values.data(), buffer.data(), buffer.size_bytes()).ok());
    const absl::Status status = stream_->SynchronizeStatus();
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

 private:
  static inline std::unique_ptr<CudaDevice> device_;
  static inline std::string reason_;
  std::unique_ptr<CudaStream> stream_;
};

template <typename T>
T* As(const std::unique_ptr<Buffer>& buffer) {
  return reinterpret_cast<T*>(buffer->data());
}

// Rows of `width` values with `extra` NaN behind each.
inline std::vector<float> SpreadRows(const std::vector<float>& values, int rows, int width, int extra) {
  std::vector<float> out(static_cast<size_t>(rows) * (width + extra), std::numeric_limits<float>::quiet_NaN());
  for (ptrdiff_t row = 0; row < rows; ++row)
    std::copy_n(values.begin() + row * width, width, out.begin() + row * (width + extra));
  return out;
}

// One element of a wire type as raw bits, and back.
inline uint32_t ToWire(WireType type, float x) {
  if (type == WireType::kBF16) return ToBF16(x).bits;
  if (type == WireType::kF16) return ToF16(x).bits;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float FromWire(WireType type, const std::byte* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  if (type == WireType::kBF16) return ToFloat(BF16{half});
  if (type == WireType::kF16) return ToFloat(F16{half});
  float x;
  std::memcpy(&x, at, 4);
  return x;
}
inline size_t BytesOf(WireType type) { return type == WireType::kF32 ? 4 : 2; }

inline std::vector<std::byte> ToWireBytes(WireType type, const std::vector<float>& x) {
  std::vector<std::byte> out(x.size() * BytesOf(type));
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t bits = ToWire(type, x[i]);
    std::memcpy(out.data() + i * BytesOf(type), &bits, BytesOf(type));
  }
  return out;
}
inline std::vector<float> FromWireBytes(WireType type, const std::vector<std::byte>& bytes) {
  std::vector<float> out(bytes.size() / BytesOf(type));
  for (size_t i = 0; i < out.size(); ++i) out[i] = FromWire(type, bytes.data() + i * BytesOf(type));
  return out;
}

// What an E4M3 byte means (OCP 8-bit floating point): 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are
// NaN.
inline float FromE4M3(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return __builtin_nanf("");
  const float magnitude = exponent == 0 ? __builtin_ldexpf(static_cast<float>(mantissa), -9)
                                        : __builtin_ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}
// The nearest one, ties to the even mantissa, saturating.
inline uint8_t ToE4M3(float x) {
  uint8_t best = 0;
  float distance = __builtin_inff();
  for (int bits = 0; bits < 0x7f; ++bits) {
    const float d = __builtin_fabsf(__builtin_fabsf(x) - FromE4M3(static_cast<uint8_t>(bits)));
    if (d < distance || (d == distance && bits % 2 == 0)) distance = d, best = static_cast<uint8_t>(bits);
  }
  return static_cast<uint8_t>(best | (__builtin_signbit(x) ? 0x80 : 0));
}

// Stores an element of a block as the GPU keeps it; returns what it then is.
inline float StoreKv(KvType type, float x, std::byte* at) {
  if (type == KvType::kE4M3) {
    const uint8_t bits = ToE4M3(x);
    std::memcpy(at, &bits, 1);
    return FromE4M3(bits);
  }
  const WireType wire = type == KvType::kBF16 ? WireType::kBF16 : WireType::kF16;
  const uint32_t bits = ToWire(wire, x);
  std::memcpy(at, &bits, 2);
  return FromWire(wire, at);
}
inline float LoadKv(KvType type, const std::byte* at) {
  if (type == KvType::kE4M3) return FromE4M3(static_cast<uint8_t>(*at));
  return FromWire(type == KvType::kBF16 ? WireType::kBF16 : WireType::kF16, at);
}

}  // namespace dovetail::kernels::cuda::testing
