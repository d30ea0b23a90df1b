#include "server/work/work_queue.h"

#include <gmock/gmock.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "server/openai/prepare.h"
#include "tests/server/test_server.h"

// Which request is read next, and which is not read at all: the discipline with a worker that the test is, then before
// a real server whose chat template waits for the test.

namespace dovetail::server::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Names = std::vector<std::string>;

constexpr size_t kKiB = 1 << 10, kMiB = 1 << 20;

// A queue without threads. Tasks write down their names.
class Work : public testing::Test {
 protected:
  absl::Status Post(const std::string& tenant, const std::string& name, size_t bytes = 0,
                    std::shared_ptr<CancelToken> cancel = nullptr) {
    return queue_.TryPost({tenant, bytes, std::move(cancel), [this, name] { ran_.push_back(name); }});
  }
  Names RunAll() {
    while (queue_.RunNext()) {
    }
    return std::exchange(ran_, {});
  }

  WorkQueue queue_{/*threads=*/0, {.tasks = 100, .tenant_tasks = 50, .bytes = 64 * kMiB, .tenant_bytes = 32 * kMiB}};
  Names ran_;
};

TEST_F(Work, OfOneTenantTasksOfASizeRunInOrder) {
  for (const char* name : {"1", "2", "3"}) ASSERT_TRUE(Post("a", name, 10).ok());
  EXPECT_THAT(RunAll(), ElementsAre("1", "2", "3"));
  EXPECT_FALSE(queue_.RunNext());
}

TEST_F(Work, TenantsTakeTurns) {
  for (const char* name : {"a1", "a2", "a3"}) ASSERT_TRUE(Post("a", name, 10).ok());
  for (const char* name : {"b1", "b2"}) ASSERT_TRUE(Post("b", name, 10).ok());
  EXPECT_THAT(RunAll(), ElementsAre("a1", "b1", "a2", "b2", "a3"));
}

TEST_F(Work, TurnsAreOfBytes) {
  for (const char* name : {"long1", "long2", "long3"}) ASSERT_TRUE(Post("a", name, 4 * kMiB).ok());
  for (const char* name : {"b1", "b2", "b3"}) ASSERT_TRUE(Post("b", name, 3).ok());
  EXPECT_THAT(RunAll(), ElementsAre("long1", "b1", "b2", "b3", "long2", "long3"));
}

TEST_F(Work, ATenantThatComesWaitsForOneTaskAndHasSavedUpNothing) {
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(Post("a", absl::StrCat("a", i), 4 * kMiB).ok());
  for (int i = 0; i < 3; ++i) queue_.RunNext();
  ASSERT_TRUE(Post("b", "b0", 4 * kMiB).ok());
  ASSERT_TRUE(Post("b", "b1", 4 * kMiB).ok());
  EXPECT_THAT(RunAll(), ElementsAre("a0", "a1", "a2", "b0", "a3", "b1", "a4", "a5", "a6", "a7"));
}

TEST_F(Work, ShortOnesOfATenantPassItsLongOnesWhichStillHaveTheirTurn) {
  for (const char* name : {"long1", "long2"}) ASSERT_TRUE(Post("a", name, 200 * kKiB).ok());
  queue_.RunNext();
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(Post("a", absl::StrCat("s", i), 60 * kKiB).ok());
  EXPECT_THAT(RunAll(), ElementsAre("long1", "s0", "s1", "s2", "s3", "long2", "s4", "s5", "s6", "s7"));
}

TEST_F(Work, IsBoundedForEachTenantAndInAllAndARefusedTaskLeavesNoTrace) {
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Post("a", "a").ok());
  EXPECT_TRUE(absl::IsAborted(Post("a", "a")));
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Post(i % 2 == 0 ? "b" : "c", "b").ok()) << i;
  EXPECT_TRUE(absl::IsResourceExhausted(Post("d", "d")));
  EXPECT_EQ(queue_.waiting(), 100);
  queue_.RunNext();
  EXPECT_TRUE(Post("d", "d").ok());
  EXPECT_EQ(RunAll().size(), 101u);
}

TEST_F(Work, IsBoundedInBytesButNoTaskIsTooLargeAlone) {
  ASSERT_TRUE(Post("a", "a", 100 * kMiB).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Post("b", "b", 1)));
  EXPECT_EQ(RunAll().size(), 1u);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(Post("a", "a", 4 * kMiB).ok());
  EXPECT_TRUE(absl::IsAborted(Post("a", "a", 1)));
  ASSERT_TRUE(Post("b", "b", 32 * kMiB).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Post("c", "c", 1)));
  EXPECT_EQ(RunAll().size(), 9u);
}

TEST_F(Work, WhatIsCancelledBeforeItBeganIsNotRunAndFreesItsPlaceAtOnce) {
  const auto token = std::make_shared<CancelToken>();
  const auto held = std::make_shared<int>();
  ASSERT_TRUE(queue_.TryPost({"a", 10, token, [this, held] { ran_.push_back("cancelled"); }}).ok());
  for (int i = 1; i < 50; ++i) ASSERT_TRUE(Post("a", "a").ok());
  ASSERT_TRUE(absl::IsAborted(Post("a", "last")));
  queue_.Cancel(*token);
  EXPECT_EQ(held.use_count(), 1) << "what it held is let go";
  EXPECT_TRUE(Post("a", "last").ok());
  const Names ran = RunAll();
  EXPECT_EQ(ran.size(), 50u);
  EXPECT_THAT(ran, testing::Not(testing::Contains("cancelled")));
}

TEST_F(Work, WhatHasBegunIsToldThatItIsNotWanted) {
  const auto token = std::make_shared<CancelToken>();
  bool told = false;
  ASSERT_TRUE(queue_
                  .TryPost({"a", 10, token,
                            [&] {
                              queue_.Cancel(*token);
                              told = token->cancelled();
                            }})
                  .ok());
  queue_.RunNext();
  EXPECT_TRUE(told);
}

// What a task holds may ask the queue something as it ends.
TEST_F(Work, TasksEndWithoutTheLockHoweverTheyEnd) {
  struct Asks {
    ~Asks() { ++*ended, queue->waiting(); }
    WorkQueue* queue;
    int* ended;
  };
  WorkQueue queue(/*threads=*/0, {.tasks = 3});
  int ended = 0;
  const auto post = [&](std::shared_ptr<CancelToken> cancel = nullptr) {
    auto held = std::make_shared<Asks>(&queue, &ended);
    WorkTask task{"a", 10, std::move(cancel), [held] {}};
    held.reset();
    return queue.TryPost(std::move(task));
  };
  const auto token = std::make_shared<CancelToken>();
  ASSERT_TRUE(post(token).ok());
  ASSERT_TRUE(post().ok());
  ASSERT_TRUE(post().ok());
  EXPECT_FALSE(post().ok());
  EXPECT_EQ(ended, 1);
  queue.Cancel(*token);
  EXPECT_EQ(ended, 2);
  EXPECT_TRUE(queue.RunNext());
  EXPECT_EQ(ended, 3);
  queue.Stop();
  EXPECT_EQ(ended, 4);
}

TEST_F(Work, EveryTaskOfManyThreadsRunsOnceOrIsCancelledAndAllEnd) {
  constexpr int kPosters = 4, kTasks = 500;
  std::atomic<int> ran{0}, ended{0}, taken{0};
  WorkQueue queue(/*threads=*/3, {.tasks = 64, .tenant_tasks = 32});
  std::vector<std::thread> posters;
  for (int poster = 0; poster < kPosters; ++poster)
    posters.emplace_back([&, poster] {
      for (int i = 0; i < kTasks; ++i) {
        const auto token = std::make_shared<CancelToken>();
        std::shared_ptr<void> held(nullptr, [&](void*) { ++ended; });
        if (queue.TryPost({absl::StrCat(poster), 10, token, [&ran, held] { ++ran; }}).ok()) ++taken;
        if (i % 3 == 0) queue.Cancel(*token);
      }
    });
  for (std::thread& poster : posters) poster.join();
  queue.Stop();
  EXPECT_EQ(ended, kPosters * kTasks);
  EXPECT_LE(ran, taken);
  EXPECT_EQ(queue.waiting(), 0);
}

TEST_F(Work, StoppingDropsWhatWaits) {
  ASSERT_TRUE(Post("a", "a").ok());
  queue_.Stop();
  EXPECT_TRUE(absl::IsUnavailable(Post("a", "late")));
  EXPECT_THAT(RunAll(), IsEmpty());
}

// ---- reading ----

TEST(Reading, EndsBetweenTheTemplateAndTheTokenizerOnceItIsNotWanted) {
  const auto model = TestModel();
  CancelToken cancel;
  int rendered = 0;
  model->chat = [&](const ChatPrompt&) {
    ++rendered;
    cancel.Cancel();
    return std::vector<model::PromptPart>{};  // of which the tokenizer would make an error of its own
  };
  const RequestContext context{.cancel = &cancel};
  EXPECT_TRUE(absl::IsCancelled(Prepare(ChatRequest{}, *model, context).status()));
  EXPECT_TRUE(absl::IsCancelled(Prepare(ChatRequest{}, *model, context).status()));
  EXPECT_EQ(rendered, 1);
  CompletionRequest completion;
  completion.prompts.emplace_back("abc");
  EXPECT_TRUE(absl::IsCancelled(Prepare(completion, *model, context).status()));
}

// ---- a real server ----

// The chat template writes down who asked, and waits while the gate is closed.
class HttpWork : public testing::Test {
 protected:
  void Start(HttpServerOptions options = {}, int max_model_len = 4096) {
    auto model = TestModel(max_model_len);
    model->chat = [this, render = model->chat](const ChatPrompt& prompt) {
      std::unique_lock lock(mutex_);
      read_.push_back(prompt.messages[0]["content"].get<std::string>().substr(0, 8));
      changed_.notify_all();
      changed_.wait(lock, [this] { return open_; });
      lock.unlock();
      return render(prompt);
    };
    test_.emplace(FakeEngineOptions{}, std::move(options), std::move(model));
  }
  void TearDown() override { Open(); }

  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // From now on the worker is at this request.
  RawClient Hold(const std::string& key = "") {
    RawClient client = Send(Chat("hold"), key);
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [this] { return !read_.empty(); }));
    return client;
  }
  Names read() {
    std::lock_guard lock(mutex_);
    return read_;
  }

  static std::pair<std::string, std::string> Chat(const std::string& content) {
    return {
        "/v1/chat/completions",
        absl::StrCat(R"({"model":"bytes","max_tokens":1,"messages":[{"role":"user","content":")", content, "\"}]}")};
  }
  RawClient Send(const std::pair<std::string, std::string>& request, const std::string& key = "") {
    RawClient client(test_->port());
    client.Send(Post(request.first, request.second, key.empty() ? "" : absl::StrCat("X-Api-Key: ", key, "\r\n")));
    return client;
  }
  // Until /metrics has this line; false after 30 s.
  bool Say(const std::string& line, const std::string& key = "") {
    const std::string header = key.empty() ? "" : absl::StrCat("X-Api-Key: ", key, "\r\n");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (std::chrono::steady_clock::now() < end) {
      if (test_->Ask(Get("/metrics", header)).body.find(line + "\n") != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  bool Waiting(int tasks, const std::string& key = "") {
    return Say(absl::StrCat("dovetail:requests_to_read{model_name=\"bytes\"} ", tasks), key);
  }
  static HttpServerOptions Keys() {
    HttpServerOptions options;
    options.api_keys = {"alpha", "beta", "gamma"};
    return options;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Names read_;
  bool open_ = false;
  std::optional<TestServer> test_;  // ends first: its worker uses what is above
};

TEST_F(HttpWork, OfAClientThatLeftNothingIsReadAndItsPlaceIsFree) {
  HttpServerOptions options;
  options.max_queued_work = 2;
  Start(options);
  RawClient held = Hold();
  RawClient first = Send(Chat("left1")), second = Send(Chat("left2"));
  ASSERT_TRUE(Waiting(2));
  RawClient refused = Send(Chat("refused"));
  EXPECT_NE(refused.Read().status, 200);
  first.Reset();
  second.Close();
  ASSERT_TRUE(Waiting(0));
  EXPECT_TRUE(Say(R"(dovetail:http_responses_total{route="/v1/chat/completions",status="499"} 2)"));
  RawClient stays = Send(Chat("stays"));
  ASSERT_TRUE(Waiting(1));
  Open();
  EXPECT_EQ(held.Read().status, 200);
  EXPECT_EQ(stays.Read().status, 200);
  EXPECT_THAT(read(), ElementsAre("hold", "stays"));
}

TEST_F(HttpWork, AClientThatLeavesWhileItsRequestIsReadIsCountedOnceAndRunsNothing) {
  Start();
  RawClient held = Hold();
  held.Reset();
  ASSERT_TRUE(Say(R"(dovetail:http_responses_total{route="/v1/chat/completions",status="499"} 1)"));
  Open();
  RawClient next = Send(Chat("next"));
  EXPECT_EQ(next.Read().status, 200);
  EXPECT_EQ(test_->engine.log().submitted.size(), 1u);
  EXPECT_TRUE(Say(R"(dovetail:http_responses_total{route="/v1/chat/completions",status="499"} 1)"));
}

TEST_F(HttpWork, ATenantsShareOfTheQueueIsHalf) {
  HttpServerOptions options = Keys();
  options.max_queued_work = 4;
  Start(options);
  RawClient held = Hold("gamma");
  RawClient one = Send(Chat("a1"), "alpha"), two = Send(Chat("a2"), "alpha");
  ASSERT_TRUE(Waiting(2, "alpha"));
  RawClient over = Send(Chat("a3"), "alpha");
  const RawResponse refused = over.Read();
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  EXPECT_THAT(refused.body, HasSubstr("rate_limit_exceeded"));
  RawClient beta = Send(Chat("b1"), "beta");
  ASSERT_TRUE(Waiting(3, "alpha"));
  Open();
  for (RawClient* client : {&held, &one, &two, &beta}) EXPECT_EQ(client->Read().status, 200);
}

TEST_F(HttpWork, TheOnlyTenantMayFillTheQueue) {
  HttpServerOptions options;
  options.api_keys = {"alpha"};
  options.max_queued_work = 2;
  Start(options);
  RawClient held = Hold("alpha");
  RawClient one = Send(Chat("a1"), "alpha"), two = Send(Chat("a2"), "alpha");
  ASSERT_TRUE(Waiting(2, "alpha"));
  RawClient over = Send(Chat("a3"), "alpha");
  EXPECT_EQ(over.Read().status, 503);
  Open();
  for (RawClient* client : {&held, &one, &two}) EXPECT_EQ(client->Read().status, 200);
}

TEST_F(HttpWork, AShortPromptIsAnsweredWhileEightOfFourMegabytesThatCannotFitAreRefused) {
  Start(Keys());
  RawClient held = Hold("gamma");
  const std::string text((4 << 20) - 100, 'a');
  const auto completion = [](const std::string& prompt) {
    return std::pair<std::string, std::string>(
        "/v1/completions", absl::StrCat(R"({"model":"bytes","max_tokens":1,"prompt":")", prompt, "\"}"));
  };
  std::vector<RawClient> large;
  for (int i = 0; i < 8; ++i) large.push_back(Send(completion(text), "alpha"));
  ASSERT_TRUE(Waiting(8, "beta"));
  RawClient brief = Send(completion("abc"), "beta");
  ASSERT_TRUE(Waiting(9, "beta"));
  Open();
  EXPECT_EQ(brief.Read().status, 200);
  for (RawClient& client : large) {
    const RawResponse refused = client.Read();
    EXPECT_EQ(refused.status, 400);
    EXPECT_THAT(refused.body, HasSubstr("at least 699034 tokens, but this model's maximum context length is 4096"));
    EXPECT_THAT(refused.body, HasSubstr("context_length_exceeded"));
  }
}

TEST_F(HttpWork, LongPromptsThatFitDelayAnothersByOneTask) {
  Start(Keys(), /*max_model_len=*/5'000'000);
  RawClient held = Hold("gamma");
  std::vector<RawClient> large;
  for (int i = 0; i < 3; ++i) large.push_back(Send(Chat("alpha---" + std::string(4'000'000, 'a')), "alpha"));
  ASSERT_TRUE(Waiting(3, "beta"));
  RawClient brief = Send(Chat("beta"), "beta");
  ASSERT_TRUE(Waiting(4, "beta"));
  Open();
  EXPECT_EQ(brief.Read().status, 200);
  for (RawClient& client : large) EXPECT_EQ(client.Read().status, 200);
  EXPECT_THAT(read(), ElementsAre("hold", "alpha---", "beta", "alpha---", "alpha---"));
}

TEST_F(HttpWork, WithoutKeysAShortRequestPassesLongOnesThatWait) {
  Start();
  RawClient held = Hold();
  std::vector<RawClient> large;
  for (int i = 0; i < 2; ++i) large.push_back(Send(Chat("long----" + std::string(100'000, 'a'))));
  ASSERT_TRUE(Waiting(2));
  RawClient brief = Send(Chat("short"));
  ASSERT_TRUE(Waiting(3));
  Open();
  EXPECT_EQ(brief.Read().status, 200);
  for (RawClient& client : large) client.Read();
  EXPECT_THAT(read(), ElementsAre("hold", "long----", "short", "long----"));
}

}  // namespace
}  // namespace dovetail::server::test
