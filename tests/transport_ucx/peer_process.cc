// A node in a process of its own, for tests: peer_process NODE EPOCH LANES.
// Prints "ADDRESS <hex> <version>"; reads "ADD <node> <epoch> <hex> <version>" lines and prints "ADDED" or the error
// for each; sends every message back as it came and answers every tensor with a partial of the same bytes. "PUSH <node>
// <count> <bytes>" sends so many tensors, one a turn, each byte 0xEE, that need no answer, and prints "PUSHED"
// or the error. Ends when stdin does.
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <iostream>
#include <sstream>
#include <string>

#include "absl/strings/escaping.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::transport::ucx {
namespace {

class Echo final : public FrameHandler {
 public:
  explicit Echo(UcxPort& port) : port_(port) {}

  void OnFrame(const Delivery& delivery) override {
    std::vector<std::byte> copy(delivery.payload.begin(), delivery.payload.end());
    proto::FrameHeader header = delivery.header;
    if (header.type != proto::FrameType::kQuery) {
      (void)port_.SendMessage(delivery.from, header, std::move(copy));
      return;
    }
    header = proto::MakeHeader(proto::FrameType::kPartial, Epoch(header.epoch), StepId(header.step),
                               MicroBatchId(header.micro_batch), 0, copy.size());
    answers_.push_back(std::move(copy));
    if (answers_.size() > 16) answers_.pop_front();
    (void)port_.SendTensor(delivery.from, header, answers_.back());
  }

 private:
  UcxPort& port_;
  std::deque<std::vector<std::byte>> answers_;
};

void AddPeer(UcxPort& port, std::istream& command) {
  uint32_t node = 0, epoch = 0;
  std::string hex, version;
  command >> node >> epoch >> hex >> version;
  const absl::Status added = port.AddPeer(NodeId(node), absl::HexStringToBytes(hex), version, Epoch(epoch));
  std::cout << (added.ok() ? "ADDED" : std::string(added.message())) << std::endl;
}

struct Push {
  uint32_t node = 0;
  int left = 0;
  std::vector<std::byte> tensor;

  void Begin(std::istream& command) {
    size_t bytes = 0;
    command >> node >> left >> bytes;
    tensor.assign(bytes, std::byte{0xEE});
  }
  void Turn(UcxPort& port) {
    if (left == 0) return;
    const auto header =
        proto::MakeHeader(proto::FrameType::kQuery, Epoch(1), StepId(left), MicroBatchId(15), 0, tensor.size());
    const absl::Status sent = port.SendTensor(NodeId(node), header, tensor);
    if (!sent.ok()) left = 1;
    if (--left == 0) std::cout << (sent.ok() ? "PUSHED" : std::string(sent.message())) << std::endl;
  }
};

int Main(char** arguments) {
  UcxOptions options;
  options.node = NodeId(static_cast<uint32_t>(std::atoi(arguments[1])));
  options.epoch = Epoch(static_cast<uint32_t>(std::atoi(arguments[2])));
  options.lanes = *ParseLanes(arguments[3]);
  if (options.lanes == Lanes::kTcp) options.devices = "lo";
  options.put_min_bytes = 0;
  auto port = UcxPort::Create(options);
  if (!port.ok()) {
    std::cout << port.status().message() << std::endl;
    return 1;
  }
  std::cout << "ADDRESS " << absl::BytesToHexString((*port)->local_address()) << " " << UcxPort::Version() << std::endl;
  Echo echo(**port);
  Push push;
  std::string input;
  while (true) {
    pollfd readable{STDIN_FILENO, POLLIN, 0};
    if (poll(&readable, 1, 0) > 0) {
      char bytes[4096];
      const ssize_t count = read(STDIN_FILENO, bytes, sizeof(bytes));
      if (count <= 0) return 0;
      input.append(bytes, static_cast<size_t>(count));
      for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
        std::istringstream line(input.substr(0, end));
        std::string word;
        line >> word;
        if (word == "ADD") AddPeer(**port, line);
        if (word == "PUSH") push.Begin(line);
      }
    }
    push.Turn(**port);
    if ((*port)->Poll(echo, 64) == 0) (*port)->Wait(absl::Milliseconds(2));
  }
}

}  // namespace
}  // namespace dovetail::transport::ucx

int main(int count, char** arguments) { return count == 4 ? dovetail::transport::ucx::Main(arguments) : 2; }
