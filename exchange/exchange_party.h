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
// Where no link can be made, layers go through the hosts; a line of log says why. Reactor-owned.
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
  // Of kLinkOffer, kLinkAnswer and kLinkThere. What cannot be understood ends the link.
  void OnFrame(NodeId from, Epoch epoch, proto::FrameType type, std::string_view bytes, std::vector<Frame>& out);
  // To be called often while true: links are being made.
  bool Progress(std::vector<Frame>& out);

  GpuExchange* With(NodeId node) const;  // null: through the hosts
  // The peer is lost: kernels that wait for it stop; what it may still store into stays.
  void Lose(NodeId node);

 private:
  struct Peer {
    Epoch epoch;
    std::unique_ptr<GpuExchange> exchange;
    bool accepted = false, told = false;
  };
  void Answer(NodeId from, Epoch epoch, std::string_view offer, std::vector<Frame>& out);
  void End(NodeId node, const absl::Status& why);

  const GpuExchangeMeans means_;
  std::map<NodeId, Peer> peers_;
  std::vector<std::unique_ptr<GpuExchange>> retired_;
};

}  // namespace dovetail::exchange
