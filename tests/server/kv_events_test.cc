#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/segment_tree.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/generation_service.h"
#include "server/grpc/kv_event_hub.h"
#include "server/http/key_ring.h"
#include "tests/server/fake_engine.h"
#include "tests/server/test_model.h"

// SubscribeKvEvents with a real client, before an engine whose cache does what the test says.

namespace dovetail::server::test {
namespace {

namespace pb = vllm::grpc::engine;
using ::testing::HasSubstr;

class CachingEngine final : public FakeEngine {
 public:
  void WatchCache(std::shared_ptr<engine::CacheSink> sink) override { sink_ = std::move(sink); }
  void Tell(requests::CacheEvents events) { sink_->OnCacheEvents(std::move(events)); }

 private:
  std::shared_ptr<engine::CacheSink> sink_;
};

// Block `number` of a prompt whose tokens are all `token`.
requests::CacheEvent Event(bool stored, int number, TokenId token = 7, const std::string& tenant = kAnonymousTenant,
                           const std::string& salt = "", requests::CacheGroup group = {}) {
  const auto name = [&](int block) { return proto::BlockHash{static_cast<uint64_t>(100 * token + block), 1}; };
  auto block = std::make_shared<requests::CachedBlock>();
  block->hash = name(number);
  if (number > 0) block->parent = name(number - 1);
  block->number = number;
  block->tokens.assign(kSegmentTokens, token);
  block->of = std::make_shared<requests::CacheNamespace>(requests::CacheNamespace{tenant, salt});
  return {stored, group, block};
}
requests::CacheEvent Stored(int number, TokenId token = 7, const std::string& tenant = kAnonymousTenant,
                            const std::string& salt = "") {
  return Event(true, number, token, tenant, salt);
}
requests::CacheEvent Removed(int number, TokenId token = 7) { return Event(false, number, token); }

// "3: clear +700<-, 701 -600": batch 3, the cache is cleared, 700 is stored with 701 behind it, 600 is removed.
std::string Describe(const pb::KvEventBatch& batch) {
  std::string text = absl::StrCat(batch.sequence_number(), ":");
  for (const pb::KvCacheEvent& event : batch.events()) {
    if (event.has_cleared()) absl::StrAppend(&text, " clear");
    for (const pb::KvBlock& block : event.stored().blocks()) absl::StrAppend(&text, " +", block.block_hash());
    if (event.stored().has_parent_block_hash()) absl::StrAppend(&text, "<-", event.stored().parent_block_hash());
    for (const int64_t hash : event.removed().block_hashes()) absl::StrAppend(&text, " -", hash);
  }
  if (batch.has_snapshot()) absl::StrAppend(&text, " (", batch.snapshot().index(), "/", batch.snapshot().count(), ")");
  return text;
}

class KvEvents : public ::testing::Test {
 protected:
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<pb::KvEventBatch>> reader;

    std::string Next() {
      pb::KvEventBatch batch;
      return reader->Read(&batch) ? Describe(batch) : "(end)";
    }
  };

  explicit KvEvents(std::vector<ApiKey> keys = {}) {
    GrpcServerOptions options;
    options.listen = "127.0.0.1:0";
    options.api_keys = std::move(keys);
    auto started =
        GrpcServer::Start(options, TestModel(), &engine_, std::make_shared<Intake>(1, WorkLimits{}), metrics_);
    EXPECT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    stub_ = pb::VllmEngine::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials()));
  }
  std::unique_ptr<Call> Subscribe(uint64_t start = 0, const std::string& key = "") {
    auto call = std::make_unique<Call>();
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (!key.empty()) call->context.AddMetadata("authorization", "Bearer " + key);
    pb::SubscribeKvEventsRequest request;
    request.set_start_sequence_number(start);
    call->reader = stub_->SubscribeKvEvents(&call->context, request);
    call->reader->WaitForInitialMetadata();  // it hears from here on
    return call;
  }
  void Flush(const std::string& key = "") {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    pb::FlushCacheResponse reply;
    EXPECT_TRUE(stub_->FlushCache(&context, {}, &reply).ok());
  }
  // What was told before has been published. A subscriber that reads too slowly for all of it is ended, and asks again.
  void Settle(const std::string& key = "") {
    for (int attempt = 0; attempt < 100; ++attempt) {
      const auto call = Subscribe(1, key);
      engine_.Tell({.events = {Stored(0, 99, key.empty() ? kAnonymousTenant : "us"), Event(false, 0, 99)}});
      std::string next;
      while (next != "(end)") {
        next = call->Next();
        if (next.find(" -9900") != std::string::npos) return;
      }
      EXPECT_EQ(call->reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    }
    FAIL() << "no subscriber could follow";
  }

  CachingEngine engine_;
  std::shared_ptr<ServerMetrics> metrics_ = std::make_shared<ServerMetrics>(ServerMetrics::Info{.model_name = "m"});
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<pb::VllmEngine::Stub> stub_;
};

TEST_F(KvEvents, ComeInNumberedBatchesAsTheyHappen) {
  const auto call = Subscribe();
  engine_.Tell({.events = {Stored(0), Stored(1), Stored(0, 8)}});
  EXPECT_EQ(call->Next(), "1: +700 +701 +800") << "701 follows 700 in one event, 800 begins another";
  engine_.Tell({.events = {Removed(1), Stored(2)}});
  EXPECT_EQ(call->Next(), "2: -701 +702<-701");
}

TEST_F(KvEvents, ABlockHasItsTokensAndItsGroup) {
  const auto call = Subscribe();
  engine_.Tell({.events = {Event(true, 0, 7, kAnonymousTenant, "pepper|epoch0123456789abcdef|rope2",
                                 {3, requests::CacheGroup::Kind::kSlidingWindow, 128})}});
  engine_.Tell({.events = {Event(true, 0, 8, kAnonymousTenant, "pepper|rope2",
                                 {3, requests::CacheGroup::Kind::kSlidingWindow, 128})}});
  pb::KvEventBatch batch;
  ASSERT_TRUE(call->reader->Read(&batch));
  ASSERT_EQ(batch.events_size(), 1);
  const pb::KvBlocksStored& stored = batch.events(0).stored();
  EXPECT_EQ(batch.events(0).event_id(), 1u);
  EXPECT_EQ(stored.blocks(0).block_hash(), 800) << "the first one is of an epoch that the tenant is not in";
  EXPECT_THAT(stored.blocks(0).token_ids(), ::testing::Each(8u));
  EXPECT_EQ(stored.blocks(0).token_ids_size(), kSegmentTokens);
  EXPECT_EQ(stored.blocks(0).block_size(), kSegmentTokens);
  EXPECT_EQ(stored.group_idx(), 3u);
  EXPECT_EQ(stored.kv_cache_spec_kind(), "sliding_window");
  EXPECT_EQ(stored.kv_cache_spec_sliding_window(), 128u);
  EXPECT_EQ(stored.cache_salt(), "pepper");
  EXPECT_GT(batch.timestamp(), 1.7e9);
}

TEST_F(KvEvents, ALateSubscriberBeginsWithAllBlocksAndGoesOnWithoutAGap) {
  engine_.Tell({.events = {Stored(0), Stored(1), Stored(0, 8)}});
  engine_.Tell({.events = {Removed(0, 8), Stored(2)}});
  Settle();  // two more batches' worth: one
  const auto call = Subscribe();
  EXPECT_EQ(call->Next(), "3: clear +700 +701 +702 (0/1)");
  engine_.Tell({.events = {Removed(2)}});
  EXPECT_EQ(call->Next(), "4: -702");
}

TEST_F(KvEvents, ASubscriberGoesOnWhereItWasOrGetsAllBlocksIfThatIsNotKept) {
  for (const int number : {0, 1, 2}) engine_.Tell({.events = {Stored(number)}});
  Settle();
  const auto again = Subscribe(2);
  EXPECT_EQ(again->Next(), "2: +701<-700");
  EXPECT_EQ(again->Next(), "3: +702<-701");
  const auto of_another_process = Subscribe(500);
  EXPECT_EQ(of_another_process->Next(), "4: clear +700 +701 +702 (0/1)");
}

TEST_F(KvEvents, ALargeSnapshotComesInChunksThatEndWithTheLastBatch) {
  requests::CacheEvents all;
  const int blocks = 2 * KvEventHub::kBlocksPerBatch + 1;
  for (int number = 0; number < blocks; ++number) all.events.push_back(Stored(number, 1000));
  engine_.Tell(std::move(all));
  Settle();
  const auto call = Subscribe();
  int stored = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    pb::KvEventBatch chunk;
    ASSERT_TRUE(call->reader->Read(&chunk));
    EXPECT_EQ(chunk.sequence_number(), 2 + i);
    EXPECT_EQ(chunk.snapshot().index(), i);
    EXPECT_EQ(chunk.snapshot().count(), 3u);
    EXPECT_EQ(chunk.snapshot().blocks(), static_cast<uint64_t>(blocks));
    EXPECT_EQ(chunk.events(0).has_cleared(), i == 0);
    for (const pb::KvCacheEvent& event : chunk.events()) {
      EXPECT_EQ(event.event_id(), 0u);
      stored += event.stored().blocks_size();
    }
  }
  EXPECT_EQ(stored, blocks);
}

TEST_F(KvEvents, AFlushClearsAndWhatRequestsOfBeforeStillStoreIsNotTold) {
  const auto call = Subscribe();
  engine_.Tell({.events = {Stored(0)}});
  EXPECT_EQ(call->Next(), "1: +700");
  Flush();
  EXPECT_EQ(call->Next(), "2: clear");
  engine_.Tell({.events = {Stored(1), Removed(0)}});  // without the new epoch: they cannot be found any more
  Flush();
  EXPECT_EQ(call->Next(), "3: clear");
}

TEST_F(KvEvents, ALostSchedulerClearsAndItsReturnStoresWhatIsThere) {
  const auto call = Subscribe();
  engine_.Tell({.events = {Stored(0), Stored(1)}});
  EXPECT_EQ(call->Next(), "1: +700 +701");
  engine_.Tell({.reset = true, .events = {}});
  EXPECT_EQ(call->Next(), "2: clear");
  engine_.Tell({.reset = true, .events = {Stored(0)}});
  EXPECT_EQ(call->Next(), "3: clear +700");
}

TEST_F(KvEvents, ASubscriberThatDoesNotReadIsEndedAndToldHowToGoOn) {
  const auto slow = Subscribe();
  const std::string salt(4000, 's');  // a batch has about 2 MiB
  for (int i = 0; i < 64; ++i) {
    requests::CacheEvents events;
    for (size_t block = 0; block < KvEventHub::kBlocksPerBatch; ++block)
      events.events.push_back(
          Stored(0, static_cast<TokenId>(100 + i * KvEventHub::kBlocksPerBatch + block), kAnonymousTenant, salt));
    engine_.Tell(std::move(events));
  }
  Settle();
  int batches = 0;
  while (slow->Next() != "(end)") ++batches;
  EXPECT_LT(batches, 64);
  const grpc::Status status = slow->reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("start_sequence_number"));
}

TEST_F(KvEvents, AServerThatStopsEndsItsSubscribers) {
  const auto call = Subscribe();
  server_->Stop(absl::Seconds(30));
  EXPECT_EQ(call->Next(), "(end)");
  EXPECT_EQ(call->reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(KvEvents, OneSubscriberTooManyIsRefusedAndOneThatLeavesMakesRoom) {
  std::vector<std::unique_ptr<Call>> calls;
  for (size_t i = 0; i < KvEventHub::kMaxSubscribers; ++i) calls.push_back(Subscribe());
  const auto refused = Subscribe();
  EXPECT_EQ(refused->Next(), "(end)");
  EXPECT_EQ(refused->reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  calls.front()->context.TryCancel();
  calls.front()->reader->Finish();
  grpc::StatusCode code = grpc::StatusCode::RESOURCE_EXHAUSTED;
  while (code == grpc::StatusCode::RESOURCE_EXHAUSTED) {
    const auto next = Subscribe();
    engine_.Tell({.events = {Stored(0), Removed(0)}});
    code = next->Next() == "(end)" ? next->reader->Finish().error_code() : grpc::StatusCode::OK;
  }
  EXPECT_EQ(code, grpc::StatusCode::OK);
}

class KvEventsOfTenants : public KvEvents {
 protected:
  KvEventsOfTenants() : KvEvents({{"key-of-us", "us"}, {"key-of-them", "them"}}) {}
};

TEST_F(KvEventsOfTenants, ATenantHearsOfItsOwnBlocksOnly) {
  const auto us = Subscribe(0, "key-of-us"), them = Subscribe(0, "key-of-them");
  engine_.Tell({.events = {Stored(0, 7, "us"), Stored(0, 8, "them"), Stored(1, 7, "us")}});
  EXPECT_EQ(us->Next(), "1: +700 +701");
  EXPECT_EQ(them->Next(), "1: +800");
  Flush("key-of-us");
  EXPECT_EQ(us->Next(), "2: clear");
  engine_.Tell({.events = {Stored(1, 8, "them")}});
  EXPECT_EQ(them->Next(), "2: +801<-800");
  const auto stranger = Subscribe(0, "another-key");
  EXPECT_EQ(stranger->Next(), "(end)");
  EXPECT_EQ(stranger->reader->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace dovetail::server::test
