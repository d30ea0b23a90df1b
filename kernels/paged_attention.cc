#include "kernels/paged_attention.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/paged_attention_checks.h"
#include "kernels/tree_fold.h"

namespace dovetail::kernels {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kChunkBytesPerThread = size_t{1} << 20;
constexpr int kTasksPerThread = 8;
constexpr int32_t kMinChunkSegments = 4;
constexpr int64_t kElementsPerFinished = 8;  // work for an element of o: it is merged from a few partials

size_t RoundUp(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Hands out aligned pieces of a span; says so when it is used up.
class Arena {
 public:
  Arena(std::byte* begin, std::byte* end) : next_(begin), end_(end) {}
  template <typename T>
  T* Take(size_t count) {
    const size_t bytes = RoundUp(count * sizeof(T));
    if (static_cast<size_t>(end_ - next_) < bytes) return nullptr;
    T* p = reinterpret_cast<T*>(next_);
    next_ += bytes;
    return p;
  }
  std::byte* next() const { return next_; }

 private:
  std::byte* next_;
  std::byte* end_;
};

}  // namespace

// The unmerged partials of one (row, head), leftmost first.
struct PagedAttention::Stack {
  float* partials = nullptr;
  SegmentNode* nodes = nullptr;
  int32_t* count = nullptr;
  int floats = 0;  // from partial to partial

  float* top() const { return partials + static_cast<int64_t>(*count) * floats; }

  // Adds the partial at top(), and merges siblings as long as there are any.
  void Push(SegmentNode node, const OpsTable& table, int stride) const {
    int32_t size = *count;
    nodes[size++] = node;
    while (size >= 2 && AreSiblings(nodes[size - 2], nodes[size - 1])) {
      table.merge_partials(partials + static_cast<int64_t>(size - 2) * floats,
                           partials + static_cast<int64_t>(size - 1) * floats, stride);
      ++nodes[size - 2].level;
      --size;
    }
    *count = size;
  }
};

// An item's segments cut into pieces for more threads, with stacks of their own:
// [kv_heads][count][row_heads].
struct PagedAttention::Chunks {
  int32_t segments = 0;  // per chunk, a power of two; 0: the item is not cut
  int32_t first = 0;     // number of the first chunk
  int count = 0;
  int capacity = 0;
  float* partials = nullptr;
  SegmentNode* nodes = nullptr;
  int32_t* counts = nullptr;
};

struct PagedAttention::ItemState {
  float* partials = nullptr;
  SegmentNode* nodes = nullptr;
  int32_t* counts = nullptr;
  int capacity = 0;
  int row_heads = 0;  // q_rows * group, per KV head
  int tiles = 0;
  SegmentRange segments;  // all that any row sees
  int32_t done = 0;       // segments below this are in the stacks
  SegmentRange phase;     // of the running Attend
  Chunks chunks;
};

struct PagedAttention::Task {
  int32_t item = 0;
  int32_t kv_head = 0;
  int32_t tile = 0;
  int32_t chunk = -1;  // -1: straight onto the rows' stacks
};

PagedAttention::PagedAttention(const OpContext& context, const AttentionShape& shape,
                               std::span<const AttentionItem> items)
    : context_(context), shape_(shape), items_(items) {}

size_t PagedAttentionScratchBytes(const AttentionShape& shape, const AttentionLimits& limits) {
  const int64_t segments = limits.tokens / kSegmentTokens + 2;
  const size_t capacity =
      MaxStackNodes(static_cast<int32_t>(std::min<int64_t>(segments, kMaxPositions / kSegmentTokens)), false);
  const size_t row_heads = static_cast<size_t>(limits.rows) * limits.kv_heads * shape.group;
  const size_t per_row =
      capacity * (PartialFloats(shape.value_dim) * sizeof(float) + sizeof(SegmentNode)) + sizeof(int32_t);
  const size_t tasks = 2 * static_cast<size_t>(limits.items) * limits.kv_heads + row_heads / kMaxTileRows +
                       static_cast<size_t>(limits.threads) * kTasksPerThread * 4;
  return row_heads * per_row + tasks * 16 + static_cast<size_t>(limits.items) * (256 + 3 * kAlign) +
         static_cast<size_t>(limits.threads) * kChunkBytesPerThread + 16 * kAlign;
}

absl::StatusOr<PagedAttention> PagedAttention::Begin(const OpContext& context, const AttentionShape& shape,
                                                     std::span<const AttentionItem> items,
                                                     std::span<std::byte> scratch) {
  DT_RETURN_IF_ERROR(CheckAttentionShape(shape));
  for (size_t i = 0; i < items.size(); ++i)
    DT_RETURN_IF_ERROR(CheckAttentionItem(shape, items[i], static_cast<int>(i)));
  PagedAttention op(context, shape, items);
  DT_RETURN_IF_ERROR(op.LayOut(scratch));
  return op;
}

absl::Status PagedAttention::LayOut(std::span<std::byte> scratch) {
  static_assert(sizeof(ItemState) <= 256 && sizeof(Task) == 16);
  Arena arena(scratch.data(), scratch.data() + scratch.size());
  const auto too_small = [&] {
    return ResourceExhausted("attention: a scratch of ", scratch.size(), " bytes is too small for ", items_.size(),
                             " items; size it with PagedAttentionScratchBytes");
  };
  states_ = arena.Take<ItemState>(items_.size());
  if (states_ == nullptr && !items_.empty()) return too_small();
  const size_t floats = PartialFloats(shape_.value_dim);
  int64_t base_tasks = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const AttentionItem& item = items_[i];
    ItemState& state = *new (&states_[i]) ItemState();
    state.segments = SegmentsOfItem(shape_, item);
    state.done = state.segments.begin;
    state.capacity =
        MaxStackNodes(state.segments.end - state.segments.begin, item.token_begin == 0 && shape_.window == 0);
    state.row_heads = item.q_rows * shape_.group;
    state.tiles = (state.row_heads + kMaxTileRows - 1) / kMaxTileRows;
    const size_t stacks = static_cast<size_t>(state.row_heads) * item.kv_heads;
    state.counts = arena.Take<int32_t>(stacks);
    state.nodes = arena.Take<SegmentNode>(stacks * state.capacity);
    state.partials = arena.Take<float>(stacks * state.capacity * floats);
    if (state.counts == nullptr || state.nodes == nullptr || state.partials == nullptr) return too_small();
    std::memset(state.counts, 0, stacks * sizeof(int32_t));
    base_tasks += static_cast<int64_t>(state.tiles) * item.kv_heads;
  }
  const int64_t tasks = base_tasks + int64_t{context_.pool->threads()} * kTasksPerThread * 4;
  if (tasks >= ThreadPool::kMaxTasks)
    return InvalidArgument("attention: ", tasks, " tasks in one call; split the step");
  max_tasks_ = static_cast<int>(tasks);
  tasks_ = arena.Take<Task>(max_tasks_);
  if (tasks_ == nullptr) return too_small();
  chunk_memory_ = arena.next();
  chunk_memory_end_ = scratch.data() + scratch.size();
  return absl::OkStatus();
}

PagedAttention::Stack PagedAttention::RowStack(int item, int kv_head, int row) const {
  const ItemState& state = states_[item];
  const int64_t index = static_cast<int64_t>(kv_head) * state.row_heads + row;
  const int floats = PartialFloats(shape_.value_dim);
  return {state.partials + index * state.capacity * floats, state.nodes + index * state.capacity, state.counts + index,
          floats};
}

PagedAttention::Stack PagedAttention::ChunkStack(int item, int kv_head, int chunk, int row) const {
  const ItemState& state = states_[item];
  const Chunks& chunks = state.chunks;
  const int64_t index = (static_cast<int64_t>(kv_head) * chunks.count + chunk) * state.row_heads + row;
  const int floats = PartialFloats(shape_.value_dim);
  return {chunks.partials + index * chunks.capacity * floats, chunks.nodes + index * chunks.capacity,
          chunks.counts + index, floats};
}

// Cuts an item's segments into aligned power-of-two chunks, each with stacks of its own. False, and
// nothing changed, where the memory or the task list does not allow it; then the item is done in
// one piece, with the same bits.
bool PagedAttention::PlanChunks(int item, int32_t chunk_segments, std::byte*& free, Task* tasks, int& count) {
  ItemState& state = states_[item];
  const int kv_heads = items_[item].kv_heads;
  Chunks chunks;
  chunks.segments = chunk_segments;
  chunks.first = state.phase.begin / chunk_segments;
  chunks.count = (state.phase.end + chunk_segments - 1) / chunk_segments - chunks.first;
  chunks.capacity = MaxStackNodes(chunk_segments, false);
  if (chunks.count < 2 || count + chunks.count * kv_heads > max_tasks_) return false;
  const size_t stacks = static_cast<size_t>(chunks.count) * kv_heads * state.row_heads;
  Arena arena(free, chunk_memory_end_);
  chunks.counts = arena.Take<int32_t>(stacks);
  chunks.nodes = arena.Take<SegmentNode>(stacks * chunks.capacity);
  chunks.partials = arena.Take<float>(stacks * chunks.capacity * PartialFloats(shape_.value_dim));
  if (chunks.counts == nullptr || chunks.nodes == nullptr || chunks.partials == nullptr) return false;
  std::memset(chunks.counts, 0, stacks * sizeof(int32_t));
  free = arena.next();
  state.chunks = chunks;
  for (int h = 0; h < kv_heads; ++h) {
    for (int c = 0; c < chunks.count; ++c) tasks[count++] = {item, h, 0, c};
  }
  return true;
}

int PagedAttention::PlanTasks(bool complete_only) {
  const int threads = context_.pool->threads();
  int64_t cost = 0, base_tasks_left = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    ItemState& state = states_[i];
    int32_t end = state.segments.end;
    if (complete_only) end = std::min<int32_t>(end, static_cast<int32_t>(items_[i].first_position / kSegmentTokens));
    state.phase = {state.done, std::max(end, state.done)};
    state.done = state.phase.end;
    state.chunks = {};
    if (state.phase.empty()) continue;
    cost += int64_t{state.phase.end - state.phase.begin} * state.row_heads * items_[i].kv_heads;
    base_tasks_left += int64_t{state.tiles} * items_[i].kv_heads;
  }
  const int64_t target = cost / (int64_t{threads} * kTasksPerThread);
  const int all_tasks = max_tasks_;
  std::byte* free = chunk_memory_;
  int count = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    ItemState& state = states_[i];
    if (state.phase.empty()) continue;
    const int item_tasks = state.tiles * items_[i].kv_heads;
    base_tasks_left -= item_tasks;
    max_tasks_ = all_tasks - static_cast<int>(base_tasks_left);  // leave room for those that come
    if (threads > 1 && state.tiles == 1) {
      const int64_t wish = std::max<int64_t>(kMinChunkSegments, target / state.row_heads);
      const auto chunk = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(wish, 1 << 24))));
      if (PlanChunks(static_cast<int>(i), chunk, free, tasks_, count)) continue;
    }
    for (int h = 0; h < items_[i].kv_heads; ++h) {
      for (int t = 0; t < state.tiles; ++t) tasks_[count++] = {static_cast<int32_t>(i), h, t, -1};
    }
  }
  max_tasks_ = all_tasks;
  return count;
}

// The (row, head)s of one task, ready to go through segments.
struct PagedAttention::Tile {
  int rows = 0;
  SegmentRange range;  // that any of them sees, within the task
  Stack stacks[kMaxTileRows];
  TokenSpan visible[kMaxTileRows];
  alignas(64) std::byte prepared[kMaxTileRows * 256 * sizeof(float)];
};

void PagedAttention::Prepare(const Task& task, Tile& tile) const {
  const AttentionItem& item = items_[task.item];
  const ItemState& state = states_[task.item];
  const int group = shape_.group, first = task.tile * kMaxTileRows;
  const int64_t q_step = item.q_row_step != 0 ? item.q_row_step : int64_t{item.kv_heads} * group * shape_.key_dim;
  tile.rows = std::min(kMaxTileRows, state.row_heads - first);
  SegmentRange range{INT32_MAX, 0};
  for (int r = 0; r < tile.rows; ++r) {
    const int row = (first + r) / group, head = task.kv_head * group + (first + r) % group;
    const int64_t at = row * q_step + int64_t{head} * shape_.key_dim;
    const std::byte* q = static_cast<const std::byte*>(item.q) + at * static_cast<int64_t>(SizeOf(shape_.dtype));
    context_.table->prepare_query[AttentionIndex(shape_.dtype, shape_.storage)](q, shape_.key_dim,
                                                                                tile.prepared + r * shape_.key_dim * 4);
    tile.stacks[r] = task.chunk < 0 ? RowStack(task.item, task.kv_head, first + r)
                                    : ChunkStack(task.item, task.kv_head, task.chunk, first + r);
    tile.visible[r] = VisibleTokens(item.first_position + row, shape_.window, item.token_begin, item.token_end);
    const SegmentRange sees = SegmentsOf(tile.visible[r]);
    if (!sees.empty()) range = {std::min(range.begin, sees.begin), std::max(range.end, sees.end)};
  }
  range = {std::max(range.begin, state.phase.begin), std::min(range.end, state.phase.end)};
  if (task.chunk >= 0) {
    const int32_t begin = (state.chunks.first + task.chunk) * state.chunks.segments;
    range = {std::max(range.begin, begin), std::min(range.end, begin + state.chunks.segments)};
  }
  tile.range = range;
}

void PagedAttention::RunTask(const Task& task) {
  const KvBlockTable& blocks = items_[task.item].blocks;
  const OpsTable& table = *context_.table;
  const size_t value_offset = shape_.layout().key_bytes();
  Tile tile;
  Prepare(task, tile);

  alignas(64) float scores[kMaxTileRows * kSegmentTokens];
  const void* q[kMaxTileRows];
  float* partials[kMaxTileRows];
  uint8_t begins[kMaxTileRows], ends[kMaxTileRows], who[kMaxTileRows];
  SegmentTask work{.key_dim = shape_.key_dim,
                   .value_stride = PartialStride(shape_.value_dim),
                   .scale = shape_.scale,
                   .q = q,
                   .begin = begins,
                   .end = ends,
                   .partial = partials,
                   .scores = scores};
  for (int32_t segment = tile.range.begin; segment < tile.range.end; ++segment) {
    const int64_t base = int64_t{segment} * kSegmentTokens;
    work.rows = 0;
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t begin = std::max(tile.visible[r].begin - base, int64_t{0});
      const int64_t end = std::min(tile.visible[r].end - base, int64_t{kSegmentTokens});
      if (begin >= end) continue;
      const int n = work.rows++;
      q[n] = tile.prepared + r * shape_.key_dim * 4;
      partials[n] = tile.stacks[r].top();
      begins[n] = static_cast<uint8_t>(begin);
      ends[n] = static_cast<uint8_t>(end);
      who[n] = static_cast<uint8_t>(r);
    }
    if (work.rows == 0) continue;
    work.keys = blocks.block(task.kv_head, segment);
    work.values = work.keys + value_offset;
    work.next_keys = segment + 1 < tile.range.end ? blocks.block(task.kv_head, segment + 1) : nullptr;
    table.attend_segment[AttentionIndex(shape_.dtype, shape_.storage)](work);
    for (int i = 0; i < work.rows; ++i) tile.stacks[who[i]].Push({segment, 0}, table, work.value_stride);
  }
}

void PagedAttention::JoinChunks(int item, int kv_head) {
  const ItemState& state = states_[item];
  const int stride = PartialStride(shape_.value_dim);
  for (int row = 0; row < state.row_heads; ++row) {
    const Stack stack = RowStack(item, kv_head, row);
    for (int c = 0; c < state.chunks.count; ++c) {
      const Stack chunk = ChunkStack(item, kv_head, c, row);
      for (int i = 0; i < *chunk.count; ++i) {
        std::memcpy(stack.top(), chunk.partials + static_cast<int64_t>(i) * chunk.floats, (stride + 2) * sizeof(float));
        stack.Push(chunk.nodes[i], *context_.table, stride);
      }
    }
  }
}

void PagedAttention::Attend(bool complete_only) {
  const int count = PlanTasks(complete_only);
  context_.pool->Run(count, [&](int t) { RunTask(tasks_[t]); });
  int joins = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (states_[i].chunks.count == 0) continue;
    for (int h = 0; h < items_[i].kv_heads; ++h) tasks_[joins++] = {static_cast<int32_t>(i), h, 0, 0};
  }
  if (joins > 0) context_.pool->Run(joins, [&](int t) { JoinChunks(tasks_[t].item, tasks_[t].kv_head); });
}

void PagedAttention::AttendComplete() { Attend(true); }
void PagedAttention::AttendRest() { Attend(false); }

// The heads of one KV head in a row.
void PagedAttention::FinishHeads(int index, int64_t row, int kv_head, int64_t node) {
  const AttentionItem& item = items_[index];
  const OpsTable& table = *context_.table;
  const int stride = PartialStride(shape_.value_dim), value_dim = shape_.value_dim, group = shape_.group;
  const int heads = item.kv_heads * group;
  alignas(64) float nothing[PartialFloats(256)] = {};
  nothing[stride] = -__builtin_inff();
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Stack stack = RowStack(index, kv_head, static_cast<int>(row * group + head % group));
    if (item.o == nullptr) {
      for (int i = 0; i < *stack.count; ++i) {
        const float* partial = stack.partials + static_cast<int64_t>(i) * stack.floats;
        const int64_t at = (node + i) * heads + head;
        std::memcpy(item.partial_o + at * value_dim, partial, value_dim * sizeof(float));
        std::memcpy(item.partial_ml + at * 2, partial + stride, 2 * sizeof(float));
      }
      continue;
    }
    TreeFold fold(table, stride);
    for (int i = 0; i < *stack.count; ++i) {
      fold.MakeRoom(stack.nodes[i]);
      fold.Push(stack.partials + static_cast<int64_t>(i) * stack.floats);
    }
    const float* root = fold.Finish();
    const int64_t step = item.o_row_step != 0 ? item.o_row_step : int64_t{heads} * value_dim;
    std::byte* out = static_cast<std::byte*>(item.o) + (row * step + int64_t{head} * value_dim) * SizeOf(shape_.dtype);
    table.finish_partial(root != nullptr ? root : nothing, value_dim,
                         item.sinks != nullptr ? item.sinks + head : nullptr, shape_.dtype, out);
  }
}

// Units [begin, end) of an item: a KV head of a row each, those of a row together.
void PagedAttention::FinishUnits(int index, int64_t begin, int64_t end) {
  const AttentionItem& item = items_[index];
  int64_t row = begin / item.kv_heads, node = 0;
  if (item.o == nullptr) {
    node = PartialNodes(item.first_position, static_cast<int>(row), shape_.window, item.token_begin, item.token_end);
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    if (unit / item.kv_heads != row) {
      if (item.o == nullptr)
        node +=
            CountSubtrees(VisibleSegments(item.first_position + row, shape_.window, item.token_begin, item.token_end));
      ++row;
    }
    FinishHeads(index, row, static_cast<int>(unit % item.kv_heads), node);
  }
}

// Rows of decodes have an item each: the units of all items are shared out together.
void PagedAttention::Finish() {
  const auto units_of = [](const AttentionItem& item) { return int64_t{item.q_rows} * item.kv_heads; };
  int64_t units = 0;
  for (const AttentionItem& item : items_) units += units_of(item);
  const int64_t elements = int64_t{shape_.group} * shape_.value_dim * kElementsPerFinished;
  ForRows(context_, units, elements, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // of the item
    for (size_t i = 0; i < items_.size() && first < end; ++i) {
      const int64_t count = units_of(items_[i]);
      const int64_t from = std::max(begin, first), to = std::min(end, first + count);
      if (from < to) FinishUnits(static_cast<int>(i), from - first, to - first);
      first += count;
    }
  });
}

}  // namespace dovetail::kernels
