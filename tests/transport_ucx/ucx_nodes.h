#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "base/clock.h"
#include "transport/ucx/ucx_port.h"

// Ports and what reaches them, for tests in one process.

namespace dovetail::transport::ucx {

struct Received {
  NodeId from;
  proto::FrameHeader header;
  std::vector<std::byte> bytes;        // a copy
  std::span<const std::byte> payload;  // what the handler was given
};

class Collector final : public FrameHandler {
 public:
  void OnFrame(const Delivery& delivery) override {
    frames.push_back(
        {delivery.from, delivery.header, {delivery.payload.begin(), delivery.payload.end()}, delivery.payload});
    if (then) then(delivery);
  }
  std::deque<Received> frames;
  std::function<void(const Delivery&)> then;
};

struct TestNode {
  std::unique_ptr<UcxPort> port;
  Collector collector;

  explicit TestNode(const UcxOptions& options) {
    auto created = UcxPort::Create(options);
    DT_CHECK(created.ok());
    port = *std::move(created);
  }
  NodeId id() const { return port->id(); }
  int Poll(int max_frames = 64) { return port->Poll(collector, max_frames); }
};

// How payloads travel: over which lanes, and whether tensors of any size are put into regions or none is (on TCP none
// ever is).
struct Way {
  Lanes lanes;
  bool put;
};

inline std::string NameOfWay(const Way& way) { return std::string(NameOf(way.lanes)) + (way.put ? "_put" : ""); }

inline UcxOptions OptionsFor(uint32_t node, Lanes lanes, uint32_t epoch = 1) {
  UcxOptions options;
  options.node = NodeId(node);
  options.epoch = Epoch(epoch);
  options.lanes = lanes;
  if (lanes == Lanes::kTcp) options.devices = "lo";
  return options;
}

inline UcxOptions OptionsFor(uint32_t node, const Way& way, uint32_t epoch = 1) {
  UcxOptions options = OptionsFor(node, way.lanes, epoch);
  options.put_min_bytes = way.put ? 0 : ~uint64_t{0};
  return options;
}

// Polls every node until `done`, at most ten seconds. Returns whether it is done.
inline bool PumpUntil(const std::vector<TestNode*>& nodes, const std::function<bool()>& done) {
  const absl::Time deadline = SystemClock().Now() + absl::Seconds(10);
  while (!done()) {
    if (SystemClock().Now() > deadline) return false;
    for (TestNode* node : nodes) node->Poll();
  }
  return true;
}

inline absl::Status Add(TestNode& node, const TestNode& peer, uint32_t epoch = 1) {
  return node.port->AddPeer(peer.id(), peer.port->local_address(), UcxPort::Version(), Epoch(epoch));
}

inline bool Connect(TestNode& a, TestNode& b) {
  return Add(a, b).ok() && Add(b, a).ok() &&
         PumpUntil({&a, &b}, [&] { return a.port->Connected(b.id()) && b.port->Connected(a.id()); });
}

inline std::vector<std::byte> Pattern(size_t bytes, uint32_t seed) {
  std::vector<std::byte> out(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (std::byte& byte : out) byte = static_cast<std::byte>((state = state * 1664525u + 1013904223u) >> 24);
  return out;
}

inline proto::FrameHeader HeaderOf(proto::FrameType type, uint64_t step, uint16_t micro_batch, uint64_t bytes) {
  return proto::MakeHeader(type, Epoch(1), StepId(step), MicroBatchId(micro_batch), 0, bytes);
}

inline absl::Status SendMessage(TestNode& from, const TestNode& to, uint64_t step, std::vector<std::byte> bytes) {
  const auto header = HeaderOf(proto::FrameType::kStepPlan, step, 0, bytes.size());
  return from.port->SendMessage(to.id(), header, std::move(bytes));
}

inline absl::Status SendTensor(TestNode& from, const TestNode& to, uint64_t step, std::span<const std::byte> bytes,
                               proto::FrameType type = proto::FrameType::kQuery, uint16_t micro_batch = 0) {
  return from.port->SendTensor(to.id(), HeaderOf(type, step, micro_batch, bytes.size()), bytes);
}

}  // namespace dovetail::transport::ucx
