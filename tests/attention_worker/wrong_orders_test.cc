#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention_worker/attention_worker_node.h"
#include "base/dtype.h"
#include "base/log.h"
#include "kernels/kv_block.h"
#include "kernels/linear_state.h"
#include "linear_attention/packed_state.h"
#include "transport/inproc/inproc_fabric.h"

// Attention workers whose scheduler and compute workers say things in a wrong order: every frame can be decoded, and
// most fit what the worker holds, so that the others meet every state. No order may end a worker, and after each one
// every block is accounted for.

namespace dovetail::attention {
namespace {

using proto::FrameType;

constexpr Epoch kEpoch{3};
constexpr int kWorkers = 2;
constexpr int kMicroBatches = 2;
constexpr uint64_t kSequences = 5;

// Full attention, a window, and a linear state with a convolution.
proto::AttentionTable Table() {
  proto::SoftmaxSpec full;
  full.query_heads = 4;
  full.kv_heads = 2;
  full.key_dim = full.value_dim = 16;
  full.scale = 0.25f;
  full.kv = DType::kF32;
  proto::SoftmaxSpec windowed = full;
  windowed.query_heads = windowed.kv_heads = 1;
  windowed.window = 100;
  proto::LinearSpec linear;
  linear.heads = 2;
  linear.key_dim = linear.value_dim = 16;
  linear.delta = linear.token_rate = linear.normalise = true;
  linear.conv_width = 4;
  linear.wire = DType::kF32;
  const size_t block_bytes = (kernels::KvBlockLayout{16, 16, DType::kF32}.bytes() + 63) / 64 * 64;
  linear.blocks_per_head = kernels::LinearStateLayout(linear_attention::ShapeOf(linear)).pieces(block_bytes);
  proto::LinearConstants constants;
  constants.log_decay = {-0.1f, -0.2f};
  constants.conv.assign(static_cast<size_t>(linear.conv_width) * linear.heads * linear.channels(), 0.2f);
  return *proto::AttentionTable::Build({full, windowed, linear, full}, {{}, {}, constants, {}});
}

class WrongOrders : public transport::FrameHandler {
 public:
  explicit WrongOrders(uint64_t seed) : random_(seed), client_(fabric_.CreatePort(nullptr)) {
    for (uint32_t worker = 0; worker < kWorkers; ++worker) {
      ports_.push_back(fabric_.CreatePort(nullptr));
      devices_.push_back(*kernels::CreateCpuDevice({.threads = 1}));
      AttentionWorkerOptions options{WorkerId(worker), kEpoch, /*kv_blocks=*/150, kMicroBatches};
      options.model_digest = 7;
      options.block_bytes = KvBlockBytes(table_, KvStorage::kAsSent);
      options.poison_freed = Chance(50);
      options.digests = Chance(50) ? Digests::kOfFinishedBlocks : Digests::kNone;
      nodes_.push_back(*AttentionWorkerNode::Create(table_, options, *devices_.back(), *ports_.back()));
    }
  }

  void RandomOrder() {
    const uint64_t kind = Below(100);
    if (kind < 12) return Open();
    if (kind < 16) return Fork();
    if (kind < 20) return Release();
    if (kind < 24) return Probe();
    if (kind < 32) return Move();
    if (kind < 38) return Group();
    if (kind < 60) return Begin();
    if (kind < 63) return Answer();
    if (kind < 65) return Fill();
    Advance();
  }
  absl::Status CheckInvariants() const {
    for (const auto& node : nodes_) DT_RETURN_IF_ERROR(node->core().CheckInvariants());
    return absl::OkStatus();
  }
  uint64_t steps() const { return nodes_[0]->core().counters().steps + nodes_[1]->core().counters().steps; }
  uint64_t moved_parts() const { return nodes_[0]->core().counters().moved_parts; }
  uint64_t refused() const { return refused_; }
  const std::string& history() const { return history_; }

 private:
  struct Running {
    int worker = 0;
    uint16_t micro_batch = 0;
    uint64_t step = 0;
    int op = 0;
    bool asked = false;
  };

  uint64_t Below(uint64_t n) { return random_() % n; }
  bool Chance(uint64_t percent) { return Below(100) < percent; }
  int AnyWorker() { return static_cast<int>(Below(kWorkers)); }
  SequenceId AnySequence() { return SequenceId(1 + Below(kSequences)); }
  const SequenceState* Find(int worker, SequenceId id) { return nodes_[worker]->core().sequences().Find(id); }
  // One that is open, if there is one.
  SequenceId OpenSequence(int worker) {
    SequenceId id = AnySequence();
    for (uint64_t i = 0; i < kSequences && Find(worker, id) == nullptr; ++i)
      id = SequenceId(id.value() % kSequences + 1);
    return id;
  }
  KvGeneration GenerationOf(int worker, SequenceId id) {
    const SequenceState* sequence = Find(worker, id);
    if (sequence == nullptr || Chance(5)) return KvGeneration(Below(9));
    return Chance(20) ? KvGeneration(0) : sequence->generation;
  }
  // Texts of one version begin alike.
  std::vector<proto::BlockHash> Hashes(SequenceId id, int64_t first, int64_t end) {
    std::vector<proto::BlockHash> hashes;
    const uint64_t version = id.value() % 2 + (Chance(5) ? 10 : 0);
    for (int64_t i = first; i < end; ++i) hashes.push_back({static_cast<uint64_t>(i) + 1, 77 + version});
    return hashes;
  }
  std::vector<proto::BlockHash> LastHashes(SequenceId id, Position ctx_len) {
    const int64_t end = ctx_len / kSegmentTokens;
    return Chance(50) ? std::vector<proto::BlockHash>() : Hashes(id, Below(end + 1), end);
  }
  Position AnyContext(const SequenceState* sequence) {
    if (sequence == nullptr || Chance(5)) return static_cast<Position>(Below(400));
    if (!sequence->started) {
      const auto& offered = sequence->resumable;
      return offered.empty() ? 0 : kSegmentTokens * static_cast<Position>(offered[Below(offered.size())]);
    }
    return sequence->ctx_len + (Chance(80) ? sequence->q_len : Below(sequence->q_len + 1));
  }
  std::vector<proto::Shard> AnyShards(int worker) {
    std::vector<proto::Shard> shards;
    for (const proto::Shard& whole : proto::WholePlacement(table_, WorkerId(worker), kEpoch)) {
      if (Chance(10)) continue;
      proto::Shard shard = whole;
      if (shard.kv_heads.size() > 1 && Chance(20)) shard.kv_heads.begin = 1;
      if (Chance(10)) shard.tokens.begin = 128;
      if (Chance(10)) shard.tokens.end = 192;
      for (int copies = Chance(3) ? 2 : 1; copies > 0; --copies) shards.push_back(shard);
    }
    return shards;
  }

  void Extend(int worker, proto::OpenSequence& order) {
    order.extend = true;
    order.ctx_len = AnyContext(Find(worker, order.sequence));
    if (Chance(80)) order.hashes = Hashes(order.sequence, 0, order.ctx_len / kSegmentTokens);
    order.steps_from = StepId(Chance(80) ? steps_ + 1 : Below(steps_ + 1));
  }

  void Open() {
    const int worker = AnyWorker();
    proto::OpenSequence order{Chance(70) ? AnySequence() : OpenSequence(worker), AnyShards(worker), {}};
    order.hashes = Hashes(order.sequence, 0, static_cast<int64_t>(Below(6)));
    if (Chance(20)) Extend(worker, order);
    Tell(worker, FrameType::kOpenSequence, order);
  }
  void Fork() {
    const int worker = AnyWorker();
    const SequenceId parent = OpenSequence(worker);
    const SequenceState* sequence = Find(worker, parent);
    Tell(worker, FrameType::kForkSequence,
         proto::ForkSequence{parent, AnySequence(), AnyContext(sequence), GenerationOf(worker, parent)});
  }
  void Release() {
    const int worker = AnyWorker();
    const SequenceId id = OpenSequence(worker);
    const Position ctx_len = AnyContext(Find(worker, id));
    Tell(worker, FrameType::kReleaseSequence,
         proto::ReleaseSequence{id, ctx_len, LastHashes(id, ctx_len), GenerationOf(worker, id)});
  }
  void Probe() {
    const int worker = AnyWorker();
    if (Chance(40)) return Tell(worker, FrameType::kUnpin, proto::Unpin{Below(3)});
    const auto hashes = Hashes(AnySequence(), 0, static_cast<int64_t>(Below(6)));
    Tell(worker, FrameType::kPrefixProbe, proto::PrefixProbe{Below(3), AnyShards(worker), hashes});
  }

  // Usually to another worker that has opened the sequence for it.
  void Move() {
    const int worker = AnyWorker();
    const SequenceId id = OpenSequence(worker);
    const SequenceState* sequence = Find(worker, id);
    const int target = Chance(90) ? 1 - worker : worker;
    const Position end = AnyContext(sequence);
    if (sequence != nullptr && Chance(80)) {
      proto::OpenSequence order{id, {}, Hashes(id, 0, static_cast<int64_t>(Below(3)))};
      for (const ShardState& shard : sequence->shards) {
        order.shards.push_back(shard.shard);
        order.shards.back().worker = WorkerId(target);
      }
      if (Chance(20)) Extend(target, order);
      Tell(target, FrameType::kOpenSequence, order);
    }
    proto::MoveSequence order{id, 0, end, static_cast<uint16_t>(Below(proto::kMoveSlots))};
    if (Chance(20)) order.begin = kSegmentTokens * static_cast<Position>(Below(3));
    order.step = StepId(++steps_);
    steps_ += 10;  // of its parts
    order.target = Chance(95) ? ports_[target]->id() : client_->id();
    order.target_epoch = kEpoch;
    order.generation = GenerationOf(worker, id);
    order.target_generation = GenerationOf(target, id);
    Tell(worker, FrameType::kMoveSequence, order);
  }
  // What a giver would send.
  void Fill() {
    const int worker = AnyWorker();
    const SequenceId id = OpenSequence(worker);
    const SequenceState* sequence = Find(worker, id);
    proto::StepBeginEntry entry{.sequence = id, .generation = GenerationOf(worker, id)};
    const bool filled = sequence != nullptr && sequence->filled != SequenceState::kNotFilled;
    entry.ctx_len = filled && Chance(80) ? sequence->filled : kSegmentTokens * static_cast<Position>(Below(3));
    entry.q_len = 1 + static_cast<int32_t>(Below(150));
    entry.fill_end = entry.ctx_len + entry.q_len + static_cast<Position>(Chance(50) ? 0 : Below(150));
    BeginStep(worker, static_cast<uint16_t>(kMicroBatches + Below(proto::kMoveSlots)), {{entry}});
  }

  proto::StepBeginEntry AnyEntry(int worker) {
    const SequenceId id = OpenSequence(worker);
    proto::StepBeginEntry entry{.sequence = id, .generation = GenerationOf(worker, id)};
    entry.ctx_len = AnyContext(Find(worker, id));
    entry.q_len = 1 + static_cast<int32_t>(Below(Chance(50) ? 3 : 150));
    entry.hashes = LastHashes(id, entry.ctx_len);
    if (Chance(30))
      entry.attend_end = kSegmentTokens * static_cast<Position>(Below(entry.ctx_len / kSegmentTokens + 1));
    if (entry.attend_end < entry.ctx_len && Chance(50))
      entry.gather_begin = entry.attend_end + static_cast<Position>(Below(entry.ctx_len - entry.attend_end));
    if (Chance(30)) entry.states = Chance(50) ? proto::StateExchange::kLeave : proto::StateExchange::kFetch;
    return entry;
  }
  void Begin() {
    const int worker = AnyWorker();
    proto::StepBegin message{{AnyEntry(worker)}};
    while (Chance(30)) message.entries.push_back(AnyEntry(worker));
    BeginStep(worker, static_cast<uint16_t>(Chance(95) ? Below(kMicroBatches) : Below(8)), message);
  }
  // Two ranks of one prompt, or one of them.
  void Group() {
    const int worker = AnyWorker();
    proto::StepBeginEntry entry = AnyEntry(worker);
    const Position base = entry.ctx_len,
                   cut = (base / kSegmentTokens + 1 + static_cast<Position>(Below(2))) * kSegmentTokens;
    const proto::PrefillPart part{StepId(steps_ + 1), base, cut + 1 + static_cast<Position>(Below(100)), 0, 2};
    std::vector<int> ranks = {0, 1};
    if (Chance(50)) std::swap(ranks[0], ranks[1]);
    if (Chance(20)) ranks.pop_back();
    for (const int rank : ranks) {
      proto::StepBegin message{{entry}, part};
      message.part.rank = rank;
      message.entries[0].ctx_len = rank == 0 ? base : cut;
      message.entries[0].q_len = static_cast<int32_t>(rank == 0 ? cut - base : part.end - cut);
      BeginStep(worker, static_cast<uint16_t>(rank), message, part.group.value() + static_cast<uint64_t>(rank));
    }
    steps_ = part.group.value() + 1;
  }
  void BeginStep(int worker, uint16_t micro_batch, const proto::StepBegin& message, uint64_t step = 0) {
    if (step == 0) step = Chance(95) ? ++steps_ : 1 + Below(steps_ + 1);
    Tell(worker, FrameType::kStepBegin, message, step, micro_batch);
    running_.push_back({worker, micro_batch, step});
  }

  // A frame of a step: mostly the next one.
  void Advance() {
    if (running_.empty()) return;
    const size_t index = Chance(80) ? running_.size() - 1 : Below(running_.size());
    Running& step = running_[index];
    if (step.op >= table_.op_count() || step.micro_batch >= kMicroBatches + proto::kMoveSlots) {
      running_.erase(running_.begin() + static_cast<int64_t>(index));
      return;
    }
    const proto::StepLayout& layout =
        nodes_[step.worker]->core().LayoutOf(MicroBatchId(step.micro_batch), table_.op_group[step.op]);
    const bool query = layout.asks() && !step.asked;
    const int64_t bytes =
        Chance(97) ? (query ? layout.query_bytes : layout.key_value_bytes) : static_cast<int64_t>(Below(999));
    const Running sent = step;
    if (query) {
      step.asked = true;
    } else {
      step.asked = false;
      ++step.op;
    }
    if (Chance(3)) return;  // it is lost
    Send(sent.worker, query ? FrameType::kQuery : FrameType::kKeyValue, sent.step, sent.op, Numbers(bytes),
         sent.micro_batch);
    if (Chance(3)) step.op = static_cast<int>(Below(table_.op_count()));
  }
  // As if to parts of a move.
  void Answer() {
    const auto slot = static_cast<uint16_t>(Below(kMicroBatches + proto::kMoveSlots));
    const uint64_t step = 1 + Below(steps_ + 1);
    const int worker = AnyWorker();
    if (Chance(50)) return Tell(worker, FrameType::kStepRefused, proto::StepRefused{}, step, slot);
    Send(worker, FrameType::kPartial, step, static_cast<int>(Below(table_.op_count())), {}, slot);
  }

  std::vector<std::byte> Numbers(int64_t bytes) {
    std::vector<std::byte> out(bytes);
    for (size_t at = 0; at + sizeof(float) <= out.size(); at += sizeof(float)) {
      const float number = static_cast<float>(random_() % 1000) / 2000 - 0.25f;
      std::memcpy(out.data() + at, &number, sizeof(number));
    }
    return out;
  }
  template <typename Message>
  void Tell(int worker, FrameType type, const Message& message, uint64_t step = 0, uint16_t micro_batch = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    Send(worker, type, step, 0, payload, micro_batch);
  }
  void Send(int worker, FrameType type, uint64_t step, int op, const std::vector<std::byte>& payload,
            uint16_t micro_batch) {
    absl::StrAppend(&history_, " ", static_cast<int>(type), ">", worker, "/", micro_batch, ":", step, ".", op);
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(micro_batch), op, payload.size());
    tensors_.push_back(payload);  // lent until it is answered
    const bool tensor = type == FrameType::kQuery || type == FrameType::kKeyValue || type == FrameType::kPartial;
    const NodeId to = ports_[worker]->id();
    ASSERT_TRUE(
        (tensor ? client_->SendTensor(to, header, tensors_.back()) : client_->SendMessage(to, header, payload)).ok());
    for (int quiet = 0; quiet < 2;) {
      int work = 0;
      for (const auto& node : nodes_) work += node->Poll();
      while (client_->Poll(*this, 64) > 0) ++work;
      quiet = work == 0 ? quiet + 1 : 0;
    }
  }
  void OnFrame(const transport::Delivery& delivery) override {
    if (delivery.header.type == FrameType::kStepRefused) ++refused_;
  }

  std::mt19937_64 random_;
  const proto::AttentionTable table_ = Table();
  transport::InprocFabric fabric_;
  std::unique_ptr<transport::Port> client_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<kernels::Device>> devices_;
  std::vector<std::unique_ptr<AttentionWorkerNode>> nodes_;
  std::deque<std::vector<std::byte>> tensors_;
  std::vector<Running> running_;
  uint64_t steps_ = 0, refused_ = 0;
  std::string history_;  // TYPE>WORKER/MICRO_BATCH:STEP.OP
};

class WrongOrdersTest : public ::testing::Test {
 protected:
  ~WrongOrdersTest() override { close(nowhere_); }

  const int nowhere_ = open("/dev/null", O_WRONLY | O_CLOEXEC);
  LogWriter log_{{.file = nowhere_}};  // workers log what they refuse
};

// DOVETAIL_SEED=n runs that seed alone, DOVETAIL_SEEDS=n so many.
TEST_F(WrongOrdersTest, EndNoWorkerAndLoseNoBlock) {
  const char* given = std::getenv("DOVETAIL_SEED");
  const char* count = std::getenv("DOVETAIL_SEEDS");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  const uint64_t seeds = given != nullptr ? 1 : count != nullptr ? std::strtoull(count, nullptr, 10) : 40;
  std::printf("DOVETAIL_SEED=%lu to %lu\n", first, first + seeds - 1);  // what ends the process is said by no test
  std::fflush(stdout);
  uint64_t steps = 0, refused = 0, moved = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    WrongOrders cluster(seed);
    for (int i = 0; i < 400; ++i) {
      cluster.RandomOrder();
      const absl::Status status = cluster.CheckInvariants();
      ASSERT_TRUE(status.ok()) << "DOVETAIL_SEED=" << seed << ", after order " << i << ": " << status
                               << cluster.history();
    }
    steps += cluster.steps();
    refused += cluster.refused();
    moved += cluster.moved_parts();
  }
  // What most orders ask for is possible, so that the others find workers in the midst of it.
  EXPECT_GT(steps, 20 * seeds);
  EXPECT_GT(refused, 20 * seeds);
  EXPECT_GT(moved, seeds);
}

}  // namespace
}  // namespace dovetail::attention
