#include "examples/spatio_temporal/report.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "examples/spatio_temporal/rank_run.h"
#include "nlohmann/json.hpp"

namespace dovetail::spatio_temporal {
namespace {

using Json = nlohmann::json;

std::string HexOf(const Sha256Digest& digest) {
  return absl::BytesToHexString(std::string(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

absl::Status WriteFrames(const std::string& path, int64_t first_byte, std::span<const std::byte> bytes) {
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return InvalidArgument("--output ", path, ": ", std::strerror(errno));
  absl::Status status;
  while (!bytes.empty() && status.ok()) {
    const ssize_t count = pwrite(fd, bytes.data(), bytes.size(), first_byte);
    if (count < 0) status = ResourceExhausted("--output ", path, ": ", std::strerror(errno));
    if (count < 0) break;
    first_byte += count;
    bytes = bytes.subspan(count);
  }
  close(fd);
  return status;
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

absl::Status RunOptions::Validate() const {
  DT_RETURN_IF_ERROR(config.Validate());
  if (ranks < 1 || ranks > kMaxRanksHere) return InvalidArgument("--ranks ", ranks, " is outside 1..", kMaxRanksHere);
  if (transport != "inproc" && transport != "shm" && transport != "tcp")
    return InvalidArgument("--transport ", transport, " is none of inproc, shm, tcp");
  if (!devices.empty() && (transport != "inproc" || static_cast<int>(devices.size()) != ranks))
    return InvalidArgument("--devices names ", devices.size(), " GPUs for ", ranks, " ranks over ", transport,
                           "; on GPUs each rank has one, in one process, and --ranks and --transport are left out");
  if (threads < 1 || threads > 256) return InvalidArgument("--threads ", threads, " is outside 1..256");
  if (stall <= absl::ZeroDuration())
    return InvalidArgument("--stall ", absl::FormatDuration(stall), " is not positive");
  return FormulaBytesOfPair(config, way, ranks).status();
}

std::string ToJson(const RunOptions& options) {
  const Config& c = options.config;
  return Json{{"frames", c.frames},
              {"positions", c.positions},
              {"channels", c.channels},
              {"heads", c.heads},
              {"pairs", c.pairs},
              {"steps", c.steps},
              {"seed", c.seed},
              {"exchange_only", c.exchange_only},
              {"way", std::string(NameOf(options.way))},
              {"ranks", options.ranks},
              {"transport", options.transport},
              {"threads", options.threads},
              {"stall_ms", absl::ToInt64Milliseconds(options.stall)},
              {"chunk_bytes", options.chunk_bytes},
              {"output", options.output}}
      .dump();
}

absl::StatusOr<RunOptions> OptionsFromJson(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return InvalidArgument("options of a rank: no JSON object");
  RunOptions options;
  Config& c = options.config;
  c.frames = json.value("frames", int64_t{0});
  c.positions = json.value("positions", int64_t{0});
  c.channels = json.value("channels", int64_t{0});
  c.heads = json.value("heads", 0);
  c.pairs = json.value("pairs", 0);
  c.steps = json.value("steps", 0);
  c.seed = json.value("seed", uint64_t{0});
  c.exchange_only = json.value("exchange_only", false);
  DT_ASSIGN_OR_RETURN(options.way, ParseWay(json.value("way", std::string())));
  options.ranks = json.value("ranks", 0);
  options.transport = json.value("transport", std::string());
  options.threads = json.value("threads", 0);
  options.stall = absl::Milliseconds(json.value("stall_ms", int64_t{0}));
  options.chunk_bytes = json.value("chunk_bytes", int64_t{0});
  options.output = json.value("output", std::string());
  DT_RETURN_IF_ERROR(options.Validate());
  return options;
}

std::string ToJson(const RankReport& report) {
  Json frames = Json::array();
  for (const Sha256Digest& digest : report.frames) frames.push_back(HexOf(digest));
  return Json{{"rank", report.rank},
              {"pair_seconds", report.pair_seconds},
              {"seconds", report.seconds},
              {"exchange_seconds", report.exchange_seconds},
              {"bytes_sent", report.bytes_sent},
              {"frames", frames}}
      .dump();
}

absl::StatusOr<RankReport> ReportFromJson(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("frames")) return InvalidArgument("report of a rank: ", text);
  RankReport report;
  report.rank = json.value("rank", 0);
  report.pair_seconds = json.value("pair_seconds", std::vector<double>());
  report.seconds = json.value("seconds", 0.0);
  report.exchange_seconds = json.value("exchange_seconds", 0.0);
  report.bytes_sent = json.value("bytes_sent", int64_t{0});
  for (const std::string& hex : json.value("frames", std::vector<std::string>())) {
    const std::string bytes = absl::HexStringToBytes(hex);
    Sha256Digest digest{};
    std::memcpy(digest.data(), bytes.data(), std::min(bytes.size(), digest.size()));
    report.frames.push_back(digest);
  }
  return report;
}

absl::Status KeepFrames(const RunOptions& options, int64_t first_frame, std::span<const std::byte> hidden,
                        RankReport& report) {
  const size_t bytes = options.config.positions * options.config.channels * 2;
  for (size_t at = 0; at < hidden.size(); at += bytes) report.frames.push_back(Sha256(hidden.subspan(at, bytes)));
  if (options.output.empty()) return absl::OkStatus();
  return WriteFrames(options.output, first_frame * static_cast<int64_t>(bytes), hidden);
}

absl::StatusOr<RankReport> RunRank(const RunOptions& options, const Weights& weights, int rank, kernels::Device& device,
                                   RankLink* link) {
  const Config& config = options.config;
  DT_ASSIGN_OR_RETURN(const auto run, RankRun::Create(config, weights, options.way, rank, options.ranks, device, link));
  RankReport report;
  report.rank = rank;
  const absl::Time begun = SystemClock().Now();
  for (int step = 0; step < config.steps; ++step) {
    for (int pair = 0; pair < config.pairs; ++pair) {
      const absl::Time pair_begun = SystemClock().Now();
      DT_RETURN_IF_ERROR(run->Pair(StepId(step), pair));
      if (report.pair_seconds.size() == kMaxPairsTimed) report.pair_seconds.erase(report.pair_seconds.begin());
      report.pair_seconds.push_back(absl::ToDoubleSeconds(SystemClock().Now() - pair_begun));
    }
  }
  report.seconds = absl::ToDoubleSeconds(SystemClock().Now() - begun);
  if (link != nullptr) {
    report.exchange_seconds = absl::ToDoubleSeconds(link->in_exchange());
    report.bytes_sent = link->bytes_sent();
  }
  DT_RETURN_IF_ERROR(KeepFrames(options, run->frames().begin, run->hidden(), report));
  return report;
}

absl::StatusOr<Summary> Summarize(const RunOptions& options, const std::vector<RankReport>& by_rank) {
  Summary summary;
  std::vector<double> slowest = by_rank[0].pair_seconds;
  std::vector<std::byte> digests;
  double seconds = 0, exchange = 0;
  int64_t bytes = 0;
  for (const RankReport& report : by_rank) {
    for (size_t i = 0; i < std::min(slowest.size(), report.pair_seconds.size()); ++i)
      slowest[i] = std::max(slowest[i], report.pair_seconds[i]);
    seconds += report.seconds;
    exchange += report.exchange_seconds;
    bytes += report.bytes_sent;
    for (const Sha256Digest& digest : report.frames) {
      const auto* begin = reinterpret_cast<const std::byte*>(digest.data());
      digests.insert(digests.end(), begin, begin + digest.size());
    }
  }
  const int64_t pairs = int64_t{options.config.steps} * options.config.pairs;
  summary.pair_seconds = Median(slowest);
  summary.exchange_share = seconds > 0 ? exchange / seconds : 0;
  summary.pair_bytes = bytes / pairs;
  DT_ASSIGN_OR_RETURN(summary.formula_bytes, FormulaBytesOfPair(options.config, options.way, options.ranks));
  summary.digest = HexOf(Sha256(digests));
  if (bytes != summary.formula_bytes * pairs)
    return Internal("ranks sent ", bytes, " bytes for ", pairs, " pairs; the formula says ", summary.formula_bytes,
                    " a pair");
  return summary;
}

std::string Describe(const RunOptions& options, const Summary& summary) {
  const std::string where =
      options.devices.empty()
          ? absl::StrFormat("%d ranks of %d threads over %s", options.ranks, options.threads, options.transport)
          : absl::StrFormat("%d ranks on %s", options.ranks, absl::StrJoin(options.devices, ", "));
  return absl::StrFormat(
      "%s, %s: %s, %d steps\n"
      "  time of a pair      %.*f s (median, slowest rank)\n"
      "  in exchange         %.1f %% of the ranks' time, waiting for each other included\n"
      "  bytes sent a pair   %d by all ranks; the formula says %d\n"
      "  digest of hidden    %s\n",
      std::string(NameOf(options.way)), where, options.config.DebugString(), options.config.steps,
      options.devices.empty() ? 4 : 6, summary.pair_seconds, 100 * summary.exchange_share, summary.pair_bytes,
      summary.formula_bytes, summary.digest);
}

}  // namespace dovetail::spatio_temporal
