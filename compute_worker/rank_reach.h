#pragma once
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"
#include "compute_worker/rank_links.h"
#include "compute_worker/rank_memory.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Finds out which other compute workers read this one's device memory (kMemoryOffer and kMemoryAnswer of
// proto/rank_frames.h), and tells the memory and the links.
// Threads: reactor-owned.
class RankReach {
 public:
  // Both outlive it. `memory`: null on a CPU, which answers offers with that.
  RankReach(RankMemory* memory, RankLinks& links) : memory_(memory), links_(links) {}

  // After RankLinks::Add. A later call with the same worker replaces its epoch and node.
  void Add(const ComputeWorkerAddress& address);
  void Lose(WorkerId worker, Epoch epoch);
  void OnFrame(const transport::Delivery& delivery);

  // How what is given to it crosses: "device", or "host: " and why; empty on a CPU, and for a node that is no peer.
  std::string Describe(NodeId node) const;

 private:
  struct Peer {
    ComputeWorkerAddress address;
    bool answered = false;
    absl::Status reaches;  // once it has answered; else why it is not asked
  };
  Peer* Find(NodeId node);
  void Offer(Peer& peer);
  void OnOffer(Peer& peer, std::string_view offer);
  void OnAnswer(Peer& peer, std::string_view answer);

  RankMemory* const memory_;
  RankLinks& links_;
  std::map<WorkerId, Peer> peers_;
};

}  // namespace dovetail::compute
