#include "examples/spatio_temporal/run_threads.h"

#include <memory>
#include <thread>
#include <utility>

#include "sequence_parallel/run_switch.h"
#include "transport/doorbell.h"
#include "transport/inproc/inproc_fabric.h"

namespace dovetail::spatio_temporal {
namespace {

using sequence_parallel::SwitchExchange;

// In the order of construction: bells outlive the fabric, the fabric its ports. Exchanges go when all threads have
// ended, since other ranks may read what one has sent.
struct Ranks {
  std::vector<std::unique_ptr<transport::Doorbell>> bells;
  transport::InprocFabric fabric;
  std::vector<std::unique_ptr<transport::Port>> ports;
  std::vector<std::unique_ptr<SwitchExchange>> exchanges;
};

absl::Status Connect(const RunOptions& options, Ranks& ranks) {
  sequence_parallel::ExchangeOptions exchange;
  exchange.group = Epoch(1);
  exchange.stall = options.stall;
  exchange.chunk_bytes = options.chunk_bytes;
  for (int rank = 0; rank < options.ranks; ++rank) {
    ranks.bells.push_back(std::make_unique<transport::Doorbell>());
    ranks.ports.push_back(ranks.fabric.CreatePort(ranks.bells.back().get()));
    exchange.members.push_back(ranks.ports.back()->id());
  }
  for (exchange.rank = 0; exchange.rank < options.ranks; ++exchange.rank) {
    DT_ASSIGN_OR_RETURN(auto one, SwitchExchange::Create(exchange, *ranks.ports[exchange.rank], SystemClock()));
    ranks.exchanges.push_back(std::move(one));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<RankReport>> RunThreads(const RunOptions& options) {
  DT_RETURN_IF_ERROR(options.Validate());
  DT_ASSIGN_OR_RETURN(const auto device, kernels::CreateCpuDevice({.threads = options.threads}));
  const auto stream = device->CreateStream();
  DT_ASSIGN_OR_RETURN(const Weights weights, Weights::Random(options.config, &stream->pool()));
  Ranks ranks;
  DT_RETURN_IF_ERROR(Connect(options, ranks));
  std::vector<absl::StatusOr<RankReport>> reports(options.ranks, absl::UnknownError("has not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.ranks; ++rank)
    threads.emplace_back([&, rank] {
      SwitchExchange& exchange = *ranks.exchanges[rank];
      RankLink link(exchange, *ranks.ports[rank], *ranks.bells[rank], [](SwitchExchange&) {});
      const auto own = kernels::CreateCpuDevice({.threads = options.threads});
      if (own.ok())
        reports[rank] = RunRank(options, weights, rank, **own, options.ranks == 1 ? nullptr : &link);
      else
        reports[rank] = own.status();
      if (!reports[rank].ok()) exchange.Void(reports[rank].status());  // the others need not wait
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<RankReport> done;
  for (int rank = 0; rank < options.ranks; ++rank) {
    if (!reports[rank].ok()) return Annotate(reports[rank].status(), absl::StrCat("rank ", rank));
    done.push_back(*std::move(reports[rank]));
  }
  return done;
}

}  // namespace dovetail::spatio_temporal
