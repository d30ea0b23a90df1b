#include "proto/cache_frames.h"

#include "proto/codec.h"

namespace dovetail::proto {
namespace {

template <typename Archive, typename Message>
void FieldsOf(Archive& a, Message& m) {
  a.Each("changes", m.changes, kMaxCacheChanges, [](auto& each, auto& change) {
    each.Number("change.block[0]", change.block[0]);
    each.Number("change.block[1]", change.block[1]);
    each.Id("change.group", change.group);
    each.Number("change.kv_heads.begin", change.kv_heads.begin);
    each.Number("change.kv_heads.end", change.kv_heads.end);
    each.Bool("change.held", change.held);
    if constexpr (Archive::kDecoding) {
      each.Require(change.group.value() < kMaxLayerGroups, "change.group", "is outside the limit");
      each.Require(
          change.kv_heads.begin >= 0 && change.kv_heads.begin < change.kv_heads.end && change.kv_heads.end <= kMaxHeads,
          "change.kv_heads", "is empty or outside the limit");
    }
  });
}

}  // namespace

void Encode(const CacheChanged& message, std::vector<std::byte>& out) {
  Encoder encoder(out);
  FieldsOf(encoder, message);
}

template <>
absl::StatusOr<CacheChanged> Decode<CacheChanged>(std::span<const std::byte> bytes) {
  Decoder decoder(bytes);
  CacheChanged message;
  FieldsOf(decoder, message);
  if (absl::Status status = decoder.Finish(); !status.ok()) return Annotate(status, "CacheChanged");
  return message;
}

}  // namespace dovetail::proto
