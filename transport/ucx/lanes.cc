#include "transport/ucx/lanes.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_join.h"

namespace dovetail::transport::ucx {
namespace {

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

bool Belongs(Lanes lanes, std::string_view transport) {
  const std::string_view kind = transport.substr(0, transport.find('/'));
  switch (lanes) {
    case Lanes::kShm: return kind == "posix";
    case Lanes::kTcp: return kind == "tcp";
    case Lanes::kRc: return kind.starts_with("rc") || kind.starts_with("ud");  // ud connects what rc then carries
    case Lanes::kAny: return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<Lanes> ParseLanes(std::string_view text) {
  for (const Lanes lanes : {Lanes::kShm, Lanes::kTcp, Lanes::kRc, Lanes::kAny})
    if (text == NameOf(lanes)) return lanes;
  if (text == "cuda_ipc")
    return Unimplemented("--lanes cuda_ipc: this build of UCX has no CUDA; use shm, tcp, rc or any");
  return InvalidArgument("--lanes ", View(text.substr(0, 64)), ": is none of shm, tcp, rc, cuda_ipc, any");
}

std::string_view NameOf(Lanes lanes) {
  switch (lanes) {
    case Lanes::kShm: return "shm";
    case Lanes::kTcp: return "tcp";
    case Lanes::kRc: return "rc";
    case Lanes::kAny: return "any";
  }
  return "?";
}

std::string_view UcxTransports(Lanes lanes) {
  switch (lanes) {
    case Lanes::kShm: return "posix";
    case Lanes::kTcp: return "tcp";
    case Lanes::kRc: return "rc";
    case Lanes::kAny: return "all";
  }
  return "";
}

// Lines look like "#   lane[0]:  1:posix/memory.0 md[1]   -> md[1]/posix/sysdev[255] am am_bw#0 keepalive".
std::vector<std::string> TransportsIn(std::string_view info) {
  std::vector<std::string> found;
  constexpr std::string_view kMark = "lane[";
  for (size_t at = info.find(kMark); at != std::string_view::npos; at = info.find(kMark, at + 1)) {
    std::string_view line = info.substr(at, info.find('\n', at) - at);
    const size_t label = line.find("]:");
    if (label == std::string_view::npos) continue;
    line.remove_prefix(label + 2);
    const size_t begin = line.find(':');
    if (begin == std::string_view::npos) continue;
    line.remove_prefix(begin + 1);
    std::string_view name = line.substr(0, line.find(' '));
    if (const size_t dot = name.rfind('.'); dot != std::string_view::npos) name = name.substr(0, dot);
    if (std::find(found.begin(), found.end(), name) == found.end()) found.emplace_back(name);
  }
  return found;
}

absl::Status CheckLanes(Lanes lanes, const std::vector<std::string>& transports) {
  const bool fits = !transports.empty() && std::all_of(transports.begin(), transports.end(),
                                                       [&](const std::string& t) { return Belongs(lanes, t); });
  if (fits) return absl::OkStatus();
  const std::string chosen = transports.empty() ? "nothing" : absl::StrJoin(transports, ", ");
  return FailedPrecondition("UCX chose ", chosen, ", but --lanes asked for ", View(NameOf(lanes)), ": ",
                            lanes == Lanes::kRc
                                ? "install or enable RDMA on both hosts, or start every node with --lanes tcp"
                                : "start every node of the cluster with the same --lanes");
}

}  // namespace dovetail::transport::ucx
