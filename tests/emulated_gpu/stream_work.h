#pragma once
#include <cuda_runtime_api.h>

#include <functional>

namespace emu {

// Work of a stream: done at once, or added to the graph that the stream records.
void Do(cudaStream_t stream, std::function<void()> work);

// The last launch's error, once.
cudaError_t TakeError();

}  // namespace emu
