#include "bench/exchange/two_processes.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::bench {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaLibrary;
using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeEnd;
using kernels::cuda::ExchangeWords;

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%d: %s\n", static_cast<int>(getpid()), std::string(status.message()).c_str());
  std::fflush(stderr);
  _exit(1);
}

TwoProcesses::TwoProcesses() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) _exit(1);
  child_ = fork();
  rank_ = child_ == 0 ? 1 : 0;
  socket_ = sockets[rank_];
  close(sockets[1 - rank_]);
}

std::string TwoProcesses::Swap(const std::string& own) {
  const uint64_t size = own.size();
  const auto read_all = [&](char* to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      const ssize_t got = read(socket_, to + at, bytes - at);
      if (got <= 0) _exit(2);
      at += static_cast<size_t>(got);
    }
  };
  if (write(socket_, &size, sizeof(size)) != sizeof(size)) _exit(2);
  if (write(socket_, own.data(), own.size()) != static_cast<ssize_t>(own.size())) _exit(2);
  uint64_t other = 0;
  read_all(reinterpret_cast<char*>(&other), sizeof(other));
  std::string theirs(other, '\0');
  read_all(theirs.data(), other);
  return theirs;
}

LinkedGpus::LinkedGpus(TwoProcesses& processes, size_t bytes, int words)
    : words_bytes_((words * sizeof(ExchangeWords) + 4095) / 4096 * 4096) {
  device_ = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = processes.rank()}));
  memory_ = Must(device_->Allocate(words_bytes_ + bytes + transport::DeviceLink::kTouched));
  auto stream = Must(device_->CreateCudaStream());
  Must(stream->Fill(memory_->data(), 0, memory_->size_bytes()));
  Must(stream->SynchronizeStatus());
  Must(stream->UseDevice());
  links_ = Must(transport::ucx::MakeDeviceLinks(
      [this](void* list, unsigned index) { return kernels::cuda::UcxPeerPointer(*device_, list, index); }));
  link_ = Must(links_->Link(memory_->data(), memory_->size_bytes()));
  Must(link_->Accept(processes.Swap(link_->offer())));
  while (!Must(link_->Progress())) {
  }
  for (int round = 0; round < 20000; ++round) (void)Must(link_->Progress());  // the peer may still need it
  processes.Barrier();
}

ExchangeEnd LinkedGpus::End(int index, uint64_t deadline_ns) const {
  return {reinterpret_cast<ExchangeWords*>(memory_->data()) + index,
          reinterpret_cast<ExchangeWords*>(link_->peer_memory()) + index, deadline_ns};
}

void LinkedGpus::ClearWords(CudaStream& stream) {
  Must(stream.Fill(memory_->data(), 0, words_bytes_));
  Must(stream.SynchronizeStatus());
}

StepNumbers::StepNumbers(CudaDevice& device, int count)
    : pinned_(Must(device.AllocatePinned(count * 2 * sizeof(uint64_t)))), count_(count) {}

void StepNumbers::Next(CudaStream& stream, ExchangeWords* words, uint64_t step) {
  auto* pair = reinterpret_cast<uint64_t*>(pinned_->data()) + 2 * (at_++ % count_);
  pair[0] = step * kernels::cuda::kExchangeOps;
  pair[1] = 0;
  Must(stream.Copy(&words->step, pair, 2 * sizeof(uint64_t)));
}

uint64_t StepNumbers::Failure(CudaStream& stream, const ExchangeWords* words) {
  uint64_t failure = 0;
  Must(stream.Copy(&failure, &words->failure, sizeof(failure)));
  Must(stream.SynchronizeStatus());
  return failure;
}

}  // namespace dovetail::bench
