#pragma once
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/device.h"

namespace dovetail::test {

// A device whose memory fails, or which is lost as a whole. Thread-safe, but Alter() must not run together with what
// uses the memory.
class FrailDevice final : public kernels::Device {
 public:
  explicit FrailDevice(std::unique_ptr<kernels::Device> device) : device_(std::move(device)) {}

  // From now on nothing is allocated, which fails the next step that is larger than those before it.
  void Lose() { lost_ = true; }

  // Hands over the largest buffer that is allocated now: of an attention worker its KV blocks.
  void Alter(const std::function<void(std::byte* data, size_t bytes)>& alter) {
    std::lock_guard<std::mutex> lock(*mutex_);
    std::pair<std::byte*, size_t> largest;
    for (const auto& buffer : *buffers_)
      if (buffer.second > largest.second) largest = buffer;
    alter(largest.first, largest.second);
  }
  // Flips the lowest bit of the first byte of every `step` bytes of it.
  void FlipBits(size_t step) {
    Alter([step](std::byte* data, size_t bytes) { Flip(data, bytes, 0, step, 1); });
  }
  // Changes the sign of every float of it.
  void FlipSigns() {
    Alter([](std::byte* data, size_t bytes) { Flip(data, bytes, 3, 4, 0x80); });
  }

  std::string name() const override { return device_->name(); }
  std::unique_ptr<kernels::Stream> CreateStream() override { return device_->CreateStream(); }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t size_bytes) override {
    if (lost_) return Internal("an illegal address was used");
    DT_ASSIGN_OR_RETURN(auto buffer, device_->Allocate(size_bytes));
    std::lock_guard<std::mutex> lock(*mutex_);
    buffers_->emplace_back(buffer->data(), size_bytes);
    return std::unique_ptr<kernels::Buffer>(std::make_unique<Noted>(std::move(buffer), mutex_, buffers_));
  }
  absl::Status Health() override { return lost_ ? FailedPrecondition("the test's device is lost") : absl::OkStatus(); }

 private:
  // As memory that fails does, in no order with the threads that use it. Where a test knows that none does, it often
  // knows from gRPC, whose synchronisation ThreadSanitizer does not see.
  __attribute__((no_sanitize_thread)) static void Flip(std::byte* data, size_t bytes, size_t first, size_t step,
                                                       unsigned char bits) {
    unsigned char* const memory = reinterpret_cast<unsigned char*>(data);
    for (size_t at = first; at < bytes; at += step) memory[at] ^= bits;
  }

  using Buffers = std::vector<std::pair<std::byte*, size_t>>;

  // Buffers may outlive the device object's use, not its list.
  class Noted final : public kernels::Buffer {
   public:
    Noted(std::unique_ptr<kernels::Buffer> buffer, std::shared_ptr<std::mutex> mutex, std::shared_ptr<Buffers> all)
        : buffer_(std::move(buffer)), mutex_(std::move(mutex)), all_(std::move(all)) {}
    ~Noted() override {
      std::lock_guard<std::mutex> lock(*mutex_);
      std::erase(*all_, std::pair(buffer_->data(), buffer_->size_bytes()));
    }
    std::byte* data() override { return buffer_->data(); }
    size_t size_bytes() const override { return buffer_->size_bytes(); }

   private:
    const std::unique_ptr<kernels::Buffer> buffer_;
    const std::shared_ptr<std::mutex> mutex_;
    const std::shared_ptr<Buffers> all_;
  };

  const std::unique_ptr<kernels::Device> device_;
  std::atomic<bool> lost_{false};
  const std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  const std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
};

}  // namespace dovetail::test
