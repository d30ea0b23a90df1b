#include "server/grpc/engine_call.h"

#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace dovetail::server {

absl::Status ToldRefusal(const absl::Status& status, const EngineCall::Server& server) {
  if (!absl::IsResourceExhausted(status) && !absl::IsAborted(status)) return status;
  const int waiting = server.engine.stats().scheduler.waiting_requests;
  const int seconds = server.intake.admission.RetryAfterSeconds(waiting, SystemClock().Now());
  return ResourceExhausted(status.message(), "; try again in ", seconds, " s");
}

grpc::Status ErrorOf(const requests::GenerationUpdate& update) {
  absl::StatusCode code = update.error_code;
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kInternal;
  // A tenant that has its part of a full queue.
  if (code == absl::StatusCode::kAborted) code = absl::StatusCode::kResourceExhausted;
  // What an internal error says (paths, addresses) never leaves the process.
  if (code == absl::StatusCode::kInternal) return grpc::Status(grpc::StatusCode::INTERNAL, "the generation failed");
  return grpc::Status(static_cast<grpc::StatusCode>(code), update.error);
}

grpc::Status TimedOut(absl::Duration limit) {
  return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                      absl::StrCat("the request was not finished after ", absl::FormatDuration(limit),
                                   ", the most that this server gives one (--request-timeout)"));
}

}  // namespace dovetail::server
