#include "transport/ucx/ucx_worker.h"

#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <malloc.h>

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>

#include "base/log.h"
#include "transport/ucx/spent_descriptors.h"
#include "transport/ucx/ucx_version.h"
#include "transport/ucx/worker_sockets.h"

namespace dovetail::transport::ucx {
namespace {

ucs_log_func_rc_t ForwardLog(const char*, unsigned, const char*, ucs_log_level_t level,
                             const ucs_log_component_config_t*, const char* format, va_list arguments) {
  // Failures come back as statuses, which say what they mean here and what to do; what UCX says in addition is for
  // debugging.
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_STOP;
  char text[512];
  std::vsnprintf(text, sizeof(text), format, arguments);
  if (level == UCS_LOG_LEVEL_FATAL)
    LogError("UCX: ", text);
  else
    LogLine(LogLevel::kDebug, absl::StrCat("UCX: ", text));
  return UCS_LOG_FUNC_RC_STOP;
}

// What comes in pieces is put together in memory of malloc, which by itself gives every large piece back to the system
// and takes it again for the next frame: that took two thirds of the time of a stream of 1 MiB tensors over TCP.
void KeepFreedMemory() {
  constexpr int kLargestKept = 32 << 20;  // malloc takes no more
  constexpr int kMostKept = 256 << 20;
  mallopt(M_MMAP_THRESHOLD, kLargestKept);
  mallopt(M_TRIM_THRESHOLD, kMostKept);
}

// UCX of this age writes its log to stdout and catches SIGSEGV and its kind, which are the program's own affair.
void TameLibrary() {
  static std::once_flag once;
  std::call_once(once, [] {
    KeepFreedMemory();
    ucs_log_push_handler(ForwardLog);
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) ucs_debug_disable_signal(signal);
  });
}

struct ConfigRelease {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};

absl::Status Set(ucp_config_t* config, const char* name, const std::string& value) {
  const ucs_status_t status = ucp_config_modify(config, name, value.c_str());
  return status == UCS_OK ? absl::OkStatus() : UcxError(status, absl::StrCat("UCX setting ", name, "=", value));
}

// Settings of the TCP transport. UCX 1.13 takes them with TCP_ in front, as the environment has them, without a word
// and without effect; UCX 1.22 refuses them without.
absl::Status SetOfTcp(ucp_config_t* config, const std::string& name, const std::string& value) {
  if (Set(config, name.c_str(), value).ok()) return absl::OkStatus();
  return Set(config, ("TCP_" + name).c_str(), value);
}

absl::Status NoLane(const UcxWorkerOptions& options, ucs_status_t status) {
  const std::string asked(NameOf(options.lanes));
  const std::string devices = options.devices.empty() ? "" : absl::StrCat(" on device ", options.devices);
  if (options.lanes == Lanes::kRc)
    return FailedPrecondition("--lanes rc: this host has no usable RDMA device", devices,
                              "; install or enable RDMA, or start every node with --lanes tcp");
  return UcxError(status, absl::StrCat("--lanes ", asked, ": this host has no such lane", devices));
}

}  // namespace

absl::Status UcxError(ucs_status_t status, const std::string& what) {
  const std::string text = absl::StrCat(what, ": ", ucs_status_string(status));
  switch (status) {
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_UNSUPPORTED: return absl::FailedPreconditionError(text);
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_BUSY: return absl::ResourceExhaustedError(text);
    default: return absl::UnavailableError(text);
  }
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const UcxWorkerOptions& options) {
  TameLibrary();
  std::unique_ptr<UcxWorker> worker(new UcxWorker);
  DT_RETURN_IF_ERROR(worker->Init(options));
  return worker;
}

absl::Status UcxWorker::Init(const UcxWorkerOptions& options) {
  DT_RETURN_IF_ERROR(CheckLoadedUcx());
  ucp_config_t* raw = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &raw); status != UCS_OK)
    return UcxError(status, "UCX settings");
  const std::unique_ptr<ucp_config_t, ConfigRelease> config(raw);
  DT_RETURN_IF_ERROR(Set(raw, "TLS", std::string(UcxTransports(options.lanes))));
  // Receivers get every payload as a whole: a rendezvous that its sender does not live to finish would have to be given
  // up by a timer.
  DT_RETURN_IF_ERROR(Set(raw, "RNDV_THRESH", "inf"));
  DT_RETURN_IF_ERROR(Set(raw, "KEEPALIVE_INTERVAL", absl::StrCat(absl::ToInt64Milliseconds(options.keepalive), "ms")));
  if (!options.devices.empty()) DT_RETURN_IF_ERROR(Set(raw, "NET_DEVICES", options.devices));
  if (options.lanes == Lanes::kShm || options.lanes == Lanes::kAny) {
    // Without it shared memory refuses endpoints that handle errors, and UCX silently takes TCP.
    DT_RETURN_IF_ERROR(Set(raw, "MM_ERROR_HANDLING", "y"));
    // A wire header and a small payload fit an element of the FIFO: 35 ns less than through a segment of it.
    DT_RETURN_IF_ERROR(Set(raw, "MM_FIFO_ELEM_SIZE", "256"));
  }
  if (options.lanes == Lanes::kTcp || options.lanes == Lanes::kAny) {
    // Large payloads in few pieces, and sent from where they lie: a piece costs system calls and copies at both ends,
    // and pieces of 8 KiB, UCX's own size, halve what a stream of 1 MiB tensors gets.
    DT_RETURN_IF_ERROR(SetOfTcp(raw, "TX_SEG_SIZE", "512K"));
    DT_RETURN_IF_ERROR(SetOfTcp(raw, "RX_SEG_SIZE", "512K"));
    DT_RETURN_IF_ERROR(Set(raw, "ZCOPY_THRESH", "32K"));
    // Newer UCX leaves bridges out, which carry the address of many a host of virtual machines; one that is named is
    // meant. Older UCX knows no such setting and takes them.
    if (!options.devices.empty()) SetOfTcp(raw, "BRIDGE_ENABLE", "y").IgnoreError();
  }
  // Else making an endpoint waits for the other host to answer, which one behind a cut link does after two minutes.
  if (options.lanes == Lanes::kTcp || options.lanes == Lanes::kAny) DT_RETURN_IF_ERROR(SetOfTcp(raw, "CONN_NB", "y"));
  if (options.first_port > 0 && (options.lanes == Lanes::kTcp || options.lanes == Lanes::kAny))
    DT_RETURN_IF_ERROR(SetOfTcp(raw, "PORT_RANGE", absl::StrCat(options.first_port, "-", options.last_port)));

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (const ucs_status_t status = ucp_init(&params, raw, &context_); status != UCS_OK) return NoLane(options, status);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // its maker and its user may be two threads
  worker_params.am_alignment = 64;                         // kernels read payloads in place
  ucs_status_t status = UCS_OK;
  guarded_.Collect([&] { status = ucp_worker_create(context_, &worker_params, &worker_); });
  if (status != UCS_OK)
    return status == UCS_ERR_BUSY && options.first_port > 0
               ? ResourceExhausted("--data-ports ", options.first_port, "-", options.last_port,
                                   ": all of these are taken; give a wider range, or another one")
               : UcxError(status, "UCX worker");
  if (status = ucp_worker_get_efd(worker_, &event_fd_); status != UCS_OK) return UcxError(status, "UCX event fd");
  return absl::OkStatus();
}

int UcxWorker::connections() const { return CountConnections(WatchedBy(event_fd_)); }

// A peer's connection that this end has accepted and never answers keeps the peer's UCX awake for as long as it stands:
// its socket can be written, so epoll says so at once, each time, while what it has to say waits for the answer.
void UcxWorker::Abandon() {
  CloseListeners(listeners());
  CloseTcpSockets(WatchedBy(event_fd_));
#ifdef __SANITIZE_ADDRESS__
  __lsan_ignore_object(this);  // left behind on purpose
#endif
  LogWarning("data plane: a connection that is neither made nor broken is left behind with its worker");
}

UcxWorker::~UcxWorker() {
  const std::vector<int> shared = SharedMemoryDescriptors();
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
  KeepOutOfUse(shared);  // of which other workers' are still open
}

absl::StatusOr<std::string> UcxWorker::Address() const {
  ucp_address_t* address = nullptr;
  size_t length = 0;
  if (const ucs_status_t status = ucp_worker_get_address(worker_, &address, &length); status != UCS_OK)
    return UcxError(status, "UCX address");
  std::string bytes(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  return bytes;
}

std::string DescribeEndpoint(ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t length = 0;
  std::FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) return "";
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);
  std::string description(text, length);
  std::free(text);
  return description;
}

}  // namespace dovetail::transport::ucx
