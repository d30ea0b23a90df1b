#include <atomic>
#include <cstdlib>
#include <new>

#include "gtest/gtest.h"
#include "kernels/activation.h"
#include "kernels/convert.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/sampling.h"
#include "tests/kernels/attention_fixture.h"

// The pair below is malloc and free throughout, which g++ cannot see once one of them is inlined.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace dovetail::kernels::testing {
namespace {

TEST(Ops, AllocateNothingOnThePerLayerPath) {
  ThreadPool pool({.threads = 2});
  const OpContext context{&pool, &SelectOps(TestableIsas().back())};
  const AttentionShape shape{.group = 3, .key_dim = 64, .value_dim = 64, .scale = 0.125f, .dtype = DType::kBF16};
  const TestSequence sequence(shape, 2, 2000, 1);
  TestShard shard(sequence, 0, 2, 0, 2000);
  shard.Append(context, 0, 1999);
  const int heads = 6, dim = 64;
  std::vector<std::byte> o(heads * dim * 2);
  AttentionItem whole = shard.Item(1999, 1), part = whole;
  whole.o = o.data();
  const int64_t nodes = PartialNodes(1999, 1, 0, 0, 2000);
  std::vector<float> partial_o(nodes * heads * dim), partial_ml(nodes * heads * 2);
  part.partial_o = partial_o.data();
  part.partial_ml = partial_ml.data();
  const AttentionItem items[] = {whole, part};
  const ShardPartials partials[] = {{0, 2000, partial_o.data(), partial_ml.data()}};
  const MergeItem merge{.shards = partials,
                        .q_rows = 1,
                        .heads = heads,
                        .value_dim = dim,
                        .first_position = 1999,
                        .dtype = DType::kBF16,
                        .o = o.data()};
  Scratch scratch(ScratchBytesFor(context, shape, items)), sampling(SamplingScratchBytes(5000));
  auto x = RandomFloats(5000, 1), y = RandomFloats(5000, 2), cosine = RandomFloats(320, 3);
  const std::vector<TokenCount> seen = {{1, 1}, {2, 3}};
  const SamplingParams sampled{.top_p = 0.9f, .frequency_penalty = 1, .seed = 1, .seen = seen, .logprobs = 5};
  const SamplingParams top_k{.top_k = 40, .top_p = 0.9f, .seed = 1};

  const int64_t before = allocations;
  bool ok = true;
  {
    auto op = PagedAttention::Begin(context, shape, items, scratch.span());
    ok = ok && op.ok();
    op->AttendComplete();
    shard.Append(context, 1999, 2000);
    op->AttendRest();
    op->Finish();
  }
  ok = ok && MergeShardPartials(context, {&merge, 1}).ok();
  ok = ok && RmsNorm(context, {.x = x.data(),
                               .residual = y.data(),
                               .weight = y.data(),
                               .eps = 1e-5f,
                               .rows = 5,
                               .size = 1000,
                               .out = x.data()})
                 .ok();
  ok = ok && Rope(context, {.x = x.data(),
                            .rows = 10,
                            .heads = 6,
                            .head_dim = 64,
                            .rotary = 64,
                            .cos = cosine.data(),
                            .sin = cosine.data(),
                            .dtype = DType::kF32,
                            .out = y.data()})
                 .ok();
  ok =
      ok && GatedActivation(context, {.gate = x.data(), .up = y.data(), .out = x.data(), .rows = 5, .size = 1000}).ok();
  ok = ok && Add(context, x.data(), y.data(), x.data(), 5000).ok();
  for (const SamplingParams& p : {sampled, top_k}) ok = ok && SampleRow(*context.table, y, p, 3, sampling.span()).ok();
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace dovetail::kernels::testing
