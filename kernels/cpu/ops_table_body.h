// The table of one ISA. Included last by ops_avx2.cc and ops_avx512.cc.
// Threads: pure.
#pragma once
#include "kernels/cpu/attention_body.h"
#include "kernels/cpu/attention_int8_body.h"
#include "kernels/cpu/logits_body.h"
#include "kernels/cpu/rows_body.h"

namespace dovetail::kernels::DT_ISA_NS {

// DType order: f32, f16, bf16.
static OpsTable MakeTable(Isa isa) {
  OpsTable t;
  t.isa = isa;
  t.prepare_query[0] = PrepareQueryF32;
  t.prepare_query[1] = PrepareQueryF16;
  t.prepare_query[2] = PrepareQueryBF16;
  t.attend_segment[0] = AttendSegment<ElementF32>;
  t.attend_segment[1] = AttendSegment<ElementF16>;
  t.attend_segment[2] = AttendSegment<ElementBF16>;
  t.prepare_query[3] = PrepareQueryBF16;
  t.attend_segment[3] = AttendSegment<ElementE4M3>;
  t.prepare_query[4] = PrepareQueryI8;
  t.attend_segment[4] = AttendSegmentI8;
  t.to_float[0] = F32ToFloat;
  t.to_float[1] = HalfToFloat<LoadF16>;
  t.to_float[2] = HalfToFloat<LoadBF16>;
  t.from_float[0] = F32FromFloat;
  t.from_float[1] = HalfFromFloat<StoreF16>;
  t.from_float[2] = HalfFromFloat<StoreBF16>;
  t.merge_partials = MergePartials;
  t.finish_partial = FinishPartial;
  t.rms_norm = RmsNorm;
  t.rope = Rope;
  t.silu_mul = SiluMul;
  t.gelu_mul = GeluMul;
  t.relu_mul = ReluMul;
  t.mul = MulRows;
  t.clamped_swiglu = ClampedSwiglu;
  t.add = AddRows;
  t.scale = ScaleRows;
  t.shift_scale = ShiftScaleRows;
  t.logit_stats = Stats;
  t.sum_exp = SumExp;
  t.mass_at_least = MassAtLeast;
  t.count_at_least = CountAtLeast;
  t.collect_at_least = CollectAtLeast;
  t.chunk_max = ChunkMax;
  t.gumbel_scores = GumbelScores;
  t.exp = ExpRows;
  return t;
}

}  // namespace dovetail::kernels::DT_ISA_NS
