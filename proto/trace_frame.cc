#include "proto/trace_frame.h"

#include "proto/codec.h"

namespace dovetail::proto {
namespace {

template <typename Archive, typename Message>
void FieldsOf(Archive& a, Message& m) {
  a.Id("sequence", m.sequence);
  a.Number("trace_high", m.trace.trace_high);
  a.Number("trace_low", m.trace.trace_low);
  a.Number("span", m.trace.span);
  a.Bool("sampled", m.trace.sampled);
}

}  // namespace

void Encode(const TraceSequence& message, std::vector<std::byte>& out) {
  Encoder encoder(out);
  FieldsOf(encoder, message);
}

template <>
absl::StatusOr<TraceSequence> Decode<TraceSequence>(std::span<const std::byte> bytes) {
  Decoder decoder(bytes);
  TraceSequence message;
  FieldsOf(decoder, message);
  if (absl::Status status = decoder.Finish(); !status.ok()) return Annotate(status, "TraceSequence");
  return message;
}

}  // namespace dovetail::proto
