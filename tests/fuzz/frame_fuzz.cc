#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "proto/cache_frames.h"
#include "proto/frame.h"
#include "proto/sequence_frames.h"
#include "proto/trace_frame.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

// What a decoder accepts means exactly its bytes: encoding it again gives them back.
template <typename Message>
void CheckMessage(std::span<const std::byte> payload) {
  const auto message = proto::Decode<Message>(payload);
  if (!message.ok()) {
    DT_CHECK(!message.status().message().empty());
    return;
  }
  std::vector<std::byte> again;
  proto::Encode(*message, again);
  DT_CHECK(again.size() == payload.size() && std::memcmp(again.data(), payload.data(), again.size()) == 0);
}

void CheckPayload(proto::FrameType type, std::span<const std::byte> payload) {
  if (type == proto::kCacheChanged) return CheckMessage<proto::CacheChanged>(payload);
  if (type == proto::kTraceSequence) return CheckMessage<proto::TraceSequence>(payload);
  switch (type) {
    case proto::FrameType::kOpenSequence: return CheckMessage<proto::OpenSequence>(payload);
    case proto::FrameType::kSequenceOpened: return CheckMessage<proto::SequenceOpened>(payload);
    case proto::FrameType::kForkSequence: return CheckMessage<proto::ForkSequence>(payload);
    case proto::FrameType::kReleaseSequence: return CheckMessage<proto::ReleaseSequence>(payload);
    case proto::FrameType::kPrefixProbe: return CheckMessage<proto::PrefixProbe>(payload);
    case proto::FrameType::kPrefixProbed: return CheckMessage<proto::PrefixProbed>(payload);
    case proto::FrameType::kUnpin: return CheckMessage<proto::Unpin>(payload);
    case proto::FrameType::kStepBegin: return CheckMessage<proto::StepBegin>(payload);
    case proto::FrameType::kStepRefused: return CheckMessage<proto::StepRefused>(payload);
    default: return;
  }
}

}  // namespace

// A header and its payload.
void FuzzFrame(const uint8_t* data, size_t size) {
  proto::FrameHeader header;
  if (size < sizeof(header)) return;
  std::memcpy(&header, data, sizeof(header));
  (void)proto::Validate(header);
  // Random bytes do not pass the checksum: the fields behind it are looked at under a fresh one too.
  header.checksum = proto::Crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(proto::FrameHeader, checksum)));
  if (!proto::Validate(header).ok()) return;
  const proto::FrameHeader made =
      proto::MakeHeader(header.type, Epoch(header.epoch), StepId(header.step), MicroBatchId(header.micro_batch),
                        header.op, header.payload_bytes, header.busy_us);
  DT_CHECK(std::memcmp(&made, &header, sizeof(header)) == 0);
  CheckPayload(header.type, std::as_bytes(std::span(data, size)).subspan(sizeof(header)));
}

}  // namespace dovetail::fuzz
