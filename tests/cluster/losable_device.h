#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "kernels/device.h"

namespace dovetail::test {

// A device that can be lost in the middle of work, as a GPU by a fault: from then on nothing is allocated there, which
// fails the next step that is larger than those before it. Thread-safe.
class LosableDevice final : public kernels::Device {
 public:
  explicit LosableDevice(std::unique_ptr<kernels::Device> device) : device_(std::move(device)) {}
  void Lose() { lost_ = true; }

  std::string name() const override { return device_->name(); }
  std::unique_ptr<kernels::Stream> CreateStream() override { return device_->CreateStream(); }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t size_bytes) override {
    if (lost_) return Internal("an illegal address was used");
    return device_->Allocate(size_bytes);
  }
  absl::Status Health() override {
    return lost_ ? FailedPrecondition("the test's device is lost") : absl::OkStatus();
  }

 private:
  const std::unique_ptr<kernels::Device> device_;
  std::atomic<bool> lost_{false};
};

}  // namespace dovetail::test
