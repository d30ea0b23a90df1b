#pragma once
#include <cstddef>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"

// Every message that crosses a process, filled in and as bytes, for tests that treat them alike.

namespace dovetail::proto::testing {

// One kind of message. `decode` returns the bytes of what it decoded, encoded again.
struct MessageKind {
  std::string name;
  std::vector<std::vector<std::byte>> samples;  // the first has every field and list filled in
  std::function<absl::StatusOr<std::vector<std::byte>>(std::span<const std::byte>)> decode;
};
std::vector<MessageKind> AllMessages();

// Values in which every field differs from its default.
StepPlan FullPlan();
StepPlan PlanOfRank();
StepResult FullResult();
OpenSequence FullOpen();
StepBegin FullBegin();
StepBegin BeginOfRank();
SamplingParams FullSampling();

template <typename Message>
std::vector<std::byte> Bytes(const Message& message) {
  std::vector<std::byte> bytes;
  Encode(message, bytes);
  return bytes;
}

}  // namespace dovetail::proto::testing
