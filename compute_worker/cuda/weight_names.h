#pragma once
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/launch_records.h"
#include "compute_worker/cuda/lower.h"

namespace dovetail::compute {

// A step's weights on the GPU by their names in records. Null where the step has none.
// Shapes: as CudaStep and CudaHybridWeights have them.
// Ownership: device pointers, valid as long as the step.
// Threads: thread-safe.
const kernels::cuda::CudaWeights* WeightsOf(const CudaStep& step, Weight weight);
const void* BiasOf(const CudaStep& step, Weight weight);  // in the type of the product's result
const float* VectorOf(const CudaStep& step, Weight weight);

// What lowering has to know of them.
WeightShape ShapeOf(const CudaStep& step, Weight weight);

}  // namespace dovetail::compute
