#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/fabric.h"
#include "transport/ucx/wire.h"

namespace dovetail::transport::ucx {

// What one node holds of one peer's frames: those not handed over yet, in the order of their sequence numbers however
// they arrived, and the tensors that were handed over but not answered. The mirror of the peer's SendWindow. What was
// given back last is used first, since it is in the cache.
// Threads: thread-compatible; allocates only in the constructor.
class ReceiveWindow {
 public:
  struct Frame {
    proto::FrameHeader header;
    const std::byte* data = nullptr;
    uint64_t bytes = 0;    // set by Accept
    bool tensor = false;   // kept until answered
    bool placed = false;   // lies in this node's region
    bool refused = false;  // takes its turn, but is not handed over
    Frame* next_free = nullptr;
  };
  enum class Verdict { kTaken, kRepeated, kBeyondCredit };

  explicit ReceiveWindow(uint64_t max_bytes)
      : max_bytes_(max_bytes), frames_(kMaxHeld), queue_(kMaxFramesInFlight, nullptr) {
    for (Frame& frame : frames_) frame.next_free = std::exchange(free_, &frame);
    held_.reserve(kMaxHeld);
  }
  ReceiveWindow(const ReceiveWindow&) = delete;
  ReceiveWindow& operator=(const ReceiveWindow&) = delete;

  // For a frame of so many bytes; kTaken: `frame` is its place, which the caller fills.
  Verdict Accept(uint64_t sequence, uint64_t bytes, Frame*& frame) {
    if (sequence < delivered_) return Verdict::kRepeated;
    if (sequence - delivered_ >= kMaxFramesInFlight || bytes_ + bytes > max_bytes_) return Verdict::kBeyondCredit;
    if (free_ == nullptr) return Verdict::kBeyondCredit;
    Frame*& place = queue_[sequence % kMaxFramesInFlight];
    if (place != nullptr) return Verdict::kRepeated;
    frame = place = free_;
    free_ = free_->next_free;
    frame->bytes = bytes;
    bytes_ += bytes;
    return Verdict::kTaken;
  }

  bool HasNext() const { return queue_[delivered_ % kMaxFramesInFlight] != nullptr; }

  // Takes the next frame out; HasNext() holds. It is the caller's, and counted, until Hold or Release.
  Frame& Pop() { return *std::exchange(queue_[delivered_++ % kMaxFramesInFlight], nullptr); }

  // A tensor that has not been answered.
  void Hold(Frame& frame) { held_.push_back({&frame, frame.header.micro_batch}); }

  // After its payload was given back; the frame is free then.
  void Release(Frame& frame) {
    bytes_ -= frame.bytes;
    frame.next_free = std::exchange(free_, &frame);
  }

  // This node sends an answer in micro-batch `id`: on_release(const Frame&) for each held tensor of it.
  template <typename F>
  void Answer(uint16_t id, F&& on_release) {
    std::erase_if(held_, [&](const Held& held) {
      if (held.micro_batch != id) return false;
      on_release(static_cast<const Frame&>(*held.frame));
      Release(*held.frame);
      return true;
    });
  }

  // on_release for everything, queued or held, at the end.
  template <typename F>
  void Clear(F&& on_release) {
    for (Frame*& frame : queue_)
      if (frame != nullptr) on_release(static_cast<const Frame&>(*std::exchange(frame, nullptr)));
    for (const Held& held : held_) on_release(static_cast<const Frame&>(*held.frame));
    held_.clear();
    bytes_ = 0;
  }

  uint64_t delivered() const { return delivered_; }
  uint64_t bytes() const { return bytes_; }
  size_t held() const { return held_.size(); }

 private:
  static constexpr size_t kMaxHeld = 2 * kMaxFramesInFlight;  // and queued
  struct Held {
    Frame* frame;
    uint16_t micro_batch;
  };

  const uint64_t max_bytes_;
  uint64_t delivered_ = 0;
  uint64_t bytes_ = 0;  // queued and held
  Frame* free_ = nullptr;
  std::vector<Frame> frames_;
  std::vector<Frame*> queue_;  // by sequence; null: not here
  std::vector<Held> held_;
};

}  // namespace dovetail::transport::ucx
