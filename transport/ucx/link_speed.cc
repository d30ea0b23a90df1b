#include "transport/ucx/link_speed.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::transport::ucx {
namespace {

constexpr size_t kSmallBytes = 4 << 10, kLargeBytes = 1 << 20;
constexpr int kInFlight = 8;
constexpr absl::Duration kConnectTime = absl::Seconds(10);
constexpr absl::Duration kAnswerTime = absl::Seconds(10);

absl::StatusOr<std::unique_ptr<UcxPort>> MakePort(Lanes lanes, uint32_t node) {
  UcxOptions options;
  options.node = NodeId(node);
  options.epoch = Epoch(1);
  options.lanes = lanes;
  if (lanes == Lanes::kTcp) options.devices = "lo";
  return UcxPort::Create(options);
}

proto::FrameHeader HeaderOf(proto::FrameType type, size_t bytes) {
  return proto::MakeHeader(type, Epoch(1), StepId(0), MicroBatchId(0), 0, bytes);
}

// Answers each tensor with one of `bytes`.
class Responder final : public FrameHandler {
 public:
  Responder(UcxPort& port, size_t bytes) : port_(port), answer_(bytes) {}
  void OnFrame(const Delivery& delivery) override {
    const auto sent = port_.SendTensor(delivery.from, HeaderOf(proto::FrameType::kPartial, answer_.size()),
                                       std::span<const std::byte>(answer_));
    if (!sent.ok()) failed = true;
  }
  bool failed = false;

 private:
  UcxPort& port_;
  const std::vector<std::byte> answer_;
};

class Counter final : public FrameHandler {
 public:
  void OnFrame(const Delivery&) override { ++frames; }
  int64_t frames = 0;
};

class Pair {
 public:
  static absl::StatusOr<std::unique_ptr<Pair>> Create(Lanes lanes) {
    auto pair = std::make_unique<Pair>();
    DT_ASSIGN_OR_RETURN(pair->near_, MakePort(lanes, 1));
    DT_ASSIGN_OR_RETURN(pair->far_, MakePort(lanes, 2));
    DT_RETURN_IF_ERROR(pair->near_->AddPeer(NodeId(2), pair->far_->local_address(), UcxPort::Version(), Epoch(1)));
    DT_RETURN_IF_ERROR(pair->far_->AddPeer(NodeId(1), pair->near_->local_address(), UcxPort::Version(), Epoch(1)));
    Counter none;
    const absl::Time deadline = SystemClock().Now() + kConnectTime;
    while (!pair->near_->Connected(NodeId(2)) || !pair->far_->Connected(NodeId(1))) {
      pair->near_->Poll(none, 16);
      pair->far_->Poll(none, 16);
      if (SystemClock().Now() > deadline)
        return absl::DeadlineExceededError(
            absl::StrCat("two ports do not reach each other over ", std::string(NameOf(lanes))));
    }
    return pair;
  }

  // Keeps `in_flight` tensors of `bytes` under way, which are answered with `answer_bytes`, for as long as `each`.
  // `took(tensors, duration)` is told of each time that all of them were answered.
  template <typename Took>
  absl::Status Exchange(size_t bytes, size_t answer_bytes, int in_flight, absl::Duration each, Took&& took) {
    Responder responder(*far_, answer_bytes);
    const std::vector<std::byte> tensor(bytes);
    Counter answers;
    const absl::Time begin = SystemClock().Now();
    while (SystemClock().Now() - begin < each) {
      const absl::Time before = SystemClock().Now();
      answers.frames = 0;
      for (int i = 0; i < in_flight; ++i)
        DT_RETURN_IF_ERROR(near_->SendTensor(NodeId(2), HeaderOf(proto::FrameType::kQuery, bytes),
                                             std::span<const std::byte>(tensor)));
      while (answers.frames < in_flight) {
        far_->Poll(responder, 16);
        near_->Poll(answers, 16);
        if (responder.failed) return Internal("a tensor could not be answered");
        if (SystemClock().Now() - before > kAnswerTime)
          return absl::DeadlineExceededError("a tensor was not answered in time");
      }
      took(in_flight, SystemClock().Now() - before);
    }
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<UcxPort> near_, far_;
};

}  // namespace

absl::StatusOr<LinkSpeed> MeasureLink(Lanes lanes, absl::Duration each) {
  DT_ASSIGN_OR_RETURN(const auto pair, Pair::Create(lanes));
  LinkSpeed speed{std::numeric_limits<double>::infinity(), 0};
  DT_RETURN_IF_ERROR(pair->Exchange(kSmallBytes, kSmallBytes, 1, each, [&](int, absl::Duration took) {
    speed.latency_s = std::min(speed.latency_s, absl::ToDoubleSeconds(took) / 2);
  }));
  DT_RETURN_IF_ERROR(pair->Exchange(kLargeBytes, 0, kInFlight, each, [&](int tensors, absl::Duration took) {
    const double rate = static_cast<double>(tensors) * kLargeBytes / absl::ToDoubleSeconds(took);
    speed.bytes_per_s = std::max(speed.bytes_per_s, rate);
  }));
  return speed;
}

}  // namespace dovetail::transport::ucx
