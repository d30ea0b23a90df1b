#include "tracing/otlp_exporter.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread_name.h"

namespace dovetail::tracing {
namespace {

constexpr absl::Duration kBetweenWarnings = absl::Seconds(10);

// A collector that is busy says so: the same may be sent again.
bool MayRetry(const absl::StatusOr<int>& status) {
  return !status.ok() || *status == 429 || *status == 502 || *status == 503 || *status == 504;
}

}  // namespace

absl::StatusOr<http_client::Url> ParseEndpoint(const std::string& url) {
  auto endpoint = http_client::ParseUrl(url);
  if (!endpoint.ok())
    return InvalidArgument("--otlp-traces-endpoint: ", std::string(endpoint.status().message()),
                           ". It is the address of a collector's OTLP/HTTP receiver, as "
                           "http://127.0.0.1:4318/v1/traces (OTLP over gRPC is not spoken)");
  if (endpoint->path.empty()) endpoint->path = "/v1/traces";
  return endpoint;
}

OtlpExporter::OtlpExporter(http_client::Url endpoint, Resource resource)
    : endpoint_(std::move(endpoint)), resource_(std::move(resource)) {
  thread_ = std::thread([this] { Run(); });
}

OtlpExporter::~OtlpExporter() {
  {
    MutexLock lock(mutex_);
    give_up_ = SystemClock().Now() + kFlushLimit;
  }
  wake_.notify_all();
  thread_.join();
}

void OtlpExporter::Push(Item item) {
  MutexLock lock(mutex_);
  if (waiting_.size() >= kMaxQueued) {
    ++dropped_;
    return;
  }
  waiting_.push_back(std::move(item));
}

void OtlpExporter::Add(Span span) { Push(std::move(span)); }
void OtlpExporter::AddStep(const StepPart& part) { Push(part); }

void OtlpExporter::Run() {
  NameThread("dt-traces");
  while (true) {
    std::vector<Item> items;
    bool ends = false;
    {
      MutexLock lock(mutex_);
      ends = wake_.wait_for(lock, absl::ToChronoMilliseconds(kEvery), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return give_up_ != absl::InfiniteFuture();
      });
      items.swap(waiting_);
    }
    std::vector<Span> spans;
    for (Item& item : items) {
      if (auto* span = std::get_if<Span>(&item))
        spans.push_back(std::move(*span));
      else
        steps_.Add(std::get<StepPart>(item));
    }
    steps_.Take(SystemClock().Now(), ends, spans);
    Send(spans);
    if (ends) return;
  }
}

void OtlpExporter::Send(std::vector<Span>& spans) {
  for (size_t at = 0; at < spans.size(); at += kMaxBatch) {
    const size_t end = std::min(spans.size(), at + kMaxBatch);
    const std::vector<Span> batch(std::make_move_iterator(spans.begin() + static_cast<int64_t>(at)),
                                  std::make_move_iterator(spans.begin() + static_cast<int64_t>(end)));
    if (SendBatch(batch)) sent_ += batch.size();
  }
}

absl::Duration OtlpExporter::TimeLeft() {
  MutexLock lock(mutex_);
  return std::min(kTimeout, give_up_ - SystemClock().Now());
}

absl::StatusOr<int> OtlpExporter::Post(const std::string& body) {
  const absl::Duration limit = TimeLeft();
  if (limit <= absl::ZeroDuration()) return absl::UnavailableError("the process ends");
  if (client_ == nullptr) {
    DT_ASSIGN_OR_RETURN(client_, http_client::HttpClient::Create(endpoint_, {}));
  }
  const http_client::HttpRequest request{.headers = {{"Content-Type", "application/json"}}, .body = body};
  DT_ASSIGN_OR_RETURN(const http_client::HttpClient::Answer answer, client_->Fetch(request, limit));
  return answer.status;
}

bool OtlpExporter::SendBatch(const std::vector<Span>& batch) {
  // Nodes tell time since an arbitrary start; a collector wants the time of day, which may be set meanwhile.
  const std::string body = OtlpJson(resource_, batch, absl::Now() - SystemClock().Now());
  for (int attempt = 1;; ++attempt) {
    const absl::StatusOr<int> status = Post(body);
    if (status.ok() && *status >= 200 && *status < 300) return true;
    if (!status.ok()) client_ = nullptr;  // the name may mean another address by now
    if (!MayRetry(status) || attempt == kAttempts || !PauseBeforeRetry(attempt)) {
      Drop(batch.size(), status.ok() ? absl::StrCat("it answers ", *status) : std::string(status.status().message()));
      return false;
    }
  }
}

bool OtlpExporter::PauseBeforeRetry(int attempt) {
  MutexLock lock(mutex_);
  const auto pause = absl::ToChronoMilliseconds(kEvery * attempt);
  return !wake_.wait_for(lock, pause,
                         [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return give_up_ != absl::InfiniteFuture(); });
}

void OtlpExporter::Drop(size_t spans, const std::string& why) {
  dropped_ += spans;
  const absl::Time now = SystemClock().Now();
  if (now < last_warning_ + kBetweenWarnings) return;
  last_warning_ = now;
  LogWarning("traces: ", endpoint_.Text(), " does not take them (", why, "); ", dropped_.load(),
             " spans were dropped so far");
}

}  // namespace dovetail::tracing
