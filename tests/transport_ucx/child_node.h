#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>
#include <string>

#include "absl/strings/escaping.h"
#include "tests/transport_ucx/ucx_nodes.h"

namespace dovetail::transport::ucx {

// A peer_process: an echoing node that can be stopped and killed. Killed and reaped at the end.
class ChildNode {
 public:
  ChildNode(uint32_t node, Lanes lanes, uint32_t epoch = 1) : node_(node), epoch_(epoch) {
    int to[2], from[2];
    DT_CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    const std::string id = absl::StrCat(node), incarnation = absl::StrCat(epoch), lane(NameOf(lanes));
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], STDIN_FILENO);
      dup2(from[1], STDOUT_FILENO);
      execl(DOVETAIL_PEER_PROCESS, "peer_process", id.c_str(), incarnation.c_str(), lane.c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    input_ = to[1];
    output_ = from[0];
    std::istringstream line(ReadLine());
    std::string word, hex;
    line >> word >> hex >> version_;
    address_ = word == "ADDRESS" ? absl::HexStringToBytes(hex) : "";
  }
  ~ChildNode() {
    close(input_);
    close(output_);
    Kill();
    Reap();
  }

  NodeId id() const { return NodeId(node_); }
  pid_t pid() const { return pid_; }
  void Signal(int signal) { kill(pid_, signal); }
  void Kill() {
    if (pid_ > 0) kill(pid_, SIGKILL);
  }
  void Reap() {
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Ends as a node does that is asked to: closes its port. Returns its exit status.
  int Finish() {
    close(std::exchange(input_, -1));
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

  // Each adds the other; "" or what went wrong.
  std::string Join(TestNode& node, uint32_t node_epoch = 1) {
    const std::string added =
        Ask(absl::StrCat("ADD ", node.id().value(), " ", node_epoch, " ",
                         absl::BytesToHexString(node.port->local_address()), " ", UcxPort::Version()));
    if (added != "ADDED") return added;
    return AddedBy(node);
  }

  // Only the node adds it, as when it is stopped before it hears of the node; "" or what went wrong.
  std::string AddedBy(TestNode& node) {
    return std::string(node.port->AddPeer(id(), address_, version_, Epoch(epoch_)).message());
  }

  // Returns when everything that it has posted has had a turn of its loop.
  void Turn() {
    for (int i = 0; i < 2; ++i) Ask("ADD 0 0 00 none");  // refused
  }

  static constexpr const char* kPushed = "PUSHED";
  // Sends `count` tensors of `bytes` to the node, one in about 2 ms. Pushed(): all of them, waiting for at most `wait`.
  void Push(TestNode& node, int count, size_t bytes) {
    const std::string line = absl::StrCat("PUSH ", node.id().value(), " ", count, " ", bytes, "\n");
    DT_CHECK(write(input_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }
  bool Pushed(absl::Duration wait) { return EndOfPush(wait) == kPushed; }
  // kPushed, or the error that ended it before; "": neither yet.
  std::string EndOfPush(absl::Duration wait) {
    pollfd readable{output_, POLLIN, 0};
    return poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(wait))) > 0 ? ReadLine() : "";
  }

 private:
  std::string Ask(std::string line) {
    line += "\n";
    DT_CHECK(write(input_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
    return ReadLine();
  }
  std::string ReadLine() {
    std::string line;
    for (char byte; read(output_, &byte, 1) == 1 && byte != '\n';) line.push_back(byte);
    return line;
  }

  const uint32_t node_, epoch_;
  pid_t pid_ = -1;
  int input_ = -1, output_ = -1;
  std::string address_, version_;
};

}  // namespace dovetail::transport::ucx
