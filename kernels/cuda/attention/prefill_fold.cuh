#pragma once
#include "kernels/cuda/primitives/primitives.cuh"

// How pieces of a row's keys become one (PrefillLaunch::fold): the same operations in the same order, whether a thread
// block has several pieces or each was stored by another. Device code only.

namespace dovetail::kernels::cuda {

// What a row has of the pieces so far: the reference of the weights times log2(e), and their sum.
struct Folded {
  float m = -INFINITY, l = 0;
};

// What the next piece, with m and l, makes of it; o of both are to be multiplied by the factors, and added (FoldSum).
struct FoldFactors {
  float before, piece;
};
__device__ __forceinline__ FoldFactors FoldPiece(Folded& all, float m, float l) {
  const float top = fmaxf(all.m, m);
  const FoldFactors factors{all.m == -INFINITY ? 0.0f : Exp2(all.m - top), m == -INFINITY ? 0.0f : Exp2(m - top)};
  all.m = top;
  all.l = __fmaf_rn(all.l, factors.before, __fmul_rn(l, factors.piece));
  return factors;
}
__device__ __forceinline__ float FoldSum(const FoldFactors& factors, float before, float piece) {
  return __fmaf_rn(before, factors.before, __fmul_rn(piece, factors.piece));
}

}  // namespace dovetail::kernels::cuda
