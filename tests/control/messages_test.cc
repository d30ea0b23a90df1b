#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>

#include "control/cache_messages.h"
#include "control/convert.h"
#include "control/generation_messages.h"
#include "control/security.h"
#include "proto/frame.h"
#include "tests/support/test_data.h"

// What crosses the control plane is checked before it is used.

namespace dovetail::control {
namespace {

using testing::HasSubstr;

JoinRequest GoodJoin() {
  proto::SoftmaxSpec wide, narrow;
  wide.query_heads = 8;
  wide.kv_heads = 2;
  wide.key_dim = wide.value_dim = 16;
  wide.scale = 0.25f;
  narrow = wide;
  narrow.window = 128;
  JoinRequest request;
  request.role = Role::kComputeWorker;
  request.name = "compute-1";
  request.node = NodeId(17);
  request.epoch = Epoch(4);
  request.build_version = "0.1.0";
  request.frame_version = proto::kFrameVersion;
  request.data_plane_version = "ucx 1.13.1";
  request.data_plane_address = std::string("\0binary", 7);
  request.capabilities = {0, 8, 20'000'000'000, "cpu", "CPU avx2"};
  request.process = 0x1234567890abcdef;
  request.runs_as = {"boot pid:[1] net:[2]", 77, 123456789012};
  ModelSummary& model = request.model.emplace();
  model.name = "tiny";
  model.digest = ~uint64_t{0};
  model.deterministic = true;
  model.attention = *proto::AttentionTable::Build({wide, narrow, wide});
  model.vocab_size = 512;
  model.max_positions = 2048;
  model.bos = 1;
  model.stop_ids = {2, 3};
  model.temperature = 0.5f;
  model.top_k = 40;
  model.length_ropes = {{2, 4096, 1024}};
  model.files = {{"tokenizer.json", 100, std::string(32, 'x')}};
  return request;
}

TEST(ControlMessages, AJoinRequestSurvivesTheWire) {
  v1::JoinRequest wire, again;
  ToProto(GoodJoin(), wire);
  const auto read = FromProto(wire);
  ASSERT_TRUE(read.ok()) << read.status();
  ToProto(*read, again);
  EXPECT_EQ(wire.SerializeAsString(), again.SerializeAsString());
  EXPECT_EQ(read->model->attention.op_group, GoodJoin().model->attention.op_group);
  EXPECT_TRUE(read->model->deterministic);
  EXPECT_EQ(read->data_plane_address.size(), 7u);
  EXPECT_EQ(read->process, 0x1234567890abcdefu);
  EXPECT_EQ(read->runs_as, GoodJoin().runs_as);
  EXPECT_EQ(read->capabilities.arithmetic, "CPU avx2");
}

TEST(ControlMessages, AConfigurationSurvivesTheWire) {
  const Configuration configuration{GoodJoin().model->attention, 5, 2, 512, KvStorage::kE4M3, true};
  v1::Configuration wire;
  ToProto(configuration, wire);
  const auto read = FromProto(wire);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->model_digest, 5u);
  EXPECT_EQ(read->micro_batches, 2);
  EXPECT_EQ(read->max_step_tokens, 512);
  EXPECT_EQ(read->kv_storage, KvStorage::kE4M3);
  EXPECT_TRUE(read->deterministic);
}

TEST(Capabilities, AllCoresReadTogetherAndAGpuReadsAsOne) {
  Capabilities has;
  has.memory_bytes_per_s = 1000;
  has.cores = 12;
  has.device = "cpu";
  EXPECT_EQ(ReadRate(has), 12'000);
  has.cores = 0;  // not known
  EXPECT_EQ(ReadRate(has), 1000);
  has.cores = 12;  // of its host
  has.device = "cuda:0";
  EXPECT_EQ(ReadRate(has), 1000);
}

TEST(ControlMessages, AJoinReplySurvivesTheWire) {
  JoinReply reply{WorkerId(3), Epoch(4), 400, 50, true, 77, {"boot pid:[1] net:[2]", 5, 123456789012}};
  for (const bool known : {true, false}) {
    if (!known) reply.scheduler = {};
    v1::JoinReply wire;
    ToProto(reply, wire);
    const auto read = FromProto(wire);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->worker, WorkerId(3));
    EXPECT_EQ(read->epoch, Epoch(4));
    EXPECT_EQ(read->lease_ms, 400u);
    EXPECT_EQ(read->heartbeat_ms, 50u);
    EXPECT_TRUE(read->wants_model_files);
    EXPECT_EQ(read->cluster, 77u);
    EXPECT_EQ(read->scheduler, reply.scheduler);
  }
  v1::JoinReply bad;
  ToProto(reply, bad);
  bad.mutable_scheduler()->set_host("line\nbreak");
  EXPECT_THAT(std::string(FromProto(bad).status().message()), HasSubstr("scheduler.host"));
}

TEST(ControlMessages, LinearStatesAndTheirConstantsSurviveTheWire) {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = 3;
  state.value_dim = 5;
  state.delta = state.vector_decay = state.token_decay = state.token_rate = state.normalise = true;
  state.query_scale = 0.25f;
  state.conv_width = 4;
  state.conv_linear = true;
  state.wire = DType::kF16;
  state.blocks_per_head = 7;
  proto::LinearConstants constants;
  for (int i = 0; i < 4 * 2 * 11; ++i) constants.conv.push_back(0.5f * static_cast<float>(i));
  constants.conv_bias.assign(2 * 11, 0.125f);
  constants.skip = {1, 2};
  JoinRequest request = GoodJoin();
  proto::LinearConstants sinks;
  sinks.sinks = {0.5f, -0.25f};
  request.model->attention =
      *proto::AttentionTable::Build({proto::SoftmaxSpec{2, 1, 4, 4, 1.0f}, state}, {sinks, constants});
  v1::JoinRequest wire;
  ToProto(request, wire);
  const auto read = FromProto(wire);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->model->attention.groups, request.model->attention.groups);
  EXPECT_EQ(read->model->attention.constants, request.model->attention.constants);
  wire.mutable_model()->mutable_attention()->mutable_constants(1)->mutable_skip()->RemoveLast();
  EXPECT_EQ(FromProto(wire).status().message(), "attention op 1: its constants do not fit its spec");
  wire.mutable_model()->mutable_attention()->mutable_groups(1)->mutable_linear()->set_blocks_per_head(0);
  EXPECT_NE(FromProto(wire).status().message().find("attention.linear.blocks_per_head"), absl::string_view::npos);
}

TEST(ControlMessages, EveryBadFieldOfAJoinRequestIsNamed) {
  using Change = std::function<void(v1::JoinRequest&)>;
  const std::vector<std::pair<const char*, Change>> cases = {
      {"role", [](auto& r) { r.set_role(v1::ROLE_UNSPECIFIED); }},
      {"role", [](auto& r) { r.set_role(static_cast<v1::Role>(77)); }},
      {"name", [](auto& r) { r.set_name(""); }},
      {"name", [](auto& r) { r.set_name("line\nbreak"); }},
      {"name", [](auto& r) { r.set_name(std::string(129, 'a')); }},
      {"node", [](auto& r) { r.set_node(0); }},
      {"epoch", [](auto& r) { r.set_epoch(0); }},
      {"data_plane_address", [](auto& r) { r.set_data_plane_address(std::string(kMaxAddressBytes + 1, 'a')); }},
      {"capabilities.cores", [](auto& r) { r.mutable_capabilities()->set_cores(0); }},
      {"capabilities.kv_bytes", [](auto& r) { r.mutable_capabilities()->set_kv_bytes(~uint64_t{0}); }},
      {"runs_as.host", [](auto& r) { r.mutable_runs_as()->set_host("line\nbreak"); }},
      {"runs_as.host", [](auto& r) { r.mutable_runs_as()->set_host(std::string(kMaxHostBytes + 1, 'a')); }},
      {"capabilities.arithmetic", [](auto& r) { r.mutable_capabilities()->set_arithmetic("line\nbreak"); }},
      {"kv-capacity",
       [](auto& r) {
         r.set_role(v1::ROLE_ATTENTION_WORKER);
         r.mutable_capabilities()->set_kv_bytes(0);
       }},
      {"model", [](auto& r) { r.clear_model(); }},
      {"model.vocab_size", [](auto& r) { r.mutable_model()->set_vocab_size(0); }},
      {"model.max_positions", [](auto& r) { r.mutable_model()->set_max_positions(~uint64_t{0}); }},
      {"model.bos", [](auto& r) { r.mutable_model()->set_bos(512); }},
      {"model.stop_ids", [](auto& r) { r.mutable_model()->add_stop_ids(-1); }},
      {"sampling defaults",
       [](auto& r) { r.mutable_model()->set_temperature(std::numeric_limits<float>::quiet_NaN()); }},
      {"attention.groups", [](auto& r) { r.mutable_model()->mutable_attention()->clear_groups(); }},
      {"attention.op_group", [](auto& r) { r.mutable_model()->mutable_attention()->add_op_group(9); }},
      {"attention.op_group",
       [](auto& r) {  // groups in another order than of first appearance
         auto* table = r.mutable_model()->mutable_attention();
         table->set_op_group(0, 1);
         table->set_op_group(1, 0);
       }},
      {"attention.kv_heads",
       [](auto& r) { r.mutable_model()->mutable_attention()->mutable_groups(0)->set_kv_heads(0); }},
      {"query heads", [](auto& r) { r.mutable_model()->mutable_attention()->mutable_groups(0)->set_kv_heads(3); }},
      {"attention.kv_dtype",
       [](auto& r) { r.mutable_model()->mutable_attention()->mutable_groups(0)->set_kv_dtype(9); }},
      {"model.kv_storage", [](auto& r) { r.mutable_model()->set_kv_storage(3); }},
      {"attention.scale",
       [](auto& r) { r.mutable_model()->mutable_attention()->mutable_groups(0)->set_scale(INFINITY); }},
      {"model.files.name", [](auto& r) { r.mutable_model()->mutable_files(0)->set_name("../etc/passwd"); }},
      {"model.files.sha256", [](auto& r) { r.mutable_model()->mutable_files(0)->set_sha256("short"); }},
      {"model.files", [](auto& r) { r.mutable_model()->mutable_files(0)->set_size(kMaxModelFileBytes + 1); }},
  };
  for (const auto& [field, change] : cases) {
    v1::JoinRequest wire;
    ToProto(GoodJoin(), wire);
    change(wire);
    const auto read = FromProto(wire);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(field));
  }
}

requests::GenerationRequest GoodRequest() {
  requests::GenerationRequest request;
  request.tenant = "t";
  request.cache_salt = "s";
  request.priority = -3;
  request.prompt = {1, 2, 3};
  request.choices = 2;
  request.sampling.temperature = 0.5f;
  request.sampling.logprobs = 0;
  request.sampling.seed = ~uint64_t{0};
  request.sampling.logit_bias = {{5, -1.5f}};
  request.sampling.allowed_token_ids = {5, 6};
  request.max_tokens = 7;
  request.stop_token_ids = {2};
  request.prompt_logprobs = 0;
  request.call = 9;
  request.prompt_progress = true;
  request.pooling = requests::Pooling::kCls;
  request.use_prefix_cache = false;
  return request;
}

TEST(ControlMessages, WhatIsSaidAboutPeersAndLoopsSurvivesTheWire) {
  v1::LinkFailed failed;
  ToProto(LinkFailed{NodeId(7), Epoch(8), "why", LinkFailed::Kind::kLate}, failed);
  EXPECT_EQ(FromProto(failed)->kind, LinkFailed::Kind::kLate);
  EXPECT_EQ(FromProto(failed)->node, NodeId(7));
  failed.set_kind(static_cast<v1::LinkFailed::Kind>(3));
  EXPECT_EQ(FromProto(failed).status(), absl::InvalidArgumentError("link_failed.kind: 3 is outside 0..2"));

  v1::Applied applied;
  ToProto(Applied{5, {NodeId(1), NodeId(9)}}, applied);
  EXPECT_EQ(FromProto(applied)->peers_version, 5u);
  EXPECT_THAT(FromProto(applied)->unconnected, testing::ElementsAre(NodeId(1), NodeId(9)));
  for (int i = 0; i < kMaxPeers; ++i) applied.add_unconnected(1);
  EXPECT_EQ(FromProto(applied).status(), absl::InvalidArgumentError("applied.unconnected: 1026 is outside 0..1024"));

  Heartbeat heartbeat;
  heartbeat.busy_ms = 1234;
  heartbeat.links = {{NodeId(3), "tcp/eth0"}, {NodeId(4), "shm", 1, 2, "host: the attention worker runs on cpu"}};
  v1::Heartbeat wire;
  ToProto(heartbeat, wire);
  EXPECT_EQ(FromProto(wire)->busy_ms, 1234u);
  EXPECT_EQ(FromProto(wire)->links, heartbeat.links);
  wire.mutable_links(1)->set_exchange("device\x1b[2J");  // it appears on operators' terminals
  EXPECT_EQ(FromProto(wire).status(),
            absl::InvalidArgumentError("links.exchange: holds a character that is not printable ASCII"));
}

TEST(ControlMessages, AGenerationRequestSurvivesTheWire) {
  v1::GenerationRequest wire;
  ToProto(GoodRequest(), wire);
  const auto read = FromProto(wire);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->prompt, GoodRequest().prompt);
  EXPECT_EQ(read->sampling, GoodRequest().sampling);
  EXPECT_EQ(read->prompt_logprobs, 0);
  EXPECT_EQ(read->priority, -3);
  EXPECT_EQ(read->call, 9u);
  EXPECT_EQ(read->pooling, requests::Pooling::kCls);
  EXPECT_TRUE(read->prompt_progress);
  EXPECT_FALSE(read->use_prefix_cache);
  v1::GenerationRequest again;
  ToProto(*read, again);
  EXPECT_EQ(wire.SerializeAsString(), again.SerializeAsString());
}

TEST(ControlMessages, EveryBadFieldOfAGenerationRequestIsNamed) {
  using Change = std::function<void(v1::GenerationRequest&)>;
  const std::vector<std::pair<const char*, Change>> cases = {
      {"prompt", [](auto& r) { r.clear_prompt(); }},
      {"choices", [](auto& r) { r.set_choices(0); }},
      {"choices", [](auto& r) { r.set_choices(9); }},
      {"max_tokens", [](auto& r) { r.set_max_tokens(1u << 31); }},
      {"min_tokens", [](auto& r) { r.set_min_tokens(1u << 31); }},
      {"prompt_logprobs", [](auto& r) { r.set_prompt_logprobs(65); }},
      {"logits_last", [](auto& r) { r.set_logits_last(4); }},
      {"pooling", [](auto& r) { r.set_pooling(4); }},
      {"tenant", [](auto& r) { r.set_tenant(std::string(1025, 'a')); }},
      {"sampling", [](auto& r) { r.mutable_sampling()->set_temperature(NAN); }},
      {"sampling.temperature", [](auto& r) { r.mutable_sampling()->set_temperature(-1); }},
      {"sampling.top_k", [](auto& r) { r.mutable_sampling()->set_top_k(-1); }},
      {"sampling.top_p", [](auto& r) { r.mutable_sampling()->set_top_p(1.5f); }},
      {"sampling.min_p", [](auto& r) { r.mutable_sampling()->set_min_p(-0.5f); }},
      {"sampling.repetition_penalty", [](auto& r) { r.mutable_sampling()->set_repetition_penalty(0); }},
      {"biased tokens", [](auto& r) { r.mutable_sampling()->add_bias_tokens(1); }},
      {"sampling.bias_values", [](auto& r) { r.mutable_sampling()->set_bias_values(0, INFINITY); }},
      {"sampling.logprobs", [](auto& r) { r.mutable_sampling()->set_logprobs(65); }},
  };
  for (const auto& [field, change] : cases) {
    v1::GenerationRequest wire;
    ToProto(GoodRequest(), wire);
    change(wire);
    const auto read = FromProto(wire);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(field));
  }
}

TEST(ControlMessages, AnUpdateSurvivesTheWire) {
  requests::GenerationUpdate update;
  update.request = RequestId(9);
  update.choice = 1;
  update.tokens = {4, 5};
  update.first_index = 3;
  update.logprobs = {{{4, -0.5f, 1}, {{4, -0.5f, 1}, {6, -1.0f, 2}}}, {{5, -2.0f, 3}, {}}};
  update.logits = {{1.0f, 2.0f}};
  update.choice_finished = true;
  update.reason = requests::FinishReason::kError;
  update.error = "why";
  update.error_code = absl::StatusCode::kUnavailable;
  update.stop_token = -1;
  v1::Update wire, again;
  ToProto(update, wire);
  const auto read = FromProto(wire);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->logprobs, update.logprobs);
  EXPECT_EQ(read->error_code, absl::StatusCode::kUnavailable);
  ToProto(*read, again);
  EXPECT_EQ(wire.SerializeAsString(), again.SerializeAsString());
  wire.set_reason(99);
  EXPECT_THAT(std::string(FromProto(wire).status().message()), HasSubstr("reason"));
}

requests::CacheEvents SomeCacheEvents() {
  auto block = std::make_shared<requests::CachedBlock>();
  block->hash = {1, 2};
  block->parent = proto::BlockHash{3, 4};
  block->number = 9;
  block->tokens.assign(64, 7);
  block->of = std::make_shared<requests::CacheNamespace>(requests::CacheNamespace{"tenant", "salt"});
  const requests::CacheGroup group{2, requests::CacheGroup::Kind::kSlidingWindow, 128};
  return {.reset = true, .events = {{true, group, block}, {false, {}, block}}};
}

TEST(ControlMessages, WhatTheCacheHoldsSurvivesTheWireAndOfALostBlockItsName) {
  v1::CacheEvents wire;
  ToProto(SomeCacheEvents(), 0, wire);
  const auto back = FromProto(wire);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(back->reset);
  ASSERT_EQ(back->events.size(), 2u);
  const requests::CachedBlock& stored = *back->events[0].block;
  EXPECT_TRUE(back->events[0].stored);
  EXPECT_EQ(stored.hash, (proto::BlockHash{1, 2}));
  EXPECT_EQ(stored.parent, (proto::BlockHash{3, 4}));
  EXPECT_EQ(stored.number, 9);
  EXPECT_EQ(stored.tokens, std::vector<TokenId>(64, 7));
  EXPECT_EQ(stored.of->tenant, "tenant");
  EXPECT_EQ(stored.of->cache_salt, "salt");
  EXPECT_EQ(back->events[0].group, (requests::CacheGroup{2, requests::CacheGroup::Kind::kSlidingWindow, 128}));
  EXPECT_FALSE(back->events[1].stored);
  EXPECT_EQ(back->events[1].block->hash, stored.hash);
  EXPECT_TRUE(back->events[1].block->tokens.empty());
}

TEST(ControlMessages, ManyBlocksCrossInSeveralMessagesOfWhichTheFirstOneResets) {
  requests::CacheEvents many = SomeCacheEvents();
  many.events.assign(kCacheEventsPerMessage + 1, many.events[0]);
  v1::CacheEvents first, second;
  ToProto(many, 0, first);
  ToProto(many, kCacheEventsPerMessage, second);
  EXPECT_EQ(first.events_size(), static_cast<int>(kCacheEventsPerMessage));
  EXPECT_TRUE(first.reset());
  EXPECT_EQ(second.events_size(), 1);
  EXPECT_FALSE(second.reset());
}

TEST(ControlMessages, EveryBadFieldOfACacheEventIsNamed) {
  const auto refused = [](const char* field, const auto& spoil) {
    v1::CacheEvents wire;
    ToProto(SomeCacheEvents(), 0, wire);
    spoil(*wire.mutable_events(0));
    const auto read = FromProto(wire);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(read.status().message()).find(field), std::string::npos) << read.status();
  };
  refused("cache.tokens", [](v1::CacheEvent& event) { event.add_tokens(1); });
  refused("cache.number", [](v1::CacheEvent& event) { event.set_number(uint64_t{1} << 40); });
  refused("cache.group", [](v1::CacheEvent& event) { event.set_group(99); });
  refused("cache.kind", [](v1::CacheEvent& event) { event.set_kind(3); });
  refused("cache.tenant", [](v1::CacheEvent& event) { event.set_tenant(std::string(5000, 'x')); });
}

// Bytes that once were a message, with some of them changed, either read as something valid or are refused.
TEST(ControlMessages, DamagedMessagesAreRefusedOrValidButNeverAnythingElse) {
  std::mt19937_64 random(42);
  v1::JoinRequest join;
  ToProto(GoodJoin(), join);
  const std::string good = join.SerializeAsString();
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = good;
    for (int n = 1 + static_cast<int>(random() % 4); n > 0; --n)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    v1::JoinRequest wire;
    if (!wire.ParseFromString(bytes)) continue;
    const auto read = FromProto(wire);
    if (!read.ok()) {
      ++refused;
      continue;
    }
    EXPECT_FALSE(read->name.empty());
    EXPECT_LE(read->model ? read->model->files.size() : 0, static_cast<size_t>(kMaxModelFiles));
  }
  EXPECT_GT(refused, 1000);
}

TEST(ControlAddresses, WhatIsNoHostAndPortIsRefusedByTheNameOfItsFlag) {
  for (const char* bad :
       {"", "host", "host:", ":7100", "host:0", "host:65536", "host:-1", "host:71x", "http://host:7100", "host:7100/"})
    EXPECT_THAT(std::string(CheckAddress("--scheduler", bad, false).message()), HasSubstr("--scheduler")) << bad;
  for (const char* good : {"host:7100", "127.0.0.1:1", "[::1]:65535"})
    EXPECT_TRUE(CheckAddress("--scheduler", good, false).ok()) << good;
  EXPECT_TRUE(CheckAddress("--listen", "127.0.0.1:0", true).ok());
}

}  // namespace
}  // namespace dovetail::control
