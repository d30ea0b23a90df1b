#include "kernels/cuda/experts/expert_ops.h"

#include <algorithm>

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

absl::Status RouteExperts(CudaStream& stream, const RouteLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("router", args.rows, {args.hidden, args.experts, args.chosen}));
  if (args.experts > kMostCudaExperts || args.chosen > args.experts || args.hidden > kMostRouterHidden)
    return InvalidArgument("router on a GPU: ", args.chosen, " of ", args.experts, " experts over ", args.hidden,
                           " dimensions; at most ", kMostCudaExperts, " and ", kMostRouterHidden, " are supported");
  if (args.groups < 1 || args.experts % args.groups != 0 || (args.groups > 1 && args.experts / args.groups < 2) ||
      args.chosen_groups < 1 || args.chosen_groups > args.groups ||
      args.chosen > args.chosen_groups * (args.experts / args.groups))
    return InvalidArgument("router on a GPU: ", args.chosen, " experts from ", args.chosen_groups, " of ", args.groups,
                           " groups of ", args.experts, " experts");
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.norm, args.router, args.expert, args.weight})) return NullPointer("router");
  if (args.h != nullptr && args.type == WireType::kF32) return InvalidArgument("router on a GPU: h in f32");
  return Enqueue(stream, stream.device().library()->route, args, "router");
}

int32_t MostExpertTiles(int64_t pairs, int experts, int tile_rows) {
  return static_cast<int32_t>(std::min<int64_t>(pairs, experts + pairs / tile_rows));
}

absl::Status PlaceExperts(CudaStream& stream, const PlaceLaunch& args) {
  if (args.pairs < 0 || args.chosen < 1 || args.experts < 1 || args.experts > kMostCudaExperts || args.tile_rows < 1 ||
      args.most_tiles < MostExpertTiles(args.pairs, args.experts, args.tile_rows))
    return InvalidArgument("places of experts on a GPU: ", args.pairs, " pairs of ", args.experts, " experts in ",
                           args.most_tiles, " tiles");
  if (args.pairs == 0) return absl::OkStatus();
  if (!AllThere({args.expert, args.slot, args.member, args.tiles})) return NullPointer("places of experts");
  return Enqueue(stream, stream.device().library()->place, args, "places of experts");
}

absl::StatusOr<bool> GroupsProducts(CudaStream& stream) {
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const DeviceLimits limits = stream.device().limits();
  return stream.device().library()->grouped_product_runs(&limits);
}

namespace {

absl::Status CheckGrouped(const ExpertGemmLaunch& args) {
  const bool gated = args.activation != ExpertActivation::kNone;
  if (args.experts < 1 || args.k < 64 || args.n % (gated ? 16 : 8) != 0 ||
      (gated && (args.bias != nullptr || args.y_is_f32 != 0)))
    return InvalidArgument("experts on a GPU: ", args.experts, " of ", args.n, " x ", args.k, " in tiles of ",
                           kGroupedTileRows, gated ? " with" : " without", " an activation",
                           args.bias != nullptr ? " and with a bias" : "", args.y_is_f32 != 0 ? ", in f32" : "",
                           " are not supported");
  return absl::OkStatus();
}

}  // namespace

bool FitsGroupedTiles(int64_t n, int64_t k) { return k >= 64 && n % 16 == 0; }

absl::Status MultiplyExperts(CudaStream& stream, const ExpertGemmLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("experts", args.most_tiles, {args.n, args.k}));
  bool grouped = args.tile_rows == kGroupedTileRows;
  if (grouped) {
    DT_ASSIGN_OR_RETURN(grouped, GroupsProducts(stream));
  }
  const bool is_tile =
      args.tile_rows == kFewTileRows || args.tile_rows == kMoreTileRows || args.tile_rows == kManyTileRows || grouped;
  if (args.k % 8 != 0 || !is_tile || args.type == WireType::kF32)
    return InvalidArgument("experts on a GPU: ", args.n, " x ", args.k, " in tiles of ", args.tile_rows,
                           "; a multiple of 8 columns, ", kFewTileRows, ", ", kMoreTileRows, ", ", kManyTileRows,
                           " or, with a GPU of compute capability 9.0, ", kGroupedTileRows,
                           " rows and 16-bit types are supported");
  if (grouped) DT_RETURN_IF_ERROR(CheckGrouped(args));
  if (!grouped && args.activation != ExpertActivation::kNone && (args.n % 2 != 0 || args.y_is_f32 != 0))
    return InvalidArgument("experts on a GPU: an activation of ", args.n, " columns",
                           args.y_is_f32 != 0 ? ", in f32" : "", " is not supported");
  if (args.most_tiles == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.w, args.y, args.tiles})) return NullPointer("experts");
  const auto& library = stream.device().library();
  return Enqueue(stream, grouped ? library->grouped_product : library->expert_gemm, args, "experts");
}

bool MultipliesPairs(int64_t rows, int chosen, int experts) { return rows == 1 || 2 * rows * chosen <= experts; }

absl::Status GatePairs(CudaStream& stream, const PairGateLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("gated experts of pairs", args.pairs, {args.chosen, args.size, args.k}));
  if (args.k % 8 != 0 || args.type == WireType::kF32 || args.activation == ExpertActivation::kNone)
    return InvalidArgument("gated experts of pairs on a GPU: ", args.size, " x ", args.k,
                           "; a multiple of 8 columns, 16-bit types and an activation are supported");
  if (args.pairs == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.expert, args.w, args.y})) return NullPointer("gated experts of pairs");
  return Enqueue(stream, stream.device().library()->pair_gate, args, "gated experts of pairs");
}

absl::Status SumPairs(CudaStream& stream, const PairSumLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("sum of pairs", args.rows, {args.chosen, args.n, args.k}));
  if (args.k % 8 != 0 || args.type == WireType::kF32)
    return InvalidArgument("sum of pairs on a GPU: ", args.n, " x ", args.k,
                           "; a multiple of 8 columns and 16-bit types are supported");
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.expert, args.weight, args.w, args.out})) return NullPointer("sum of pairs");
  return Enqueue(stream, stream.device().library()->pair_sum, args, "sum of pairs");
}

bool FitsExpertCodes(int64_t n, int64_t k) {
  constexpr int64_t kMostColumns = 8192;  // of eight rows, with sums of groups: 160 KB
  return n % kQuantTileRows == 0 && n >= kQuantTileRows && k % 8 == 0 && k >= 8 && k <= kMostColumns;
}

absl::Status MultiplyExpertCodes(CudaStream& stream, const ExpertCodesLaunch& args) {
  const ExpertGemmLaunch& product = args.product;
  DT_RETURN_IF_ERROR(CheckRows("experts in codes", product.most_tiles, {product.n, product.k}));
  const bool gated = product.activation != ExpertActivation::kNone;
  if (!FitsExpertCodes(product.n, product.k) || product.tile_rows != kFewTileRows || args.most_rows < 1 ||
      args.most_rows > kFewTileRows || args.codes.cols != product.k || args.codes.rows % product.n != 0 ||
      product.type == WireType::kF32)
    return InvalidArgument("experts in codes on a GPU: ", product.n, " x ", product.k, " of ", args.codes.rows, " x ",
                           args.codes.cols, " in tiles of ", product.tile_rows, ", ", args.most_rows,
                           " rows at the most; multiples of 16 x 8, up to 8192 columns, tiles of ", kFewTileRows,
                           " rows and 16-bit types are supported");
  if ((args.codes.halves_of != 0 && args.codes.halves_of != product.n) ||
      (gated && (args.codes.halves_of == 0 || product.y_is_f32 != 0)))
    return InvalidArgument("experts in codes on a GPU: an activation needs tiles of both halves and y in 16 bits");
  if (product.most_tiles == 0) return absl::OkStatus();
  const bool scaled = TraitsOf(args.codes.kind).values > 0;
  if (!AllThere({product.x, product.y, product.tiles, args.codes.codes, args.codes.factor}) ||
      (scaled && args.codes.scales == nullptr))
    return NullPointer("experts in codes");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = stream.device().library()->expert_codes(&args, stream.handle());
  if (error == kQuantTooWide)
    return Unimplemented("experts in codes on a GPU: rows of ", product.k, " elements do not fit into shared memory");
  return stream.device().library().Check(error, stream.device().name() + ": experts in codes");
}

absl::Status SumExperts(CudaStream& stream, const ExpertSumLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("sum of experts", args.rows, {args.chosen, args.size}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.y, args.slot, args.weight, args.out})) return NullPointer("sum of experts");
  return Enqueue(stream, stream.device().library()->expert_sum, args, "sum of experts");
}

absl::Status GatedAdd(CudaStream& stream, const GatedAddLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("gated sum", args.rows, {args.h_size, args.size}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.h, args.w, args.y, args.x})) return NullPointer("gated sum");
  return Enqueue(stream, stream.device().library()->gated_add, args, "gated sum");
}

}  // namespace dovetail::kernels::cuda
