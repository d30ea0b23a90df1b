#include "examples/spatio_temporal/gpu/run_gpus.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/spatio_temporal/gpu/gpu_rank.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaEvent;
using kernels::cuda::CudaLibrary;

// In the order of construction: what a rank owns goes when all threads have ended, since others write into it.
struct Ranks {
  std::vector<std::unique_ptr<CudaDevice>> devices;
  std::unique_ptr<RankBoard> board;
  std::vector<GpuWeights> weights;
  std::vector<std::unique_ptr<GpuRank>> ranks;
};

absl::Status OpenDevices(const RunOptions& options, Ranks& all) {
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> library, CudaLibrary::Open());
  for (const std::string& name : options.devices) {
    DT_ASSIGN_OR_RETURN(const int index, kernels::cuda::ParseCudaName(name));
    DT_ASSIGN_OR_RETURN(auto device, CudaDevice::Create(library, {.index = index}));
    all.devices.push_back(std::move(device));
  }
  for (const auto& from : all.devices)
    for (const auto& to : all.devices) {
      DT_ASSIGN_OR_RETURN(const bool reaches, from->ReachPeer(*to));
      if (!reaches)
        return FailedPrecondition(from->name(), " does not reach the memory of ", to->name(),
                                  "; choose GPUs that are connected by NVLink or by one PCIe switch");
    }
  return absl::OkStatus();
}

absl::StatusOr<RankReport> RunPairs(const RunOptions& options, GpuRank& rank, int number) {
  std::vector<CudaEvent> marks;
  for (int step = 0; step < options.config.steps; ++step)
    for (int pair = 0; pair < options.config.pairs; ++pair) {
      DT_ASSIGN_OR_RETURN(CudaEvent mark, rank.Mark());
      marks.push_back(std::move(mark));
      const bool is_last = step + 1 == options.config.steps && pair + 1 == options.config.pairs;
      DT_RETURN_IF_ERROR(rank.Pair(pair, is_last ? -1 : (pair + 1) % options.config.pairs));
    }
  DT_RETURN_IF_ERROR(rank.End());
  DT_ASSIGN_OR_RETURN(CudaEvent end, rank.Mark());
  marks.push_back(std::move(end));
  DT_RETURN_IF_ERROR(rank.Synchronize());
  RankReport report;
  report.rank = number;
  for (size_t i = marks.size() - std::min(marks.size(), kMaxPairsTimed + 1); i + 1 < marks.size(); ++i) {
    DT_ASSIGN_OR_RETURN(const float milliseconds, marks[i + 1].MillisecondsSince(marks[i]));
    report.pair_seconds.push_back(milliseconds / 1e3);
  }
  DT_ASSIGN_OR_RETURN(const float milliseconds, marks.back().MillisecondsSince(marks.front()));
  report.seconds = milliseconds / 1e3;
  DT_ASSIGN_OR_RETURN(report.exchange_seconds, rank.exchange().SecondsWaited());
  report.bytes_sent = rank.exchange().bytes_sent();
  return report;
}

absl::StatusOr<RankReport> RunOne(const RunOptions& options, int number, Ranks& all) {
  CudaDevice& device = *all.devices[number];
  DT_ASSIGN_OR_RETURN(all.weights[number], GpuWeights::Random(options.config, device));
  const GpuRank::Place place{options.config, options.way, number, options.ranks, options.chunk_rows};
  DT_ASSIGN_OR_RETURN(all.ranks[number], GpuRank::Create(place, all.weights[number], device, *all.board));
  GpuRank& rank = *all.ranks[number];
  DT_RETURN_IF_ERROR(all.board->Meet(number));
  std::vector<GpuRank*> ranks;
  for (const auto& other : all.ranks) ranks.push_back(other.get());
  DT_RETURN_IF_ERROR(rank.Connect(ranks));
  DT_ASSIGN_OR_RETURN(RankReport report, RunPairs(options, rank, number));
  DT_RETURN_IF_ERROR(all.board->Meet(number));  // nothing travels any more
  DT_ASSIGN_OR_RETURN(const std::vector<std::byte> hidden, rank.Hidden());
  DT_RETURN_IF_ERROR(KeepFrames(options, rank.frames().begin, hidden, report));
  return report;
}

}  // namespace

absl::StatusOr<std::vector<RankReport>> RunGpus(const RunOptions& options) {
  DT_RETURN_IF_ERROR(options.Validate());
  Ranks all;
  DT_RETURN_IF_ERROR(OpenDevices(options, all));
  all.board = std::make_unique<RankBoard>(options.ranks, options.stall);
  all.weights.resize(options.ranks);
  all.ranks.resize(options.ranks);
  std::vector<absl::StatusOr<RankReport>> reports(options.ranks, absl::UnknownError("has not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.ranks; ++rank)
    threads.emplace_back([&, rank] {
      reports[rank] = RunOne(options, rank, all);
      if (!reports[rank].ok()) all.board->Fail(rank, reports[rank].status());  // the others need not wait
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : all.ranks)
    if (rank != nullptr) (void)rank->Synchronize();  // before any memory goes
  std::vector<RankReport> done;
  // A rank that only heard of another's failure says less than that one does.
  for (const bool heard : {false, true})
    for (int rank = 0; rank < options.ranks; ++rank)
      if (!reports[rank].ok() && absl::IsUnavailable(reports[rank].status()) == heard)
        return Annotate(reports[rank].status(), absl::StrCat("rank ", rank, " on ", options.devices[rank]));
  for (auto& report : reports) done.push_back(*std::move(report));
  return done;
}

}  // namespace dovetail::spatio_temporal
