#include "server/metrics/server_metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/mutex.h"
#include "server/metrics/paired_metrics.h"
#include "server/metrics/process_metrics.h"
#include "server/metrics/tenant_metrics.h"
#include "server/metrics/worker_metrics.h"

namespace dovetail::server {
namespace {

// vLLM's ranges (design of its loggers), so that dashboards' quantiles mean the same.
const std::vector<double> kFirstTokenS = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                                          1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const std::vector<double> kPerTokenS = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                        0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
const std::vector<double> kRequestS = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                       30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
const std::vector<double> kStepS = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10};
const std::vector<double> kStepTokens = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
const std::vector<double> kChoices = {1, 2, 5, 10, 20};

// 1, 2, 5, 10, ... up to the model's length.
std::vector<double> TokenBuckets(int max_model_len) {
  std::vector<double> buckets;
  for (double decade = 1;; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (step * decade > max_model_len && !buckets.empty()) return buckets;
      buckets.push_back(step * decade);
    }
  }
}

// Of what another part counts from its start.
void Grow(const CounterPair& counter, uint64_t current, uint64_t last) {
  if (current > last) counter.Add(static_cast<double>(current - last));
}

void GrowSeconds(const CounterPair& counter, double current, double last) {
  if (current > last) counter.Add(current - last);
}

double Seconds(absl::Duration duration) { return std::max(0.0, absl::ToDoubleSeconds(duration)); }

constexpr size_t kMostDamageSeries = 1024;
// Of other methods there could be one series each.
constexpr std::array<std::string_view, 7> kMethods = {"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"};
constexpr std::array<const char*, 4> kEnds = {"stop", "length", "abort", "error"};

}  // namespace

class ServerMetrics::Impl {
 public:
  explicit Impl(const Info& info)
      : make_(registry_, {{"model_name", info.model_name}}), token_buckets_(TokenBuckets(info.max_model_len)) {
    for (size_t i = 0; i < kEnds.size(); ++i)
      ends_[i] = make_.Counter("requests_total", "request_success_total", "Requests by how they ended.",
                               {{"finished_reason", kEnds[i]}});
    for (size_t i = 0; i < kBodyRefusals.size(); ++i)
      bodies_refused_[i] = make_.Counter("http_bodies_refused_total", "", "Request bodies that were not read.",
                                         {{"reason", kBodyRefusals[i]}});
    for (size_t i = 0; i < kForRoom.size(); ++i)
      ended_for_room_[i] = make_.Counter("http_connections_ended_for_room_total", "",
                                         "Connections that ended because all were taken.", {{"reason", kForRoom[i]}});
    for (size_t i = 0; i < kTlsFailures.size(); ++i)
      tls_failures_[i] = make_.Counter("tls_handshakes_failed_total", "", "TLS handshakes with clients that failed.",
                                       {{"reason", kTlsFailures[i]}});
    make_.Gauge("info", "", "Constant 1; the labels say what runs.", {{"version", info.version}}).Set(1);
    make_
        .Gauge("cache_config_info", "cache_config_info", "Constant 1; the labels describe the KV cache.",
               {{"block_size", std::to_string(info.block_size)},
                {"max_model_len", std::to_string(info.max_model_len)},
                {"num_gpu_blocks", std::to_string(info.block_count)}})
        .Set(1);
  }

  prometheus::Registry registry_;
  PairMaker make_;
  const std::vector<double> token_buckets_;
  std::array<CounterPair, kEnds.size()> ends_;

  // requests
  CounterPair prompt_tokens_ =
      make_.Counter("prompt_tokens_total", "prompt_tokens_total", "Prompt tokens of all requests.");
  CounterPair generation_tokens_ =
      make_.Counter("generation_tokens_total", "generation_tokens_total", "Tokens generated.");
  CounterPair cached_tokens_ = make_.Counter("prompt_tokens_cached_total", "prompt_tokens_cached_total",
                                             "Prompt tokens found in the prefix cache.");
  CounterPair computed_tokens_ =
      make_.Counter("prompt_tokens_by_source_total", "prompt_tokens_by_source_total",
                    "Prompt tokens of ended requests by where their KV came from.", {{"source", "local_compute"}});
  CounterPair found_tokens_ =
      make_.Counter("prompt_tokens_by_source_total", "prompt_tokens_by_source_total",
                    "Prompt tokens of ended requests by where their KV came from.", {{"source", "local_cache_hit"}});
  HistogramPair first_token_ = make_.Histogram("time_to_first_token_seconds", "time_to_first_token_seconds",
                                               "From arrival to the first token.", kFirstTokenS);
  HistogramPair inter_token_ = make_.Histogram("inter_token_latency_seconds", "inter_token_latency_seconds",
                                               "Between tokens of a choice.", kPerTokenS);
  HistogramPair per_output_token_ =
      make_.Histogram("request_time_per_output_token_seconds", "request_time_per_output_token_seconds",
                      "A request's mean time per token after the first.", kPerTokenS);
  HistogramPair e2e_ = make_.Histogram("e2e_request_latency_seconds", "e2e_request_latency_seconds",
                                       "From arrival to the end.", kRequestS);
  HistogramPair queue_ = make_.Histogram("request_queue_time_seconds", "request_queue_time_seconds",
                                         "In the engine, waiting for a place.", kRequestS);
  HistogramPair inference_ = make_.Histogram("request_inference_time_seconds", "request_inference_time_seconds",
                                             "In the engine, running.", kRequestS);
  HistogramPair prefill_ = make_.Histogram("request_prefill_time_seconds", "request_prefill_time_seconds",
                                           "From a place in the engine to the first token.", kRequestS);
  HistogramPair decode_ = make_.Histogram("request_decode_time_seconds", "request_decode_time_seconds",
                                          "From the first token to the end.", kRequestS);
  HistogramPair request_prompt_ =
      make_.Histogram("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens a request.", token_buckets_);
  HistogramPair request_computed_ =
      make_.Histogram("request_prefill_kv_computed_tokens", "request_prefill_kv_computed_tokens",
                      "Prompt tokens a request that were not in the prefix cache.", token_buckets_);
  HistogramPair request_generation_ = make_.Histogram("request_generation_tokens", "request_generation_tokens",
                                                      "Generated tokens a request.", token_buckets_);
  HistogramPair request_largest_ =
      make_.Histogram("request_max_num_generation_tokens", "request_max_num_generation_tokens",
                      "Tokens of a request's longest choice.", token_buckets_);
  HistogramPair request_n_ = make_.Histogram("request_params_n", "request_params_n", "Choices asked for.", kChoices);
  HistogramPair request_max_tokens_ =
      make_.Histogram("request_params_max_tokens", "request_params_max_tokens", "Tokens asked for.", token_buckets_);
  CounterPair slow_readers_ =
      make_.Counter("slow_readers_cancelled_total", "", "Streams cancelled because the client did not read.");

  // engine
  GaugePair running_ = make_.Gauge("requests_running", "num_requests_running", "Sequences being generated.");
  GaugePair waiting_ = make_.Gauge("requests_waiting", "num_requests_waiting", "Requests in the queue.");
  GaugePair paused_ = make_.Gauge("requests_paused", "", "Requests whose reader is slow.");
  GaugePair kv_usage_ = make_.Gauge("kv_cache_usage_perc", "kv_cache_usage_perc",
                                    "KV used by live sequences on the fullest attention worker, 0 to 1.");
  GaugePair blocks_total_ = make_.Gauge("kv_blocks_total", "", "KV blocks of all attention workers.");
  GaugePair blocks_used_ = make_.Gauge("kv_blocks_in_use", "", "KV blocks of live sequences.");
  GaugePair blocks_cached_ = make_.Gauge("kv_blocks_cached", "", "KV blocks kept for prefix hits only.");
  GaugePair healthy_ = make_.Gauge("healthy", "", "1: the engine makes progress.");
  CounterPair preemptions_ =
      make_.Counter("preemptions_total", "num_preemptions_total", "Sequences preempted to be recomputed.");
  CounterPair prefix_queries_ = make_.Counter("prefix_cache_queries_total", "prefix_cache_queries_total",
                                              "Tokens looked up in the prefix cache.");
  CounterPair prefix_hits_ =
      make_.Counter("prefix_cache_hits_total", "prefix_cache_hits_total", "Tokens found in the prefix cache.");
  CounterPair spilled_ = make_.Counter("prefix_spilled_tokens_total", "",
                                       "Tokens of ended sequences that a slower tier of attention workers has cached, "
                                       "too, before the faster one dropped them.");
  CounterPair fetched_ = make_.Counter("prefix_fetched_tokens_total", "",
                                       "Tokens found in the prefix cache of a slower tier of attention workers, and "
                                       "moved to the faster one where their sequence runs.");
  CounterPair steps_ = make_.Counter("steps_total", "", "Engine steps.");
  CounterPair late_events_ =
      make_.Counter("late_events_total", "", "Results of an old epoch or a finished request, dropped.");
  CounterPair damaged_ = make_.Counter("damaged_sequences_total", "",
                                       "Sequences that began again because their KV was not what was written.");
  CounterPair replays_same_ =
      make_.Counter("replays_same_total", "", "Requests computed again (--replay-one-in) that gave their tokens.");
  CounterPair replays_different_ =
      make_.Counter("replays_different_total", "", "Requests computed again that gave other tokens: see the log.");
  CounterPair prefill_groups_ =
      make_.Counter("prefill_groups_total", "", "Parts of long prompts that several compute workers took together.");
  CounterPair prefill_group_tokens_ = make_.Counter("prefill_group_tokens_total", "", "Tokens in those parts.");
  CounterPair shortened_chunks_ =
      make_.Counter("prefill_shortened_steps_total", "",
                    "Steps and parts of prompts on several workers that took less of a prompt because running streams "
                    "would have waited longer than --prefill-itl-budget.");
  CounterPair prefix_asked_bytes_ = PrefillExchange("plane"), prefix_gathered_bytes_ = PrefillExchange("gather"),
              prefix_state_bytes_ = PrefillExchange("state"), prefix_chain_bytes_ = PrefillExchange("chain"),
              prefix_direct_bytes_ = PrefillExchange("gather-direct"), prefix_ring_bytes_ = PrefillExchange("ring"),
              prefix_switch_bytes_ = PrefillExchange("switch"), prefix_pass_q_bytes_ = PrefillExchange("pass-q");
  CounterPair PrefillExchange(const char* exchange) {
    return make_.Counter(
        "prefill_exchange_bytes_total", "",
        "Bytes that crossed so that prompts' steps see earlier tokens, by exchange: queries and "
        "partials (plane), K and V from attention workers (gather), from rank to rank "
        "(gather-direct) and round the ranks (ring), q, k, v and outputs of heads between ranks "
        "(switch), queries and partials between ranks (pass-q), linear states by way of attention workers "
        "(state) and from rank to rank (chain).",
        {{"exchange", exchange}});
  }
  struct PrefillSeconds {
    CounterPair predicted, measured, next_best, had_other;
  };
  PrefillSeconds PrefillSecondsOf(const std::string& exchange) {
    const auto counter = [&](const char* what) {
      return make_.Counter("prefill_seconds_total", "",
                           "Parts of prompts by exchange: as predicted, and as measured; and where there was another "
                           "way, what was predicted of the best of them (next_best) and measured of the one taken "
                           "(had_other).",
                           {{"exchange", exchange}, {"what", what}});
    };
    return {counter("predicted"), counter("measured"), counter("next_best"), counter("had_other")};
  }
  // By proto::IndexOf the way, of those that are there.
  std::vector<std::pair<size_t, PrefillSeconds>> PrefillSecondsOfWays() {
    using proto::LinearExchange, proto::PrefixExchange;
    std::vector<std::pair<size_t, PrefillSeconds>> all;
    for (const LinearExchange linear : {LinearExchange::kStates, LinearExchange::kChain, LinearExchange::kSwitch})
      for (const PrefixExchange softmax : {PrefixExchange::kAsk, PrefixExchange::kGather, PrefixExchange::kGatherDirect,
                                           PrefixExchange::kRing, PrefixExchange::kSwitch, PrefixExchange::kPassQ}) {
        if (linear == LinearExchange::kSwitch && softmax != PrefixExchange::kSwitch) continue;
        const proto::PrefillWay way{softmax, linear};
        all.emplace_back(IndexOf(way), PrefillSecondsOf(NameOf(way)));
      }
    return all;
  }
  std::vector<std::pair<size_t, PrefillSeconds>> prefill_seconds_ = PrefillSecondsOfWays();
  CounterPair replays_unclear_ =
      make_.Counter("replays_unclear_total", "", "Requests that could not be computed again to their end.");
  HistogramPair step_tokens_ =
      make_.Histogram("step_tokens", "iteration_tokens_total", "New tokens a step.", kStepTokens);
  HistogramPair step_ = make_.Histogram("step_seconds", "", "A step, whole.", kStepS);
  HistogramPair step_dense_ = make_.Histogram("step_dense_seconds", "", "A step's dense layers.", kStepS);
  HistogramPair step_attention_wait_ =
      make_.Histogram("step_attention_wait_seconds", "", "A step's wait for attention workers.", kStepS);
  HistogramPair step_sample_ = make_.Histogram("step_sample_seconds", "", "A step's sampling.", kStepS);
  CounterPair StepPart(const char* part) {
    return make_.Counter("step_part_seconds_total", "",
                         "Where steps spend their time: dense layers; attention and the wire, while the compute worker "
                         "has nothing else to do; and the bubble in which a step waits for its turn.",
                         {{"part", part}});
  }
  std::array<CounterPair, 4> step_parts_ = {StepPart("dense"), StepPart("attention"), StepPart("wire"),
                                            StepPart("bubble")};

  // HTTP
  GaugePair connections_ = make_.Gauge("http_connections", "", "Open connections.");
  GaugePair max_connections_ =
      make_.Gauge("http_connections_max", "", "--max-connections, or fewer where open files are short.");
  GaugePair active_ = make_.Gauge("http_requests_active", "", "HTTP requests under way.");
  GaugePair to_read_ = make_.Gauge("requests_to_read", "", "Requests that wait to be parsed and tokenised.");
  GaugePair body_bytes_ = make_.Gauge("http_body_bytes", "", "Held by request bodies that are not parsed yet.");
  std::array<CounterPair, kBodyRefusals.size()> bodies_refused_;
  std::array<CounterPair, kForRoom.size()> ended_for_room_;
  std::array<CounterPair, kTlsFailures.size()> tls_failures_;
  prometheus::Family<prometheus::Counter>& http_ = prometheus::BuildCounter()
                                                       .Name("dovetail:http_responses_total")
                                                       .Help("Responses by route and status.")
                                                       .Register(registry_);
  prometheus::Family<prometheus::Counter>& http_requests_ =
      prometheus::BuildCounter()
          .Name("http_requests_total")
          .Help("HTTP requests by route, method and kind of status, as vLLM's server names them.")
          .Register(registry_);
  prometheus::Family<prometheus::Counter>& grpc_ = prometheus::BuildCounter()
                                                       .Name("dovetail:grpc_responses_total")
                                                       .Help("Calls of the gRPC API by method and code.")
                                                       .Register(registry_);
  GaugePair Waiting(const char* reason) {
    return make_.Gauge("requests_waiting_by_reason", "num_requests_waiting_by_reason",
                       "Requests that wait: for a place in the engine (capacity), or for their grammar (deferred).",
                       {{"reason", reason}});
  }
  GaugePair waiting_capacity_ = Waiting("capacity"), waiting_deferred_ = Waiting("deferred");
  ProcessMetrics process_{registry_};

  TenantMetrics tenants_{make_};
  WorkerMetrics workers_{registry_};

  void UpdateDamagedBlocks(const std::vector<engine::DamagedBlocks>& now);
  std::map<std::string, CounterPair> damage_series_;                  // by attention worker
  std::map<std::pair<std::string, uint64_t>, uint64_t> damage_seen_;  // by worker and incarnation

  // The engine counts from its start; Prometheus counters are fed with differences.
  Mutex mutex_;
  scheduler::SchedulerStats last_ ABSL_GUARDED_BY(mutex_);
  HttpStats last_http_ ABSL_GUARDED_BY(mutex_);
};

ServerMetrics::ServerMetrics(const Info& info) : impl_(std::make_unique<Impl>(info)) {
  impl_->grpc_.Add({{"method", "Generate"}, {"code", "OK"}});  // 0 until the first call, not absent
}
ServerMetrics::~ServerMetrics() = default;

const char* NameOf(RequestEnd end) { return kEnds[static_cast<size_t>(end)]; }

void ServerMetrics::HttpResponse(const std::string& route, const std::string& method, int status) {
  impl_->http_.Add({{"route", route}, {"status", std::to_string(status)}}).Increment();
  const std::string kind = std::to_string(status / 100) + "xx";
  const bool known = std::find(kMethods.begin(), kMethods.end(), method) != kMethods.end();
  impl_->http_requests_.Add({{"handler", route}, {"method", known ? method : "other"}, {"status", kind}}).Increment();
}

void ServerMetrics::GrpcResponse(const std::string& method, const std::string& code) {
  impl_->grpc_.Add({{"method", method}, {"code", code}}).Increment();
}

void ServerMetrics::PromptAccepted(int64_t prompt_tokens) {
  impl_->prompt_tokens_.Add(static_cast<double>(prompt_tokens));
}

void ServerMetrics::FirstToken(absl::Duration since_arrival) { impl_->first_token_.Observe(Seconds(since_arrival)); }

void ServerMetrics::Tokens(int count, absl::Duration since_last) {
  impl_->generation_tokens_.Add(count);
  if (since_last == absl::InfiniteDuration()) return;
  for (int i = 0; i < count; ++i) impl_->inter_token_.Observe(Seconds(since_last) / count);
}

void ServerMetrics::RequestFinished(const RequestRecord& record) {
  Impl& m = *impl_;
  m.ends_[static_cast<size_t>(record.end)].Add(1);
  m.tenants_.Finished(record);
  m.cached_tokens_.Add(static_cast<double>(record.cached_tokens));
  m.request_prompt_.Observe(static_cast<double>(record.prompt_tokens));
  m.request_computed_.Observe(static_cast<double>(record.prompt_tokens - record.cached_tokens));
  m.request_generation_.Observe(static_cast<double>(record.generation_tokens));
  m.request_largest_.Observe(static_cast<double>(record.largest_choice));
  m.request_n_.Observe(record.choices);
  m.request_max_tokens_.Observe(static_cast<double>(record.max_tokens));
  m.e2e_.Observe(Seconds(record.ended));
  m.computed_tokens_.Add(static_cast<double>(record.prompt_tokens - record.cached_tokens));
  m.found_tokens_.Add(static_cast<double>(record.cached_tokens));
  const absl::Duration admitted = record.submitted + record.queued;
  m.queue_.Observe(Seconds(record.queued));
  m.inference_.Observe(Seconds(record.ended - admitted));
  if (record.first_token == absl::InfiniteDuration()) return;
  m.prefill_.Observe(Seconds(record.first_token - admitted));
  m.decode_.Observe(Seconds(record.ended - record.first_token));
  if (record.largest_choice > 1)
    m.per_output_token_.Observe(Seconds(record.ended - record.first_token) /
                                static_cast<double>(record.largest_choice - 1));
}

void ServerMetrics::SlowReaderCancelled() { impl_->slow_readers_.Add(1); }

void ServerMetrics::Update(const engine::EngineStats& stats, const std::vector<engine::StepSample>& samples) {
  Impl& m = *impl_;
  MutexLock lock(m.mutex_);
  const scheduler::SchedulerStats& now = stats.scheduler;
  m.running_.Set(now.running_sequences);
  m.waiting_.Set(now.waiting_requests);
  m.paused_.Set(now.paused_requests);
  m.kv_usage_.Set(now.kv_usage);
  m.blocks_total_.Set(static_cast<double>(stats.kv_blocks_total));
  m.blocks_used_.Set(static_cast<double>(stats.kv_blocks_in_use));
  m.blocks_cached_.Set(static_cast<double>(stats.kv_blocks_cached));
  m.healthy_.Set(stats.healthy ? 1 : 0);
  Grow(m.preemptions_, now.preemptions, m.last_.preemptions);
  Grow(m.prefix_queries_, now.prefix_queries, m.last_.prefix_queries);
  Grow(m.prefix_hits_, now.prefix_hits, m.last_.prefix_hits);
  Grow(m.spilled_, now.spilled_tokens, m.last_.spilled_tokens);
  Grow(m.fetched_, now.fetched_tokens, m.last_.fetched_tokens);
  Grow(m.steps_, now.steps, m.last_.steps);
  Grow(m.late_events_, now.late_events, m.last_.late_events);
  Grow(m.damaged_, now.damaged, m.last_.damaged);
  m.UpdateDamagedBlocks(stats.damaged_blocks);
  m.workers_.Update(stats.workers);
  m.workers_.UpdateCertificate("scheduler", stats.scheduler_certificate_end);
  m.workers_.UpdateCertificate("server", stats.own_certificate_end);
  Grow(m.replays_same_, now.replays_same, m.last_.replays_same);
  Grow(m.replays_different_, now.replays_different, m.last_.replays_different);
  Grow(m.prefill_groups_, now.prefill_groups, m.last_.prefill_groups);
  Grow(m.prefill_group_tokens_, now.prefill_group_tokens, m.last_.prefill_group_tokens);
  Grow(m.shortened_chunks_, now.shortened_chunks, m.last_.shortened_chunks);
  Grow(m.prefix_asked_bytes_, now.prefix_asked_bytes, m.last_.prefix_asked_bytes);
  Grow(m.prefix_gathered_bytes_, now.prefix_gathered_bytes, m.last_.prefix_gathered_bytes);
  Grow(m.prefix_state_bytes_, now.prefix_state_bytes, m.last_.prefix_state_bytes);
  Grow(m.prefix_chain_bytes_, now.prefix_chain_bytes, m.last_.prefix_chain_bytes);
  Grow(m.prefix_direct_bytes_, now.prefix_direct_bytes, m.last_.prefix_direct_bytes);
  Grow(m.prefix_ring_bytes_, now.prefix_ring_bytes, m.last_.prefix_ring_bytes);
  Grow(m.prefix_switch_bytes_, now.prefix_switch_bytes, m.last_.prefix_switch_bytes);
  Grow(m.prefix_pass_q_bytes_, now.prefix_pass_q_bytes, m.last_.prefix_pass_q_bytes);
  Grow(m.replays_unclear_, now.replays_unclear, m.last_.replays_unclear);
  for (const auto& [way, seconds] : m.prefill_seconds_) {
    const scheduler::PrefillTimes &times = now.prefill_times[way], &last = m.last_.prefill_times[way];
    GrowSeconds(seconds.predicted, times.predicted_s, last.predicted_s);
    GrowSeconds(seconds.measured, times.measured_s, last.measured_s);
    GrowSeconds(seconds.next_best, times.next_best_s, last.next_best_s);
    GrowSeconds(seconds.had_other, times.had_other_s, last.had_other_s);
  }
  m.last_ = now;
  for (const engine::StepSample& sample : samples) {
    m.step_tokens_.Observe(sample.new_tokens);
    m.step_.Observe(static_cast<double>(sample.total_us) * 1e-6);
    m.step_dense_.Observe(static_cast<double>(sample.dense_us) * 1e-6);
    m.step_attention_wait_.Observe(static_cast<double>(sample.attention_wait_us) * 1e-6);
    m.step_sample_.Observe(static_cast<double>(sample.sample_us) * 1e-6);
    m.step_parts_[0].Add(static_cast<double>(sample.OwnUs()) * 1e-6);
    m.step_parts_[1].Add(static_cast<double>(sample.AttentionPartUs()) * 1e-6);
    m.step_parts_[2].Add(static_cast<double>(sample.WirePartUs()) * 1e-6);
    m.step_parts_[3].Add(static_cast<double>(sample.BubbleUs()) * 1e-6);
  }
}

// One series for all incarnations of a worker. Workers without a --name have another one at each start, so that there
// would be more and more series: the last one is of all further workers.
void ServerMetrics::Impl::UpdateDamagedBlocks(const std::vector<engine::DamagedBlocks>& now) {
  std::map<std::pair<std::string, uint64_t>, uint64_t> seen;
  for (const engine::DamagedBlocks& worker : now) {
    const bool room = damage_series_.size() < kMostDamageSeries || damage_series_.contains(worker.worker);
    const std::string name = room ? worker.worker : "others";
    const auto [series, is_new] = damage_series_.try_emplace(name);
    if (is_new)
      series->second = make_.Counter("kv_damaged_blocks_total", "",
                                     "KV blocks that were not what was written (--kv-checksums), by attention worker.",
                                     {{"attention_worker", name}});
    const std::pair<std::string, uint64_t> incarnation(worker.worker, worker.incarnation);
    const auto last = damage_seen_.find(incarnation);
    Grow(series->second, worker.blocks, last == damage_seen_.end() ? 0 : last->second);
    seen[incarnation] = worker.blocks;
  }
  damage_seen_ = std::move(seen);
}

void ServerMetrics::UpdateHttp(const HttpStats& stats) {
  Impl& m = *impl_;
  MutexLock lock(m.mutex_);
  m.connections_.Set(stats.connections);
  m.max_connections_.Set(stats.max_connections);
  m.active_.Set(stats.active_requests);
  m.to_read_.Set(stats.requests_to_read);
  m.body_bytes_.Set(static_cast<double>(stats.body_bytes));
  for (size_t i = 0; i < kBodyRefusals.size(); ++i)
    Grow(m.bodies_refused_[i], stats.bodies_refused[i], m.last_http_.bodies_refused[i]);
  for (size_t i = 0; i < kForRoom.size(); ++i)
    Grow(m.ended_for_room_[i], stats.ended_for_room[i], m.last_http_.ended_for_room[i]);
  for (size_t i = 0; i < kTlsFailures.size(); ++i)
    Grow(m.tls_failures_[i], stats.tls_failures[i], m.last_http_.tls_failures[i]);
  m.workers_.UpdateCertificate("https", stats.certificate_end);
  m.last_http_ = stats;
}

void ServerMetrics::UpdateWaiting(int for_a_place, int for_a_grammar) {
  impl_->waiting_capacity_.Set(for_a_place);
  impl_->waiting_deferred_.Set(for_a_grammar);
}

std::string ServerMetrics::Text() const {
  impl_->process_.Update();
  return prometheus::TextSerializer().Serialize(impl_->registry_.Collect());
}

}  // namespace dovetail::server
