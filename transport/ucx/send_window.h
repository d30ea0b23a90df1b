#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "transport/fabric.h"
#include "transport/ucx/wire.h"

namespace dovetail::transport::ucx {

// True for the frames by which one side of a step answers the other (frame.h, from kStepBegin on). Such a frame answers
// every tensor of its micro-batch that its sender had been handed before. Both ends apply this rule, so that no message
// about it is needed.
inline bool IsAnswer(const proto::FrameHeader& header) {
  return static_cast<uint16_t>(header.type) >= static_cast<uint16_t>(proto::FrameType::kStepBegin);
}

// What one node has sent to one peer and may not forget: frames the peer has not been handed (at most
// kMaxFramesInFlight, since they are unread) and tensors it has not answered. Thread-compatible; allocates only in the
// constructor.
class SendWindow {
 public:
  struct Frame {
    WireHeader header;
    std::vector<std::byte> message;  // owns the payload of a message
    std::span<const std::byte> payload;
    void* owner = nullptr;  // for the callbacks of the fabric
    bool busy = false;      // the fabric still reads header and payload
  };
  struct Tensor {
    uint64_t sequence = 0;
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in the peer's region, if `placed`
    uint16_t micro_batch = 0;
    bool placed = false;
  };

  SendWindow(uint64_t max_bytes, void* owner) : max_bytes_(max_bytes), frames_(kMaxFramesInFlight) {
    for (Frame& frame : frames_) frame.owner = owner;
    unanswered_.reserve(kMaxFramesInFlight);
  }

  // The next frame, for the caller to fill; null: no room. Nothing has changed until Push().
  Frame* Next(uint64_t bytes, bool tensor) {
    if (next_ - delivered_ >= kMaxFramesInFlight || bytes_ + bytes > max_bytes_) return nullptr;
    if (tensor && unanswered_.size() == kMaxFramesInFlight) return nullptr;
    Frame& frame = At(next_);
    return frame.busy ? nullptr : &frame;
  }

  // Counts what Next() returned and the caller filled, header.sequence aside.
  void Push(Frame& frame) {
    frame.header.sequence = next_++;
    const uint64_t bytes = frame.payload.size();
    bytes_ += bytes;
    if (frame.header.kind == WireKind::kMessage) return;
    unanswered_.push_back(Tensor{frame.header.sequence, bytes, frame.header.offset, frame.header.frame.micro_batch,
                                 frame.header.kind == WireKind::kPlaced});
  }

  Frame& At(uint64_t sequence) { return frames_[sequence % kMaxFramesInFlight]; }
  uint64_t next() const { return next_; }
  uint64_t unread() const { return next_ - delivered_; }
  uint64_t bytes() const { return bytes_; }

  // The peer has been handed the first `delivered` frames. False: it cannot have been.
  bool Delivered(uint64_t delivered) {
    if (delivered > next_) return false;
    for (; delivered_ < delivered; ++delivered_)
      if (const Frame& frame = At(delivered_); frame.header.kind == WireKind::kMessage)
        bytes_ -= frame.header.frame.payload_bytes;
    return true;
  }

  // The peer has answered micro-batch `id` having been handed `delivered` frames: on_release(const Tensor&) for each
  // tensor that is free again.
  template <typename F>
  void Answered(uint16_t id, uint64_t delivered, F&& on_release) {
    std::erase_if(unanswered_, [&](const Tensor& tensor) {
      if (tensor.micro_batch != id || tensor.sequence >= delivered) return false;
      bytes_ -= tensor.bytes;
      on_release(tensor);
      return true;
    });
  }

 private:
  const uint64_t max_bytes_;
  std::vector<Frame> frames_;       // by sequence
  std::vector<Tensor> unanswered_;  // in order
  uint64_t next_ = 0;
  uint64_t delivered_ = 0;
  uint64_t bytes_ = 0;  // of unread messages and unanswered tensors
};

}  // namespace dovetail::transport::ucx
