#include "base/crash_report.h"

#include <execinfo.h>

#include <algorithm>
#include <csignal>

#include "absl/debugging/failure_signal_handler.h"
#include "absl/debugging/stacktrace.h"
#include "absl/debugging/symbolize.h"

namespace dovetail {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitizerReports = true;
#else
constexpr bool kSanitizerReports = false;
#endif

constexpr int kMostFrames = 64;

// absl::SetStackUnwinder. By the tables that exceptions use: Abseil's own follows frame pointers, which optimised code
// does not keep.
int UnwindByTables(void** frames, int* sizes, int max_depth, int skip_count, const void* /*context*/,
                   int* min_dropped_frames) {
  void* all[kMostFrames];
  const int skipped = skip_count + 1;  // and this function
  const int depth = std::max(0, backtrace(all, kMostFrames) - skipped);
  const int kept = std::min(depth, max_depth);
  std::copy_n(all + skipped, kept, frames);
  if (sizes != nullptr) std::fill_n(sizes, kept, 0);
  if (min_dropped_frames != nullptr) *min_dropped_frames = depth - kept;
  return kept;
}

}  // namespace

void ReportCrashes(const char* program) {
  if (kSanitizerReports) return;
  void* first = nullptr;
  backtrace(&first, 1);  // loads what it needs, which a signal's handler must not
  absl::SetStackUnwinder(UnwindByTables);
  absl::InitializeSymbolizer(program);
  absl::InstallFailureSignalHandler({});
  // It takes this one for a crash, too. An orchestrator ends every process with it.
  std::signal(SIGTERM, SIG_DFL);
}

}  // namespace dovetail
