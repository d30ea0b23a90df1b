#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "exchange/cuda/gpu_exchange.h"
#include "proto/link_frames.h"

namespace dovetail::exchange {

// A worker's exchanges with its peers of the other role: makes links by frames (link_frames.h), knows which are there.
// Where no link can be made, layers go through the hosts; a line of log and Describe() say why.
// Threads: reactor-owned.
class ExchangeParty {
 public:
  struct Frame {
    NodeId to;
    Epoch epoch;  // of the attention worker
    proto::FrameType type{};
    std::string bytes;
  };

  explicit ExchangeParty(const GpuExchangeMeans& means) : means_(means) {}

  // A compute worker's: offers a link to an attention worker.
  void Offer(NodeId node, Epoch epoch, const ExchangeRoom& room, std::vector<Frame>& out);
  // Makes no link with it.
  void Decline(NodeId node, const absl::Status& why) { End(node, why); }
  // Of kLinkOffer, kLinkAnswer and kLinkThere. What cannot be understood ends the link.
  void OnFrame(NodeId from, Epoch epoch, proto::FrameType type, std::string_view bytes, std::vector<Frame>& out);
  // To be called often while true: links are being made.
  bool Progress(std::vector<Frame>& out);

  GpuExchange* With(NodeId node) const;  // null: through the hosts
  // "device", or "host: " and why, in one line; empty for an unknown node.
  std::string Describe(NodeId node) const;
  // There is no link with this node and none is being made, although it has a GPU.
  bool Refused(NodeId node) const;
  // The peer is lost: kernels that wait for it stop; what it may still store into stays.
  void Lose(NodeId node);

 private:
  struct Peer {
    Epoch epoch;
    std::unique_ptr<GpuExchange> exchange;
    bool accepted = false, told = false;
  };
  void Answer(NodeId from, Epoch epoch, std::string_view offer, std::vector<Frame>& out);
  struct Reason {
    std::string why;
    bool on_cpu = false;  // what is no failure of anything
  };
  void End(NodeId node, const absl::Status& why, bool on_cpu = false);

  const GpuExchangeMeans means_;
  std::map<NodeId, Peer> peers_;
  std::map<NodeId, Reason> through_hosts_;
  std::vector<std::unique_ptr<GpuExchange>> retired_;
};

}  // namespace dovetail::exchange
