#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace dovetail::compute {

// What another rank of a prefill group sent, as it is kept until it is used. Copying it copies no bytes.
//   Bytes:     in host memory, or on the device of the worker that got them: only its backend reads them
//   Ownership: `owner` keeps them
//   Threads:   thread-compatible; the last copy of `owner` may be released by any thread
struct RankTensor {
  RankTensor() = default;
  RankTensor(std::span<const std::byte> memory, std::shared_ptr<const void> keeper)
      : bytes(memory), owner(std::move(keeper)) {}
  RankTensor(std::vector<std::byte> host) {  // NOLINT: host memory is one
    const auto kept = std::make_shared<const std::vector<std::byte>>(std::move(host));
    bytes = *kept;
    owner = kept;
  }
  size_t size() const { return bytes.size(); }
  bool empty() const { return bytes.empty(); }

  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

}  // namespace dovetail::compute
