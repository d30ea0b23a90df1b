#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/device_link.h"

namespace dovetail::test {

// Links between two workers of one process, whose GPUs see each other's memory as it is. Keeps what memory was linked.
class LoopLinks final : public transport::DeviceLinks {
 public:
  absl::StatusOr<std::unique_ptr<transport::DeviceLink>> Link(void* memory, size_t) override {
    linked.push_back(static_cast<std::byte*>(memory));
    return std::unique_ptr<transport::DeviceLink>(new LoopLink(linked.back()));
  }
  std::vector<std::byte*> linked;

 private:
  class LoopLink final : public transport::DeviceLink {
   public:
    explicit LoopLink(std::byte* own) : offer_(reinterpret_cast<const char*>(&own), sizeof(own)) {}
    const std::string& offer() const override { return offer_; }
    absl::Status Accept(std::string_view offer) override {
      if (offer.size() != sizeof(peer_)) return InvalidArgument("that is no offer");
      std::memcpy(&peer_, offer.data(), sizeof(peer_));
      return absl::OkStatus();
    }
    absl::StatusOr<bool> Progress() override { return peer_ != nullptr; }
    std::byte* peer_memory() const override { return peer_; }

   private:
    const std::string offer_;
    std::byte* peer_ = nullptr;
  };
};

}  // namespace dovetail::test
