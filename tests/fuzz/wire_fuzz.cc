#include <cstring>
#include <span>
#include <string>

#include "base/check.h"
#include "proto/frame.h"
#include "tests/fuzz/targets.h"
#include "transport/ucx/lanes.h"
#include "transport/ucx/wire.h"

namespace dovetail::fuzz {
namespace {

namespace ucx = transport::ucx;

template <typename T>
void CheckAgain(const absl::StatusOr<T>& value, const std::string& bytes) {
  if (value.ok())
    DT_CHECK(ucx::Encode(*value) == bytes);
  else
    DT_CHECK(!value.status().message().empty());
}

// As it is, and with the checksum that makes readers look at the rest.
std::string Sealed(std::string bytes) {
  if (bytes.size() < 4) return bytes;
  const auto body = std::as_bytes(std::span(bytes)).first(bytes.size() - 4);
  const uint32_t checksum = proto::Crc32c(body);
  std::memcpy(bytes.data() + body.size(), &checksum, 4);
  return bytes;
}

}  // namespace

// One byte says what follows: an address, the key of a region, a header, UCX's text about an endpoint.
void FuzzWire(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const std::string given(reinterpret_cast<const char*>(data) + 1, size - 1);
  for (const std::string& bytes : {given, Sealed(given)}) {
    if (data[0] == 'A') CheckAgain(ucx::DecodeNodeAddress(bytes), bytes);
    if (data[0] == 'K') CheckAgain(ucx::DecodeRegionKey(bytes), bytes);
    if (data[0] == 'H' && bytes.size() >= sizeof(ucx::WireHeader)) {
      ucx::WireHeader header;
      std::memcpy(&header, bytes.data(), sizeof(header));
      if (ucx::Check(header).ok()) (void)proto::Validate(header.frame).ok();
    }
    if (data[0] == 'L') (void)ucx::CheckLanes(ucx::Lanes::kShm, ucx::TransportsIn(bytes)).ok();
  }
}

}  // namespace dovetail::fuzz
