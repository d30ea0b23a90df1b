#include "loadgen/load_run.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>  // before Boost 1.74's asio, which forgets it in C++20

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace dovetail::loadgen {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr absl::Duration kLook = absl::Milliseconds(50);  // at the stop flag
constexpr int kLooksPerProgress = 20;

class Load;

// One request under way.
class Exchange final : public http_client::HttpObserver {
 public:
  Exchange(Load& load, size_t index, bool probe, AnswerReader reader)
      : load_(load), index_(index), probe_(probe), reader_(std::move(reader)) {}

  void Begin(double planned_s, double now_s) { reader_.Begin(planned_s, now_s); }
  void SetCall(std::shared_ptr<http_client::HttpCall> call) { call_ = std::move(call); }
  void GiveUp(const absl::Status& why);

  void OnStatus(int status, const std::string& reason) override { reader_.OnStatus(status, reason); }
  void OnBody(std::string_view bytes) override;
  void OnEnd(const absl::Status& status) override;

 private:
  Load& load_;
  const size_t index_;
  const bool probe_;
  AnswerReader reader_;
  std::shared_ptr<http_client::HttpCall> call_;
  std::optional<absl::Status> gave_up_;
};

class Load {
 public:
  Load(http_client::HttpClient& client, const ApiOptions& api, const std::vector<PlannedRequest>& requests,
       const std::vector<double>& times_s, const LoadOptions& options, Clock& clock)
      : io_(client.io()),
        client_(client),
        api_(api),
        requests_(requests),
        times_s_(times_s),
        options_(options),
        clock_(clock),
        arrivals_(io_),
        probes_(io_),
        looks_(io_),
        records_(requests.size()) {}

  LoadResult Run() {
    start_ = clock_.Now();
    timer_start_ = std::chrono::steady_clock::now();
    SendDue();
    if (options_.probe_rate > 0) SendProbe();
    Look();
    io_.restart();
    io_.run();
    LoadResult result;
    for (size_t i = 0; i < records_.size(); ++i) {
      if (records_[i].has_value())
        result.records.push_back(*std::move(records_[i]));
      else
        ++result.not_sent;
    }
    result.probes = std::move(probe_records_);
    result.duration_s = duration_s_;
    result.stopped = stopped_;
    return result;
  }

  double Now() const { return absl::ToDoubleSeconds(clock_.Now() - start_); }
  absl::Duration request_timeout() const { return options_.request_timeout; }

  void OnEnded(size_t index, bool probe, RequestRecord record) {
    if (probe) {
      probe_records_.push_back(std::move(record));
      live_probes_[index] = nullptr;
      --probes_under_way_;
    } else {
      if (!record.success) ++failed_;
      records_[index] = std::move(record);
      live_[index] = nullptr;
      --under_way_;
      ++ended_;
      duration_s_ = Now();
      SendWaiting(/*held=*/true);
    }
    EndIfDone();
  }

 private:
  void At(asio::steady_timer& timer, double seconds, void (Load::*next)()) {
    timer.expires_at(timer_start_ +
                     std::chrono::duration_cast<SteadyTime::duration>(std::chrono::duration<double>(seconds)));
    timer.async_wait([this, next](error_code error) {
      if (!error) (this->*next)();
    });
  }

  void SendDue() {
    // The clock of records may be a test's; timers follow the real one.
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - timer_start_).count();
    while (!stopped_ && next_ < requests_.size() && times_s_[next_] <= now) {
      waiting_.push_back(next_++);
      SendWaiting(/*held=*/false);
    }
    if (!stopped_ && next_ < requests_.size()) At(arrivals_, times_s_[next_], &Load::SendDue);
  }

  // `held`: they waited for a place, and are due when one is free: now.
  void SendWaiting(bool held) {
    while (!stopped_ && !waiting_.empty() && (options_.max_concurrency == 0 || under_way_ < options_.max_concurrency)) {
      const size_t index = waiting_.front();
      waiting_.pop_front();
      ++under_way_;
      live_.resize(std::max(live_.size(), index + 1));
      live_[index] = Send(requests_[index], index, false, held ? Now() : times_s_[index]);
    }
  }

  std::shared_ptr<Exchange> Send(const PlannedRequest& planned, size_t index, bool probe, double due_s) {
    auto exchange =
        std::make_shared<Exchange>(*this, index, probe, AnswerReader(api_.backend, planned, options_.tokenizer));
    const http_client::HttpRequest request = MakeRequest(api_, planned);
    const double now = Now();
    exchange->Begin(std::min(now, due_s), now);
    exchange->SetCall(client_.Start(request, exchange));
    return exchange;
  }

  void SendProbe() {
    if (stopped_ || Done()) return;
    const size_t index = live_probes_.size();
    const double due = static_cast<double>(index) / options_.probe_rate;
    ++probes_under_way_;
    live_probes_.push_back(nullptr);
    live_probes_[index] = Send(options_.make_probe(static_cast<int64_t>(index)), index, true, due);
    At(probes_, static_cast<double>(index + 1) / options_.probe_rate, &Load::SendProbe);
  }

  void Look() {
    if (options_.stop != nullptr && !stopped_ && options_.stop->load()) Stop();
    if (looked_++ % kLooksPerProgress == kLooksPerProgress - 1) Progress();
    if (Done() && probes_under_way_ == 0) return;
    At(looks_, absl::ToDoubleSeconds(kLook) * static_cast<double>(looked_), &Load::Look);
  }

  void Progress() {
    if (options_.progress != nullptr) options_.progress(ended_, failed_, under_way_);
  }

  void Stop() {
    stopped_ = true;
    waiting_.clear();
    arrivals_.cancel();
    probes_.cancel();
    for (const auto& exchanges : {live_, live_probes_})
      for (const auto& exchange : exchanges)
        if (exchange != nullptr) exchange->GiveUp(absl::CancelledError("given up: the run was stopped"));
  }

  bool Done() const { return under_way_ == 0 && (stopped_ || (waiting_.empty() && next_ == requests_.size())); }

  void EndIfDone() {
    if (!Done()) return;
    probes_.cancel();
    if (probes_under_way_ > 0) return;
    looks_.cancel();
    Progress();
  }

  asio::io_context& io_;
  http_client::HttpClient& client_;
  const ApiOptions& api_;
  const std::vector<PlannedRequest>& requests_;
  const std::vector<double>& times_s_;
  const LoadOptions& options_;
  Clock& clock_;
  asio::steady_timer arrivals_, probes_, looks_;
  absl::Time start_;
  SteadyTime timer_start_;

  size_t next_ = 0;  // of requests_, not due yet
  std::deque<size_t> waiting_;
  std::vector<std::optional<RequestRecord>> records_;
  std::vector<RequestRecord> probe_records_;
  std::vector<std::shared_ptr<Exchange>> live_, live_probes_;  // null: ended
  int64_t under_way_ = 0, probes_under_way_ = 0, ended_ = 0, failed_ = 0, looked_ = 0;
  double duration_s_ = 0;
  bool stopped_ = false;
};

void Exchange::GiveUp(const absl::Status& why) {
  if (!gave_up_.has_value()) gave_up_ = why;
  if (call_ != nullptr) call_->Cancel();
}

void Exchange::OnBody(std::string_view bytes) {
  const double now = load_.Now();
  if (const absl::Status read = reader_.OnBody(bytes, now); !read.ok()) return GiveUp(read);
  if (now - reader_.record().start_s > absl::ToDoubleSeconds(load_.request_timeout()))
    GiveUp(absl::DeadlineExceededError(
        absl::StrCat("took longer than --request-timeout-sec ", absl::ToInt64Seconds(load_.request_timeout()))));
}

void Exchange::OnEnd(const absl::Status& status) {
  reader_.OnEnd(gave_up_.has_value() ? *gave_up_ : status);
  call_ = nullptr;
  load_.OnEnded(index_, probe_, reader_.TakeRecord());
}

}  // namespace

LoadResult RunLoad(http_client::HttpClient& client, const ApiOptions& api, const std::vector<PlannedRequest>& requests,
                   const std::vector<double>& times_s, const LoadOptions& options, Clock& clock) {
  Load load(client, api, requests, times_s, options, clock);
  return load.Run();
}

}  // namespace dovetail::loadgen
