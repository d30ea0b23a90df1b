#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
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
// kMaxFramesInFlight, since they are unread) and tensors it has not answered. A frame that the fabric has read is the
// first to be used again: its memory is in the cache, where a walk through all of them would have left nothing.
// Threads: thread-compatible; allocates only in the constructor.
class SendWindow {
 public:
  struct Frame {
    WireHeader header;
    std::vector<std::byte> message;  // owns the payload of a message
    std::span<const std::byte> payload;
    std::shared_ptr<const void> lender;  // keeps the payload of a tensor mapped until Sent()
    void* owner = nullptr;               // for the callbacks of the fabric
    Frame* next_free = nullptr;
    bool busy = false;  // the fabric still reads header and payload
    bool of_window = false;
  };
  struct Tensor {
    uint64_t sequence = 0;
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in the peer's region, if `placed`
    uint16_t micro_batch = 0;
    bool placed = false;
  };

  SendWindow(uint64_t max_bytes, void* owner)
      : max_bytes_(max_bytes),
        frames_(kMaxFramesInFlight),
        waiting_(kMaxFramesInFlight),
        unread_bytes_(kMaxFramesInFlight) {
    for (Frame& frame : frames_) {
      frame.owner = owner;
      frame.of_window = true;
      frame.next_free = std::exchange(free_, &frame);
    }
    unanswered_.reserve(kMaxFramesInFlight);
  }

  SendWindow(const SendWindow&) = delete;
  SendWindow& operator=(const SendWindow&) = delete;

  // The next frame, for the caller to fill; null: no room. Nothing has changed until Push().
  Frame* Next(uint64_t bytes, bool tensor) {
    if (next_ - delivered_ >= kMaxFramesInFlight || bytes_ + bytes > max_bytes_) return nullptr;
    if (tensor && unanswered_.size() == kMaxFramesInFlight) return nullptr;
    return free_;
  }

  // Counts what Next() returned and the caller filled, header.sequence aside.
  void Push(Frame& frame) {
    free_ = frame.next_free;
    const uint64_t bytes = frame.payload.size();
    const bool message = frame.header.kind == WireKind::kMessage;
    frame.header.sequence = next_;
    waiting_[next_ % kMaxFramesInFlight] = &frame;
    unread_bytes_[next_ % kMaxFramesInFlight] = message ? bytes : 0;
    ++next_;
    bytes_ += bytes;
    if (message) return;
    unanswered_.push_back(Tensor{frame.header.sequence, bytes, frame.header.offset, frame.header.frame.micro_batch,
                                 frame.header.kind == WireKind::kPlaced});
  }

  // What Push() was given, until Sent().
  Frame& At(uint64_t sequence) { return *waiting_[sequence % kMaxFramesInFlight]; }

  // The fabric reads header and payload of the frame, which is of this window, no more.
  void Sent(Frame& frame) { frame.next_free = std::exchange(free_, &frame); }

  uint64_t next() const { return next_; }
  uint64_t unread() const { return next_ - delivered_; }
  uint64_t bytes() const { return bytes_; }

  // The peer has been handed the first `delivered` frames. False: it cannot have been.
  bool Delivered(uint64_t delivered) {
    if (delivered > next_) return false;
    for (; delivered_ < delivered; ++delivered_) bytes_ -= unread_bytes_[delivered_ % kMaxFramesInFlight];
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
  uint64_t next_ = 0;
  uint64_t delivered_ = 0;
  uint64_t bytes_ = 0;  // of unread messages and unanswered tensors
  Frame* free_ = nullptr;
  std::vector<Frame> frames_;
  std::vector<Frame*> waiting_;         // by sequence: pushed, not sent
  std::vector<uint64_t> unread_bytes_;  // by sequence: of messages, free once the peer has been handed them
  std::vector<Tensor> unanswered_;      // in order
};

}  // namespace dovetail::transport::ucx
