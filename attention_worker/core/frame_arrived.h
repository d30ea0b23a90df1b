#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <variant>

#include "base/ids.h"
#include "proto/frame.h"
#include "proto/sequence_frames.h"

namespace dovetail::attention {

// What the payload of a frame is, if it is no message.
struct WrongSize {};  // not as long as the header says
struct NotTaken {};   // of a type that no attention worker takes, or a tensor in an answer
struct NoMessage {};  // the answer to a part of a move, or a question for rows: the header says all
struct Unreadable {   // a message that cannot be decoded
  std::string why;
};
struct TensorBytes {  // q, or k and v; they stay the sender's
  std::span<const std::byte> bytes;
};

// The event of the attention worker's core: a frame has come.
struct FrameArrived {
  using Body = std::variant<WrongSize, NotTaken, NoMessage, Unreadable, TensorBytes, proto::OpenSequence,
                            proto::ForkSequence, proto::ReleaseSequence, proto::MoveSequence, proto::PrefixProbe,
                            proto::Unpin, proto::StepBegin, proto::StepRefused>;
  NodeId from;
  proto::FrameHeader header;
  Body body;
};

// Decodes the payload: the one place where bytes become values of this core.
// Cost: allocates for messages only, never for tensors.
// Threads: pure.
FrameArrived ReadFrame(NodeId from, const proto::FrameHeader& header, std::span<const std::byte> payload);

}  // namespace dovetail::attention
