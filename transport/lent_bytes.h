#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace dovetail::transport {

// Memory that a node lends to its port for a frame. Copying it does not allocate.
//
// Ownership: `owner` keeps the memory mapped as long as the port may read it, even when the node that lent it has grown
// its buffers or has ended meanwhile. Without an owner the caller keeps it mapped for as long as the port exists.
// Threads: thread-compatible; a value. The port's thread may release the last copy of `owner`, after the node's end.
class LentBytes : public std::span<const std::byte> {
 public:
  LentBytes() = default;
  LentBytes(std::span<const std::byte> bytes, std::shared_ptr<const void> owner_of_bytes)
      : std::span<const std::byte>(bytes), owner(std::move(owner_of_bytes)) {}
  template <typename Bytes>
  requires(std::is_constructible_v<std::span<const std::byte>, const Bytes&>) LentBytes(const Bytes& bytes)
      : std::span<const std::byte>(bytes) {}  // NOLINT: as a span, owned by the caller

  std::shared_ptr<const void> owner;
};

// The first `bytes` of a buffer, which has data().
template <typename Buffer>
LentBytes Lend(const std::shared_ptr<Buffer>& buffer, size_t bytes) {
  return {std::span<const std::byte>(buffer->data(), bytes), buffer};
}

}  // namespace dovetail::transport
