#pragma once
#include <array>
#include <cstdint>
#include <map>

#include "kernels/cuda/products/blas_lt.h"

namespace dovetail::kernels::cuda {

// Whether algorithms of a product, whatever its m, sum in order.
using InOrderAlgorithms = std::map<std::array<uint8_t, sizeof(cublasLtMatmulAlgo_t)>, bool>;

// Of cuBLASLt's proposals, up to `most` of those that give the bits of in_order_product.h for the call's weights and up
// to 64 rows of x of its own; they come to the front, in their order. How many there are; 0 also where they cannot be
// compared. An algorithm's tiles, and with them the order of its sums, do not follow from m, so what holds for these
// rows holds for all: each is compared once, and `known` says then.
// Works in a stream of its own and waits for it, also while another stream of this thread records a graph. call.w is
// read.
// Threads: any host thread.
int KeepInOrder(const Blas& blas, cublasLtHandle_t handle, const GemmCall& call, size_t workspace_bytes,
                InOrderAlgorithms& known, int most, cublasLtMatmulHeuristicResult_t* found, int count);

}  // namespace dovetail::kernels::cuda
