#include <string>

#include "base/check.h"
#include "control/convert.h"
#include "control/generation_messages.h"
#include "scheduler/control_generation.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

// What is accepted is written and read again to the same value; what is not says why.
template <typename Wire>
void ReadTwice(const std::string& bytes) {
  Wire wire;
  if (!wire.ParseFromString(bytes)) return;
  const auto value = control::FromProto(wire);
  if (!value.ok()) {
    DT_CHECK(!value.status().message().empty());
    return;
  }
  Wire first, second;
  control::ToProto(*value, first);
  const auto again = control::FromProto(first);
  DT_CHECK(again.ok());
  control::ToProto(*again, second);
  DT_CHECK(first.SerializeAsString() == second.SerializeAsString());
}

// Commands of a server: whatever they hold, each submission is handed on once or ends with an error.
void Command(const std::string& bytes) {
  control::v1::GenerationCommands commands;
  if (!commands.ParseFromString(bytes)) return;
  int64_t submitted = 0, handed_on = 0, refused = 0;
  const auto count = [&](const scheduler::Event& event) {
    handed_on += std::holds_alternative<scheduler::RequestArrived>(event);
  };
  scheduler::ControlGeneration generation(count, 16);
  const uint64_t server = generation.AddServer([&](const control::v1::GenerationEvents& events) {
    for (const control::v1::Update& update : events.updates()) refused += update.request_finished();
  });
  for (const auto& command : commands.commands()) submitted += command.has_submit();
  generation.OnCommands(server, commands);
  generation.Flush(nullptr);
  DT_CHECK(handed_on + refused <= submitted && handed_on <= 16);
  generation.RemoveServer(server);
}

}  // namespace

// One byte says which message follows.
void FuzzControl(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  namespace pb = control::v1;
  switch (data[0]) {
    case 'J': return ReadTwice<pb::JoinRequest>(bytes);
    case 'R': return ReadTwice<pb::JoinReply>(bytes);
    case 'H': return ReadTwice<pb::Heartbeat>(bytes);
    case 'L': return ReadTwice<pb::LinkFailed>(bytes);
    case 'A': return ReadTwice<pb::Applied>(bytes);
    case 'C': return ReadTwice<pb::Configuration>(bytes);
    case 'P': return ReadTwice<pb::Peers>(bytes);
    case 'M': return ReadTwice<pb::Model>(bytes);
    case 'G': return ReadTwice<pb::GenerationRequest>(bytes);
    case 'U': return ReadTwice<pb::Update>(bytes);
    case 'S': return Command(bytes);
    default: return;
  }
}

}  // namespace dovetail::fuzz
