#include "transport/ucx/wire.h"

#include <cstring>
#include <span>
#include <utility>

namespace dovetail::transport::ucx {
namespace {

inline constexpr uint32_t kAddressMagic = 0x41545644;  // "DVTA"
inline constexpr uint32_t kRegionMagic = 0x52545644;   // "DVTR"

uint32_t ChecksumOf(std::string_view bytes) {
  return proto::Crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

template <typename T>
void Put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes values off the front; `ok` turns false for good at the first that is not there.
struct Reader {
  std::string_view rest;
  bool ok = true;

  template <typename T>
  T Take() {
    T value{};
    if (rest.size() < sizeof(T)) {
      ok = false;
      return value;
    }
    std::memcpy(&value, rest.data(), sizeof(T));
    rest.remove_prefix(sizeof(T));
    return value;
  }
};

// Checks the checksum at the end and the magic at the front.
absl::StatusOr<Reader> Open(std::string_view bytes, uint32_t magic, const char* what) {
  if (bytes.size() < 8) return InvalidArgument(what, ": ", bytes.size(), " bytes are too few");
  uint32_t checksum;
  std::memcpy(&checksum, bytes.data() + bytes.size() - 4, 4);
  bytes.remove_suffix(4);
  if (checksum != ChecksumOf(bytes)) return DataLoss(what, ": its checksum does not match; it was damaged on the way");
  Reader reader{bytes};
  if (reader.Take<uint32_t>() != magic) return InvalidArgument(what, ": these bytes are something else");
  return reader;
}

absl::StatusOr<std::vector<SocketAddress>> TakeListeners(Reader& reader) {
  const auto count = reader.Take<uint32_t>();
  if (count > kMaxListeners) return InvalidArgument("node address: ", count, " TCP listeners; at most ", kMaxListeners);
  std::vector<SocketAddress> listeners;
  for (uint32_t i = 0; i < count && reader.ok; ++i) {
    const auto length = reader.Take<uint32_t>();
    if (length > reader.rest.size()) return InvalidArgument("node address: a TCP listener in it is cut short");
    DT_ASSIGN_OR_RETURN(SocketAddress listener, SocketAddress::FromBytes(reader.rest.substr(0, length)));
    listeners.push_back(std::move(listener));
    reader.rest.remove_prefix(length);
  }
  return listeners;
}

absl::StatusOr<std::string> TakeTail(Reader& reader, const char* what) {
  const auto length = reader.Take<uint32_t>();
  if (!reader.ok || length == 0 || length > kMaxWorkerAddressBytes || length != reader.rest.size())
    return InvalidArgument(what, ": a length in it does not fit its size");
  return std::string(reader.rest);
}

}  // namespace

absl::Status Check(const WireHeader& header) {
  if (header.magic != kWireMagic) return InvalidArgument("wire header: magic ", header.magic, " is not ", kWireMagic);
  if (header.version != kWireVersion)
    return InvalidArgument("wire header: version ", header.version, "; this node speaks ", kWireVersion);
  if (header.checksum != proto::ChecksumOfHeader(header)) return DataLoss("wire header: the checksum does not match");
  if (!Known(header.kind)) return InvalidArgument("wire header: kind ", static_cast<int>(header.kind), " is unknown");
  if (header.reserved != 0) return InvalidArgument("wire header: reserved bytes are not 0");
  return absl::OkStatus();
}

std::string Encode(const NodeAddress& address) {
  std::string out;
  Put(out, kAddressMagic);
  Put(out, address.node.value());
  Put(out, address.epoch.value());
  Put(out, address.key);
  Put(out, address.process.pid);
  Put(out, address.process.start);
  Put(out, address.ticket);
  Put(out, static_cast<uint32_t>(address.listeners.size()));
  for (const SocketAddress& listener : address.listeners) {
    Put(out, static_cast<uint32_t>(listener.bytes().size()));
    out += listener.bytes();
  }
  Put(out, static_cast<uint32_t>(address.worker.size()));
  out += address.worker;
  Put(out, ChecksumOf(out));
  return out;
}

absl::StatusOr<NodeAddress> DecodeNodeAddress(std::string_view bytes) {
  DT_ASSIGN_OR_RETURN(Reader reader, Open(bytes, kAddressMagic, "node address"));
  NodeAddress address;
  address.node = NodeId(reader.Take<uint32_t>());
  address.epoch = Epoch(reader.Take<uint32_t>());
  address.key = reader.Take<uint64_t>();
  address.process.pid = reader.Take<uint32_t>();
  address.process.start = reader.Take<uint64_t>();
  address.ticket = reader.Take<Ticket>();
  DT_ASSIGN_OR_RETURN(address.listeners, TakeListeners(reader));
  DT_ASSIGN_OR_RETURN(address.worker, TakeTail(reader, "node address"));
  return address;
}

std::string Encode(const RegionKey& key) {
  std::string out;
  Put(out, kRegionMagic);
  Put(out, key.owner.value());
  Put(out, key.owner_epoch.value());
  Put(out, key.writer.value());
  Put(out, key.descriptor);
  Put(out, key.bytes);
  Put(out, key.token);
  Put(out, ChecksumOf(out));
  return out;
}

absl::StatusOr<RegionKey> DecodeRegionKey(std::string_view bytes) {
  DT_ASSIGN_OR_RETURN(Reader reader, Open(bytes, kRegionMagic, "region key"));
  RegionKey key;
  key.owner = NodeId(reader.Take<uint32_t>());
  key.owner_epoch = Epoch(reader.Take<uint32_t>());
  key.writer = NodeId(reader.Take<uint32_t>());
  key.descriptor = reader.Take<uint32_t>();
  key.bytes = reader.Take<uint64_t>();
  key.token = reader.Take<uint64_t>();
  if (!reader.ok || !reader.rest.empty()) return InvalidArgument("region key: it has another size than keys have");
  if (key.bytes == 0 || key.bytes > kMaxRegionBytes)
    return InvalidArgument("region key: ", key.bytes, " bytes are outside 1..", kMaxRegionBytes);
  return key;
}

}  // namespace dovetail::transport::ucx
