#include "examples/spatio_temporal/gpu/padded_rows.h"

#include <algorithm>

namespace dovetail::spatio_temporal {
namespace {

using kernels::cuda::CopyRunsLaunch;

// Bytes [begin, end) of shares of a region's bytes, `of` in all.
absl::StatusOr<proto::Region> ShareOf(proto::Region region, int64_t of, int64_t begin, int64_t end) {
  if (region.runs % of == 0) {
    const int64_t runs = region.runs / of;
    region.offset += begin * runs * region.step;
    region.runs = (end - begin) * runs;
    return region;
  }
  if (region.runs != 1 || region.run_bytes % of != 0)
    return InvalidArgument(region.runs, " runs of ", region.run_bytes, " bytes are not ", of, " equal shares");
  region.offset += begin * (region.run_bytes / of);
  region.run_bytes = (end - begin) * (region.run_bytes / of);
  return region;
}

// A region as pieces of rows: row i of piece p is at first + p * piece_step + i * row_step.
struct Pieces {
  std::byte* first = nullptr;
  int64_t rows = 0, row_step = 0;  // of a piece
  int64_t pieces = 1, piece_step = 0;
  int64_t runs = 0;  // of a row
  std::byte* At(int64_t row) const { return first + row / rows * piece_step + row % rows * row_step; }
};

absl::StatusOr<Pieces> PiecesOf(const proto::Region& region, const PaddedRows& memory) {
  const int64_t row = memory.row_bytes, in_row = region.offset % row;
  const bool of_rows = region.run_bytes < row;  // parts of rows, one a run; else whole ones
  if (region.run_bytes % memory.run_bytes != 0 || in_row % memory.run_bytes != 0 || region.step % row != 0 ||
      (!of_rows && (in_row != 0 || region.run_bytes % row != 0)))
    return InvalidArgument("runs of ", region.run_bytes, " bytes from ", region.offset, " on, one every ", region.step,
                           ", are not made of rows of ", row, " bytes in runs of ", memory.run_bytes);
  Pieces pieces;
  pieces.first = memory.data + region.offset / row * memory.row_step + in_row / memory.run_bytes * memory.run_step;
  const int64_t step = region.step / row * memory.row_step;
  if (of_rows) {
    pieces.rows = region.runs;
    pieces.row_step = step;
    pieces.runs = region.run_bytes / memory.run_bytes;
  } else {
    pieces.rows = region.run_bytes / row;
    pieces.row_step = memory.row_step;
    pieces.pieces = region.runs;
    pieces.piece_step = step;
    pieces.runs = row / memory.run_bytes;
  }
  return pieces;
}

}  // namespace

absl::StatusOr<proto::Transfer> FramesOf(const proto::Transfer& transfer, int64_t frames, int64_t begin, int64_t end) {
  if (begin < 0 || end > frames || begin >= end)
    return InvalidArgument("frames ", begin, "..", end, " of ", frames, " that a transfer moves");
  proto::Transfer some = transfer;
  DT_ASSIGN_OR_RETURN(some.from, ShareOf(transfer.from, frames, begin, end));
  DT_ASSIGN_OR_RETURN(some.to, ShareOf(transfer.to, frames, begin, end));
  return some;
}

absl::StatusOr<std::vector<CopyRunsLaunch>> CopiesOf(const proto::Transfer& transfer, const PaddedRows& from,
                                                     const PaddedRows& to) {
  DT_ASSIGN_OR_RETURN(const Pieces source, PiecesOf(transfer.from, from));
  DT_ASSIGN_OR_RETURN(const Pieces target, PiecesOf(transfer.to, to));
  const int64_t rows = std::min(source.rows, target.rows), all = source.rows * source.pieces;
  if (from.run_bytes != to.run_bytes || source.runs != target.runs || all != target.rows * target.pieces ||
      source.rows % rows != 0 || target.rows % rows != 0)
    return InvalidArgument("a transfer of ", all, " rows of ", source.runs, " runs of ", from.run_bytes,
                           " bytes ends as ", target.rows * target.pieces, " rows of ", target.runs, " runs of ",
                           to.run_bytes);
  std::vector<CopyRunsLaunch> copies;
  for (int64_t row = 0; row < all; row += rows) {
    copies.push_back({.from = source.At(row),
                      .to = target.At(row),
                      .from_row_step = source.row_step,
                      .to_row_step = target.row_step,
                      .from_run_step = static_cast<int32_t>(from.run_step),
                      .to_run_step = static_cast<int32_t>(to.run_step),
                      .run_bytes = static_cast<int32_t>(from.run_bytes),
                      .runs = static_cast<int32_t>(source.runs),
                      .rows = static_cast<int32_t>(rows)});
  }
  return copies;
}

bool IsContiguous(const CopyRunsLaunch& copy) {
  const int64_t row = int64_t{copy.run_bytes} * copy.runs;
  const bool runs = copy.runs == 1 || (copy.from_run_step == copy.run_bytes && copy.to_run_step == copy.run_bytes);
  return runs && (copy.rows == 1 || (copy.from_row_step == row && copy.to_row_step == row));
}

int64_t BytesOf(const CopyRunsLaunch& copy) { return int64_t{copy.run_bytes} * copy.runs * copy.rows; }

}  // namespace dovetail::spatio_temporal
