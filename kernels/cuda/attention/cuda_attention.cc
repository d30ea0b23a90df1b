#include "kernels/cuda/attention/cuda_attention.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/primitives/base2.h"
#include "kernels/paged_attention.h"

namespace dovetail::kernels::cuda {
namespace {

absl::Status CheckShape(const CudaAttentionShape& shape) {
  for (const int dim : {shape.layout.key_dim, shape.layout.value_dim}) {
    if (dim < 8 || dim > 256 || dim % 8 != 0) {
      return InvalidArgument("attention on a GPU: head dimensions ", shape.layout.key_dim, " (keys) and ",
                             shape.layout.value_dim, " (values) must be multiples of 8 in 8..256");
    }
  }
  if (shape.group < 1 || shape.group > 256) {
    return InvalidArgument("attention: ", shape.group, " query heads per KV head is outside 1..256");
  }
  if (shape.window < 0) return InvalidArgument("attention: window ", shape.window, " is negative; 0 means none");
  if (!(shape.scale > 0) || !(shape.key_scale > 0) || !std::isfinite(shape.scale * shape.key_scale)) {
    return InvalidArgument("attention: scale ", shape.scale, " times key scale ", shape.key_scale,
                           " must be a positive number");
  }
  return absl::OkStatus();
}

absl::Status CheckItem(const CudaAttentionItem& item, size_t index) {
  const auto bad = [&](const auto&... parts) { return InvalidArgument("attention item ", index, ": ", parts...); };
  if (item.q_rows < 1 || item.kv_heads < 1 || item.kv_heads > 65536) {
    return bad(item.q_rows, " rows of ", item.kv_heads, " KV heads");
  }
  if (item.first_position < 0 || item.first_position + item.q_rows > kMaxPositions) {
    return bad("rows at positions ", item.first_position, "..", item.first_position + item.q_rows - 1, " leave 0..",
               kMaxPositions - 1);
  }
  if (item.token_begin < 0 || item.token_begin % kSegmentTokens != 0 || item.token_end < item.token_begin ||
      item.token_end > kMaxPositions) {
    return bad("tokens ", item.token_begin, "..", item.token_end, " do not begin on a segment of ", kSegmentTokens,
               " or are out of order");
  }
  if (item.blocks == nullptr && item.token_end > item.token_begin) return bad("has no blocks");
  if (item.q_offset % 8 != 0 || item.q_row_step % 8 != 0) {
    return bad("q offset ", item.q_offset, " and row step ", item.q_row_step, " must be multiples of 8 elements");
  }
  if (!item.partial && (item.o_offset % 2 != 0 || item.o_row_step % 2 != 0)) {
    return bad("o offset ", item.o_offset, " and row step ", item.o_row_step, " must be even");
  }
  if (item.partial && item.sinks != nullptr) return bad("sinks belong to the merge of a token shard's partials");
  return absl::OkStatus();
}

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Where the parts of a plan lie in one piece of memory.
struct PlanLayout {
  size_t extent = 0, items = 0, spans = 0, parts = 0, first_node = 0, first_tile = 0, joins = 0, tiles = 0, bytes = 0;
};

PlanLayout LayOut(const AttentionPlan& plan, const PrefillPlan& prefill, size_t items, size_t nodes) {
  PlanLayout at;
  at.items = RoundUp(sizeof(AttentionExtent));
  at.spans = at.items + RoundUp(items * sizeof(DeviceAttentionItem));
  at.parts = at.spans + RoundUp(plan.spans.size() * sizeof(AttentionSpan));
  at.first_node = at.parts + RoundUp(plan.grid * sizeof(AttentionPart));
  at.first_tile = at.first_node + RoundUp(nodes * sizeof(int32_t));
  at.joins = at.first_tile + RoundUp(prefill.first_tile.size() * sizeof(int32_t));
  at.tiles = at.joins + RoundUp(prefill.joins.size() * sizeof(PrefillJoin));
  at.bytes = at.tiles + RoundUp(prefill.tiles.size() * sizeof(PrefillTile));
  return at;
}

}  // namespace

CudaAttention::CudaAttention(CudaDevice& device, Kernel kernel) : device_(device), kernel_(kernel) {}

bool CudaAttention::Takes(const CudaAttentionShape& shape) const {
  const DeviceLimits limits = device_.limits();
  return shape.arena != nullptr && shape.o_type == shape.q_type &&
         device_.library()->prefill_takes(&shape.layout, shape.q_type, shape.arena_bytes, &limits);
}

absl::Status CudaAttention::CheckInvariant(const CudaAttentionShape& shape) const {
  if (Takes(shape)) return absl::OkStatus();
  return FailedPrecondition(device_.name(), ": heads of ", shape.layout.key_dim, " (keys) and ", shape.layout.value_dim,
                            " (values) dimensions are not attended by one kernel whatever the number of rows; that "
                            "takes a GPU of compute capability 9.0, and heads of 64, 80, 96, 128 or 256");
}

std::vector<bool> CudaAttention::Choose(const CudaAttentionShape& shape, std::span<const CudaAttentionItem> items,
                                        std::span<const PlannedItem> planned) const {
  if (kernel_ == Kernel::kForFewRows || !Takes(shape)) return std::vector<bool>(items.size());
  std::vector<bool> chosen =
      kernel_ == Kernel::kFaster ? ChoosePrefill(planned, shape.group) : std::vector<bool>(items.size(), true);
  for (size_t i = 0; i < items.size(); ++i)
    chosen[i] = chosen[i] && (items[i].partial || (items[i].o_offset % 8 == 0 && items[i].o_row_step % 8 == 0));
  return chosen;
}

absl::Status CudaAttention::Plan(CudaStream& stream, const CudaAttentionShape& shape,
                                 std::span<const CudaAttentionItem> items) {
  DT_RETURN_IF_ERROR(CheckShape(shape));
  if (kernel_ == Kernel::kBatchInvariant) DT_RETURN_IF_ERROR(CheckInvariant(shape));
  std::vector<PlannedItem> planned;
  planned.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    DT_RETURN_IF_ERROR(CheckItem(items[i], i));
    planned.push_back(
        {items[i].q_rows, items[i].kv_heads, items[i].first_position, items[i].token_begin, items[i].token_end});
  }
  const std::vector<bool> many = Choose(shape, items, planned);
  std::vector<PlannedItem> few;
  std::vector<int32_t> number;  // of the items in `few`
  std::vector<PrefillItem> prefill;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto me = static_cast<int32_t>(i);
    if (many[i]) {
      prefill.push_back({planned[i], items[i].blocks, items[i].head_step, items[i].first_segment, me});
    } else if (kernel_ == Kernel::kBatchInvariant) {
      return InvalidArgument("attention item ", i, ": o offset ", items[i].o_offset, " and row step ",
                             items[i].o_row_step, " must be multiples of 8 elements");
    } else {
      few.push_back(planned[i]);
      number.push_back(me);
    }
  }
  plan_ = {};
  prefill_plan_ = {};
  folds_ = false;
  if (!prefill.empty()) DT_RETURN_IF_ERROR(PlanMany(stream, shape, prefill));
  if (!few.empty() || items.empty()) {
    DT_ASSIGN_OR_RETURN(plan_, PlanAttention(few, shape.group, shape.window, device_.info().multiprocessors));
    for (AttentionSpan& span : plan_.spans) span.item = number[span.item];
    DT_RETURN_IF_ERROR(GrowPieces(stream, plan_.tiles, shape.layout.value_dim));
  }
  return Upload(stream, items, shape.window);
}

absl::Status CudaAttention::PlanMany(CudaStream& stream, const CudaAttentionShape& shape,
                                     std::span<const PrefillItem> items) {
  const int multiprocessors = device_.info().multiprocessors;
  const int token_bytes = shape.layout.bytes() / CudaKvLayout::kTokens;
  if (kernel_ == Kernel::kBatchInvariant) {
    DT_ASSIGN_OR_RETURN(prefill_plan_, PlanFixedPrefill(items, shape.group, shape.window, multiprocessors, token_bytes,
                                                        PrefillStepBlocks(shape.layout.key_dim)));
  } else {
    DT_ASSIGN_OR_RETURN(prefill_plan_, PlanPrefill(items, shape.group, shape.window, multiprocessors, token_bytes,
                                                   kernel_ == Kernel::kForManyRowsWhole ? 0 : kMostPieces));
  }
  if (prefill_plan_.pieces > 0) DT_RETURN_IF_ERROR(GrowTilePieces(stream, shape.layout.value_dim));
  folds_ = kernel_ == Kernel::kBatchInvariant && HasFixedPieces(prefill_plan_);
  if (!folds_ || fold_ != nullptr) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(fold_, device_.Allocate(multiprocessors * PrefillFoldBytes(shape.layout.value_dim)));
  return absl::OkStatus();
}

namespace {

// The items as kernels read them. Nodes of partial items lie at `first_node` here and at `first_node_there` on the
// device.
void WriteItems(std::span<const CudaAttentionItem> items, int window, DeviceAttentionItem* out, int32_t* first_node,
                const int32_t* first_node_there) {
  for (const CudaAttentionItem& item : items) {
    *out = {.q_offset = item.q_offset,
            .q_row_step = item.q_row_step,
            .o_offset = item.o_offset,
            .o_row_step = item.o_row_step,
            .blocks = item.blocks,
            .head_step = item.head_step,
            .sinks = item.sinks,
            .first_segment = item.first_segment,
            .kv_heads = item.kv_heads,
            .q_rows = item.q_rows,
            .first_position = static_cast<int32_t>(item.first_position),
            .token_end = static_cast<int32_t>(item.token_end)};
    if (item.partial) {
      out->first_node = first_node_there;
      int32_t node = item.first_node;
      for (int32_t row = 0; row <= item.q_rows; ++row) {
        first_node[row] = node;
        node +=
            item.node_a_row
                ? 1
                : CountSubtrees(VisibleSegments(item.first_position + row, window, item.token_begin, item.token_end));
      }
      first_node += item.q_rows + 1;
      first_node_there += item.q_rows + 1;
    }
    ++out;
  }
}

}  // namespace

absl::Status CudaAttention::Upload(CudaStream& stream, std::span<const CudaAttentionItem> items, int window) {
  size_t nodes = 0;
  for (const CudaAttentionItem& item : items) nodes += item.partial ? item.q_rows + 1 : 0;
  const PlanLayout at = LayOut(plan_, prefill_plan_, items.size(), nodes);
  Staging& staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  if (staging.copied.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(staging.copied, device_.CreateEvent());
  } else {
    DT_RETURN_IF_ERROR(staging.copied.Synchronize());  // four plans ago: done, unless the device is far behind
  }
  if (staging.host == nullptr || staging.host->size_bytes() < at.bytes) {
    DT_ASSIGN_OR_RETURN(staging.host, device_.AllocatePinned(2 * at.bytes));
  }
  if (plan_memory_ == nullptr || plan_memory_->size_bytes() < at.bytes) {
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // what still runs reads the old memory
    DT_ASSIGN_OR_RETURN(plan_memory_, device_.Allocate(2 * at.bytes));
  }
  std::byte* host = staging.host->data();
  std::byte* there = plan_memory_->data();
  WriteItems(items, window, reinterpret_cast<DeviceAttentionItem*>(host + at.items),
             reinterpret_cast<int32_t*>(host + at.first_node), reinterpret_cast<const int32_t*>(there + at.first_node));
  std::memcpy(host + at.spans, plan_.spans.data(), plan_.spans.size() * sizeof(AttentionSpan));
  std::memcpy(host + at.parts, plan_.parts.data(), plan_.parts.size() * sizeof(AttentionPart));
  std::memcpy(host + at.extent, &plan_.extent, sizeof(plan_.extent));
  std::memcpy(host + at.first_tile, prefill_plan_.first_tile.data(), prefill_plan_.first_tile.size() * sizeof(int32_t));
  std::memcpy(host + at.joins, prefill_plan_.joins.data(), prefill_plan_.joins.size() * sizeof(PrefillJoin));
  std::memcpy(host + at.tiles, prefill_plan_.tiles.data(), prefill_plan_.tiles.size() * sizeof(PrefillTile));
  extent_ = reinterpret_cast<AttentionExtent*>(there + at.extent);
  items_ = reinterpret_cast<DeviceAttentionItem*>(there + at.items);
  spans_ = reinterpret_cast<AttentionSpan*>(there + at.spans);
  parts_ = reinterpret_cast<AttentionPart*>(there + at.parts);
  first_tile_ = reinterpret_cast<int32_t*>(there + at.first_tile);
  joins_ = reinterpret_cast<PrefillJoin*>(there + at.joins);
  tiles_ = reinterpret_cast<PrefillTile*>(there + at.tiles);
  return stream.Upload(there, host, at.bytes, &staging.copied);
}

absl::Status CudaAttention::GrowPieces(CudaStream& stream, int tiles, int value_dim) {
  const PieceBytes bytes = PieceBytesOf(device_.info().multiprocessors, tiles, value_dim);
  if (piece_o_ != nullptr && piece_o_->size_bytes() >= bytes.o && piece_ml_->size_bytes() >= bytes.ml &&
      arrived_->size_bytes() >= bytes.arrived) {
    return absl::OkStatus();
  }
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  DT_ASSIGN_OR_RETURN(piece_o_, device_.Allocate(bytes.o));
  DT_ASSIGN_OR_RETURN(piece_ml_, device_.Allocate(bytes.ml));
  DT_ASSIGN_OR_RETURN(arrived_, device_.Allocate(bytes.arrived));
  return stream.Fill(arrived_->data(), 0, arrived_->size_bytes());
}

// As much as most plans take, so that it is allocated once.
int64_t CudaAttention::TilePieceRows() const {
  const int64_t each = kernel_ == Kernel::kBatchInvariant ? kFixedPieces : kMostPieces;
  return std::max<int64_t>(each * device_.info().multiprocessors, prefill_plan_.pieces) * kPrefillRows;
}

absl::Status CudaAttention::GrowTilePieces(CudaStream& stream, int value_dim) {
  const auto bytes = static_cast<size_t>(TilePieceRows() * (value_dim + 2)) * sizeof(float);
  if (tile_pieces_ != nullptr && tile_pieces_->size_bytes() >= bytes) return absl::OkStatus();
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  DT_ASSIGN_OR_RETURN(tile_pieces_, device_.Allocate(bytes));
  return absl::OkStatus();
}

uint64_t CudaAttention::Launches() const {
  uint64_t hash = static_cast<uint64_t>(plan_.grid) << 8 ^ static_cast<uint64_t>(plan_.tiles);
  const auto mix = [&](const void* p) {
    hash = (hash ^ reinterpret_cast<uint64_t>(p)) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  };
  mix(extent_), mix(items_), mix(spans_), mix(parts_);
  if (!prefill_plan_.tiles.empty()) mix(first_tile_), mix(tiles_), mix(folds_ ? fold_->data() : nullptr);
  if (!prefill_plan_.joins.empty()) {
    for (const PrefillPass& pass : prefill_plan_.passes) hash = (hash ^ pass.joins) * 0x9e3779b97f4a7c15ull;
    hash ^= static_cast<uint64_t>(TilePieceRows());
    mix(joins_), mix(tile_pieces_->data());
  }
  for (Buffer* buffer : {piece_o_.get(), piece_ml_.get(), arrived_.get()})
    mix(buffer != nullptr ? buffer->data() : nullptr);
  return hash;
}

absl::Status CudaAttention::Run(CudaStream& stream, const CudaAttentionShape& shape, const CudaAttentionRun& run) {
  DT_RETURN_IF_ERROR(CheckShape(shape));
  if (run.q == nullptr || (run.o == nullptr && run.partial_o == nullptr))
    return InvalidArgument("attention: q or o is null");
  const DeviceLimits limits = device_.limits();
  const CudaLibrary& library = device_.library();
  DT_RETURN_IF_ERROR(stream.UseDevice());
  AttentionCall call;
  call.q = run.q;
  call.o = run.o;
  call.partial_o = run.partial_o;
  call.partial_ml = run.partial_ml;
  call.items = items_;
  call.kv_offset = static_cast<int64_t>(run.kv_offset_bytes);
  call.layout = shape.layout;
  call.q_type = shape.q_type;
  call.o_type = shape.o_type;
  call.group = shape.group;
  call.window = shape.window;
  call.scale_log2 = shape.scale * shape.key_scale * kLog2E;
  call.value_scale = shape.value_scale;
  DT_RETURN_IF_ERROR(RunMany(stream, shape, call));
  if (plan_.spans.empty()) return absl::OkStatus();
  AttentionLaunch launch{call};
  launch.grid = plan_.grid;
  launch.spans = spans_;
  launch.parts = parts_;
  launch.extent = extent_;
  launch.piece_o = reinterpret_cast<float*>(piece_o_->data());
  launch.piece_ml = reinterpret_cast<float*>(piece_ml_->data());
  launch.arrived = reinterpret_cast<int32_t*>(arrived_->data());
  launch.tiles = plan_.tiles;
  return library.Check(library->attention(&launch, &limits, stream.handle()), device_.name() + ": paged attention");
}

absl::Status CudaAttention::RunMany(CudaStream& stream, const CudaAttentionShape& shape,
                                    const AttentionCall& call) const {
  const CudaLibrary& library = device_.library();
  for (const PrefillPass& pass : prefill_plan_.passes) {
    PrefillLaunch launch{call};
    launch.grid = prefill_plan_.grid;
    launch.tiles = tiles_;
    launch.first_tile = first_tile_ + pass.first_tile;
    launch.arena = shape.arena;
    launch.arena_bytes = shape.arena_bytes;
    if (folds_) launch.fold = fold_->data();
    if (pass.joins > 0) {
      launch.joins = joins_ + pass.first_join;
      launch.join_count = pass.joins;
      launch.piece_ml = reinterpret_cast<float*>(tile_pieces_->data());
      launch.piece_o = launch.piece_ml + TilePieceRows() * 2;
    }
    DT_RETURN_IF_ERROR(
        library.Check(library->prefill(&launch, stream.handle()), device_.name() + ": paged attention of many rows"));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels::cuda
