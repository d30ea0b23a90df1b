#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/span_sink.h"
#include "base/status.h"
#include "http_client/http_client.h"
#include "tracing/otlp_json.h"
#include "tracing/step_seconds.h"

namespace dovetail::tracing {

// Where spans go: http://HOST:PORT[/PATH] or https://; without a path /v1/traces, where collectors take them.
// kInvalidArgument names the flag and what to write.
absl::StatusOr<http_client::Url> ParseEndpoint(const std::string& url);

// Sends spans to a collector by OTLP over HTTP with JSON bodies, on a thread of its own. At most kMaxQueued spans and
// parts of steps wait, and a batch of kMaxBatch is sent at most kAttempts times. What is beyond that is dropped and
// counted, and the log says so at most every ten seconds.
// Threads: thread-safe.
class OtlpExporter final : public SpanSink {
 public:
  static constexpr size_t kMaxQueued = 8192;
  static constexpr size_t kMaxBatch = 512;
  static constexpr int kAttempts = 3;
  static constexpr absl::Duration kEvery = absl::Milliseconds(500);
  static constexpr absl::Duration kTimeout = absl::Seconds(5);     // of one request
  static constexpr absl::Duration kFlushLimit = absl::Seconds(2);  // of the end

  OtlpExporter(http_client::Url endpoint, Resource resource);
  ~OtlpExporter() override;  // sends what is there, for kFlushLimit at most

  void Add(Span span) override;
  void AddStep(const StepPart& part) override;

  uint64_t sent() const { return sent_; }
  uint64_t dropped() const { return dropped_; }

 private:
  using Item = std::variant<Span, StepPart>;

  void Push(Item item);
  void Run();
  void Send(std::vector<Span>& spans);
  bool SendBatch(const std::vector<Span>& batch);
  absl::StatusOr<int> Post(const std::string& body);  // the answer's status
  absl::Duration TimeLeft();                          // of one request
  bool PauseBeforeRetry(int attempt);                 // false: the end has come
  void Drop(size_t spans, const std::string& why);

  const http_client::Url endpoint_;
  const Resource resource_;
  std::atomic<uint64_t> sent_{0}, dropped_{0};

  // Of the thread.
  std::unique_ptr<http_client::HttpClient> client_;  // null: the host was not looked up yet, or was not found
  StepSeconds steps_;
  absl::Time last_warning_ = absl::InfinitePast();

  Mutex mutex_;
  CondVar wake_;
  std::vector<Item> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Time give_up_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // once the end has come
  std::thread thread_;
};

}  // namespace dovetail::tracing
