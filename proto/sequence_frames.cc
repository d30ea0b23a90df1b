#include "proto/sequence_frames.h"

#include "proto/codec.h"
#include "proto/fields.h"

namespace dovetail::proto {
namespace {

template <typename T, typename Message>
concept Is = std::is_same_v<std::remove_const_t<T>, Message>;

void FieldsOf(auto& a, Is<OpenSequence> auto& m) {
  a.Id("sequence", m.sequence);
  ShardsField(a, m.shards);
  a.Array("hashes", m.hashes, kMaxSequenceBlocks);
  a.Bool("extend", m.extend);
  PositionField(a, "ctx_len", m.ctx_len);
  a.Id("steps_from", m.steps_from);
}

void FieldsOf(auto& a, Is<SequenceOpened> auto& m) {
  a.Id("sequence", m.sequence);
  a.Array("resumable", m.resumable, kMaxSequenceBlocks);
  a.Id("generation", m.generation);
}

void FieldsOf(auto& a, Is<ForkSequence> auto& m) {
  a.Id("parent", m.parent);
  a.Id("child", m.child);
  PositionField(a, "ctx_len", m.ctx_len);
  a.Id("generation", m.generation);
}

void FieldsOf(auto& a, Is<ReleaseSequence> auto& m) {
  a.Id("sequence", m.sequence);
  PositionField(a, "ctx_len", m.ctx_len);
  a.Array("hashes", m.hashes, kMaxSequenceBlocks);
  a.Id("generation", m.generation);
}

void FieldsOf(auto& a, Is<PrefixProbe> auto& m) {
  a.Number("pin_id", m.pin_id);
  ShardsField(a, m.shards);
  a.Array("hashes", m.hashes, kMaxSequenceBlocks);
}

void FieldsOf(auto& a, Is<PrefixProbed> auto& m) {
  a.Number("pin_id", m.pin_id);
  a.Array("resumable", m.resumable, kMaxSequenceBlocks);
}

void FieldsOf(auto& a, Is<Unpin> auto& m) { a.Number("pin_id", m.pin_id); }

void FieldsOf(auto& a, Is<MoveSequence> auto& m) {
  a.Id("sequence", m.sequence);
  PositionField(a, "begin", m.begin);
  PositionField(a, "end", m.end);
  a.Number("slot", m.slot);
  a.Id("step", m.step);
  a.Id("target", m.target);
  a.Id("target_epoch", m.target_epoch);
  a.Id("generation", m.generation);
  a.Id("target_generation", m.target_generation);
  if constexpr (std::remove_reference_t<decltype(a)>::kDecoding) {
    a.Require(m.begin % kSegmentTokens == 0 && m.begin < m.end, "begin", "is no segment boundary before the end");
    a.Require(m.slot < kMoveSlots, "slot", "is outside the limit");
  }
}

void FieldsOf(auto& a, Is<SequenceMoved> auto& m) {
  a.Id("sequence", m.sequence);
  a.Id("step", m.step);
  a.Bool("moved", m.moved);
  a.Text("reason", m.reason, 4096);
}

void FieldsOf(auto& archive, Is<StepBegin> auto& m) {
  archive.Each("entries", m.entries, kMaxStepEntries, [](auto& a, auto& entry) {
    a.Id("entry.sequence", entry.sequence);
    PositionField(a, "entry.ctx_len", entry.ctx_len);
    a.Number("entry.q_len", entry.q_len);
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding)
      a.Require(entry.q_len >= 1 && entry.q_len <= kMaxStepTokens, "entry.q_len", "is outside the limit");
    a.Array("entry.hashes", entry.hashes, kMaxSequenceBlocks);
    a.Number("entry.attend_end", entry.attend_end);
    a.Number("entry.gather_begin", entry.gather_begin);
    a.Number("entry.gather_end", entry.gather_end);
    a.Number("entry.states", entry.states);
    PositionField(a, "entry.fill_end", entry.fill_end);
    a.Id("entry.generation", entry.generation);
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding)
      a.Require(entry.attend_end == kOpenEnd || (entry.attend_end >= 0 && entry.attend_end <= entry.ctx_len &&
                                                 entry.attend_end % kSegmentTokens == 0),
                "entry.attend_end", "is no segment boundary at or before ctx_len");
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding)
      a.Require(entry.gather_begin == kOpenEnd || (entry.gather_begin >= entry.attend_end &&
                                                   entry.gather_begin < entry.ctx_len && entry.fill_end == 0),
                "entry.gather_begin", "is not between attend_end and ctx_len");
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding)
      a.Require(
          entry.gather_end == kOpenEnd || (entry.gather_begin != kOpenEnd && entry.gather_end > entry.gather_begin &&
                                           entry.gather_end <= entry.ctx_len),
          "entry.gather_end", "is not between gather_begin and ctx_len");
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding)
      a.Require(
          entry.states == StateExchange::kTokens || (entry.states <= StateExchange::kFetch && entry.fill_end == 0),
          "entry.states", "is no way for states to cross");
  });
  PartField(archive, m.part);
  archive.Number("gather_piece_bytes", m.gather_piece_bytes);
  if constexpr (std::remove_reference_t<decltype(archive)>::kDecoding)
    archive.Require(m.gather_piece_bytes >= 0 && m.gather_piece_bytes <= kMaxGatherPieceBytes, "gather_piece_bytes",
                    "is outside the limit");
  if constexpr (std::remove_reference_t<decltype(archive)>::kDecoding) {
    int64_t tokens = 0;
    for (const StepBeginEntry& entry : m.entries) tokens += entry.q_len;
    archive.Require(tokens >= 1 && tokens <= kMaxStepTokens, "entries", "hold no token or more than a step may");
    if (!m.part.in_group()) return;
    archive.Require(m.entries.size() == 1 && m.entries[0].fill_end == 0, "entries", "of a part of a group are not one");
    const Position begin = m.entries.empty() ? 0 : m.entries[0].ctx_len;
    RequireTokensOfPart(archive, m.part, StepId(), begin, begin + static_cast<Position>(tokens));
  }
}

void FieldsOf(auto& a, Is<StepRefused> auto& m) {
  a.Bool("out_of_memory", m.out_of_memory);
  a.Text("reason", m.reason, 4096);
  a.Array("damaged", m.damaged, kMaxStepEntries);
}

}  // namespace

#define DT_MESSAGE(Message)                                                                      \
  void Encode(const Message& message, std::vector<std::byte>& out) {                             \
    Encoder encoder(out);                                                                        \
    FieldsOf(encoder, message);                                                                  \
  }                                                                                              \
  template <>                                                                                    \
  absl::StatusOr<Message> Decode<Message>(std::span<const std::byte> bytes) {                    \
    Decoder decoder(bytes);                                                                      \
    Message message;                                                                             \
    FieldsOf(decoder, message);                                                                  \
    if (absl::Status status = decoder.Finish(); !status.ok()) return Annotate(status, #Message); \
    return message;                                                                              \
  }

DT_MESSAGE(OpenSequence)
DT_MESSAGE(SequenceOpened)
DT_MESSAGE(ForkSequence)
DT_MESSAGE(ReleaseSequence)
DT_MESSAGE(PrefixProbe)
DT_MESSAGE(PrefixProbed)
DT_MESSAGE(Unpin)
DT_MESSAGE(MoveSequence)
DT_MESSAGE(SequenceMoved)
DT_MESSAGE(StepBegin)
DT_MESSAGE(StepRefused)
#undef DT_MESSAGE

}  // namespace dovetail::proto
