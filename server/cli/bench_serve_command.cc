#include "server/cli/bench_serve_command.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "loadgen/load_run.h"
#include "loadgen/prompt_writer.h"
#include "loadgen/server_info.h"
#include "server/cli/model_text.h"
#include "server/cli/report_file.h"
#include "server/cli/role.h"
#include "server/cli/serve_report.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

using loadgen::Dataset;
using loadgen::PlannedRequest;
using loadgen::RunReport;

constexpr absl::Duration kBetweenReadyChecks = absl::Seconds(1);

void Note(const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }

// One command: a server, a way to make prompts for it, and loads that are run one after the other.
class BenchServe {
 public:
  BenchServe(const BenchServeFlags& flags, BenchServeOptions options, const StopSignal& signal)
      : flags_(flags), options_(std::move(options)), signal_(signal) {}

  // What the server and the files say. Nothing is sent that counts.
  absl::Status Prepare();
  absl::Status Run();
  void Stop() { stop_ = true; }  // on any thread: Run gives up what is under way
  bool has_measured() const { return has_measured_; }

 private:
  absl::Status FindModel();
  absl::Status NoServer(const absl::Status& why) const;
  absl::Status MakeWriter();
  absl::Status LoadLocalTokenizer(const std::string& path);
  absl::Status WaitUntilReady();
  absl::Status WarmUp();
  absl::Status Measure();
  absl::StatusOr<RunReport> RunAt(const loadgen::ArrivalOptions& arrivals);
  absl::StatusOr<loadgen::ServerTimes> TimesOfServer();
  absl::Status Sweep();
  loadgen::LoadResult Send(const std::vector<PlannedRequest>& requests, const std::vector<double>& times,
                           const loadgen::LoadOptions& options);
  loadgen::LoadOptions MeasuredLoad();
  PlannedRequest MakeProbe(int64_t index);
  loadgen::RunDescription Describe(const loadgen::ArrivalOptions& arrivals) const;
  absl::Status PrintAndSave(const RunReport& report, bool append);
  absl::Status WriteHtml();

  const BenchServeFlags& flags_;
  BenchServeOptions options_;
  const StopSignal& signal_;
  std::atomic<bool> stop_ = false;
  bool has_measured_ = false;  // a request that counts has succeeded
  std::unique_ptr<http_client::HttpClient> client_;
  std::string model_id_, tokenizer_id_;
  std::unique_ptr<loadgen::LocalTokenCounter> local_tokens_;  // null: no tokenizer in this process
  std::unique_ptr<loadgen::TokenCounter> server_tokens_;
  std::unique_ptr<loadgen::PromptWriter> writer_;
  loadgen::Random probe_random_{0};
  Dataset dataset_;
  std::vector<ServeRun> runs_;  // for --report
  std::optional<loadgen::Knee> knee_;
};

absl::Status BenchServe::Prepare() {
  DT_ASSIGN_OR_RETURN(client_, http_client::HttpClient::Create(options_.url, options_.http));
  DT_RETURN_IF_ERROR(FindModel());
  DT_RETURN_IF_ERROR(MakeWriter());
  Note(absl::StrCat("prompts by ", writer_->vocabulary().source));
  DT_ASSIGN_OR_RETURN(dataset_, loadgen::MakeDataset(options_.dataset, *writer_));
  for (const std::string& note : dataset_.notes) Note(note);
  probe_random_.seed(options_.dataset.seed + 1);
  return absl::OkStatus();
}

absl::Status BenchServe::NoServer(const absl::Status& why) const {
  const bool checks = options_.url.tls && options_.http.verify_certificates;
  return absl::UnavailableError(absl::StrCat(
      std::string(why.message()), "; --base-url, or --host and --port, say where the server is",
      checks ? "; SSL_CERT_FILE names authorities whose certificates count, and with --insecure all do" : ""));
}

absl::Status BenchServe::FindModel() {
  const std::string wanted = !flags_.served_model_name.empty() ? flags_.served_model_name : flags_.model;
  auto served = loadgen::AskForModel(*client_, options_.api.headers, wanted);
  const absl::Time give_up = absl::Now() + absl::Seconds(flags_.ready_check_timeout_s);
  while (!served.ok() && !absl::IsNotFound(served.status()) && absl::Now() < give_up) {
    absl::SleepFor(kBetweenReadyChecks);
    served = loadgen::AskForModel(*client_, options_.api.headers, wanted);
  }
  if (served.ok()) {
    options_.api.model = served->name;
    options_.dataset.max_model_len = served->max_model_len;
    if (served->max_model_len == 0) Note("the server does not say how long sequences may be: lengths are not checked");
  } else if (absl::IsUnavailable(served.status())) {
    return NoServer(served.status());
  } else if (absl::IsNotFound(served.status())) {
    return served.status();
  } else if (wanted.empty()) {
    return Annotate(served.status(), "--model is not given, and the server names none");
  } else {
    Note(absl::StrCat(std::string(served.status().message()), "; lengths are not checked"));
    options_.api.model = wanted;
  }
  model_id_ = flags_.model.empty() ? options_.api.model : flags_.model;
  return absl::OkStatus();
}

absl::Status BenchServe::LoadLocalTokenizer(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const auto tokenizer, LoadTokenizerAt(path));
  local_tokens_ = std::make_unique<loadgen::LocalTokenCounter>(tokenizer);
  tokenizer_id_ = path;
  DT_ASSIGN_OR_RETURN(auto words, loadgen::VocabularyOf(*tokenizer, absl::StrCat("the tokenizer of ", path)));
  writer_ = std::make_unique<loadgen::PromptWriter>(std::move(words), local_tokens_.get());
  return absl::OkStatus();
}

absl::Status BenchServe::MakeWriter() {
  std::error_code error;
  if (!flags_.skip_tokenizer_init) {
    if (!flags_.tokenizer.empty()) return Annotate(LoadLocalTokenizer(flags_.tokenizer), "--tokenizer");
    if (std::filesystem::exists(flags_.model, error)) return Annotate(LoadLocalTokenizer(flags_.model), "--model");
    auto counter = std::make_unique<loadgen::ServerTokenCounter>(*client_, options_.api.headers, options_.api.model);
    auto words = loadgen::VocabularyOf(*counter, "the server's /tokenize");
    if (words.ok()) {
      server_tokens_ = std::move(counter);
      tokenizer_id_ = model_id_;
      writer_ = std::make_unique<loadgen::PromptWriter>(*std::move(words), server_tokens_.get());
      return absl::OkStatus();
    }
    Note(absl::StrCat("there is no --tokenizer, and the server counts no tokens: ", words.status().message()));
  }
  auto by_usage = loadgen::TokensPerWordByUsage(*client_, options_.api);
  if (!by_usage.ok())
    Note(absl::StrCat("a word is taken for a token, so prompts have other lengths than asked for: ",
                      by_usage.status().message()));
  const std::string source = by_usage.ok() ? absl::StrFormat("usage: %.2f tokens a word", *by_usage) : "words";
  writer_ = std::make_unique<loadgen::PromptWriter>(loadgen::GuessedVocabulary(by_usage.value_or(1), source), nullptr);
  return absl::OkStatus();
}

loadgen::LoadResult BenchServe::Send(const std::vector<PlannedRequest>& requests, const std::vector<double>& times,
                                     const loadgen::LoadOptions& options) {
  return loadgen::RunLoad(*client_, options_.api, requests, times, options, SystemClock());
}

absl::Status BenchServe::WaitUntilReady() {
  if (flags_.ready_check_timeout_s == 0) return absl::OkStatus();
  const absl::Time give_up = absl::Now() + absl::Seconds(flags_.ready_check_timeout_s);
  while (!stop_) {
    loadgen::LoadOptions options;
    options.stop = &stop_;
    options.request_timeout = std::max(absl::Seconds(1), give_up - absl::Now());
    const auto result = Send({dataset_.requests.front()}, {0}, options);
    if (!result.records.empty() && result.records.front().success) return absl::OkStatus();
    if (absl::Now() >= give_up)
      return absl::UnavailableError(absl::StrCat("--ready-check-timeout-sec: no request succeeded in ",
                                                 flags_.ready_check_timeout_s,
                                                 " s: ", result.records.empty() ? "" : result.records.front().error));
    signal_.WaitFor(kBetweenReadyChecks);
  }
  return absl::OkStatus();
}

absl::Status BenchServe::WarmUp() {
  if (flags_.num_warmups == 0) return absl::OkStatus();
  loadgen::LoadOptions options;
  options.max_concurrency = flags_.max_concurrency;
  options.stop = &stop_;
  const auto count = static_cast<size_t>(flags_.num_warmups);
  Send(std::vector<PlannedRequest>(count, dataset_.requests.front()), std::vector<double>(count, 0), options);
  return absl::OkStatus();
}

PlannedRequest BenchServe::MakeProbe(int64_t index) {
  const auto& vocabulary = writer_->vocabulary();
  const int64_t words = std::max<int64_t>(1, flags_.probe_input_len - vocabulary.special_tokens);
  return {writer_->Piece(words, probe_random_), flags_.probe_input_len, flags_.probe_output_len, 0,
          absl::StrCat(flags_.request_id_prefix, "probe-", index)};
}

loadgen::LoadOptions BenchServe::MeasuredLoad() {
  loadgen::LoadOptions options;
  options.max_concurrency = flags_.max_concurrency;
  options.request_timeout = absl::Seconds(flags_.request_timeout_s);
  options.probe_rate = flags_.probe_request_rate;
  options.make_probe = [this](int64_t index) { return MakeProbe(index); };
  options.tokenizer = local_tokens_.get();
  options.stop = &stop_;
  if (!flags_.disable_tqdm && isatty(STDERR_FILENO) == 1)
    options.progress = [total = dataset_.requests.size()](int64_t ended, int64_t failed, int64_t under_way) {
      std::fprintf(stderr, "\r%ld of %zu ended, %ld failed, %ld under way  ", ended, total, failed, under_way);
      if (under_way == 0) std::fputc('\n', stderr);
    };
  return options;
}

loadgen::RunDescription BenchServe::Describe(const loadgen::ArrivalOptions& arrivals) const {
  loadgen::RunDescription asked;
  asked.date = absl::FormatTime("%Y%m%d-%H%M%S", absl::Now(), absl::LocalTimeZone());
  asked.backend = flags_.backend;
  asked.label = flags_.label;
  asked.model_id = model_id_;
  asked.tokenizer_id = tokenizer_id_;
  asked.num_prompts = options_.dataset.num_prompts;
  asked.metadata = options_.metadata;
  asked.arrivals = arrivals;
  asked.timed = options_.self_timed;
  asked.max_concurrency = flags_.max_concurrency;
  asked.goodput = options_.goodput;
  asked.metrics = options_.metrics;
  asked.percentiles = options_.percentiles;
  asked.steady_state = flags_.steady_state;
  asked.lengths_by = writer_->vocabulary().source;
  asked.notes = dataset_.notes;
  return asked;
}

absl::StatusOr<RunReport> BenchServe::RunAt(const loadgen::ArrivalOptions& arrivals) {
  std::vector<double> times;
  if (options_.self_timed)
    for (const PlannedRequest& request : dataset_.requests) times.push_back(request.at_s);
  else
    times = loadgen::ArrivalTimes(arrivals, std::ssize(dataset_.requests), options_.dataset.seed);
  const auto before = TimesOfServer();
  loadgen::LoadResult result = Send(dataset_.requests, times, MeasuredLoad());
  RunReport report = loadgen::MakeReport(Describe(arrivals), std::move(result));
  if (!flags_.report.empty() && !(stop_ && report.measured.completed == 0)) {
    const auto after = TimesOfServer();
    runs_.push_back(RunOf(report, !before.ok() ? before.status() : !after.ok() ? after : after->Since(*before)));
  }
  return report;
}

absl::StatusOr<loadgen::ServerTimes> BenchServe::TimesOfServer() {
  if (flags_.report.empty()) return absl::UnavailableError("was not asked");
  if (stop_) return absl::UnavailableError("the run was stopped");
  return loadgen::AskForServerTimes(*client_, options_.api.headers);
}

// Whatever was measured until the run ended or failed.
absl::Status BenchServe::WriteHtml() {
  if (runs_.empty()) return absl::OkStatus();
  ServeReportInput input;
  input.model = model_id_;
  input.server = options_.url.Text();
  input.load = absl::StrCat(options_.dataset.name, ", ", dataset_.requests.size(), " requests");
  if (flags_.max_concurrency > 0) absl::StrAppend(&input.load, ", at most ", flags_.max_concurrency, " at a time");
  input.swept = options_.sweep.has_value();
  input.goodput = options_.goodput;
  input.percentiles = options_.percentiles;
  input.knee = knee_;
  input.attainment = flags_.slo_attainment;
  input.runs = std::move(runs_);
  const auto by_rate = [](const ServeRun& a, const ServeRun& b) { return a.Rate() < b.Rate(); };
  std::stable_sort(input.runs.begin(), input.runs.end(), by_rate);
  return WriteReport(ServeReport(input), flags_.report);
}

absl::Status BenchServe::PrintAndSave(const RunReport& report, bool append) {
  std::fputs(loadgen::TextOf(report).c_str(), stdout);
  std::fflush(stdout);
  has_measured_ = has_measured_ || report.measured.completed > 0;
  if (report.result.stopped && report.measured.completed == 0) return absl::OkStatus();  // there is nothing to save
  if (!flags_.save_result && !flags_.append_result) return absl::OkStatus();
  const std::string name =
      flags_.result_filename.empty() ? loadgen::ResultFileName(report.asked) : flags_.result_filename;
  const std::string path = (std::filesystem::path(flags_.result_dir) / name).string();
  DT_RETURN_IF_ERROR(loadgen::SaveResult(loadgen::JsonOf(report, flags_.save_detailed), path, append));
  Note(absl::StrCat("saved to ", path));
  return absl::OkStatus();
}

absl::Status BenchServe::Sweep() {
  const loadgen::SweepOptions& sweep = *options_.sweep;
  std::vector<loadgen::SweepPoint> points;
  std::string table = absl::StrFormat("%12s %12s %14s %14s\n", "rate (req/s)", "SLO met", "goodput (/s)", "tok/s out");
  while (!stop_) {
    const auto rate = loadgen::NextRate(sweep, points);
    if (!rate.has_value()) break;
    loadgen::ArrivalOptions arrivals = options_.arrivals;
    arrivals.request_rate = *rate;
    DT_ASSIGN_OR_RETURN(const RunReport report, RunAt(arrivals));
    const auto& m = report.measured;
    const double attained =
        static_cast<double>(m.good) / static_cast<double>(std::max<int64_t>(1, m.completed + m.failed));
    // With a name of its own each rate has a file; with a given one the file has a line for each.
    DT_RETURN_IF_ERROR(
        PrintAndSave(report, flags_.append_result || (!points.empty() && !flags_.result_filename.empty())));
    if (report.result.stopped) break;
    points.push_back({*rate, attained});
    absl::StrAppendFormat(&table, "%12.3f %11.1f%% %14.3f %14.1f\n", *rate, attained * 100, m.request_goodput,
                          m.output_throughput);
  }
  if (points.empty()) return absl::OkStatus();  // stopped at the first rate: nothing is known of the knee
  const loadgen::Knee knee = loadgen::FindKnee(sweep, points);
  knee_ = knee;
  std::printf("\n%s", table.c_str());
  if (knee.holds.has_value())
    std::printf("The SLO holds for %.0f %% of requests up to %.3f requests/s%s\n", sweep.attainment * 100, *knee.holds,
                knee.fails.has_value() ? absl::StrFormat(", and no longer at %.3f.", *knee.fails).c_str()
                                       : ", the highest rate that was tried: the knee lies above.");
  else
    std::printf("No rate that was tried meets the SLO for %.0f %% of requests: the knee lies below.\n",
                sweep.attainment * 100);
  return absl::OkStatus();
}

absl::Status BenchServe::Run() {
  const absl::Status measured = Measure();
  const absl::Status written = WriteHtml();
  return measured.ok() ? written : measured;
}

absl::Status BenchServe::Measure() {
  DT_RETURN_IF_ERROR(WaitUntilReady());
  DT_RETURN_IF_ERROR(WarmUp());
  if (stop_) return absl::OkStatus();
  if (options_.sweep.has_value()) return Sweep();
  DT_ASSIGN_OR_RETURN(const RunReport report, RunAt(options_.arrivals));
  DT_RETURN_IF_ERROR(PrintAndSave(report, flags_.append_result));
  if (report.measured.completed > 0) return absl::OkStatus();
  const auto& records = report.result.records;
  return FailedPrecondition("no request succeeded",
                            records.empty() ? "" : absl::StrCat("; the first: ", records.front().error));
}

}  // namespace

absl::Status RunBenchServe(const BenchServeFlags& flags) {
  StopSignal signal(StopSignal::Process::kFinishes);
  const auto say_nothing_was_measured = [] { Note("stopped before anything was measured"); };
  signal.AtEnd(say_nothing_was_measured);
  BeginRole("bench");
  DT_ASSIGN_OR_RETURN(BenchServeOptions options, ReadBenchServeFlags(flags));
  DT_RETURN_IF_ERROR(CheckReportPath(flags.report));
  BenchServe bench(flags, std::move(options), signal);
  DT_RETURN_IF_ERROR(bench.Prepare());
  signal.OwnerEnds();
  signal.EndsAtOnce();
  absl::Status status = signal.RunUntil([&] { return bench.Run(); }, [&] { bench.Stop(); });
  if (signal.Raised() && !bench.has_measured()) {
    say_nothing_was_measured();
    signal.EndNow();
  }
  return status;
}

}  // namespace dovetail::cli
