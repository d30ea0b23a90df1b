#include "sequence_parallel/region_copy.h"

#include <algorithm>
#include <cstring>

namespace dovetail::sequence_parallel {
namespace {

// Calls piece(place in the part, place in the stream from `at` on, bytes) for each contiguous piece.
template <typename Piece>
void ForEachPiece(const proto::Region& region, int64_t at, int64_t bytes, Piece&& piece) {
  int64_t run = at / region.run_bytes, within = at % region.run_bytes;
  for (int64_t done = 0; done < bytes; ++run, within = 0) {
    const int64_t count = std::min(region.run_bytes - within, bytes - done);
    piece(region.offset + run * region.step + within, done, static_cast<size_t>(count));
    done += count;
  }
}

}  // namespace

void Pack(const proto::Region& region, const std::byte* part, int64_t at, std::span<std::byte> out) {
  ForEachPiece(region, at, static_cast<int64_t>(out.size()),
               [&](int64_t place, int64_t done, size_t bytes) { std::memcpy(out.data() + done, part + place, bytes); });
}

void Unpack(const proto::Region& region, std::byte* part, int64_t at, std::span<const std::byte> in) {
  ForEachPiece(region, at, static_cast<int64_t>(in.size()),
               [&](int64_t place, int64_t done, size_t bytes) { std::memcpy(part + place, in.data() + done, bytes); });
}

void Copy(const proto::Transfer& transfer, const std::byte* from, std::byte* to) {
  ForEachPiece(transfer.from, 0, transfer.bytes(), [&](int64_t place, int64_t done, size_t bytes) {
    Unpack(transfer.to, to, done, {from + place, bytes});
  });
}

}  // namespace dovetail::sequence_parallel
