#include "attention_worker/core/frame_arrived.h"

#include <utility>

#include "proto/gather_frames.h"
#include "proto/link_frames.h"

namespace dovetail::attention {

using proto::FrameType;

namespace {

template <typename Message>
FrameArrived::Body Decoded(std::span<const std::byte> payload) {
  auto message = proto::Decode<Message>(payload);
  if (!message.ok()) return Unreadable{std::string(message.status().message())};
  return *std::move(message);
}

FrameArrived::Body BodyOf(const proto::FrameHeader& header, std::span<const std::byte> payload) {
  if (header.payload_bytes != payload.size()) return WrongSize{};
  if (header.type == proto::kStepBeginOnDevice) return Decoded<proto::StepBegin>(payload);
  if (header.type == proto::kAskRows) return NoMessage{};
  switch (header.type) {
    case FrameType::kOpenSequence: return Decoded<proto::OpenSequence>(payload);
    case FrameType::kForkSequence: return Decoded<proto::ForkSequence>(payload);
    case FrameType::kReleaseSequence: return Decoded<proto::ReleaseSequence>(payload);
    case FrameType::kMoveSequence: return Decoded<proto::MoveSequence>(payload);
    case FrameType::kPrefixProbe: return Decoded<proto::PrefixProbe>(payload);
    case FrameType::kUnpin: return Decoded<proto::Unpin>(payload);
    case FrameType::kStepBegin: return Decoded<proto::StepBegin>(payload);
    case FrameType::kStepRefused: return Decoded<proto::StepRefused>(payload);
    case FrameType::kPartial:
      if (!payload.empty()) return NotTaken{};
      return NoMessage{};
    case FrameType::kQuery:
    case FrameType::kKeyValue: return TensorBytes{payload};
    default: return NotTaken{};
  }
}

}  // namespace

FrameArrived ReadFrame(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload) {
  return {from, header, BodyOf(header, payload)};
}

}  // namespace dovetail::attention
