#pragma once
#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"

// Strong integer ids: a SequenceId is not a WorkerId. Values, ordered and hashable; 0 is a valid id.

namespace dovetail {

// Threads: thread-compatible; a value.
template <typename Tag, typename Int = uint64_t>
class StrongId {
 public:
  using Value = Int;
  constexpr StrongId() = default;
  constexpr explicit StrongId(Int value) : value_(value) {}
  constexpr Int value() const { return value_; }
  constexpr auto operator<=>(const StrongId&) const = default;
  StrongId& operator++() {
    ++value_;
    return *this;
  }
  template <typename H>
  friend H AbslHashValue(H h, const StrongId& id) {
    return H::combine(std::move(h), id.value_);
  }
  friend std::ostream& operator<<(std::ostream& out, const StrongId& id) { return out << id.value_; }

 private:
  Int value_ = 0;
};

using RequestId = StrongId<struct RequestIdTag>;          // one HTTP or gRPC request
using SequenceId = StrongId<struct SequenceIdTag>;        // one stream of tokens; a request with n choices has n
using WorkerId = StrongId<struct WorkerIdTag, uint32_t>;  // an attention or compute worker, unique in a cluster
using NodeId = StrongId<struct NodeIdTag, uint32_t>;      // an address on a Fabric
using Epoch = StrongId<struct EpochTag, uint32_t>;        // one incarnation of a worker
using KvGeneration = StrongId<struct KvGenerationTag>;    // what an attention worker calls a sequence's KV; from 1
using StepId = StrongId<struct StepIdTag>;                // one step of one micro-batch; grows by one per step
using MicroBatchId = StrongId<struct MicroBatchIdTag, uint16_t>;
using LayerGroup = StrongId<struct LayerGroupTag, uint16_t>;  // attention ops with equal AttentionSpec

using TokenId = int32_t;   // an index into the vocabulary
using Position = int64_t;  // a token's place in its sequence, from 0

}  // namespace dovetail

template <typename Tag, typename Int>
struct std::hash<dovetail::StrongId<Tag, Int>> {
  size_t operator()(const dovetail::StrongId<Tag, Int>& id) const { return std::hash<Int>()(id.value()); }
};
