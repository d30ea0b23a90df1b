#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "proto/frame.h"
#include "proto/header_checksum.h"
#include "transport/ucx/process.h"
#include "transport/ucx/socket_guard.h"

// The bytes that UcxPort puts around a frame, and the address by which nodes find each other. Little-endian, fixed
// size.
// Threads: plain values and pure functions.

namespace dovetail::transport::ucx {

enum class WireKind : uint16_t {
  // Greetings tell limits: `sequence` the bytes of a frame, `offset` those in flight. On shared memory a RegionKey
  // follows.
  kHello = 1,    // the sender has added the receiver as a peer
  kWelcome = 2,  // answers kHello: so has the receiver
  kCredit = 3,   // only tells `delivered`
  kMessage = 4,  // payload follows; the receiver drops it after handling
  kTensor = 5,   // payload follows; the receiver keeps it until it has answered
  kPlaced = 6,   // as kTensor, but the payload was PUT into the receiver's region at `offset` before this was sent
  kGoodbye = 7,  // the sender's port ends, and has given up the receiver's region: it cannot write there any more
};

inline constexpr unsigned kActiveMessageId = 1;     // of UCX; there is no other
inline constexpr uint32_t kWireMagic = 0x55545644;  // "DVTU"
inline constexpr uint16_t kWireVersion = 4;

// The user header of every active message. `key` is the receiver's, which it gives out over the control plane only:
// what does not carry it was not sent by a member. Frames (kMessage and later) are numbered from 0 by `sequence`;
// `delivered` counts the frames of the receiver that the sender has handed to its node.
struct WireHeader {
  uint32_t magic = kWireMagic;
  uint16_t version = kWireVersion;
  WireKind kind{};
  uint32_t from = 0;
  uint32_t from_epoch = 0;
  uint64_t key = 0;
  uint64_t sequence = 0;
  uint64_t delivered = 0;
  uint64_t offset = 0;
  proto::FrameHeader frame;
  uint32_t reserved = 0;
  uint32_t checksum = 0;  // CRC-32C of the 116 bytes before it
};
static_assert(sizeof(WireHeader) == 120);

// Fills in the checksum.
inline void Seal(WireHeader& header) { header.checksum = proto::ChecksumOfHeader(header); }

inline bool Known(WireKind kind) { return kind >= WireKind::kHello && kind <= WireKind::kGoodbye; }

// Magic, version, checksum, kind and reserved bytes. Says nothing about `frame`. Intact() is whether Check() is ok,
// where damaged headers are only counted.
// Errors: kDataLoss: the checksum does not match; kInvalidArgument names the field.
absl::Status Check(const WireHeader& header);
inline bool Intact(const WireHeader& header) {
  return header.magic == kWireMagic && header.version == kWireVersion && Known(header.kind) && header.reserved == 0 &&
         header.checksum == proto::ChecksumOfHeader(header);
}

// What one node tells the others over the control plane.
struct NodeAddress {
  NodeId node;
  Epoch epoch;
  uint64_t key = 0;
  ProcessIdentity process;               // means something on its own host only
  Ticket ticket{};                       // what a connection to one of `listeners` begins with
  std::vector<SocketAddress> listeners;  // on TCP; none if it takes no connections there
  std::string worker;  // UCX's own address; parsed by UCX, so never fed from a source that is not trusted
};

inline constexpr size_t kMaxWorkerAddressBytes = 16 << 10;
inline constexpr size_t kMaxListeners = 64;  // of one node: UCX opens one for each network device

std::string Encode(const NodeAddress& address);
absl::StatusOr<NodeAddress> DecodeNodeAddress(std::string_view bytes);

// Where a peer may PUT: a descriptor of the owner's process (RemoteRegion). Means nothing off this host.
struct RegionKey {
  NodeId owner;
  Epoch owner_epoch;
  NodeId writer;  // the one node that may use it
  uint32_t descriptor = 0;
  uint64_t bytes = 0;
  uint64_t token = 0;  // lies at the front of the region, if the key still opens what it was made for
};

inline constexpr uint64_t kMaxRegionBytes = uint64_t{1} << 30;

std::string Encode(const RegionKey& key);
absl::StatusOr<RegionKey> DecodeRegionKey(std::string_view bytes);

}  // namespace dovetail::transport::ucx
