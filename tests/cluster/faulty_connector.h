#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/connector.h"
#include "transport/faulty/faulty_port.h"

namespace dovetail::test {

// What the connectors of a cluster did to its frames. Thread-safe.
struct FaultTotals {
  std::atomic<int64_t> duplicated{0}, delayed{0}, echoed{0}, swapped{0};
};

// A connector whose frames come twice, late, or again when no node awaits them any more. Thread rule of a connector.
class FaultyConnector final : public transport::Connector {
 public:
  // `totals` outlives it.
  FaultyConnector(std::unique_ptr<transport::Connector> connector, const transport::Faults& faults, uint64_t seed,
                  FaultTotals& totals)
      : connector_(std::move(connector)), port_(*connector_, SystemClock(), seed), totals_(totals) {
    port_.Set(faults);
  }

  NodeId id() const override { return connector_->id(); }
  std::string address() const override { return connector_->address(); }
  std::string version() const override { return connector_->version(); }
  absl::Status AddPeer(NodeId node, Epoch epoch, const std::string& address) override {
    return connector_->AddPeer(node, epoch, address);
  }
  void RemovePeer(NodeId node) override { connector_->RemovePeer(node); }
  std::vector<Failure> TakeFailures() override { return connector_->TakeFailures(); }
  bool Connected(NodeId node) const override { return connector_->Connected(node); }
  std::vector<Silence> SilentPeers() const override { return connector_->SilentPeers(); }
  Bytes BytesTo(NodeId node) const override { return connector_->BytesTo(node); }
  std::string LanesTo(NodeId node) const override { return connector_->LanesTo(node); }
  void Wake() override { connector_->Wake(); }

  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    return port_.SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    const absl::Status sent = port_.SendTensor(to, header, std::move(payload));
    Count(totals_.swapped, port_.swapped(), swapped_);
    return sent;
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override {
    const int frames = port_.Poll(handler, max_frames);
    Count(totals_.duplicated, port_.duplicated(), duplicated_);
    Count(totals_.delayed, port_.delayed(), delayed_);
    Count(totals_.echoed, port_.echoed(), echoed_);
    return frames;
  }
  // A frame that becomes due meanwhile is sent by the Poll that follows.
  void Wait(absl::Duration timeout) override {
    const absl::Duration due = port_.NextDue() - SystemClock().Now();
    if (due > absl::ZeroDuration()) connector_->Wait(std::min(timeout, due));
  }

 private:
  static void Count(std::atomic<int64_t>& total, int64_t now, int64_t& counted) {
    total += now - counted;
    counted = now;
  }

  const std::unique_ptr<transport::Connector> connector_;
  transport::FaultyPort port_;
  FaultTotals& totals_;
  int64_t duplicated_ = 0, delayed_ = 0, echoed_ = 0, swapped_ = 0;
};

}  // namespace dovetail::test
