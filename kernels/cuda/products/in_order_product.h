#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// Products whose sums are made in one order, whatever m: each element of y (of a part of it) has one accumulator in
// f32, to which tensor cores add 16 columns of k after the other, from the first to the last. Algorithms of cuBLASLt
// that do not divide k sum so, too, whatever their tiles (bench/results/2026-12-01-deterministic.md); they are compared
// with this, which is slow, and it stands in where there is none.
// Threads: any host thread, one at a time per stream.

// k and the strides are even, and rows of x and w begin on 4 bytes.
bool IsInOrderProduct(const GemmCall& call);
// Enqueues what IsInOrderProduct accepts. cudaError_t as int.
int LaunchInOrderProduct(const GemmCall& call, void* stream);

// Adds to *count how many of `words` words of a and b differ. cudaError_t as int.
int LaunchCountUnlike(const uint32_t* a, const uint32_t* b, size_t words, uint32_t* count, void* stream);
// Fills `count` elements with numbers in (-1, 1) that depend on their place only. cudaError_t as int.
int LaunchSpread(GemmType type, void* memory, size_t count, void* stream);

}  // namespace dovetail::kernels::cuda
