#include "server/http/http_server.h"

#include <boost/asio/post.hpp>

#include "base/segment_tree.h"
#include "server/http/api_handler.h"
#include "server/http/listener.h"
#include "server/http/tls_context.h"

namespace dovetail::server {
namespace {
constexpr std::chrono::seconds kCollectEvery{1};
constexpr int kLimitEvery = 10;                           // collections: connections of other APIs come and go
constexpr absl::Duration kDrainGrace = absl::Seconds(1);  // for the error frames to be written
}  // namespace

class HttpServer::Impl {
 public:
  Impl(HttpServerOptions options, std::shared_ptr<Intake> intake)
      : options_(std::move(options)),
        handler_(options_, intake ? std::move(intake)
                                  : std::make_shared<Intake>(options_.worker_threads, options_.work_limits())),
        listener_(std::make_unique<Listener>(options_, handler_)) {
    for (int i = 0; i < options_.io_threads; ++i) {
      boost::asio::io_context& context = listener_->context(i);
      inboxes_.push_back(std::make_shared<UpdateInbox>(
          [&context](std::function<void()> task) { boost::asio::post(context, std::move(task)); }));
    }
    handler_.SetInboxes(inboxes_);
    handler_.SetHttpStats([this] {
      HttpStats stats = listener_->stats();
      if (tls_ != nullptr) stats.certificate_end = tls_->certificate_end();
      return stats;
    });
  }

  absl::Status Start() {
    DT_RETURN_IF_ERROR(options_.Validate());
    if (options_.tls.enabled()) {
      DT_ASSIGN_OR_RETURN(tls_, TlsContext::Create(options_.tls));
      listener_->SetTls(tls_.get());
    }
    collect_timer_.emplace(listener_->context(0));
    CollectLater();
    DT_RETURN_IF_ERROR(listener_->Start());
    running_ = true;
    return absl::OkStatus();
  }

  void Serve(std::shared_ptr<const ServedModel> model, engine::Engine* engine, std::shared_ptr<ServerMetrics> metrics) {
    auto backend = std::make_shared<Backend>();
    if (metrics == nullptr)
      metrics = std::make_shared<ServerMetrics>(ServerMetrics::Info{.model_name = model->names.front(),
                                                                    .max_model_len = model->max_model_len,
                                                                    .block_size = kSegmentTokens,
                                                                    .version = options_.version});
    backend->metrics = std::move(metrics);
    backend->model = std::move(model);
    backend->engine = engine;
    listener_->RefreshLimit();
    handler_.SetBackend(std::move(backend));
  }

  bool Drain(absl::Duration limit) {
    handler_.SetDraining();
    return listener_->Drain(limit, kDrainGrace);
  }

  void Stop() {
    if (!running_) return;
    running_ = false;
    handler_.SetDraining();
    handler_.StopWork();
    listener_->Stop();
    for (const auto& inbox : inboxes_) inbox->Close();
  }

  Listener& listener() { return *listener_; }

 private:
  // Step samples are kept for a limited time, so they are fetched also when no client reads /metrics. Certificates
  // change.
  void CollectLater() {
    collect_timer_->expires_after(kCollectEvery);
    collect_timer_->async_wait([this](const boost::system::error_code& error) {
      if (error) return;
      handler_.CollectMetrics();
      if (tls_ != nullptr) tls_->ReloadIfChanged();
      if (++collected_ % kLimitEvery == 0) listener_->RefreshLimit();
      CollectLater();
    });
  }

  const HttpServerOptions options_;
  ApiHandler handler_;
  std::unique_ptr<TlsContext> tls_;
  std::vector<std::shared_ptr<UpdateInbox>> inboxes_;
  std::unique_ptr<Listener> listener_;
  std::optional<boost::asio::steady_timer> collect_timer_;
  int64_t collected_ = 0;
  bool running_ = false;
};

HttpServer::HttpServer(HttpServerOptions options, std::shared_ptr<Intake> intake)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(intake))) {}
HttpServer::~HttpServer() { Stop(); }
absl::Status HttpServer::Start() { return impl_->Start(); }
int HttpServer::port() const { return impl_->listener().port(); }
void HttpServer::Serve(std::shared_ptr<const ServedModel> model, engine::Engine* engine,
                       std::shared_ptr<ServerMetrics> metrics) {
  impl_->Serve(std::move(model), engine, std::move(metrics));
}
bool HttpServer::Drain(absl::Duration limit) { return impl_->Drain(limit); }
void HttpServer::Stop() { impl_->Stop(); }
ConnectionLimit HttpServer::connection_limit() const { return impl_->listener().limit(); }
int HttpServer::connections() const { return impl_->listener().connections(); }

}  // namespace dovetail::server
