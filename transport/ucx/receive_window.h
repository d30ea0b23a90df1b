#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/fabric.h"
#include "transport/ucx/wire.h"

namespace dovetail::transport::ucx {

// What one node holds of one peer's frames: those not handed over yet, in the order of their sequence numbers however
// they arrived, and the tensors that were handed over but not answered. The mirror of the peer's SendWindow.
// Thread-compatible; allocates only in the constructor.
class ReceiveWindow {
 public:
  struct Frame {
    proto::FrameHeader header;
    const std::byte* data = nullptr;
    uint64_t bytes = 0;
    bool tensor = false;   // kept until answered
    bool placed = false;   // lies in this node's region
    bool refused = false;  // takes its turn, but is not handed over
  };
  enum class Verdict { kTaken, kRepeated, kBeyondCredit };

  explicit ReceiveWindow(uint64_t max_bytes)
      : max_bytes_(max_bytes), frames_(kMaxFramesInFlight), present_(kMaxFramesInFlight) {
    held_.reserve(kMaxFramesInFlight);
  }

  Verdict Accept(uint64_t sequence, const Frame& frame) {
    if (sequence < delivered_) return Verdict::kRepeated;
    if (sequence - delivered_ >= kMaxFramesInFlight || bytes_ + frame.bytes > max_bytes_) return Verdict::kBeyondCredit;
    if (frame.tensor && held_.size() + queued_ >= 2 * kMaxFramesInFlight) return Verdict::kBeyondCredit;
    const size_t slot = sequence % kMaxFramesInFlight;
    if (present_[slot]) return Verdict::kRepeated;
    frames_[slot] = frame;
    present_[slot] = true;
    bytes_ += frame.bytes;
    ++queued_;
    return Verdict::kTaken;
  }

  bool HasNext() const { return present_[delivered_ % kMaxFramesInFlight]; }

  // Takes the next frame out; HasNext() holds. A tensor stays counted until Release or Answer.
  Frame Pop() {
    const size_t slot = delivered_++ % kMaxFramesInFlight;
    present_[slot] = false;
    --queued_;
    return frames_[slot];
  }
  void Hold(const Frame& frame) { held_.push_back(frame); }
  void Release(const Frame& frame) { bytes_ -= frame.bytes; }

  // This node sends an answer in micro-batch `id`: on_release(const Frame&) for each held tensor of it.
  template <typename F>
  void Answer(uint16_t id, F&& on_release) {
    std::erase_if(held_, [&](const Frame& frame) {
      if (frame.header.micro_batch != id) return false;
      bytes_ -= frame.bytes;
      on_release(frame);
      return true;
    });
  }

  // on_release for everything, queued or held, at the end.
  template <typename F>
  void Clear(F&& on_release) {
    for (size_t slot = 0; slot < frames_.size(); ++slot)
      if (present_[slot]) on_release(frames_[slot]);
    for (const Frame& frame : held_) on_release(frame);
    present_.assign(present_.size(), false);
    held_.clear();
    bytes_ = queued_ = 0;
  }

  uint64_t delivered() const { return delivered_; }
  uint64_t bytes() const { return bytes_; }
  size_t held() const { return held_.size(); }

 private:
  const uint64_t max_bytes_;
  std::vector<Frame> frames_;  // by sequence
  std::vector<bool> present_;
  std::vector<Frame> held_;
  uint64_t delivered_ = 0;
  uint64_t bytes_ = 0;  // queued and held
  size_t queued_ = 0;
};

}  // namespace dovetail::transport::ucx
