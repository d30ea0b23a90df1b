#include "loadgen/load_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>

#include "loadgen/measurement.h"
#include "tests/loadgen/script_server.h"

// Runs against servers whose schedule is known: the numbers that come out are known, too.

namespace dovetail::loadgen {
namespace {

using test::ManualClock;
using test::ScriptServer;
using test::TextChunk;
using test::UsageChunk;
using test::Visit;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr absl::Duration kMs = absl::Milliseconds(1);

struct Bench {
  ApiOptions api;
  http_client::HttpClientOptions http;
  LoadOptions load;
  ManualClock clock;

  Bench() {
    api.endpoint = "/v1/completions";
    api.model = "m";
    load.max_concurrency = 1;
  }
  LoadResult Run(int port, int requests, int64_t output_len = 4) {
    const http_client::Url url{.host = "127.0.0.1", .port = static_cast<uint16_t>(port)};
    auto client = http_client::HttpClient::Create(url, http);
    EXPECT_TRUE(client.ok()) << client.status();
    const std::vector<PlannedRequest> planned(static_cast<size_t>(requests), {"Once upon", 2, output_len, 0, "id"});
    return RunLoad(**client, api, planned, std::vector<double>(planned.size(), 0), load, clock);
  }
};

// Four tokens in three chunks: first after 50 ms, then 20 and 30 ms; usage 5 ms later.
void Answer(Visit& visit, ManualClock& clock) {
  visit.BeginStream();
  visit.EventAfter(clock, 50 * kMs, TextChunk(" a"));
  visit.EventAfter(clock, 20 * kMs, TextChunk(" b"));
  visit.EventAfter(clock, 30 * kMs, TextChunk(" c d"));
  visit.EventAfter(clock, 5 * kMs, UsageChunk(7, 4));
  visit.Event("[DONE]");
  visit.EndStream();
}

TEST(LoadRun, AKnownScheduleGivesKnownNumbers) {
  Bench bench;
  ScriptServer server([&](Visit& visit) { Answer(visit, bench.clock); });
  const LoadResult result = bench.Run(server.port(), 3);
  ASSERT_THAT(result.records, SizeIs(3));
  for (const RequestRecord& record : result.records) {
    ASSERT_TRUE(record.success) << record.error;
    EXPECT_NEAR(record.ttft_s, 0.050, 1e-9);
    ASSERT_THAT(record.itl_s, SizeIs(2));
    EXPECT_NEAR(record.itl_s[0], 0.020, 1e-9);
    EXPECT_NEAR(record.itl_s[1], 0.030, 1e-9);
    EXPECT_NEAR(record.latency_s, 0.100, 1e-9);  // to the last chunk with choices
    EXPECT_EQ(record.input_len, 7);
    EXPECT_EQ(record.output_len, 4);
    EXPECT_EQ(record.text, " a b c d");
  }
  EXPECT_NEAR(result.duration_s, 3 * 0.105, 1e-9);
  const Measurement m = Measure(result.records, result.duration_s, std::vector<double>{99}, {});
  EXPECT_NEAR(m.Of(Metric::kTpot).mean_ms, 50.0 / 3, 1e-6);
  EXPECT_NEAR(m.output_throughput, 12 / 0.315, 1e-6);
  EXPECT_EQ(server.connections(), 1) << "the connection is kept";
}

TEST(LoadRun, TheLatencyOfAChatEndsWithItsLastChunkOfAnyKind) {
  Bench bench;
  bench.api.backend = Backend::kOpenaiChat;
  ScriptServer server([&](Visit& visit) {
    visit.BeginStream();
    visit.EventAfter(bench.clock, 50 * kMs, test::ChatChunk(""));
    visit.EventAfter(bench.clock, 20 * kMs, test::ChatChunk("b"));
    visit.EventAfter(bench.clock, 5 * kMs, UsageChunk(9, 2));
    visit.Event("[DONE]");
    visit.EndStream();
  });
  const LoadResult result = bench.Run(server.port(), 1);
  ASSERT_THAT(result.records, SizeIs(1));
  EXPECT_NEAR(result.records[0].ttft_s, 0.050, 1e-9);
  EXPECT_NEAR(result.records[0].latency_s, 0.075, 1e-9);
  EXPECT_EQ(result.records[0].input_len, 9);
}

TEST(LoadRun, SendsWhatVllmSends) {
  Bench bench;
  std::string head, body;
  ScriptServer server([&](Visit& visit) {
    head = visit.head();
    body = visit.body();
    Answer(visit, bench.clock);
  });
  bench.api.ignore_eos = true;
  bench.api.extra_body = {{"temperature", 0.5}};
  bench.api.headers = {{"Authorization", "Bearer k"}};
  bench.Run(server.port(), 1);
  EXPECT_THAT(head, AllOf(HasSubstr("POST /v1/completions HTTP/1.1"), HasSubstr("Authorization: Bearer k"),
                          HasSubstr("x-request-id: id"), HasSubstr("Content-Type: application/json")));
  EXPECT_EQ(nlohmann::json::parse(body),
            nlohmann::json::parse(R"({"model": "m", "prompt": "Once upon", "max_tokens": 4, "stream": true,
              "stream_options": {"include_usage": true}, "repetition_penalty": 1.0, "ignore_eos": true,
              "temperature": 0.5})"));
}

// Of three requests the second meets a server that does `wrong`; the others are measured as ever.
RequestRecord SecondOfThree(const std::function<void(Visit&)>& wrong, Bench& bench) {
  std::atomic<int> visits = 0;
  ScriptServer server([&](Visit& visit) {
    if (++visits == 2)
      wrong(visit);
    else
      Answer(visit, bench.clock);
  });
  const LoadResult result = bench.Run(server.port(), 3);
  EXPECT_THAT(result.records, SizeIs(3));
  if (result.records.size() != 3) return {};
  EXPECT_TRUE(result.records[0].success) << result.records[0].error;
  EXPECT_TRUE(result.records[2].success) << result.records[2].error;
  EXPECT_NEAR(result.records[2].ttft_s, 0.050, 1e-9);
  return result.records[1];
}

TEST(LoadRun, AServerThatRefusesIsQuoted) {
  Bench bench;
  const RequestRecord record =
      SecondOfThree([](Visit& visit) { visit.Answer(503, R"({"error": {"message": "the queue is full"}})"); }, bench);
  EXPECT_FALSE(record.success);
  EXPECT_EQ(record.error, "HTTP 503 Said: the queue is full");
}

TEST(LoadRun, AServerThatClosesInMidStreamKeepsWhatCame) {
  Bench bench;
  const RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
        visit.EventAfter(bench.clock, 20 * kMs, TextChunk(" b"));
        visit.Close();
      },
      bench);
  EXPECT_FALSE(record.success);
  EXPECT_THAT(record.error,
              AllOf(HasSubstr("closed the connection in the middle of its answer"), HasSubstr("after 2 chunks")));
  EXPECT_NEAR(record.ttft_s, 0.050, 1e-9);
  EXPECT_THAT(record.itl_s, SizeIs(1));
}

TEST(LoadRun, AServerThatStallsFailsTheRequestAfterTheTimeout) {
  Bench bench;
  bench.http.stall_timeout = absl::Milliseconds(300);
  const RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
        visit.WaitUntilClosed();
      },
      bench);
  EXPECT_FALSE(record.success);
  EXPECT_THAT(record.error, AllOf(HasSubstr("stalled: no byte for 300ms"), HasSubstr("after 1 chunk")));
}

TEST(LoadRun, AServerThatNeverEndsIsLeft) {
  Bench bench;
  bench.load.request_timeout = absl::Seconds(2);
  const RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, absl::Seconds(1), TextChunk(" a"));
        visit.EventAfter(bench.clock, absl::Seconds(5), TextChunk(" b"));
        visit.WaitUntilClosed();
      },
      bench);
  EXPECT_FALSE(record.success);
  EXPECT_THAT(record.error, HasSubstr("took longer than --request-timeout-sec 2"));
}

TEST(LoadRun, AStreamThatEndsWithoutDoneHasFailed) {
  Bench bench;
  const RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
        visit.EndStream();
      },
      bench);
  EXPECT_THAT(record.error, HasSubstr("without [DONE] and without a finish_reason after 1 chunk"));
}

TEST(LoadRun, ErrorsAndNonsenseInAStreamAreQuoted) {
  Bench bench;
  RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
        visit.Event(R"({"error": {"message": "worker lost"}})");
        visit.Event("[DONE]");
        visit.EndStream();
      },
      bench);
  EXPECT_THAT(record.error, HasSubstr("ended the stream with an error: worker lost after 1 chunk"));
  record = SecondOfThree(
      [](Visit& visit) {
        visit.BeginStream();
        visit.Event("{\"choices\": [");
        visit.EndStream();
      },
      bench);
  EXPECT_THAT(record.error, HasSubstr("a chunk of the stream is not JSON: {\"choices\": ["));
}

TEST(LoadRun, AnAnswerWithoutChoicesIsNoSuccess) {
  Bench bench;
  const RequestRecord record = SecondOfThree(
      [](Visit& visit) {
        visit.BeginStream();
        visit.Event(UsageChunk(7, 4));
        visit.Event("[DONE]");
        visit.EndStream();
      },
      bench);
  EXPECT_FALSE(record.success);
  EXPECT_THAT(record.error, HasSubstr("no chunk with choices"));
}

TEST(LoadRun, WithoutUsageChunksAreCountedAndItIsSaid) {
  Bench bench;
  const RequestRecord record = SecondOfThree(
      [&](Visit& visit) {
        visit.BeginStream();
        visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
        visit.EventAfter(bench.clock, 20 * kMs, TextChunk(" b"));
        visit.Event("[DONE]");
        visit.EndStream();
      },
      bench);
  ASSERT_TRUE(record.success) << record.error;
  EXPECT_EQ(record.output_len, 2);
  EXPECT_EQ(record.input_len, 2) << "as planned";
  EXPECT_EQ(record.counted_by, RequestRecord::CountedBy::kChunks);
}

TEST(LoadRun, UsageThatCannotBeTrueIsDoubted) {
  const auto with_usage = [](int64_t tokens) {
    Bench bench;
    return SecondOfThree(
        [&, tokens](Visit& visit) {
          visit.BeginStream();
          visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
          visit.EventAfter(bench.clock, 20 * kMs, TextChunk(" b"));
          visit.Event(UsageChunk(7, tokens));
          visit.Event("[DONE]");
          visit.EndStream();
        },
        bench);
  };
  EXPECT_THAT(with_usage(5).usage_doubt, HasSubstr("completion_tokens is 5, but 4 were the most"));
  EXPECT_THAT(with_usage(1).usage_doubt, HasSubstr("completion_tokens is 1, but 2 chunks have text"));
  const RequestRecord none = with_usage(0);
  EXPECT_THAT(none.usage_doubt, HasSubstr("completion_tokens is 0"));
  EXPECT_EQ(none.output_len, 2) << "never a silent zero";
  EXPECT_EQ(with_usage(4).usage_doubt, "");
}

TEST(LoadRun, AServerThatIsNotThereIsNamed) {
  int port = 0;
  {
    port = ScriptServer([](Visit&) {}).port();
  }
  Bench bench;
  const LoadResult result = bench.Run(port, 2);
  ASSERT_THAT(result.records, SizeIs(2));
  EXPECT_THAT(result.records[1].error, HasSubstr(absl::StrCat("127.0.0.1:", port, ": cannot connect: ")));
}

TEST(LoadRun, AKeptConnectionThatWasClosedIsReplaced) {
  Bench bench;
  ScriptServer server([&](Visit& visit) {
    Answer(visit, bench.clock);
    visit.Close();
  });
  const LoadResult result = bench.Run(server.port(), 3);
  for (const RequestRecord& record : result.records) EXPECT_TRUE(record.success) << record.error;
  EXPECT_EQ(server.connections(), 3);
}

TEST(LoadRun, NoMoreThanMaxConcurrencyAreUnderWay) {
  Bench bench;
  bench.load.max_concurrency = 3;
  std::mutex mutex;
  std::condition_variable changed;
  int under_way = 0, most = 0, begun = 0;
  ScriptServer server([&](Visit& visit) {
    {
      std::unique_lock lock(mutex);
      most = std::max(most, ++under_way);
      ++begun;
      changed.notify_all();
      changed.wait(lock, [&] { return under_way == 3 || begun == 9; });  // three do come together
    }
    visit.BeginStream();
    visit.Event(TextChunk(" a"));
    visit.Event("[DONE]");
    {
      std::lock_guard lock(mutex);
      --under_way;
    }
    visit.EndStream();
  });
  const LoadResult result = bench.Run(server.port(), 9);
  EXPECT_EQ(most, 3);
  for (const RequestRecord& record : result.records) EXPECT_TRUE(record.success) << record.error;
}

TEST(LoadRun, ProbesAreSentNextToTheLoadAndKeptApart) {
  Bench bench;
  bench.load.probe_rate = 200;
  bench.load.make_probe = [](int64_t index) {
    return PlannedRequest{absl::StrCat("probe ", index), 3, 1, 0, absl::StrCat("probe-", index)};
  };
  std::mutex mutex;
  std::condition_variable changed;
  int probes = 0;
  ScriptServer server([&](Visit& visit) {
    std::unique_lock lock(mutex);
    if (visit.body().find("probe") != std::string::npos) {
      ++probes;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return probes >= 3; });  // the only request that max_concurrency allows
    }
    lock.unlock();
    visit.BeginStream();
    visit.Event(TextChunk(" a"));
    visit.Event("[DONE]");
    visit.EndStream();
  });
  const LoadResult result = bench.Run(server.port(), 1);
  ASSERT_THAT(result.records, SizeIs(1));
  EXPECT_TRUE(result.records[0].success) << result.records[0].error;
  EXPECT_GE(result.probes.size(), 3u);
  for (const RequestRecord& probe : result.probes) EXPECT_TRUE(probe.success) << probe.error;
}

TEST(LoadRun, AStopKeepsWhatCameAndSaysWhatWasNotSent) {
  Bench bench;
  std::atomic<bool> stop = false;
  bench.load.stop = &stop;
  std::atomic<int> visits = 0;
  ScriptServer server([&](Visit& visit) {
    if (++visits < 3) return Answer(visit, bench.clock);
    visit.BeginStream();
    visit.EventAfter(bench.clock, 50 * kMs, TextChunk(" a"));
    stop = true;
    visit.WaitUntilClosed();
  });
  const LoadResult result = bench.Run(server.port(), 5);
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.not_sent, 2);
  ASSERT_THAT(result.records, SizeIs(3));
  EXPECT_TRUE(result.records[1].success);
  EXPECT_THAT(result.records[2].error, HasSubstr("given up"));
}

TEST(LoadRun, ALateClientSaysSo) {
  Bench bench;
  bench.load.max_concurrency = 0;
  // Between the moment a request is due and the moment it is sent the clock has moved on.
  class LateClock final : public Clock {
   public:
    absl::Time Now() override { return absl::UnixEpoch() + absl::Milliseconds(40 * reads_++); }

   private:
    int64_t reads_ = 0;
  } late;
  ScriptServer server([](Visit& visit) {
    visit.BeginStream();
    visit.Event(TextChunk(" a"));
    visit.Event("[DONE]");
    visit.EndStream();
  });
  const http_client::Url url{.host = "127.0.0.1", .port = static_cast<uint16_t>(server.port())};
  const auto client = http_client::HttpClient::Create(url, {});
  ASSERT_TRUE(client.ok());
  const std::vector<PlannedRequest> requests(2, {"a", 1, 1, 0, ""});
  const LoadResult result = RunLoad(**client, bench.api, requests, {0, 0}, bench.load, late);
  ASSERT_THAT(result.records, SizeIs(2));
  EXPECT_NEAR(result.records[0].lateness_s(), 0.040, 1e-9);
  EXPECT_NEAR(result.records[1].lateness_s(), 0.080, 1e-9);
  EXPECT_NEAR(LatenessOf(result.records).mean_ms, 60, 1e-6);
}

}  // namespace
}  // namespace dovetail::loadgen
