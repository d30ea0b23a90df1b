#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "sequence_parallel/region_copy.h"
#include "sequence_parallel/switch_exchange.h"
#include "transport/faulty/faulty_port.h"
#include "transport/inproc/inproc_fabric.h"

// Ranks in one thread, over the fabric of one process, in an order that the test chooses and a time that it sets.

namespace dovetail::sequence_parallel {

class SetClock final : public Clock {
 public:
  absl::Time Now() override { return now; }
  absl::Time now = absl::UnixEpoch() + absl::Seconds(1000);
};

inline proto::TensorShape Hidden(int64_t t, int64_t s, int64_t c) {
  proto::TensorShape shape;
  shape.axes = {{"T", t}, {"S", s}, {"C", c}};
  shape.element_bytes = 2;
  return shape;
}

inline proto::Layout EvenCut(const proto::TensorShape& shape, std::string_view axis, int ranks) {
  auto layout = proto::Layout::Even(shape, axis, ranks, {1, proto::FewPieces::kLeaveEmpty});
  DT_CHECK(layout.ok());
  return *std::move(layout);
}

inline proto::Switch SwitchOf(const proto::Layout& from, const proto::Layout& to) {
  auto result = proto::Switch::Between(from, to);
  DT_CHECK(result.ok());
  return *std::move(result);
}

using Bytes = std::vector<std::byte>;

inline Bytes RandomBytes(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// What a rank holds of a tensor: from everything on one rank to `layout`, by that rank's transfer alone.
inline Bytes PartOf(const Bytes& tensor, const proto::Layout& layout, int rank) {
  Bytes part(layout.PartBytes(rank));
  auto whole = proto::Layout::Replicated(layout.shape(), layout.ranks());
  DT_CHECK(whole.ok());
  if (*whole == layout) return tensor;
  const proto::Switch split = SwitchOf(*whole, layout);
  if (const proto::Transfer* kept = split.KeptBy(rank)) Copy(*kept, tensor.data(), part.data());
  return part;
}

struct Group {
  explicit Group(int ranks, std::function<void(ExchangeOptions&)> change = {}, bool faulty = false) {
    ExchangeOptions options;
    for (int rank = 0; rank < ranks; ++rank) {
      ports.push_back(fabric.CreatePort(nullptr));
      options.members.push_back(ports.back()->id());
    }
    options.group = Epoch(5);
    options.lane = MicroBatchId(2);
    options.chunk_bytes = kMinChunkBytes;
    options.chunks_in_flight = 2;
    for (int rank = 0; rank < ranks; ++rank) {
      options.rank = rank;
      if (change) change(options);
      if (faulty) faulty_ports.push_back(std::make_unique<transport::FaultyPort>(*ports[rank], clock, 77 + rank));
      auto created = SwitchExchange::Create(options, port(rank), clock);
      DT_CHECK(created.ok());
      exchanges.push_back(*std::move(created));
    }
  }

  transport::Port& port(int rank) {
    return faulty_ports.empty() ? *ports[rank] : static_cast<transport::Port&>(*faulty_ports[rank]);
  }
  SwitchExchange& operator[](int rank) { return *exchanges[rank]; }
  int ranks() const { return static_cast<int>(exchanges.size()); }

  // One turn of a rank's loop.
  void Turn(int rank) {
    port(rank).Poll(*exchanges[rank], 3);
    (void)exchanges[rank]->Progress();
  }
  // Turns of ranks in random order until all are done or one has failed. False: that never happens.
  bool Pump(std::mt19937_64& random) {
    for (int turn = 0; turn < 200000; ++turn) {
      Turn(static_cast<int>(random() % exchanges.size()));
      clock.now += absl::Microseconds(10);
      const auto over = [](const auto& exchange) { return exchange->done() || !exchange->status().ok(); };
      if (std::all_of(exchanges.begin(), exchanges.end(), over)) return true;
    }
    return false;
  }

  SetClock clock;
  transport::InprocFabric fabric;
  std::vector<std::unique_ptr<transport::Port>> ports;
  std::vector<std::unique_ptr<transport::FaultyPort>> faulty_ports;
  std::vector<std::unique_ptr<SwitchExchange>> exchanges;
};

}  // namespace dovetail::sequence_parallel
