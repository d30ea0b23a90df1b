// What TCP clients that are no members can do at a port: nothing. The attacks are those that UCX itself falls to.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "tests/transport_ucx/ucx_nodes.h"
#include "transport/ucx/socket_guard.h"
#include "transport/ucx/wire.h"

namespace dovetail::transport::ucx {
namespace {

template <typename T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// What UCX's TCP transport takes as the beginning of a connection from a peer: its public magic number and a request
// to connect (header: kind and length; event, flags, a connection number, the address of the sender).
std::string UcxGreeting() {
  std::string bytes;
  Append(bytes, uint64_t{0xCAFEBABE12345678});
  sockaddr_in from{.sin_family = AF_INET, .sin_port = htons(1), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  Append(bytes, uint8_t{32});
  Append(bytes, uint32_t{4 + 1 + 8 + sizeof(from)});
  Append(bytes, uint32_t{1});
  Append(bytes, uint8_t{0});
  Append(bytes, uint64_t{0});
  Append(bytes, from);
  return bytes;
}

// UCX's request to store bytes at an address of the receiver's process.
std::string UcxPut(const void* address, std::string_view bytes) {
  std::string request;
  Append(request, uint8_t{33});
  Append(request, uint32_t{20});
  Append(request, reinterpret_cast<uint64_t>(address));
  Append(request, uint64_t{bytes.size()});
  Append(request, uint32_t{1});
  return request.append(bytes);
}

std::string BytesOf(const Ticket& ticket) {
  return "Dovetail" + std::string(reinterpret_cast<const char*>(ticket.data()), ticket.size());
}

NodeAddress AddressOf(const TestNode& node) { return *DecodeNodeAddress(node.port->local_address()); }

// A TCP client that knows where a port listens. It connects past the wrappers, which would present the ticket for it.
class Stranger {
 public:
  explicit Stranger(const TestNode& victim) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const std::string bytes = AddressOf(victim).listeners.at(0).bytes();
    sockaddr_in to{};
    to.sin_family = AF_INET;
    std::memcpy(&to.sin_port, bytes.data(), 2);
    std::memcpy(&to.sin_addr, bytes.data() + 2, 4);
    EXPECT_EQ(syscall(SYS_connect, fd_, &to, sizeof(to)), 0) << std::strerror(errno);
  }
  ~Stranger() { close(fd_); }

  void Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // reset already
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  // Whether the other end has ended the connection.
  bool Ended() {
    pollfd readable{fd_, POLLIN, 0};
    if (poll(&readable, 1, 0) == 0) return false;
    char byte;
    const ssize_t got = recv(fd_, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }

 private:
  const int fd_;
};

class SocketGuard : public ::testing::Test {
 protected:
  SocketGuard()
      : victim_(OptionsFor(1, Lanes::kTcp)), member_(OptionsFor(2, Lanes::kTcp)), before_(CountersOfGuard()) {}

  bool PumpUntilEnded(Stranger& stranger) {
    return PumpUntil({&victim_}, [&] { return stranger.Ended(); });
  }
  void ExpectMembersGoOn() {
    ASSERT_TRUE(Connect(victim_, member_));
    ASSERT_TRUE(SendMessage(member_, victim_, 1, Pattern(1 << 20, 1)).ok());
    ASSERT_TRUE(PumpUntil({&victim_, &member_}, [&] { return victim_.collector.frames.size() == 1; }));
    EXPECT_EQ(victim_.collector.frames[0].bytes, Pattern(1 << 20, 1));
  }

  TestNode victim_, member_;
  const GuardCounters before_;
};

TEST_F(SocketGuard, AStrangerWhoSpeaksUcxStoresNothingInThisProcess) {
  static std::array<char, 16> memory;
  memory.fill('.');
  Stranger stranger(victim_);
  stranger.Send(UcxGreeting() + UcxPut(memory.data(), "sixteen bytes ok"));
  EXPECT_TRUE(PumpUntilEnded(stranger));
  EXPECT_EQ(std::string(memory.data(), memory.size()), std::string(16, '.'));
  EXPECT_EQ(CountersOfGuard().refused, before_.refused + 1);
  ExpectMembersGoOn();
}

TEST_F(SocketGuard, AStrangerCannotEndTheProcessByMalformedRequests) {
  std::string cut = UcxGreeting();
  cut[9] = 1;  // a request to connect of one byte: UCX aborts
  for (const std::string& bytes :
       {cut, UcxPut(nullptr, "null"), std::string(4096, '\xff'), std::string("GET / HTTP/1.1\r\n")}) {
    Stranger stranger(victim_);
    stranger.Send(bytes);
    EXPECT_TRUE(PumpUntilEnded(stranger));
  }
  EXPECT_EQ(CountersOfGuard().refused, before_.refused + 4);
  ExpectMembersGoOn();
}

TEST_F(SocketGuard, AnotherTicketIsRefusedAndTheRightOneMayComeInPieces) {
  Stranger wrong(victim_);
  wrong.Send(BytesOf(RandomTicket()));
  EXPECT_TRUE(PumpUntilEnded(wrong));
  Ticket close = AddressOf(victim_).ticket;
  close.back() ^= std::byte{1};
  Stranger almost(victim_);
  almost.Send(BytesOf(close));
  EXPECT_TRUE(PumpUntilEnded(almost));
  EXPECT_EQ(CountersOfGuard().refused, before_.refused + 2);

  Stranger slow(victim_);
  for (const char byte : BytesOf(AddressOf(victim_).ticket)) {
    EXPECT_EQ(CountersOfGuard().admitted, before_.admitted);
    slow.Send({&byte, 1});
    for (int i = 0; i < 20; ++i) victim_.Poll();
  }
  slow.Send(std::string(8, 'x'));  // UCX reads on, and finds no magic number
  EXPECT_TRUE(PumpUntilEnded(slow));
  EXPECT_EQ(CountersOfGuard().admitted, before_.admitted + 1);
  ExpectMembersGoOn();
}

TEST_F(SocketGuard, ATicketOfAnotherIncarnationIsRefused) {
  NodeAddress address = AddressOf(victim_);
  address.ticket = RandomTicket();
  ASSERT_TRUE(member_.port->AddPeer(victim_.id(), Encode(address), UcxPort::Version(), Epoch(1)).ok());
  ASSERT_TRUE(PumpUntil({&victim_, &member_}, [&] { return CountersOfGuard().refused > before_.refused; }));
  EXPECT_FALSE(member_.port->Connected(victim_.id()));
  EXPECT_EQ(CountersOfGuard().admitted, before_.admitted);
}

TEST_F(SocketGuard, SilentConnectionsBeyondTheLimitCostTheOldestOnes) {
  std::vector<std::unique_ptr<Stranger>> silent;
  for (size_t i = 0; i < kMaxWaiting; ++i) silent.push_back(std::make_unique<Stranger>(victim_));
  for (int i = 0; i < 1000; ++i) victim_.Poll();
  for (const auto& stranger : silent) EXPECT_FALSE(stranger->Ended());
  silent.push_back(std::make_unique<Stranger>(victim_));
  EXPECT_TRUE(PumpUntilEnded(*silent.front()));
  EXPECT_FALSE(silent[1]->Ended());
  ExpectMembersGoOn();
}

TEST_F(SocketGuard, OtherSocketsOfTheProcessAreLeftAlone) {
  ExpectMembersGoOn();
  const GuardCounters before = CountersOfGuard();
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const int server = accept(listener, nullptr, nullptr);
  ASSERT_GE(server, 0);
  ASSERT_EQ(send(client, "hello", 5, 0), 5);
  char text[5];
  ASSERT_EQ(recv(server, text, 5, MSG_WAITALL), 5);
  EXPECT_EQ(std::string(text, 5), "hello");
  for (const int fd : {server, client, listener}) EXPECT_EQ(close(fd), 0);
  EXPECT_EQ(CountersOfGuard().admitted, before.admitted);
  EXPECT_EQ(CountersOfGuard().presented, before.presented);
}

TEST(SocketAddresses, ComeBackAsTheyWereAndReadAsOperatorsWriteThem) {
  sockaddr_in v4{.sin_family = AF_INET, .sin_port = htons(7200), .sin_addr = {htonl(0x0a000005)}, .sin_zero = {}};
  const SocketAddress address = *SocketAddress::From(reinterpret_cast<sockaddr*>(&v4), sizeof(v4));
  EXPECT_EQ(address.ToString(), "10.0.0.5:7200");
  EXPECT_EQ(*SocketAddress::FromBytes(address.bytes()), address);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(7200);
  v6.sin6_addr = in6addr_loopback;
  EXPECT_EQ(SocketAddress::From(reinterpret_cast<sockaddr*>(&v6), sizeof(v6))->ToString(), "[::1]:7200");
  sockaddr other{.sa_family = AF_UNIX, .sa_data = {}};
  EXPECT_FALSE(SocketAddress::From(&other, sizeof(other)).ok());
  EXPECT_FALSE(SocketAddress::FromBytes("1234567").ok());
}

}  // namespace
}  // namespace dovetail::transport::ucx
